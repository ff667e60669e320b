#include "tokenizer/regex.h"

#include <mutex>
#include <vector>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "tokenizer/unicode.h"

namespace freshet::tokenizer {
namespace {

constexpr size_t kMaxPattern = 1 << 16;
constexpr uint32_t kMatchLimit = 50'000'000;
constexpr size_t kJitStack = 8 << 20;

// PCRE2's \s contains U+180E and its \w lacks marks; these are White_Space and Alphabetic + M + Nd
// + Pc.
constexpr std::string_view kSpaceSet = "\\t-\\r\\x{85}\\p{Z}";
constexpr std::string_view kWordSet =
    "\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}\\x{24B6}-\\x{24E9}\\x{1F130}-\\x{1F149}"
    "\\x{1F150}-\\x{1F169}\\x{1F170}-\\x{1F189}";
// Oniguruma's \w also contains these Latin-1 digits and fractions.
constexpr std::string_view kLatinNumbers = "\\xB2\\xB3\\xB9\\xBC-\\xBE";
constexpr std::string_view kAlphaSet = "\\p{L}\\p{Nl}\\x{24B6}-\\x{24E9}";
constexpr std::string_view kHexSet = "0-9A-Fa-f";

// Rewrites one pattern. Classes are read recursively (to a bounded depth); unknown syntax is
// copied, and PCRE2 decides about it.
class Translator {
 public:
  Translator(std::string_view pattern, RegexDialect dialect) : p_(pattern), dialect_(dialect) {}

  std::string run() {
    std::string out;
    while (i_ < p_.size()) {
      if (p_[i_] == '\\') {
        out += escape(false);
      } else if (p_[i_] == '[') {
        out += char_class(0);
      } else {
        out += p_[i_++];
      }
    }
    return out;
  }

 private:
  std::string word_set() const {
    std::string set(kWordSet);
    if (dialect_ == RegexDialect::kOniguruma) set += kLatinNumbers;
    return set;
  }

  // PCRE2's own \b uses its own \w.
  std::string boundary(bool negated) const {
    const std::string word = fmt::format("[{}]", word_set());
    const std::string_view ahead = negated ? "(?=" : "(?!", not_ahead = negated ? "(?!" : "(?=";
    return fmt::format("(?:(?<={0}){1}{0})|(?<!{0}){2}{0}))", word, ahead, not_ahead);
  }

  // A POSIX class as set members; whole is "[:name:]".
  std::string posix_class(std::string_view whole) const {
    const std::string_view name = whole.substr(2, whole.size() - 4);
    if (name == "alpha") return std::string(kAlphaSet);
    if (name == "alnum") return std::string(kAlphaSet) + "\\p{Nd}";
    if (name == "punct") return "\\p{P}\\p{S}";
    if (name == "space") return std::string(kSpaceSet);
    return name == "word" ? word_set() : std::string(whole);
  }

  // Reads an escape; inside a class, sets are written without brackets.
  std::string escape(bool in_class) {
    if (i_ + 1 >= p_.size()) return std::string(1, p_[i_++]);
    const char c = p_[i_ + 1];
    const auto set = [&](std::string_view members, bool negated) {
      i_ += 2;
      if (in_class) return std::string(members);
      return fmt::format("[{}{}]", negated ? "^" : "", members);
    };
    if (c == 's') return set(kSpaceSet, false);
    if (c == 'w') return set(word_set(), false);
    if (!in_class && c == 'S') return set(kSpaceSet, true);
    if (!in_class && c == 'W') return set(word_set(), true);
    if (!in_class && (c == 'b' || c == 'B')) {
      i_ += 2;
      return boundary(c == 'B');
    }
    if (dialect_ == RegexDialect::kOniguruma && c == 'h') return set(kHexSet, false);
    if (c == 'u' && i_ + 6 <= p_.size() && p_[i_ + 2] != '{') {
      const std::string hex(p_.substr(i_ + 2, 4));
      i_ += 6;
      return "\\x{" + hex + "}";
    }
    if (c == 'u' && i_ + 2 < p_.size() && p_[i_ + 2] == '{') {
      i_ += 2;
      return "\\x";
    }
    const size_t size = std::min(p_.size() - i_, 1 + utf8_size(c));
    const std::string copy(p_.substr(i_, size));
    i_ += size;
    return copy;
  }

  // Reads "[...]": nested classes are flattened, [A&&[^B]] becomes (?:(?![B])[A]) and [A&&B]
  // becomes (?:(?=[B])[A]).
  std::string char_class(int depth) {
    ++i_;
    std::string members, guards;
    bool negated = false;
    if (i_ < p_.size() && p_[i_] == '^') {
      negated = true;
      ++i_;
    }
    bool first = true;
    while (i_ < p_.size()) {
      const char c = p_[i_];
      if (c == ']' && !first) break;
      if (c == '\\') {
        members += escape(true);
      } else if (c == '&' && p_.substr(i_, 2) == "&&") {
        i_ += 2;
        guards += intersection(depth);
      } else if (c == '[' && p_.substr(i_, 2) == "[:") {
        const size_t end = p_.find(":]", i_);
        const size_t size = end == std::string_view::npos ? 1 : end + 2 - i_;
        members += size < 4 ? std::string(p_.substr(i_, size)) : posix_class(p_.substr(i_, size));
        i_ += size;
      } else if (c == '[' && depth < 8 && p_.substr(i_, 2) != "[^" && closes(i_ + 1)) {
        const std::string inner = char_class(depth + 1);
        members += inner.substr(1, inner.size() - 2);
      } else if (c == '[' || (c == ']' && first)) {
        members += '\\';
        members += c;
        ++i_;
      } else {
        const size_t size = std::min(p_.size() - i_, utf8_size(c));
        members += p_.substr(i_, size);
        i_ += size;
      }
      first = false;
    }
    // An unclosed class stays unclosed: PCRE2 refuses it.
    const std::string_view close = i_ < p_.size() ? "]" : "";
    i_ = std::min(i_ + 1, p_.size());
    const std::string set = fmt::format("[{}{}{}", negated ? "^" : "", members, close);
    return guards.empty() ? set : "(?:" + guards + set + ")";
  }

  std::string intersection(int depth) {
    if (i_ < p_.size() && p_[i_] == '[' && depth < 8) {
      std::string inner = char_class(depth + 1);
      if (inner.starts_with("[^")) return "(?![" + inner.substr(2) + ")";
      return "(?=" + inner + ")";
    }
    std::string members;
    while (i_ < p_.size() && p_[i_] != ']' && p_.substr(i_, 2) != "&&") {
      members += p_[i_] == '\\' ? escape(true) : std::string(1, p_[i_++]);
    }
    return "(?=[" + members + "])";
  }

  // Whether a nested class that begins at `from` is closed and leaves a closing bracket for the
  // outer class.
  bool closes(size_t from) const {
    int open = 2;
    for (size_t k = from; k < p_.size(); ++k) {
      if (p_[k] == '\\') {
        ++k;
      } else if (p_[k] == '[') {
        ++open;
      } else if (p_[k] == ']' && --open == 0) {
        return true;
      }
    }
    return false;
  }

  std::string_view p_;
  RegexDialect dialect_;
  size_t i_ = 0;
};

struct Scratch {
  pcre2_match_data* data = nullptr;
  pcre2_match_context* context = nullptr;
  pcre2_jit_stack* stack = nullptr;

  explicit Scratch(const pcre2_code* code) {
    data = pcre2_match_data_create_from_pattern(code, nullptr);
    context = pcre2_match_context_create(nullptr);
    stack = pcre2_jit_stack_create(32 << 10, kJitStack, nullptr);
    pcre2_set_match_limit(context, kMatchLimit);
    pcre2_set_heap_limit(context, 64 << 10);  // KiB
    pcre2_jit_stack_assign(context, nullptr, stack);
  }
  Scratch(Scratch&& o) noexcept
      : data(std::exchange(o.data, nullptr)),
        context(std::exchange(o.context, nullptr)),
        stack(std::exchange(o.stack, nullptr)) {}
  Scratch& operator=(Scratch&&) = delete;
  ~Scratch() {
    pcre2_match_data_free(data);
    pcre2_match_context_free(context);
    pcre2_jit_stack_free(stack);
  }
};

}  // namespace

std::string translate_pattern(std::string_view pattern, RegexDialect dialect) {
  return Translator(pattern, dialect).run();
}

struct Regex::Impl {
  pcre2_code* code = nullptr;
  std::mutex mutex;
  std::vector<Scratch> idle;  // guarded by mutex
  ~Impl() { pcre2_code_free(code); }

  Scratch take() {
    {
      const std::lock_guard lock(mutex);
      if (!idle.empty()) {
        Scratch scratch = std::move(idle.back());
        idle.pop_back();
        return scratch;
      }
    }
    return Scratch(code);
  }
  void give_back(Scratch scratch) {
    const std::lock_guard lock(mutex);
    if (idle.size() < 64) idle.push_back(std::move(scratch));
  }
};

Regex::Regex(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Regex::~Regex() = default;

Result<std::shared_ptr<const Regex>> Regex::compile(std::string_view pattern,
                                                    RegexDialect dialect) {
  if (pattern.size() > kMaxPattern) {
    return invalid_argument("a regular expression of {} bytes is longer than the limit of {}",
                            pattern.size(), kMaxPattern);
  }
  if (find_invalid_utf8(pattern) != std::string_view::npos) {
    return invalid_argument("a regular expression is not valid UTF-8");
  }
  const std::string translated = translate_pattern(pattern, dialect);
  uint32_t options = PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C;
  options |= dialect == RegexDialect::kOniguruma ? PCRE2_MULTILINE : PCRE2_DOLLAR_ENDONLY;
  int error = 0;
  size_t offset = 0;
  auto impl = std::make_unique<Impl>();
  impl->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                             options, &error, &offset, nullptr);
  if (impl->code == nullptr) {
    PCRE2_UCHAR text[256];
    pcre2_get_error_message(error, text, sizeof text);
    return invalid_argument("regular expression \"{}\": {}", pattern.substr(0, 200),
                            reinterpret_cast<const char*>(text));
  }
  // If JIT compilation is not available, the interpreter is used.
  (void)pcre2_jit_compile(impl->code, PCRE2_JIT_COMPLETE);
  return std::shared_ptr<const Regex>(new Regex(std::move(impl)));
}

void Regex::for_each_match(std::string_view text, FunctionRef<void(size_t, size_t)> f) const {
  Scratch scratch = impl_->take();
  const size_t* ends = pcre2_get_ovector_pointer(scratch.data);
  const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  size_t at = 0, last_end = std::string_view::npos;
  // The caller has checked the text: sanitize() runs before any matching.
  const uint32_t flags = PCRE2_NO_UTF_CHECK;
  while (at <= text.size()) {
    const int found =
        pcre2_match(impl_->code, subject, text.size(), at, flags, scratch.data, scratch.context);
    if (found < 0 || ends[1] < ends[0] || ends[0] < at) break;
    const bool empty = ends[0] == ends[1];
    // An empty match directly after another match does not count, as in Oniguruma and Rust.
    if (!empty || ends[0] != last_end) f(ends[0], ends[1]);
    at = last_end = ends[1];
    if (empty) {
      if (at >= text.size()) break;
      at += utf8_size(text[at]);
    }
  }
  impl_->give_back(std::move(scratch));
}

}  // namespace freshet::tokenizer

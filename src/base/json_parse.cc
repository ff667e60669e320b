#include <cstring>
#include <limits>
#include <utility>

#include "base/json.h"
#include "base/mapped_file.h"
#include "base/utf8.h"

namespace freshet::json {
namespace {

class Parser {
 public:
  Parser(std::string_view text, const ParseLimits& limits, bool python = false)
      : text_(text), limits_(limits), python_(python) {}

  Result<Value> run() {
    Value root;
    if (text_.size() > limits_.bytes) {
      return resource_exhausted("JSON of {} bytes is over the limit of {}", text_.size(),
                                limits_.bytes);
    }
    if (parse(root)) {
      skip_space();
      if (at_ == text_.size()) return root;
      fail("the end of the text");
    }
    return std::move(error_);
  }

 private:
  // The open containers. A child is parsed in place and its parent does not change meanwhile, so
  // the pointers stay valid.
  std::vector<Value*> open_;

  bool parse(Value& root) {
    Value* slot = &root;
    while (true) {
      skip_space();
      if (!begin_value(*slot)) return false;
      // *slot is now a finished scalar, or a newly opened container.
      bool fresh = slot->is_array() || slot->is_object();
      slot = nullptr;
      while (slot == nullptr) {
        if (open_.empty()) return true;
        if (!next_slot(slot, fresh)) return false;
        fresh = false;
      }
    }
  }

  // After '[', '{' or a member: moves to the next member's slot, or closes the container (null).
  bool next_slot(Value*& slot, bool fresh) {
    Value& container = *open_.back();
    const bool is_array = container.is_array();
    const char closer = is_array ? ']' : '}';
    skip_space();
    if (peek() == closer) {
      ++at_;
      open_.pop_back();
      return true;
    }
    if (!fresh) {
      if (peek() != ',') return fail(is_array ? "',' or ']'" : "',' or '}'");
      ++at_;
      skip_space();
    }
    if (is_array) {
      slot = &container.as_array().emplace_back();
      return true;
    }
    if (peek() != '"') return fail("a member's name in quotes");
    key_.clear();
    if (!string(key_)) return false;
    skip_space();
    if (peek() != ':') return fail("':'");
    ++at_;
    slot = &container.as_object()[key_];
    return true;
  }

  bool begin_value(Value& out) {
    switch (peek()) {
      case '{':
        return open(out, Object());
      case '[':
        return open(out, Array());
      case '"': {
        std::string s;
        if (!string(s)) return false;
        out = Value(std::move(s));
        return true;
      }
      case 't':
        return word("true", out, true);
      case 'f':
        return word("false", out, false);
      case 'n':
        return word("null", out, nullptr);
      default:
        return (python_ && python_number(out)) || number(out);
    }
  }

  // What Python's json writes, and JSON does not have. "Infinity" in time_step_limit of Mamba-2.
  bool python_number(Value& out) {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    constexpr double kNoNumber = std::numeric_limits<double>::quiet_NaN();
    for (const auto& [name, value] : {std::pair<std::string_view, double>{"Infinity", kInfinity},
                                      {"-Infinity", -kInfinity},
                                      {"NaN", kNoNumber}}) {
      if (text_.substr(at_, name.size()) != name) continue;
      at_ += name.size();
      out = Value(value);
      return true;
    }
    return false;
  }

  bool open(Value& out, Value container) {
    if (open_.size() >= limits_.depth) {
      error_ =
          invalid_argument("JSON at byte {}: nested deeper than {} levels", at_, limits_.depth);
      return false;
    }
    ++at_;
    out = std::move(container);
    open_.push_back(&out);
    return true;
  }

  bool word(std::string_view word, Value& out, Value value) {
    if (text_.substr(at_, word.size()) != word) return fail("a value");
    at_ += word.size();
    out = std::move(value);
    return true;
  }

  bool digits() {
    const size_t start = at_;
    while (peek() >= '0' && peek() <= '9') ++at_;
    return at_ > start || fail("a digit");
  }

  bool number(Value& out) {
    const size_t start = at_;
    if (peek() == '-') ++at_;
    if (at_ == start && (peek() < '0' || peek() > '9')) return fail("a value");
    if (peek() == '0') {
      ++at_;
    } else if (!digits()) {
      return false;
    }
    if (peek() == '.') {
      ++at_;
      if (!digits()) return false;
    }
    if (peek() == 'e' || peek() == 'E') {
      ++at_;
      if (peek() == '+' || peek() == '-') ++at_;
      if (!digits()) return false;
    }
    out = Value::number_from_text(std::string(text_.substr(start, at_ - start)));
    return true;
  }

  // Appends the string that starts with the quote at at_.
  bool string(std::string& out) {
    ++at_;
    while (true) {
      const size_t start = at_;
      while (at_ < text_.size() && plain(text_[at_])) ++at_;
      out.append(text_, start, at_ - start);
      if (at_ == text_.size()) return fail("'\"' at the end of a string");
      const char c = text_[at_];
      if (c == '"') {
        ++at_;
        return true;
      }
      if (c == '\\') {
        if (!escape(out)) return false;
      } else if (static_cast<uint8_t>(c) < 0x20) {
        return fail("an escape in place of a control character");
      } else {
        const Utf8Char u = decode_utf8(text_.substr(at_, 4));
        if (!u.valid) return fail("UTF-8");
        out.append(text_, at_, u.size);
        at_ += u.size;
      }
    }
  }

  static bool plain(char c) {
    return static_cast<uint8_t>(c) >= 0x20 && static_cast<uint8_t>(c) < 0x80 && c != '"' &&
           c != '\\';
  }

  bool escape(std::string& out) {
    ++at_;
    static constexpr std::string_view kNames = "\"\\/bfnrt";
    static constexpr std::string_view kBytes = "\"\\/\b\f\n\r\t";
    const size_t i = at_ < text_.size() ? kNames.find(text_[at_]) : std::string_view::npos;
    if (i != std::string_view::npos) {
      out.push_back(kBytes[i]);
      ++at_;
      return true;
    }
    uint32_t code = 0;
    if (peek() != 'u') return fail("one of \"\\/bfnrtu after a backslash");
    if (!hex4(code)) return false;
    if (code >= 0xDC00 && code <= 0xDFFF)
      return fail("the first half of a surrogate pair before this");
    if (code >= 0xD800 && code <= 0xDBFF) {
      uint32_t low = 0;
      if (text_.substr(at_, 2) != "\\u") return fail("the second half of a surrogate pair");
      ++at_;
      if (!hex4(low)) return false;
      if (low < 0xDC00 || low > 0xDFFF)
        return fail("the second half of a surrogate pair before this");
      code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    }
    append_utf8(out, code);
    return true;
  }

  // Parses the four digits after the 'u' at at_.
  bool hex4(uint32_t& code) {
    ++at_;
    for (int i = 0; i < 4; ++i, ++at_) {
      const char c = peek();
      const char lower = static_cast<char>(c | 0x20);
      if (c >= '0' && c <= '9') {
        code = code * 16 + static_cast<uint32_t>(c - '0');
      } else if (lower >= 'a' && lower <= 'f') {
        code = code * 16 + static_cast<uint32_t>(lower - 'a' + 10);
      } else {
        return fail("four hexadecimal digits");
      }
    }
    return true;
  }

  void skip_space() {
    while (peek() == ' ' || peek() == '\n' || peek() == '\t' || peek() == '\r') ++at_;
  }
  // NUL stands for the end of the input: it is not allowed outside a string anyway.
  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }

  bool fail(std::string_view expected) {
    error_ = invalid_argument("JSON at byte {}: expected {}{}", at_, expected,
                              at_ >= text_.size() ? ", but the text ends" : "");
    return false;
  }

  std::string_view text_;
  const ParseLimits& limits_;
  const bool python_;  // Infinity and NaN are numbers
  size_t at_ = 0;
  std::string key_;
  Status error_;
};

}  // namespace

Result<Value> parse(std::string_view text, const ParseLimits& limits) {
  return Parser(text, limits).run();
}

Result<Value> parse_file(const std::string& path, const ParseLimits& limits) {
  FRESHET_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::open(path));
  const auto bytes = file.bytes();
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  auto result = Parser(text, limits, true).run();
  if (!result.ok()) return result.status().with_context(path);
  return result;
}

}  // namespace freshet::json

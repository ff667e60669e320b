#include "tokenizer/scanner.h"

#include <string>

namespace freshet::tokenizer {
namespace {

struct Char {
  uint32_t bits = 0;  // 0 at the end of the text
  size_t size = 0;
};

class Scanner {
 public:
  Scanner(const ScanRules& rules, std::string_view text) : rules_(rules), text_(text) {}

  size_t word(size_t begin) const {
    switch (rules_.words) {
      case ScanRules::Words::kGpt2:
        return gpt2(begin);
      case ScanRules::Words::kCl100k:
        return cl100k(begin);
      case ScanRules::Words::kO200k:
        break;
    }
    return o200k(begin);
  }

 private:
  Char at(size_t i) const {
    if (i >= text_.size()) return {};
    const auto lead = static_cast<uint8_t>(text_[i]);
    if (lead < 0x80) return {kAsciiClass[lead] | kPresent, 1};
    const Utf8Char c = decode_utf8(text_.substr(i));
    return {char_class(c.code) | kPresent, c.size};
  }
  static constexpr uint32_t kPresent = 1u << 31;
  static constexpr uint32_t kNotOther = kSpace | kLetter | kNumber;

  // The end of the run of characters that have any of `bits`; at most `limit` characters.
  size_t run(size_t i, uint32_t bits, uint32_t limit = ~0u) const {
    for (; limit > 0; --limit) {
      const Char c = at(i);
      if ((c.bits & bits) == 0) break;
      i += c.size;
    }
    return i;
  }
  // The same for characters that have none of `bits`.
  size_t run_without(size_t i, uint32_t bits) const {
    for (Char c = at(i); c.size != 0 && (c.bits & bits) == 0; c = at(i)) i += c.size;
    return i;
  }

  // The length in bytes of the contraction at i, including its apostrophe; 0 if there is none.
  size_t contraction(size_t i) const {
    using Contractions = ScanRules::Contractions;
    if (rules_.contractions == Contractions::kNone || i >= text_.size() || text_[i] != '\'')
      return 0;
    const std::string_view rest = text_.substr(i + 1, 2);
    if (rest.empty()) return 0;
    const bool exact = rules_.contractions == Contractions::kExact;
    const auto lower = [&](char c) {
      return !exact && c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
    };
    const char first = lower(rest[0]);
    if (first == 's' || first == 't' || first == 'm' || first == 'd') return 2;
    if (rest.size() < 2) return 0;
    const char second = lower(rest[1]);
    if ((first == 'r' && second == 'e') || (first == 'v' && second == 'e') ||
        (first == 'l' && second == 'l')) {
      return 3;
    }
    // The long s folds to s.
    if (rules_.contractions == Contractions::kAnyCase && rest == "\xC5\xBF") return 3;
    return 0;
  }

  // \s*[\r
  // ]+ | \s+(?!\S) | \s+, at white space; for GPT-2 without the first.
  size_t white_space(size_t begin, bool lines) const {
    size_t end = begin, last = begin, after_newline = 0;
    for (Char c = at(end); (c.bits & kSpace) != 0; c = at(end)) {
      last = end;
      end += c.size;
      if ((c.bits & kNewline) != 0) after_newline = end;
    }
    if (lines && after_newline != 0) return after_newline;
    return end == text_.size() || last == begin ? end : last;
  }

  size_t gpt2(size_t begin) const {
    if (const size_t size = contraction(begin)) return begin + size;
    size_t i = begin;
    Char c = at(i);
    if (text_[i] == ' ') {
      const Char next = at(i + 1);
      if (next.size != 0 && (next.bits & kSpace) == 0) {
        ++i;
        c = next;
      }
    }
    if ((c.bits & kLetter) != 0) return run(i, kLetter);
    if ((c.bits & kNumber) != 0) return run(i, kNumber);
    if ((c.bits & kSpace) == 0) return run_without(i, kNotOther);
    return white_space(begin, false);
  }

  // \p{N}{1,k} | ?[^\s\p{L}\p{N}]+[\r
  // /]* | white space: the part shared by cl100k and o200k.
  size_t not_letters(size_t begin, uint32_t letters) const {
    const Char c = at(begin);
    if ((c.bits & kNumber) != 0) {
      return run(begin, kNumber, rules_.max_digits == 0 ? ~0u : rules_.max_digits);
    }
    const uint32_t stops = kSpace | kNumber | letters;
    const size_t other = text_[begin] == ' ' ? begin + 1 : begin;
    const size_t end = run_without(other, stops);
    if (end == other) return white_space(begin, true);
    size_t tail = end;
    while (tail < text_.size() &&
           (text_[tail] == '\r' || text_[tail] == '\n' || (rules_.slash && text_[tail] == '/'))) {
      ++tail;
    }
    return tail;
  }

  size_t cl100k(size_t begin) const {
    if (const size_t size = contraction(begin)) return begin + size;
    const uint32_t letters = rules_.marks ? kLetter | kMark : uint32_t{kLetter};
    const Char c = at(begin);
    if ((c.bits & letters) != 0) return run(begin, letters);
    if ((c.bits & (kNewline | kNumber)) == 0) {
      const size_t end = run(begin + c.size, letters);
      if (end != begin + c.size) return end;
    }
    return not_letters(begin, letters);
  }

  // [U]*[W]+ from i, where characters of U may begin a capitalised word and those of W may continue
  // it; 0: no match. Also stores in `upper_end` the end of [U]+[W]*.
  size_t capitalised(size_t i, size_t& upper_end) const {
    size_t end = i, after_lower = 0;
    for (Char c = at(end); (c.bits & kUpper) != 0; c = at(end)) {
      end += c.size;
      if ((c.bits & kLower) != 0) after_lower = end;
    }
    upper_end = end;
    const size_t lower_end = run(end, kLower);
    if (lower_end != end) return lower_end;
    return after_lower;  // [U]* backtracks to the last character that is also in W
  }

  size_t o200k(size_t begin) const {
    const Char c = at(begin);
    const bool may_lead = (c.bits & (kNewline | kLetter | kNumber)) == 0;
    const size_t lead = begin + c.size;
    size_t upper_led = lead, upper = begin;
    size_t end = may_lead ? capitalised(lead, upper_led) : 0;
    if (end == 0) end = capitalised(begin, upper);
    if (end == 0 && may_lead && upper_led > lead) end = upper_led;
    if (end == 0 && upper > begin) end = upper;
    if (end != 0) return end + contraction(end);
    return not_letters(begin, kLetter);
  }

  const ScanRules& rules_;
  std::string_view text_;
};

constexpr std::string_view kExactContractions = "'s|'t|'re|'ve|'m|'ll|'d";
constexpr std::string_view kAsciiContractions =
    "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])";
constexpr std::string_view kFoldedContractions = "(?i:'s|'t|'re|'ve|'m|'ll|'d)";

}  // namespace

std::string pattern_for_rules(const ScanRules& rules) {
  using Contractions = ScanRules::Contractions;
  using Words = ScanRules::Words;
  const std::string contractions(rules.contractions == Contractions::kNone    ? ""
                                 : rules.contractions == Contractions::kExact ? kExactContractions
                                 : rules.contractions == Contractions::kAnyAsciiCase
                                     ? kAsciiContractions
                                     : kFoldedContractions);
  const std::string digits = rules.max_digits == 0 ? "\\p{N}+"
                             : rules.max_digits == 1
                                 ? "\\p{N}"
                                 : "\\p{N}{1," + std::to_string(rules.max_digits) + "}";
  const std::string tail = "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
  const std::string line_ends = rules.slash ? "[\\r\\n/]*" : "[\\r\\n]*";
  if (rules.words == Words::kGpt2) {
    return contractions + "| ?\\p{L}+| ?" + digits + "| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
  }
  if (rules.words == Words::kCl100k) {
    const std::string letters = rules.marks ? "[\\p{L}\\p{M}]+" : "\\p{L}+";
    const std::string marks = rules.marks ? "\\p{M}" : "";
    return contractions + (contractions.empty() ? "" : "|") + "[^\\r\\n\\p{L}\\p{N}]?" + letters +
           "|" + digits + "| ?[^\\s\\p{L}" + marks + "\\p{N}]+" + line_ends + tail;
  }
  const std::string upper = "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]";
  const std::string lower = "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]";
  const std::string end = contractions.empty() ? "" : contractions + "?";
  const std::string lead = "[^\\r\\n\\p{L}\\p{N}]?";
  return lead + upper + "*" + lower + "+" + end + "|" + lead + upper + "+" + lower + "*" + end +
         "|" + digits + "| ?[^\\s\\p{L}\\p{N}]+" + line_ends + tail;
}

std::optional<ScanRules> rules_for_pattern(std::string_view pattern) {
  using Contractions = ScanRules::Contractions;
  using Words = ScanRules::Words;
  // Without its last alternative, GPT-2's expression leaves the same white space between matches.
  ScanRules gpt2;
  const std::string full = pattern_for_rules(gpt2);
  if (pattern == full || pattern == full.substr(0, full.size() - 4)) return gpt2;
  for (const Words words : {Words::kCl100k, Words::kO200k}) {
    for (const Contractions contractions :
         {Contractions::kNone, Contractions::kAnyAsciiCase, Contractions::kAnyCase}) {
      for (const uint32_t digits : {0u, 1u, 2u, 3u}) {
        for (const int flags : {0, 1, 2, 3}) {
          const ScanRules rules{words, contractions, digits, (flags & 1) != 0, (flags & 2) != 0};
          if (pattern == pattern_for_rules(rules)) return rules;
        }
      }
    }
  }
  return std::nullopt;
}

size_t scan_word(const ScanRules& rules, std::string_view text, size_t begin) {
  return Scanner(rules, text).word(begin);
}

}  // namespace freshet::tokenizer

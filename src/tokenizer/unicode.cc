#include "tokenizer/unicode.h"

#include <algorithm>
#include <array>
#include <vector>

#include <utf8proc.h>

namespace freshet::tokenizer {
namespace {

constexpr uint32_t class_of_category(int category) {
  switch (category) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LT:
      return kLetter | kUpper | kWord;
    case UTF8PROC_CATEGORY_LL:
      return kLetter | kLower | kWord;
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
      return kLetter | kUpper | kLower | kWord;
    case UTF8PROC_CATEGORY_MN:
      return kMark | kUpper | kLower | kNonspacing | kWord;
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
      return kMark | kUpper | kLower | kWord;
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
      return kNumber | kWord;
    case UTF8PROC_CATEGORY_NO:
      return kNumber;
    case UTF8PROC_CATEGORY_PC:
      return kPunctuation | kWord;
    case UTF8PROC_CATEGORY_PD:
    case UTF8PROC_CATEGORY_PS:
    case UTF8PROC_CATEGORY_PE:
    case UTF8PROC_CATEGORY_PI:
    case UTF8PROC_CATEGORY_PF:
    case UTF8PROC_CATEGORY_PO:
      return kPunctuation;
    case UTF8PROC_CATEGORY_SM:
    case UTF8PROC_CATEGORY_SC:
    case UTF8PROC_CATEGORY_SK:
    case UTF8PROC_CATEGORY_SO:
      return kSymbol;
    case UTF8PROC_CATEGORY_ZS:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
      return kSpace;
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
      return kOther;
    default:
      return 0;
  }
}

struct ByteAlphabet {
  std::array<std::array<char, 2>, 256> text;
  std::array<uint8_t, 256> size;
  std::array<int16_t, 0x144> byte;  // by code point

  ByteAlphabet() {
    byte.fill(-1);
    char32_t next = 0x100;
    for (int b = 0; b < 256; ++b) {
      const bool printable = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
      const char32_t code = printable ? static_cast<char32_t>(b) : next++;
      std::string utf8;
      append_utf8(utf8, code);
      std::copy(utf8.begin(), utf8.end(), text[b].begin());
      size[b] = static_cast<uint8_t>(utf8.size());
      byte[code] = static_cast<int16_t>(b);
    }
  }
};

const ByteAlphabet& byte_alphabet() {
  static const ByteAlphabet alphabet;
  return alphabet;
}

bool is_ascii(std::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return static_cast<uint8_t>(c) < 128; });
}

// Canonical ordering: each run of characters with a non-zero combining class is sorted stably by
// that class.
void order_marks(std::vector<int32_t>& codes) {
  const auto combining = [](int32_t c) { return utf8proc_get_property(c)->combining_class; };
  struct Mark {
    int32_t combining;
    size_t position;
    int32_t code;
    auto operator<=>(const Mark&) const = default;
  };
  std::vector<Mark> marks;
  for (size_t i = 0; i < codes.size(); ++i) {
    const size_t begin = i;
    marks.clear();
    for (; i < codes.size() && combining(codes[i]) != 0; ++i) {
      marks.push_back({combining(codes[i]), i, codes[i]});
    }
    if (marks.size() < 2) continue;
    std::sort(marks.begin(), marks.end());
    for (size_t k = 0; k < marks.size(); ++k) codes[begin + k] = marks[k].code;
  }
}

}  // namespace

uint32_t char_class_slow(char32_t c) {
  if (c == 0x85) return kSpace | kOther;
  uint32_t bits = class_of_category(utf8proc_category(static_cast<utf8proc_int32_t>(c)));
  // The circled and squared letters are symbols, yet Alphabetic.
  if ((c >= 0x24B6 && c <= 0x24E9) || (c >= 0x1F130 && c <= 0x1F149) ||
      (c >= 0x1F150 && c <= 0x1F169) || (c >= 0x1F170 && c <= 0x1F189)) {
    bits |= kWord;
  }
  return bits;
}

bool is_cjk_ideograph(char32_t c) {
  // The gap from 2B820 is BERT's own.
  return (c >= 0x4E00 && c <= 0x9FFF) || (c >= 0x3400 && c <= 0x4DBF) ||
         (c >= 0x20000 && c <= 0x2A6DF) || (c >= 0x2A700 && c <= 0x2B73F) ||
         (c >= 0x2B740 && c <= 0x2B81F) || (c >= 0x2B920 && c <= 0x2CEAF) ||
         (c >= 0xF900 && c <= 0xFAFF) || (c >= 0x2F800 && c <= 0x2FA1F);
}

std::string normalize(std::string_view text, NormalForm form) {
  if (is_ascii(text)) return std::string(text);
  const bool compatible = form == NormalForm::kNfkc || form == NormalForm::kNfkd;
  const bool composed = form == NormalForm::kNfc || form == NormalForm::kNfkc;
  const auto decompose = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_DECOMPOSE |
                                                        (compatible ? UTF8PROC_COMPAT : 0));
  std::vector<int32_t> codes;
  codes.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const Utf8Char c = decode_utf8(text.substr(i));
    i += c.size;
    int32_t parts[32];
    int boundary = 0;
    const auto count =
        utf8proc_decompose_char(static_cast<int32_t>(c.code), parts, 32, decompose, &boundary);
    if (count < 0 || count > 32) {
      codes.push_back(static_cast<int32_t>(c.code));
    } else {
      codes.insert(codes.end(), parts, parts + count);
    }
  }
  order_marks(codes);
  if (composed) {
    const auto count = utf8proc_normalize_utf32(
        codes.data(), static_cast<utf8proc_ssize_t>(codes.size()),
        static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
    if (count >= 0) codes.resize(static_cast<size_t>(count));
  }
  std::string out;
  out.reserve(text.size());
  for (const int32_t c : codes) append_utf8(out, static_cast<char32_t>(c));
  return out;
}

std::string to_lower(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const Utf8Char c = decode_utf8(text.substr(i));
    i += c.size;
    if (c.code == 0x130) {  // the only unconditional mapping to two characters
      out += "i\xCC\x87";
    } else {
      append_utf8(out, static_cast<char32_t>(utf8proc_tolower(static_cast<int32_t>(c.code))));
    }
  }
  return out;
}

bool grapheme_break(char32_t before, char32_t after, int32_t& state) {
  return utf8proc_grapheme_break_stateful(static_cast<int32_t>(before), static_cast<int32_t>(after),
                                          &state);
}

std::string sanitize(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const Utf8Char c = decode_utf8(text.substr(i));
    if (c.valid) {
      out.append(text, i, c.size);
    } else {
      out += "\xEF\xBF\xBD";
    }
    i += c.size;
  }
  return out;
}

std::string spaces_for_marks(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    const bool mark = text.substr(i).starts_with(kSpaceMark);
    out.push_back(mark ? ' ' : text[i]);
    i += mark ? kSpaceMark.size() : 1;
  }
  return out;
}

bool marks_only_lead(std::string_view text) {
  while (text.starts_with(kSpaceMark)) text.remove_prefix(kSpaceMark.size());
  return text.find(kSpaceMark) == text.npos;
}

std::string_view byte_to_printable(uint8_t byte) {
  const ByteAlphabet& alphabet = byte_alphabet();
  return {alphabet.text[byte].data(), alphabet.size[byte]};
}

int printable_to_byte(char32_t c) {
  const ByteAlphabet& alphabet = byte_alphabet();
  return c < alphabet.byte.size() ? alphabet.byte[c] : -1;
}

std::string bytes_to_printable(std::string_view bytes) {
  std::string out;
  out.reserve(bytes.size() * 2);
  for (const char b : bytes) out += byte_to_printable(static_cast<uint8_t>(b));
  return out;
}

bool printable_to_bytes(std::string_view text, std::string& bytes) {
  bytes.clear();
  for (size_t i = 0; i < text.size();) {
    const Utf8Char c = decode_utf8(text.substr(i));
    const int byte = c.valid ? printable_to_byte(c.code) : -1;
    if (byte < 0) return false;
    bytes.push_back(static_cast<char>(byte));
    i += c.size;
  }
  return true;
}

}  // namespace freshet::tokenizer

// Unicode for tokenizers: character classes, normal forms, lower case.
//
// Pure functions; safe from many threads. Texts are valid UTF-8 (sanitize() makes them so). Classes
// follow Unicode 15 (utf8proc); white space is the White_Space property.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/utf8.h"

namespace freshet::tokenizer {

// Bits of char_class(). A character has the bits of exactly one of the first six groups; but white
// space may also have kControl, and kUpper/kLower refine kLetter and kMark.
enum CharClass : uint32_t {
  kLetter = 1 << 0,       // L
  kMark = 1 << 1,         // M
  kNumber = 1 << 2,       // N
  kPunctuation = 1 << 3,  // P
  kSymbol = 1 << 4,       // S
  kSpace = 1 << 5,        // White_Space
  kNewline = 1 << 6,      // \r or \n
  kOther = 1 << 7,        // Cc, Cf, Cs, Co (not Cn)
  kUpper = 1 << 8,        // Lu Lt Lm Lo M: may begin a capitalised word
  kLower = 1 << 9,        // Ll Lm Lo M: may continue one
  kNonspacing = 1 << 10,  // Mn
  kWord = 1 << 11,        // \w: Alphabetic, M, Nd, Pc
};

constexpr uint32_t ascii_class(char32_t c) {
  if (c >= 'A' && c <= 'Z') return kLetter | kUpper | kWord;
  if (c >= 'a' && c <= 'z') return kLetter | kLower | kWord;
  if (c >= '0' && c <= '9') return kNumber | kWord;
  if (c == '\n' || c == '\r') return kSpace | kNewline | kOther;
  if (c >= 9 && c <= 13) return kSpace | kOther;
  if (c == ' ') return kSpace;
  if (c < 32 || c == 127) return kOther;
  if (c == '_') return kPunctuation | kWord;
  for (const char symbol : {'$', '+', '<', '=', '>', '^', '`', '|', '~'}) {
    if (c == static_cast<char32_t>(symbol)) return kSymbol;
  }
  return kPunctuation;
}
inline constexpr std::array<uint32_t, 128> kAsciiClass = [] {
  std::array<uint32_t, 128> table{};
  for (char32_t c = 0; c < 128; ++c) table[c] = ascii_class(c);
  return table;
}();
uint32_t char_class_slow(char32_t c);
inline uint32_t char_class(char32_t c) {
  return c < 128 ? kAsciiClass[c] : char_class_slow(c);
}

// Rust's \w, which also contains the two joiners.
inline bool is_word_char(char32_t c) {
  return (char_class(c) & kWord) != 0 || c == 0x200C || c == 0x200D;
}

inline bool is_ascii_punctuation(char32_t c) {
  return (c >= 33 && c <= 47) || (c >= 58 && c <= 64) || (c >= 91 && c <= 96) ||
         (c >= 123 && c <= 126);
}
bool is_cjk_ideograph(char32_t c);  // as in BERT

// The length in bytes of the character that begins with `lead`, in valid UTF-8.
inline size_t utf8_size(char lead) {
  const auto b = static_cast<uint8_t>(lead);
  return b < 0x80 ? 1 : b < 0xE0 ? 2 : b < 0xF0 ? 3 : 4;
}

enum class NormalForm { kNfc, kNfd, kNfkc, kNfkd };
// Linear, except that each run of combining marks is sorted.
std::string normalize(std::string_view text, NormalForm form);

// The full lower-case mapping of each character, independent of context.
std::string to_lower(std::string_view text);

bool grapheme_break(char32_t before, char32_t after, int32_t& state);

// Invalid sequences become U+FFFD, one per maximal well-formed prefix (as in Python and Rust).
std::string sanitize(std::string_view text);

// U+2581, which SentencePiece writes for a space.
constexpr std::string_view kSpaceMark = "\xE2\x96\x81";
std::string spaces_for_marks(std::string_view text);
// True if no mark follows another character, i.e. marks occur only at the start of a word.
bool marks_only_lead(std::string_view text);

// GPT-2's invertible map from bytes to printable characters, as UTF-8.
std::string_view byte_to_printable(uint8_t byte);
int printable_to_byte(char32_t c);  // -1: none
std::string bytes_to_printable(std::string_view bytes);
// Decodes to bytes; false if a character does not map to a byte.
bool printable_to_bytes(std::string_view text, std::string& bytes);

// Calls f with each extended grapheme cluster.
template <class F>
void for_each_grapheme(std::string_view text, F&& f) {
  size_t begin = 0;
  int32_t state = 0;
  char32_t previous = 0;
  for (size_t i = 0; i < text.size();) {
    const Utf8Char c = decode_utf8(text.substr(i));
    if (i > 0 && grapheme_break(previous, c.code, state)) {
      f(text.substr(begin, i - begin));
      begin = i;
    }
    previous = c.code;
    i += c.size;
  }
  if (begin < text.size()) f(text.substr(begin));
}

}  // namespace freshet::tokenizer

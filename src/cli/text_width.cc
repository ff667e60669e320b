#include "cli/text_width.h"

#include <algorithm>

#include <utf8proc.h>

#include "base/utf8.h"
#include "tokenizer/unicode.h"

namespace freshet::cli {
namespace {

constexpr char32_t kEmojiSelector = 0xFE0F;
constexpr std::u32string_view kClosing = U"、。〉》」』】〕〗！），．：；？］｝～,.!?:;)]}";

bool is_regional(char32_t c) {
  return c >= 0x1F1E6 && c <= 0x1F1FF;
}

}  // namespace

int grapheme_width(std::string_view grapheme) {
  int width = 0;
  while (!grapheme.empty()) {
    const Utf8Char c = decode_utf8(grapheme);
    const int own = c.code == kEmojiSelector || is_regional(c.code)
                        ? 2
                        : utf8proc_charwidth(static_cast<utf8proc_int32_t>(c.code));
    // The selector turns the character before it into an emoji; alone it is invisible.
    if (c.code != kEmojiSelector || width > 0) width = std::max(width, own);
    grapheme.remove_prefix(c.size);
  }
  return width;
}

int text_width(std::string_view text) {
  int width = 0;
  tokenizer::for_each_grapheme(text, [&](std::string_view g) { width += grapheme_width(g); });
  return width;
}

bool closes_a_phrase(std::string_view grapheme) {
  return !grapheme.empty() &&
         kClosing.find(decode_utf8(grapheme).code) != std::u32string_view::npos;
}

std::string without_controls(std::string_view text) {
  std::string clean;
  clean.reserve(text.size());
  while (!text.empty()) {
    const Utf8Char c = decode_utf8(text);
    const bool control = c.code < 0x20 || (c.code >= 0x7F && c.code < 0xA0);
    if (!control || c.code == '\n' || c.code == '\t') append_utf8(clean, c.code);
    text.remove_prefix(c.size);
  }
  return clean;
}

}  // namespace freshet::cli

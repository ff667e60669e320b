#include "cli/word_wrap.h"

#include <string>
#include <string_view>

#include <gtest/gtest.h>

#include "cli/text_width.h"

namespace freshet::cli {
namespace {

std::string wrapped(std::string_view text, int columns, size_t piece = std::string_view::npos,
                    int hang = 0) {
  std::string out;
  WordWrap wrap([columns] { return columns; }, [&out](std::string_view s) { out += s; });
  wrap.hang(hang);
  while (!text.empty()) {
    size_t n = std::min(piece, text.size());
    while (n < text.size() && (text[n] & 0xC0) == 0x80) ++n;  // never inside a character
    wrap.text(text.substr(0, n));
    text.remove_prefix(n);
  }
  wrap.flush();
  return out;
}

// Widths as wcwidth() of glibc 2.36 gives them for single characters (C.UTF-8).
TEST(TextWidth, CountsColumns) {
  EXPECT_EQ(text_width("abc"), 3);
  EXPECT_EQ(text_width("Fluß"), 4);
  EXPECT_EQ(text_width("你好吗"), 6);
  EXPECT_EQ(text_width("カタ"), 4);
  EXPECT_EQ(text_width("ｶﾀ"), 2);  // half-width forms
  EXPECT_EQ(text_width("한글"), 4);
  EXPECT_EQ(text_width("مرحبا"), 5);
  EXPECT_EQ(text_width("e\u0301"), 1);  // a letter and a combining accent
  EXPECT_EQ(text_width("🙂"), 2);
  EXPECT_EQ(text_width("👩‍👩‍👧"), 2);  // one cluster of five characters
  EXPECT_EQ(text_width("🇩🇪"), 2);
  EXPECT_EQ(text_width("\u2764\uFE0F"), 2);  // a heart shown as an emoji
  EXPECT_EQ(text_width(""), 0);
}

TEST(TextWidth, RemovesControls) {
  EXPECT_EQ(without_controls("a\x1b[2Jb\tc\nd\r\x7f"), "a[2Jb\tc\nd");
  EXPECT_EQ(without_controls("a\u0085\u009b"
                             "31mb"),
            "a31mb");
  EXPECT_EQ(without_controls("a\xff"
                             "b"),
            "a\uFFFD"
            "b");
}

TEST(WordWrap, BreaksAtWords) {
  EXPECT_EQ(wrapped("the quick brown fox", 10), "the quick\nbrown fox");
  EXPECT_EQ(wrapped("the quick brown fox", 0), "the quick brown fox");
  EXPECT_EQ(wrapped("one two\nthree", 20), "one two\nthree");
  EXPECT_EQ(wrapped("exactly10c next", 10), "exactly10c\nnext");
  EXPECT_EQ(wrapped("  indented", 20), "  indented");
}

TEST(WordWrap, BreaksWordsThatAreTooWide) {
  EXPECT_EQ(wrapped("abcdefghij", 4), "abcd\nefgh\nij");
  EXPECT_EQ(wrapped("ab abcdefgh", 4), "ab\nabcd\nefgh");
}

TEST(WordWrap, CountsWideAndCombiningCharacters) {
  EXPECT_EQ(wrapped("你好吗我很好", 6), "你好吗\n我很好");
  // No line begins with an ideographic full stop: 吗 goes with it to the next line.
  EXPECT_EQ(wrapped("你好吗。我", 6), "你好\n吗。我");
  EXPECT_EQ(wrapped("ab 你好", 6), "ab 你\n好");
  const std::string accented = "e\u0301e\u0301e\u0301 e\u0301e\u0301";
  EXPECT_EQ(wrapped(accented, 6), accented);
  EXPECT_EQ(wrapped(accented, 5), "e\u0301e\u0301e\u0301\ne\u0301e\u0301");
}

TEST(WordWrap, DoesNotDependOnPieces) {
  const std::string text =
      "Ein Fluß, der die Stadt teilt: 你好吗。Naïve e\u0301 words\n\nlast 🙂 line";
  for (const int columns : {5, 8, 13, 40}) {
    for (const size_t piece : {size_t{1}, size_t{2}, size_t{3}, size_t{7}})
      EXPECT_EQ(wrapped(text, columns, piece), wrapped(text, columns)) << columns << ' ' << piece;
  }
}

TEST(WordWrap, HangingIndent) {
  EXPECT_EQ(wrapped("- one two three", 9, std::string_view::npos, 2), "- one two\n  three");
}

TEST(WordWrap, StylesTakeNoRoom) {
  std::string out;
  WordWrap wrap([] { return 7; }, [&out](std::string_view s) { out += s; });
  wrap.text("one ");
  wrap.style("\x1b[1m");
  wrap.text("two");
  wrap.style("\x1b[0m");
  wrap.text(" three");
  wrap.flush();
  EXPECT_EQ(out, "one \x1b[1mtwo\x1b[0m\nthree");
}

}  // namespace
}  // namespace freshet::cli

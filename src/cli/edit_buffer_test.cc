#include "cli/edit_buffer.h"

#include <gtest/gtest.h>

namespace freshet::cli {
namespace {

TEST(EditBuffer, MovesAndErasesWholeCharacters) {
  EditBuffer b;
  b.insert("Flu\u00df e\u0301 👩‍👩‍👧!");
  b.left();
  b.erase_left();  // the family
  EXPECT_EQ(b.text(), "Flu\u00df e\u0301 !");
  b.left();
  b.erase_left();  // the letter with its accent
  EXPECT_EQ(b.text(), "Flu\u00df  !");
  b.line_begin();
  b.right();
  b.erase_right();
  EXPECT_EQ(b.text(), "Fu\u00df  !");
  b.erase_to_line_end();
  EXPECT_EQ(b.text(), "F");
  b.yank();
  EXPECT_EQ(b.text(), "Fu\u00df  !");
}

TEST(EditBuffer, Words) {
  EditBuffer b;
  b.insert("one two  three");
  b.word_left();
  b.word_left();
  b.erase_word_right();
  EXPECT_EQ(b.text(), "one   three");
  b.line_end();
  b.erase_word_left();
  EXPECT_EQ(b.text(), "one   ");
}

TEST(EditBuffer, Lines) {
  EditBuffer b;
  b.insert("first\n你好 second\nx");
  EXPECT_FALSE(b.down());
  EXPECT_TRUE(b.up());
  b.insert("^");  // after column 1: inside 你, so before it
  EXPECT_EQ(b.text(), "first\n^你好 second\nx");
  EXPECT_TRUE(b.up());
  EXPECT_FALSE(b.up());
  b.erase_to_line_begin();
  EXPECT_EQ(b.text(), "irst\n^你好 second\nx");
}

TEST(EditBuffer, KnowsWhatWasPasted) {
  EditBuffer b;
  b.insert("/exit", true);
  EXPECT_TRUE(b.begins_pasted());
  b.insert(" typed");
  EXPECT_TRUE(b.begins_pasted());
  b.line_begin();
  b.insert("x");
  EXPECT_FALSE(b.begins_pasted());
  b.clear();
  b.insert("typed ");
  b.insert("/exit", true);
  EXPECT_FALSE(b.begins_pasted());
}

TEST(EditBuffer, LayoutWrapsAtTheWidth) {
  EditBuffer b;
  b.insert("abcd你好\nz");
  auto l = b.layout(7, "> ");
  EXPECT_EQ(l.rows, (std::vector<std::string>{"> abcd", "你好", "  z"}));
  EXPECT_EQ(l.cursor_row, 2u);
  EXPECT_EQ(l.cursor_column, 3);
  b.up();
  b.line_end();
  l = b.layout(7, "> ");
  EXPECT_EQ(l.cursor_row, 1u);
  EXPECT_EQ(l.cursor_column, 4);
  b.clear();
  b.insert("abcde");
  l = b.layout(7, "> ");  // a full row: the cursor goes to the next one
  EXPECT_EQ(l.rows, (std::vector<std::string>{"> abcde", ""}));
  EXPECT_EQ(l.cursor_row, 1u);
  EXPECT_EQ(l.cursor_column, 0);
}

}  // namespace
}  // namespace freshet::cli

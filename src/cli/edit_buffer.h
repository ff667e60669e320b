// The text that a user edits, and how it lies on the terminal.
//
// The cursor is between grapheme clusters. Lines may be broken (by Alt-Enter, a backslash or a
// paste). No input or output; not synchronised.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace freshet::cli {

class EditBuffer {
 public:
  const std::string& text() const { return text_; }
  bool empty() const { return text_.empty(); }
  // Whether the text begins with what was pasted. Only typed text can be a command.
  bool begins_pasted() const { return begins_pasted_; }

  // `text`: valid UTF-8 without control characters, except line breaks and tabs.
  void insert(std::string_view text, bool pasted = false);
  void set(std::string text);  // the cursor goes to the end
  void clear() { set(""); }

  void left();
  void right();
  void word_left();
  void word_right();
  void line_begin();
  void line_end();
  // To the line above or below, at about the same column; false if there is none.
  bool up();
  bool down();

  void erase_left();
  void erase_right();
  void erase_word_left();
  void erase_word_right();
  void erase_to_line_begin();
  void erase_to_line_end();
  void yank() { insert(killed_); }

  void to_end() { cursor_ = text_.size(); }
  bool at_end() const { return cursor_ == text_.size(); }

  struct Layout {
    std::vector<std::string> rows;  // at least one
    size_t cursor_row = 0;
    int cursor_column = 0;
  };
  // The rows on a terminal of this width; `prompt` opens the first row, spaces of its width the
  // first row of each further line.
  Layout layout(int columns, std::string_view prompt) const;

 private:
  size_t cluster_before() const;  // its first byte
  size_t cluster_end() const;     // the end of the cluster at the cursor
  size_t begin_of_line() const;
  size_t end_of_line() const;
  size_t begin_of_word() const;
  size_t end_of_word() const;
  void erase(size_t begin, size_t end, bool keep);
  size_t offset_at(size_t line, int column) const;

  std::string text_;
  std::string killed_;
  size_t cursor_ = 0;
  bool begins_pasted_ = false;
};

}  // namespace freshet::cli

// Wraps streamed text at words for a terminal.
//
// Text arrives in pieces of any size. A word is written when it is complete, so that it never has
// to be taken back. A word that is wider than a line is broken. Lines may also break beside East
// Asian wide characters, which are written without spaces. Not synchronised.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace freshet::cli {

class WordWrap {
 public:
  using Sink = std::function<void(std::string_view)>;
  // `columns`: the width of a line, asked for at the begin of each; 0: lines are not wrapped.
  WordWrap(std::function<int()> columns, Sink sink)
      : columns_(std::move(columns)), sink_(std::move(sink)) {}

  // Text without control characters, except line breaks and tabs.
  void text(std::string_view text);
  // An escape sequence, which takes no room.
  void style(std::string_view sequence) { word_.emplace_back(sequence, 0); }
  // Text that is not wrapped, such as code.
  void verbatim(std::string_view text);
  // Columns left free at the begin of the further lines of a paragraph; a line break clears it.
  void hang(int columns) { hang_ = columns; }
  // Writes the word so far.
  void flush();
  bool at_line_begin() const { return column_ == 0 && spaces_ == 0 && word_.empty(); }

 private:
  void add(std::string_view grapheme);
  void end_line();
  void put_word();

  std::function<int()> columns_;
  Sink sink_;
  int width_ = 0;
  int column_ = 0;
  int hang_ = 0;
  int spaces_ = 0;                                 // before the word
  std::vector<std::pair<std::string, int>> word_;  // clusters and their widths
  int word_width_ = 0;
  bool after_wide_ = false;
};

}  // namespace freshet::cli

#include "cli/word_wrap.h"

#include "cli/text_width.h"
#include "tokenizer/unicode.h"

namespace freshet::cli {

void WordWrap::text(std::string_view text) {
  tokenizer::for_each_grapheme(text, [&](std::string_view g) { add(g); });
}

void WordWrap::add(std::string_view grapheme) {
  if (grapheme == "\n") {
    end_line();
    return;
  }
  if (grapheme == " " || grapheme == "\t") {
    put_word();
    spaces_ += grapheme == " " ? 1 : 4;
    return;
  }
  const int width = grapheme_width(grapheme);
  const bool wide = width == 2;
  // A mark of width 0 may have come in another piece than its letter.
  if (width > 0 && (wide || after_wide_) && !closes_a_phrase(grapheme)) put_word();
  word_.emplace_back(grapheme, width);
  word_width_ += width;
  if (width > 0) after_wide_ = wide;
}

void WordWrap::end_line() {
  put_word();
  sink_("\n");
  column_ = 0;
  spaces_ = 0;
  hang_ = 0;
}

void WordWrap::put_word() {
  after_wide_ = false;
  if (word_.empty()) return;
  if (column_ == 0) width_ = columns_();
  if (width_ > 0 && word_width_ > 0 && column_ > hang_ &&
      column_ + spaces_ + word_width_ > width_) {
    sink_("\n" + std::string(static_cast<size_t>(hang_), ' '));
    column_ = hang_;
    spaces_ = 0;
  }
  std::string line(static_cast<size_t>(spaces_), ' ');
  column_ += spaces_;
  spaces_ = 0;
  for (const auto& [piece, width] : word_) {
    if (width_ > 0 && width > 0 && column_ + width > width_ && column_ > 0) {
      line += '\n';
      column_ = 0;
    }
    line += piece;
    column_ += width;
  }
  sink_(line);
  word_.clear();
  word_width_ = 0;
}

void WordWrap::verbatim(std::string_view text) {
  flush();
  sink_(text);
  const size_t line = text.rfind('\n');
  if (line != std::string_view::npos) column_ = 0;
  column_ += text_width(text.substr(line == std::string_view::npos ? 0 : line + 1));
}

void WordWrap::flush() {
  put_word();
  if (spaces_ > 0) sink_(std::string(static_cast<size_t>(spaces_), ' '));
  column_ += spaces_;
  spaces_ = 0;
}

}  // namespace freshet::cli

#include "cli/edit_buffer.h"

#include <algorithm>

#include "cli/text_width.h"
#include "tokenizer/unicode.h"

namespace freshet::cli {
namespace {

bool separates_words(char c) {
  return c == ' ' || c == '\n' || c == '\t';
}

std::string_view shown(std::string_view grapheme) {
  return grapheme == "\t" ? std::string_view("    ") : grapheme;
}

}  // namespace

void EditBuffer::insert(std::string_view text, bool pasted) {
  if (cursor_ == 0 && !text.empty()) begins_pasted_ = pasted;
  text_.insert(cursor_, text);
  cursor_ += text.size();
}

void EditBuffer::set(std::string text) {
  text_ = std::move(text);
  cursor_ = text_.size();
  begins_pasted_ = false;
}

size_t EditBuffer::cluster_before() const {
  size_t begin = 0, at = 0;
  tokenizer::for_each_grapheme(std::string_view(text_).substr(0, cursor_), [&](std::string_view g) {
    begin = at;
    at += g.size();
  });
  return begin;
}

size_t EditBuffer::cluster_end() const {
  size_t end = cursor_;
  // A cluster is short; the rest of the text need not be looked at.
  tokenizer::for_each_grapheme(std::string_view(text_).substr(cursor_, 256),
                               [&](std::string_view g) {
                                 if (end == cursor_) end += g.size();
                               });
  return end;
}

size_t EditBuffer::begin_of_line() const {
  return cursor_ == 0 ? 0 : text_.rfind('\n', cursor_ - 1) + 1;  // npos + 1 is 0
}

size_t EditBuffer::end_of_line() const {
  return std::min(text_.find('\n', cursor_), text_.size());
}

size_t EditBuffer::begin_of_word() const {
  size_t at = cursor_;
  while (at > 0 && separates_words(text_[at - 1])) --at;
  while (at > 0 && !separates_words(text_[at - 1])) --at;
  return at;
}

size_t EditBuffer::end_of_word() const {
  size_t at = cursor_;
  while (at < text_.size() && separates_words(text_[at])) ++at;
  while (at < text_.size() && !separates_words(text_[at])) ++at;
  return at;
}

void EditBuffer::left() {
  cursor_ = cluster_before();
}
void EditBuffer::right() {
  cursor_ = cluster_end();
}
void EditBuffer::word_left() {
  cursor_ = begin_of_word();
}
void EditBuffer::word_right() {
  cursor_ = end_of_word();
}
void EditBuffer::line_begin() {
  cursor_ = begin_of_line();
}
void EditBuffer::line_end() {
  cursor_ = end_of_line();
}

size_t EditBuffer::offset_at(size_t line, int column) const {
  const size_t end = std::min(text_.find('\n', line), text_.size());
  size_t at = line;
  int width = 0;
  bool there = false;
  tokenizer::for_each_grapheme(std::string_view(text_).substr(line, end - line),
                               [&](std::string_view g) {
                                 width += text_width(shown(g));
                                 there = there || width > column;
                                 if (!there) at += g.size();
                               });
  return at;
}

bool EditBuffer::up() {
  const size_t line = begin_of_line();
  if (line == 0) return false;
  const int column = text_width(std::string_view(text_).substr(line, cursor_ - line));
  cursor_ = line - 1;
  cursor_ = offset_at(begin_of_line(), column);
  return true;
}

bool EditBuffer::down() {
  const size_t line = begin_of_line(), end = end_of_line();
  if (end == text_.size()) return false;
  const int column = text_width(std::string_view(text_).substr(line, cursor_ - line));
  cursor_ = offset_at(end + 1, column);
  return true;
}

void EditBuffer::erase(size_t begin, size_t end, bool keep) {
  if (keep && begin < end) killed_ = text_.substr(begin, end - begin);
  text_.erase(begin, end - begin);
  cursor_ = begin;
  if (text_.empty()) begins_pasted_ = false;
}

void EditBuffer::erase_left() {
  erase(cluster_before(), cursor_, false);
}
void EditBuffer::erase_right() {
  erase(cursor_, cluster_end(), false);
}
void EditBuffer::erase_word_left() {
  erase(begin_of_word(), cursor_, true);
}
void EditBuffer::erase_word_right() {
  erase(cursor_, end_of_word(), true);
}
void EditBuffer::erase_to_line_begin() {
  erase(begin_of_line(), cursor_, true);
}
void EditBuffer::erase_to_line_end() {
  erase(cursor_, end_of_line(), true);
}

EditBuffer::Layout EditBuffer::layout(int columns, std::string_view prompt) const {
  Layout l;
  const int indent = text_width(prompt);
  l.rows.emplace_back(prompt);
  int column = indent;
  size_t at = 0;
  const auto break_row = [&](int spaces) {
    l.rows.emplace_back(static_cast<size_t>(spaces), ' ');
    column = spaces;
  };
  tokenizer::for_each_grapheme(text_, [&](std::string_view g) {
    const std::string_view piece = g == "\n" ? std::string_view() : shown(g);
    const int width = text_width(piece);
    if (column + width > columns && column > 0) break_row(0);
    if (at == cursor_) {
      l.cursor_row = l.rows.size() - 1;
      l.cursor_column = column;
    }
    if (g == "\n") {
      break_row(indent);
    } else {
      l.rows.back() += piece;
      column += width;
    }
    at += g.size();
  });
  if (at == cursor_) {
    if (column >= columns) break_row(0);
    l.cursor_row = l.rows.size() - 1;
    l.cursor_column = column;
  }
  return l;
}

}  // namespace freshet::cli

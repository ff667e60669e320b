#include "cli/markdown.h"

#include <algorithm>
#include <cctype>

#include "tokenizer/unicode.h"

namespace freshet::cli {
namespace {

constexpr std::string_view kMarks = "\\`*_";

size_t run_length(std::string_view s, size_t at = 0) {
  size_t n = at;
  while (n < s.size() && s[n] == s[at]) ++n;
  return n - at;
}

bool is_ascii_word(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0;
}

// Letters of other scripts count, too.
bool is_word(char c) {
  return is_ascii_word(c) || c == '_' || static_cast<unsigned char>(c) >= 0x80;
}

bool is_blank(char c) {
  return c == ' ' || c == '\t' || c == '\n';
}

// Whether a run of `n` marks beside the character `c` may begin or end emphasis there. Stars inside
// ASCII words are more often products than italics; underscores inside words are names.
bool may_stand_beside(char mark, size_t n, char c) {
  if (mark == '_') return !is_word(c);
  return n >= 2 || !is_ascii_word(c);
}

// Where the run that closes emphasis begins, or npos. `open`: set if more text could change that.
size_t find_closer(std::string_view line, size_t n, bool complete, bool& open) {
  const char mark = line.front();
  for (size_t i = n; i < line.size();) {
    if (line[i] == '\\') {
      i += 2;
      continue;
    }
    if (line[i] != mark) {
      ++i;
      continue;
    }
    const size_t run = run_length(line, i);
    const bool at_end = i + run == line.size();
    if (at_end && !complete) {
      open = true;
      return std::string_view::npos;
    }
    const char after = at_end ? ' ' : line[i + run];
    if (run == n && i > n && !is_blank(line[i - 1]) && may_stand_beside(mark, n, after)) return i;
    i += run;
  }
  open = !complete;
  return std::string_view::npos;
}

}  // namespace

void Markdown::feed(std::string_view text) {
  held_ += text;
  consume(false);
}

void Markdown::finish() {
  consume(true);
  set({});
  wrap_.flush();
}

void Markdown::set(Style style) {
  if (style == style_) return;
  style_ = style;
  std::string sequence = "\x1b[0";
  if (style.bold) sequence += ";1";
  if (style.dim) sequence += ";2";
  if (style.italic) sequence += ";3";
  if (style.code) sequence += ";36";
  wrap_.style(sequence + "m");
}

void Markdown::show(std::string_view text) {
  if (text.empty()) return;
  wrap_.text(text);
  before_ = text.back();
}

void Markdown::end_line() {
  line_style_ = {};
  set({});
  wrap_.text("\n");
  line_begins_ = true;
  before_ = ' ';
}

void Markdown::consume(bool final) {
  while (!held_.empty()) {
    const Took took = !fence_.empty() ? take_code(final)
                      : line_begins_  ? take_block(final)
                                      : take_line(final);
    if (took == Took::kNothing) return;
  }
}

Markdown::Took Markdown::take_block(bool final) {
  const size_t end = held_.find('\n');
  const bool complete = final || end != std::string::npos;
  const std::string_view line = std::string_view(held_).substr(0, end);
  const size_t indent = std::min(line.find_first_not_of(' '), line.size());
  const std::string_view rest = line.substr(indent);
  if (rest.empty() && !complete) return Took::kNothing;
  const char first = rest.empty() ? '\n' : rest.front();
  const size_t run = rest.empty() ? 0 : run_length(rest);
  // Whether the next character decides what this is.
  const bool undecided = !complete && run == rest.size();
  if (first == '#' && run <= 6) {
    if (undecided) return Took::kNothing;
    if (run < rest.size() && rest[run] == ' ') {
      line_style_.bold = true;
      held_.erase(0, indent + run + 1);
    }
  } else if (first == '`' || first == '~') {
    if (undecided) return Took::kNothing;
    if (run >= 3) return take_fence(line, indent, complete);
  } else if (first == '-' || first == '*' || first == '+') {
    if (undecided) return Took::kNothing;
    return take_bullet(line, indent, complete);
  } else if (first >= '0' && first <= '9') {
    return take_number(line, indent, complete);
  } else if (first == '>') {
    if (undecided) return Took::kNothing;
    held_.erase(0, indent + 1 + (rest.size() > 1 && rest[1] == ' ' ? 1 : 0));
    line_style_.dim = true;
    set(line_style_);
    show("│ ");
    wrap_.hang(2);
  }
  set(line_style_);
  line_begins_ = false;
  return Took::kSome;
}

Markdown::Took Markdown::take_bullet(std::string_view line, size_t indent, bool complete) {
  const std::string_view rest = line.substr(indent);
  const size_t run = run_length(rest);
  line_begins_ = false;
  if (run == 1 && rest.size() > 1 && rest[1] == ' ') {
    held_.erase(0, indent + 2);
    show(std::string(indent, ' ') + "• ");
    wrap_.hang(static_cast<int>(indent) + 2);
  } else if (complete && run >= 3 && run == rest.size()) {
    held_.erase(0, line.size());
    set({.dim = true});
    show("────────────────────");
    set({});
  }
  return Took::kSome;
}

Markdown::Took Markdown::take_number(std::string_view line, size_t indent, bool complete) {
  const size_t digits = std::min(line.find_first_not_of("0123456789", indent), line.size());
  const size_t end = digits + 2;  // "1. "
  if (!complete && line.size() < end && digits - indent < 10) return Took::kNothing;
  line_begins_ = false;
  if (line.size() >= end && (line[digits] == '.' || line[digits] == ')') && line[digits + 1] == ' ')
    wrap_.hang(static_cast<int>(end));
  return Took::kSome;
}

Markdown::Took Markdown::take_fence(std::string_view line, size_t indent, bool complete) {
  if (!complete) return Took::kNothing;
  fence_ = line.substr(indent, run_length(line, indent));
  set({.dim = true});
  show(line);
  held_.erase(0, line.size());
  end_line();
  if (held_.starts_with('\n')) held_.erase(0, 1);
  set({.code = true});
  return Took::kSome;
}

Markdown::Took Markdown::take_code(bool final) {
  const size_t end = held_.find('\n');
  const bool complete = final || end != std::string::npos;
  const std::string_view line = std::string_view(held_).substr(0, end);
  const size_t indent = std::min(line.find_first_not_of(' '), line.size());
  const std::string_view rest = line.substr(indent);
  const bool may_close = line_begins_ && (rest.empty() || rest.front() == fence_.front());
  if (may_close && !complete) return Took::kNothing;
  const bool closes = may_close && !rest.empty() && run_length(rest) >= fence_.size() &&
                      rest.find_last_not_of(" \t") + 1 == run_length(rest);
  if (closes) {
    fence_.clear();
    set({.dim = true});
    show(line);
    held_.erase(0, line.size());
    line_begins_ = false;  // take_line() takes the line break
    return Took::kSome;
  }
  wrap_.verbatim(line);
  line_begins_ = false;
  held_.erase(0, line.size());
  if (held_.empty()) return Took::kNothing;
  wrap_.verbatim("\n");
  held_.erase(0, 1);
  line_begins_ = true;
  return Took::kSome;
}

Markdown::Took Markdown::take_line(bool final) {
  const size_t end = held_.find('\n');
  const bool complete = final || end != std::string::npos;
  const size_t done = inline_text(std::string_view(held_).substr(0, end), complete);
  held_.erase(0, done);
  if (!held_.starts_with('\n')) return Took::kNothing;
  held_.erase(0, 1);
  end_line();
  return Took::kSome;
}

size_t Markdown::inline_text(std::string_view line, bool complete) {
  size_t i = 0;
  while (i < line.size()) {
    const size_t mark = std::min(line.find_first_of(kMarks, i), line.size());
    show(line.substr(i, mark - i));
    i = mark;
    if (i == line.size()) break;
    size_t took = 0;
    if (line[i] == '\\') {
      if (i + 1 == line.size() && !complete) break;
      const bool escapes = i + 1 < line.size() &&
                           tokenizer::is_ascii_punctuation(static_cast<unsigned char>(line[i + 1]));
      show(line.substr(escapes ? i + 1 : i, 1));
      took = escapes ? 2 : 1;
    } else if (line[i] == '`') {
      took = code_span(line.substr(i), complete);
    } else {
      took = emphasis(line.substr(i), complete);
    }
    if (took == 0) break;
    i += took;
  }
  return i;
}

size_t Markdown::code_span(std::string_view line, bool complete) {
  const size_t n = run_length(line);
  if (n == line.size() && !complete) return 0;
  for (size_t i = n; i < line.size();) {
    if (line[i] != '`') {
      ++i;
      continue;
    }
    const size_t run = run_length(line, i);
    if (i + run == line.size() && !complete) return 0;
    if (run == n) {
      const Style outer = style_;
      Style inner = outer;
      inner.code = true;
      set(inner);
      show(line.substr(n, i - n));
      set(outer);
      return i + n;
    }
    i += run;
  }
  if (!complete && line.size() < kLongestHeld) return 0;
  show(line.substr(0, n));
  return n;
}

size_t Markdown::emphasis(std::string_view line, bool complete) {
  const char mark = line.front();
  const size_t n = run_length(line);
  if (n == line.size() && !complete) return 0;
  bool open = false;
  size_t closer = std::string_view::npos;
  if (n <= 3 && n < line.size() && !is_blank(line[n]) && may_stand_beside(mark, n, before_))
    closer = find_closer(line, n, complete, open);
  if (open && line.size() < kLongestHeld) return 0;
  if (closer == std::string_view::npos) {
    show(line.substr(0, n));
    return n;
  }
  const Style outer = style_;
  Style inner = outer;
  if (n >= 2) inner.bold = true;
  if (n != 2) inner.italic = true;
  set(inner);
  (void)inline_text(line.substr(n, closer - n), true);
  set(outer);
  return closer + n;
}

}  // namespace freshet::cli

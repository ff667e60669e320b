// Shows streamed Markdown on a terminal: headings, bold, italics, code, lists, quotes and rules.
//
// What begins like markup is held back until it is known to be markup: to the end of the span, of
// the line, or for at most kLongestHeld bytes. Markup that is not closed is shown as it was
// written. Code is not wrapped, so that it can be copied. Tables and links stay as they are. Not
// synchronised.
#pragma once

#include <string>
#include <string_view>

#include "cli/word_wrap.h"

namespace freshet::cli {

class Markdown {
 public:
  static constexpr size_t kLongestHeld = 400;

  // `wrap` must outlive this.
  explicit Markdown(WordWrap& wrap) : wrap_(wrap) {}

  // Text without control characters, except line breaks and tabs.
  void feed(std::string_view text);
  // Shows what was held back and ends all styles.
  void finish();

 private:
  struct Style {
    bool bold = false;
    bool italic = false;
    bool code = false;
    bool dim = false;
    bool operator==(const Style&) const = default;
  };
  // What take_*() did with the text so far: used some of it, or needs more to go on.
  enum class Took { kSome, kNothing };

  void consume(bool final);
  Took take_block(bool final);
  Took take_bullet(std::string_view line, size_t indent, bool complete);
  Took take_number(std::string_view line, size_t indent, bool complete);
  Took take_fence(std::string_view line, size_t indent, bool complete);
  Took take_code(bool final);
  Took take_line(bool final);
  // Shows markup within a line; returns how many bytes of `line` are done.
  size_t inline_text(std::string_view line, bool complete);
  size_t code_span(std::string_view line, bool complete);
  size_t emphasis(std::string_view line, bool complete);
  void show(std::string_view text);
  void set(Style style);
  void end_line();

  WordWrap& wrap_;
  std::string held_;
  Style style_, line_style_;
  bool line_begins_ = true;
  std::string fence_;  // the characters that end a block of code; "" outside of one
  char before_ = ' ';  // the last character shown
};

}  // namespace freshet::cli

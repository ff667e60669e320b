// Shows an answer while it arrives.
//
// On a terminal lines are wrapped at words, and with styles, Markdown is shown as such. Thoughts
// are folded to one line, or shown dimmed. Elsewhere the text is written as it is, without thoughts
// unless they are wanted. Not synchronised.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>

#include "cli/markdown.h"
#include "cli/output.h"
#include "cli/word_wrap.h"
#include "server/reasoning_parser.h"
#include "tokenizer/tokenizer.h"

namespace freshet::cli {

// How a model marks its thoughts.
struct Thinking {
  server::ReasoningTags tags;
  bool special = false;  // the tags are special tokens, which texts otherwise omit
};
// The tags that the chat template `source` mentions, as the server's parsers know them.
std::optional<Thinking> find_thinking(const std::string& source,
                                      const tokenizer::Tokenizer& tokenizer);

class AnswerPrinter {
 public:
  struct Options {
    bool show_thoughts = false;
    std::optional<Thinking> thinking;
    std::string prompt;  // the text before the answer, in which a thought may have begun
  };
  // `out` must outlive this.
  AnswerPrinter(Output& out, const TerminalLook& look, const Options& options);

  void feed(std::string_view text);
  void finish();  // ends the last line
  const std::string& answer() const { return answer_; }
  const std::string& thought() const { return thought_; }

 private:
  void take(const server::ReasoningParser::Step& step);
  void show_thought(std::string_view text);
  void end_thought();

  Output& out_;
  TerminalLook look_;
  bool show_thoughts_;
  std::optional<server::ReasoningParser> parser_;
  WordWrap wrap_;
  Markdown markdown_;
  ProgressLine status_;
  std::string answer_, thought_;
  bool in_thought_ = false;
  bool ends_in_break_ = true;
  std::chrono::steady_clock::time_point began_;
};

}  // namespace freshet::cli

// Separates reasoning from the answer in streamed text.
//
// Reasoning is at the beginning of the output, between two tags. The template may have written the
// opening tag at the end of the prompt, or both tags: then there is no reasoning. White space
// around reasoning and answer is removed. Text without tags is an unchanged answer. One parser per
// answer; not synchronised.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace freshet::server {

struct ReasoningTags {
  std::string_view open;
  std::string_view close;
};

// `name`: vLLM's name of the parser.
std::optional<ReasoningTags> reasoning_tags_by_name(std::string_view name);
std::string reasoning_parser_names();  // comma-separated

class ReasoningParser {
 public:
  // `prompt`: the text before the answer.
  ReasoningParser(ReasoningTags tags, std::string_view prompt);

  struct Step {
    std::string reasoning;
    std::string content;
  };
  Step feed(std::string_view text);
  Step finish();  // returns the text that was held back
  // Whether the text so far is in the reasoning.
  bool inside() const { return place_ == Place::kThought; }
  // Whether all further text is the answer, even if it begins with a tag.
  bool answers() const { return place_ == Place::kAnswer; }

 private:
  enum class Place { kBefore, kThought, kAnswer };
  void take_beginning(Step& step);
  void take_thought(Step& step);
  void take_answer(Step& step);

  ReasoningTags tags_;
  Place place_ = Place::kBefore;
  std::string held_;
  bool trim_ = false;  // skip white space that comes next
};

}  // namespace freshet::server

// Tells what a model thinks from what it answers, as the text streams.
//
// A thought stands at the beginning of an answer, between two tags; templates may have written the
// first of them at the end of the prompt, or both, so that nothing is thought. White space around
// thought and answer is left out. Text without tags is an answer as it stands. One parser serves
// one answer; not synchronised.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace freshet::server {

struct ReasoningTags {
  std::string_view open;
  std::string_view close;
};

// By vLLM's names of its parsers.
std::optional<ReasoningTags> reasoning_tags_by_name(std::string_view name);
std::string reasoning_parser_names();  // with commas between

class ReasoningParser {
 public:
  // `prompt`: the text that the answer follows.
  ReasoningParser(ReasoningTags tags, std::string_view prompt);

  struct Step {
    std::string reasoning;
    std::string content;
  };
  Step feed(std::string_view text);
  Step finish();  // what was held back
  // Whether all so far is thought.
  bool inside() const { return place_ == Place::kThought; }
  // Whether what comes next is no thought, however it begins.
  bool answers() const { return place_ == Place::kAnswer; }

 private:
  enum class Place { kBefore, kThought, kAnswer };
  void take_beginning(Step& step);
  void take_thought(Step& step);
  void take_answer(Step& step);

  ReasoningTags tags_;
  Place place_ = Place::kBefore;
  std::string held_;
  bool trim_ = false;  // white space that comes next
};

}  // namespace freshet::server

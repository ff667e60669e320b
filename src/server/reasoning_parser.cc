#include "server/reasoning_parser.h"

#include <algorithm>
#include <utility>

namespace freshet::server {
namespace {

constexpr std::string_view kSpace = " \t\r\n";
constexpr ReasoningTags kThink = {"<think>", "</think>"};
constexpr std::pair<std::string_view, ReasoningTags> kParsers[] = {
    {"deepseek_r1", kThink}, {"deepseek_v3", kThink},
    {"glm45", kThink},       {"kimi_k2", kThink},
    {"minimax_m2", kThink},  {"mistral", {"[THINK]", "[/THINK]"}},
    {"nemotron_v3", kThink}, {"olmo3", kThink},
    {"qwen3", kThink},       {"seed_oss", {"<seed:think>", "</seed:think>"}},
};

size_t leading_space(std::string_view s) {
  return std::min(s.find_first_not_of(kSpace), s.size());
}

std::string_view without_trailing_space(std::string_view s) {
  return s.substr(0, s.find_last_not_of(kSpace) + 1);  // npos + 1 is 0
}

}  // namespace

std::optional<ReasoningTags> reasoning_tags_by_name(std::string_view name) {
  for (const auto& [known, tags] : kParsers) {
    if (known == name) return tags;
  }
  return std::nullopt;
}

std::string reasoning_parser_names() {
  std::string names;
  for (const auto& [known, tags] : kParsers) {
    if (!names.empty()) names += ", ";
    names += known;
  }
  return names;
}

ReasoningParser::ReasoningParser(ReasoningTags tags, std::string_view prompt) : tags_(tags) {
  prompt = without_trailing_space(prompt);
  if (prompt.ends_with(tags.open)) {
    place_ = Place::kThought;
    trim_ = true;
  } else if (prompt.ends_with(tags.close)) {
    place_ = Place::kAnswer;
  }
}

void ReasoningParser::take_beginning(Step& step) {
  const size_t space = leading_space(held_);
  const std::string_view seen = std::string_view(held_).substr(space);
  if (seen.starts_with(tags_.open)) {
    held_.erase(0, space + tags_.open.size());
    place_ = Place::kThought;
    trim_ = true;
    take_thought(step);
  } else if (!tags_.open.starts_with(seen)) {
    place_ = Place::kAnswer;
    take_answer(step);
  }
}

void ReasoningParser::take_thought(Step& step) {
  if (trim_) held_.erase(0, leading_space(held_));
  if (!held_.empty()) trim_ = false;
  const size_t at = held_.find(tags_.close);
  size_t end = at;
  if (at == std::string::npos) {  // everything except a possible beginning of the tag
    end = held_.size();
    for (size_t n = std::min(end, tags_.close.size() - 1); n > 0; --n) {
      if (!held_.ends_with(tags_.close.substr(0, n))) continue;
      end -= n;
      break;
    }
  }
  const std::string_view thought = without_trailing_space(std::string_view(held_).substr(0, end));
  step.reasoning += thought;
  held_.erase(0, at == std::string::npos ? thought.size() : at + tags_.close.size());
  if (at == std::string::npos) return;
  place_ = Place::kAnswer;
  trim_ = true;
  take_answer(step);
}

void ReasoningParser::take_answer(Step& step) {
  if (trim_) held_.erase(0, leading_space(held_));
  if (!held_.empty()) trim_ = false;
  step.content += std::exchange(held_, {});
}

ReasoningParser::Step ReasoningParser::feed(std::string_view text) {
  Step step;
  held_ += text;
  if (place_ == Place::kBefore) {
    take_beginning(step);
  } else if (place_ == Place::kThought) {
    take_thought(step);
  } else {
    take_answer(step);
  }
  return step;
}

ReasoningParser::Step ReasoningParser::finish() {
  Step step;
  if (place_ == Place::kThought) {
    step.reasoning = without_trailing_space(held_);
  } else {
    step.content = held_;
  }
  held_.clear();
  return step;
}

}  // namespace freshet::server

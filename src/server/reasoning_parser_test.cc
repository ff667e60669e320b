#include "server/reasoning_parser.h"

#include <gtest/gtest.h>

namespace freshet::server {
namespace {

// Parses the text whole, byte by byte, and split in two at every position: all must agree.
void check(std::string_view name, std::string_view prompt, const std::string& text,
           const std::string& reasoning, const std::string& content) {
  const ReasoningTags tags = reasoning_tags_by_name(name).value();
  for (size_t cut = 0; cut <= text.size() + 1; ++cut) {
    ReasoningParser parser(tags, prompt);
    ReasoningParser::Step all;
    const auto add = [&](const ReasoningParser::Step& step) {
      all.reasoning += step.reasoning;
      all.content += step.content;
    };
    if (cut > text.size()) {
      for (const char c : text) add(parser.feed(std::string_view(&c, 1)));
    } else {
      add(parser.feed(std::string_view(text).substr(0, cut)));
      add(parser.feed(std::string_view(text).substr(cut)));
    }
    add(parser.finish());
    EXPECT_EQ(all.reasoning, reasoning) << text << " cut at " << cut;
    EXPECT_EQ(all.content, content) << text << " cut at " << cut;
  }
}

TEST(ReasoningParser, ThoughtThenAnswer) {
  check("qwen3", "assistant\n", "<think>\nTwo and two.\n</think>\n\nFour.\n", "Two and two.",
        "Four.\n");
  check("qwen3", "assistant\n", "\n<think></think>Four", "", "Four");
  check("mistral", "", "[THINK]a [b] </think>[/THINK]c", "a [b] </think>", "c");
  check("seed_oss", "", "<seed:think>a</seed:think>b", "a", "b");
}

TEST(ReasoningParser, ThoughtThatThePromptBegins) {
  check("deepseek_r1", "assistant<think>\n", "Two.\n\nAnd </thi two.</think>\nFour.",
        "Two.\n\nAnd </thi two.", "Four.");
  check("deepseek_r1", "<think>", "never ends </thin", "never ends </thin", "");
}

TEST(ReasoningParser, AnswersAlone) {
  check("qwen3", "<think>\n\n</think>\n\n", " Four, <think> is a tag</think>.\n", "",
        " Four, <think> is a tag</think>.\n");
  check("qwen3", "<think>\n\n</think>\n\n", "<think>a</think>b", "", "<think>a</think>b");
  check("qwen3", "assistant", "<thin", "", "<thin");
  check("qwen3", "assistant", "", "", "");
}

TEST(ReasoningParser, Names) {
  EXPECT_FALSE(reasoning_tags_by_name("none"));
  EXPECT_NE(reasoning_parser_names().find("deepseek_r1, "), std::string::npos);
}

}  // namespace
}  // namespace freshet::server

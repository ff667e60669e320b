// Reasoning in the formats of chats and responses, streamed and whole.
#include <gtest/gtest.h>

#include "server/openai_format.h"
#include "server/responses_format.h"

namespace freshet::server {
namespace {

const std::vector<std::string> kPieces = {"Two and", " two.", "</think>", "\n\nFo", "ur."};
const std::string kCall =
    "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"<think>\"}}</tool_call>";

FormatContext context() {
  FormatContext c;
  c.id = "x";
  c.token_bytes = [](int32_t id) { return kPieces.at(static_cast<size_t>(id)); };
  c.reasoning.emplace(*reasoning_tags_by_name("qwen3"), "<think>\n");
  return c;
}

ResponseRequest request(bool tools = false) {
  json::Object body;
  body["input"] = "Two and two?";
  json::Object tool;
  tool["type"] = "function";
  tool["name"] = "f";
  if (tools) body["tools"] = json::Array{std::move(tool)};
  return std::get<ResponseRequest>(parse_response(body));
}

struct Answered {
  json::Value whole;
  std::vector<json::Value> events;
};

// The output of a format for these tokens.
Answered answered(const std::function<std::unique_ptr<AnswerFormat>()>& make,
                  const std::vector<std::string>& pieces) {
  AnswerState state;
  state.prompts = {{1}};
  state.prompt_logprobs.resize(1);
  state.choices.resize(1);
  Choice& choice = state.choices.front();
  const auto streamed = make();
  std::string out;
  streamed->stream_begin(state, out);
  for (size_t i = 0; i < pieces.size(); ++i) {
    Delta delta;
    delta.text = pieces[i];
    delta.ids = {static_cast<int32_t>(i)};
    if (i + 1 == pieces.size()) delta.finish = FinishReason::kStop;
    choice.text += delta.text;
    choice.ids.push_back(static_cast<int32_t>(i));
    choice.finish = delta.finish;
    streamed->stream_delta(state, 0, delta, out);
  }
  streamed->stream_end(state, out);
  Answered all{make()->whole(state), {}};
  for (size_t at = out.find("data: {"); at != std::string::npos; at = out.find("data: {", at + 1))
    all.events.push_back(json::parse(out.substr(at + 6, out.find("\n\n", at) - at - 6)).value());
  return all;
}

TEST(ReasoningFormat, Chat) {
  const ChatRequest chat = request().chat;
  const Answered a =
      answered([&] { return make_chat_format(context(), chat, ToolDialect::kHermes); }, kPieces);
  const json::Value& message = *a.whole.find("choices")->as_array()[0].find("message");
  EXPECT_EQ(message.get_string("content", ""), "Four.");
  EXPECT_EQ(message.get_string("reasoning", ""), "Two and two.");
  EXPECT_EQ(message.get_string("reasoning_content", ""), "Two and two.");
  std::string reasoning;
  std::string content;
  for (const json::Value& event : a.events) {
    const json::Value& delta = *event.find("choices")->as_array()[0].find("delta");
    reasoning += delta.get_string("reasoning", "");
    content += delta.get_string("content", "");
  }
  EXPECT_EQ(reasoning, "Two and two.");
  EXPECT_EQ(content, "Four.");
}

// A tag spelled with several tokens.
TEST(ReasoningFormat, TokensOfThought) {
  const ResponseRequest r = request();
  const auto counted = [&](const std::vector<std::string>& pieces, std::string_view prompt) {
    FormatContext c = context();
    c.reasoning.emplace(*reasoning_tags_by_name("qwen3"), prompt);
    c.token_bytes = [&](int32_t id) { return pieces.at(static_cast<size_t>(id)); };
    const Answered a =
        answered([&] { return make_response_format(c, r, ToolDialect::kHermes); }, pieces);
    return a.whole.find("usage")->find("output_tokens_details")->get_int("reasoning_tokens", -1);
  };
  EXPECT_EQ(counted({"So", "</", "think", ">", "</think>"}, "<think>"), 4);
  EXPECT_EQ(counted({"<thi", "nk>", "So"}, ""), 3);
  EXPECT_EQ(counted({"</think>", "Four"}, "<think></think>"), 0);
  EXPECT_EQ(counted({"Four", "</think>"}, ""), 0);
}

TEST(ReasoningFormat, ChatWithACall) {
  const ChatRequest chat = request(/*tools=*/true).chat;
  const Answered a =
      answered([&] { return make_chat_format(context(), chat, ToolDialect::kHermes); },
               {"I might <tool_call>", "</think>", kCall});
  const json::Value& message = *a.whole.find("choices")->as_array()[0].find("message");
  EXPECT_TRUE(message.find("content")->is_null());
  EXPECT_EQ(message.get_string("reasoning", ""), "I might <tool_call>");
  EXPECT_EQ(message.find("tool_calls")->as_array().size(), 1U);
}

TEST(ReasoningFormat, Response) {
  const ResponseRequest r = request();
  const Answered a =
      answered([&] { return make_response_format(context(), r, ToolDialect::kHermes); }, kPieces);
  const json::Array& output = a.whole.find("output")->as_array();
  ASSERT_EQ(output.size(), 2U);
  EXPECT_EQ(output[0].get_string("type", ""), "reasoning");
  const auto text = [](const json::Value& item) {
    return item.find("content")->as_array()[0].get_string("text", "");
  };
  EXPECT_EQ(text(output[0]), "Two and two.");
  EXPECT_EQ(output[1].get_string("type", ""), "message");
  EXPECT_EQ(text(output[1]), "Four.");
  const json::Value& usage = *a.whole.find("usage");
  EXPECT_EQ(usage.find("output_tokens_details")->get_int("reasoning_tokens", -1), 3);
  std::vector<std::string> kinds;
  for (const json::Value& event : a.events) {
    const std::string kind = event.get_string("type", "").substr(9);
    if (kinds.empty() || kinds.back() != kind) kinds.push_back(kind);
  }
  EXPECT_EQ(kinds,
            (std::vector<std::string>{
                "created", "in_progress", "output_item.added", "content_part.added",
                "reasoning_text.delta", "reasoning_text.done", "content_part.done",
                "output_item.done", "output_item.added", "content_part.added", "output_text.delta",
                "output_text.done", "content_part.done", "output_item.done", "completed"}));
  EXPECT_EQ(*a.events.back().find("response")->find("output"), *a.whole.find("output"));
}

}  // namespace
}  // namespace freshet::server

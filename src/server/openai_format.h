// Answers in the shapes of OpenAI's completions and chat completions, with vLLM's extra fields.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/answer.h"
#include "server/openai_request.h"
#include "server/reasoning_parser.h"
#include "server/tool_parser.h"

namespace freshet::server {

// What a token looks like: its bytes, which need not be whole UTF-8 characters.
using TokenBytes = std::function<std::string(int32_t)>;

struct FormatContext {
  std::string id;       // "cmpl-..." or "chatcmpl-..."
  std::string model;    // the served name
  int64_t created = 0;  // seconds since 1970
  TokenBytes token_bytes;
  TokenBytes text_bytes;  // the token's part of the text: none of special ones that are left out
  std::optional<ReasoningParser> reasoning;  // of a chat's answer that has yet to begin
};

std::unique_ptr<AnswerFormat> make_completion_format(FormatContext context,
                                                     const CompletionRequest& request,
                                                     std::vector<std::string> prompt_texts);
// `dialect` is used when the request offers tools and lets the model call them.
std::unique_ptr<AnswerFormat> make_chat_format(FormatContext context, const ChatRequest& request,
                                               ToolDialect dialect);

// Pieces shared with other routes.
// [{"token", "logprob", "bytes", "top_logprobs"}], one a token.
json::Array logprob_entries(const std::vector<std::vector<TokenLogprob>>& logprobs,
                            const TokenBytes& bytes, bool tokens_as_ids = false);
json::Value usage_json(const Usage& usage);
json::Value finish_reason_json(FinishReason reason);  // null, "stop", "length", "abort", "error"

}  // namespace freshet::server

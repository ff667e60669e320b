// Answers in the formats of OpenAI's completions and chat completions, with vLLM's extra fields.
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

// Returns the bytes of a token, which may be partial UTF-8 characters.
using TokenBytes = std::function<std::string(int32_t)>;

struct FormatContext {
  std::string id;       // "cmpl-..." or "chatcmpl-..."
  std::string model;    // the served name
  int64_t created = 0;  // seconds since 1970
  TokenBytes token_bytes;
  TokenBytes text_bytes;  // the token's part of the text; empty for omitted special tokens
  std::optional<ReasoningParser> reasoning;  // in its state at the beginning of a chat's answer
};

std::unique_ptr<AnswerFormat> make_completion_format(FormatContext context,
                                                     const CompletionRequest& request,
                                                     std::vector<std::string> prompt_texts);
// `dialect` is used if the request has tools that the model may call.
std::unique_ptr<AnswerFormat> make_chat_format(FormatContext context, const ChatRequest& request,
                                               ToolDialect dialect);

// Also used by other routes.
// [{"token", "logprob", "bytes", "top_logprobs"}], one per token.
json::Array logprob_entries(const std::vector<std::vector<TokenLogprob>>& logprobs,
                            const TokenBytes& bytes, bool tokens_as_ids = false);
json::Value usage_json(const Usage& usage);
json::Value speculation_json(const Usage::Speculation& speculation);
json::Value finish_reason_json(FinishReason reason);  // null, "stop", "length", "abort", "error"

}  // namespace freshet::server

// Converts requests of OpenAI's Responses API to chats.
//
// `input`, `instructions`, `tools` and other fields become the matching fields of a chat, so that
// both routes give the model the same prompt. Nothing is stored: references to an earlier response
// are refused.
#pragma once

#include "base/json.h"
#include "server/openai_request.h"

namespace freshet::server {

struct ResponseRequest {
  ChatRequest chat;
  json::Object repeated;  // the request fields that every response repeats
};

// `defaults`: as in parse_chat().
Parsed<ResponseRequest> parse_response(const json::Value& body, const RequestLimits& limits = {},
                                       const json::Object* defaults = nullptr);
// Converts an error of the chat to the field names of the original request.
ApiError in_words_of_responses(ApiError error);

}  // namespace freshet::server

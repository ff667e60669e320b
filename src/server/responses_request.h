// Requests of OpenAI's Responses API, read as chats.
//
// `input`, `instructions`, `tools` and the rest become the fields that a chat has for them, so that
// both routes ask a model in the same words. Nothing is stored: what refers to an earlier response
// is refused.
#pragma once

#include "base/json.h"
#include "server/openai_request.h"

namespace freshet::server {

struct ResponseRequest {
  ChatRequest chat;
  json::Object repeated;  // what every response repeats of its request
};

// `defaults`: as of parse_chat().
Parsed<ResponseRequest> parse_response(const json::Value& body, const RequestLimits& limits = {},
                                       const json::Object* defaults = nullptr);
// An error of the chat that a request was read as, in the request's own words.
ApiError in_words_of_responses(ApiError error);

}  // namespace freshet::server

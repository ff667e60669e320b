// Fields of llama-server's own routes, in the shape of the OpenAI routes. Pure.
//
// What both have under one name stays; what the OpenAI routes do not know is translated here, or
// refused by name.
#pragma once

#include <string>
#include <vector>

#include "server/openai_request.h"
#include "tokenizer/tokenizer.h"

namespace freshet::server {

struct LlamaRequest {
  json::Value body;  // for parse_completion(); one prompt
  int n_probs = 0;   // likeliest tokens shown of each
  bool return_tokens = false;
  double max_predict_s = 0.0;                // 0: no limit
  std::vector<std::string> response_fields;  // empty: all
};

// REQUIRES: `body` is an object.
Parsed<LlamaRequest> parse_llama_request(const json::Value& body, const Tokenizer& tokenizer,
                                         const RequestLimits& limits);
// The members of `answer` that `names` ask for: "a/b" is b of its member a.
json::Object selected_fields(const json::Object& answer, const std::vector<std::string>& names);

}  // namespace freshet::server

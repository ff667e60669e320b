// Converts requests of llama-server's own routes to the format of the OpenAI routes. Pure
// functions.
//
// Fields with the same name in both are kept. Fields that the OpenAI routes do not know are
// translated here, or refused by name.
#pragma once

#include <string>
#include <vector>

#include "server/openai_request.h"
#include "tokenizer/tokenizer.h"

namespace freshet::server {

struct LlamaRequest {
  json::Value body;  // for parse_completion(); one prompt
  int n_probs = 0;   // number of most likely tokens to return per token
  bool return_tokens = false;
  double max_predict_s = 0.0;                // 0: no limit
  std::vector<std::string> response_fields;  // empty: all
};

// REQUIRES: `body` is an object.
Parsed<LlamaRequest> parse_llama_request(const json::Value& body, const Tokenizer& tokenizer,
                                         const RequestLimits& limits);
// The members of `answer` selected by `names`: "a/b" is member b of member a.
json::Object selected_fields(const json::Object& answer, const std::vector<std::string>& names);

}  // namespace freshet::server

// Requests of the OpenAI API, with vLLM's extra fields, as values.
//
// The parsers are pure functions: JSON in, a checked description out, or an ApiError that names the
// field. Unknown fields are ignored, as in OpenAI's and vLLM's servers. Known fields that ask for
// something unsupported are refused, because ignoring them would change the answer.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "base/json.h"
#include "freshet/engine.h"
#include "server/api_error.h"
#include "server/fields.h"

namespace freshet::server {

struct RequestLimits {
  int max_n = 128;
  size_t max_stop_strings = 64;
  size_t max_stop_bytes = 4096;
  int max_logprobs = 20;
  size_t max_prompts = 2048;  // OpenAI's limit for embeddings
  size_t max_logit_bias = 4096;
  size_t max_bad_words = 1024;
  std::optional<int> max_pictures;  // of a conversation; absent: the model reads text only
};

// The fields common to all generating routes.
struct CommonRequest {
  std::string model;
  SamplingParams params;
  bool max_tokens_given = false;  // else: as much as the context allows (chat) or 16
  bool stream = false;
  bool include_usage = false;
  bool continuous_usage = false;
  int priority = 0;
  std::string request_id;
  std::string user;
  std::string cache_salt;        // mixed with the salt of the API key
  std::string kv_eviction;       // a JSON object, or empty
  std::string sparse_attention;  // likewise
  int id_slot = -1;              // llama-server's: where the text is remembered; -1: slot 0
  bool return_token_ids = false;
  bool tokens_as_ids = false;  // logprobs show tokens as "token_id:N"
  bool add_special_tokens = true;
  // > 0: keep this many tokens at the prompt's end; -1: as many as leave room for max_tokens.
  int truncate_prompt_tokens = 0;
  double timeout_s = 0.0;
  double max_predict_s = 0.0;  // since the first token, after one complete line; 0: no limit
  bool parse_special = true;   // special tokens spelled in a text are recognized
  json::Value structured;      // null, or {"json"|"regex"|"choice"|"grammar"|"json_object": ...}
  std::vector<std::string> bad_words;  // as texts; bad_words.h
  // The field names of these, for errors.
  const char* prompt_field = "prompt";
  const char* structure_field = "response_format";
  const char* max_tokens_field = "max_tokens";
};

using Prompt = std::variant<std::string, std::vector<int32_t>>;

struct CompletionRequest : CommonRequest {
  std::vector<Prompt> prompts;
  bool echo = false;
  bool prompt_only = false;  // max_tokens 0: nothing is generated; with echo, the prompt is scored
  // Of a model that translates; empty: what its files say.
  std::string source_language, target_language;
  bool translates() const { return !source_language.empty() || !target_language.empty(); }
};

struct ChatRequest : CommonRequest {
  // Contents are strings or lists of {"type": "text", "text": ...} and {"type": "image"}.
  json::Array messages;
  std::vector<std::string> pictures;  // their URLs, in order
  json::Value tools;                  // null or an array
  enum class ToolChoice { kNone, kAuto, kRequired, kNamed } tool_choice = ToolChoice::kAuto;
  std::string tool_name;  // with kNamed
  bool parallel_tool_calls = true;
  bool include_reasoning = true;
  bool add_generation_prompt = true;
  bool continue_final_message = false;
  json::Object template_kwargs;
};

template <class T>
using Parsed = std::variant<T, ApiError>;

// `defaults`: sampling parameters for requests that leave them out (sampling_defaults.h).
Parsed<CompletionRequest> parse_completion(const json::Value& body,
                                           const RequestLimits& limits = {},
                                           const json::Object* defaults = nullptr);
Parsed<ChatRequest> parse_chat(const json::Value& body, const RequestLimits& limits = {},
                               const json::Object* defaults = nullptr);
// Reads the named field: a string, an array of strings, token ids, or an array of lists of ids.
Parsed<std::vector<Prompt>> parse_prompts(const json::Value& body, const char* field,
                                          const RequestLimits& limits = {});
void read_truncation(Fields& fields, CommonRequest& request);
// The API name of a field of the engine's Request.
std::string name_of_field(const CommonRequest& request, const std::string& field);
// Checks the `messages` of a chat. Parts that are pictures keep their URLs (picture_parts.h).
Parsed<json::Array> parse_messages(const json::Value& messages, const RequestLimits& limits);

}  // namespace freshet::server

#include "server/openai_request.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include "server/fields.h"
#include "server/picture_parts.h"
#include "server/refused_fields.h"
#include "server/sampling_defaults.h"
#include "server/slot_texts.h"
#include "server/structured_request.h"
#include "server/tool_request.h"
#include "speculative/acceptance.h"

namespace freshet::server {
namespace {

constexpr int kMaxTokens = std::numeric_limits<int32_t>::max();
constexpr const char* kMessages = "messages";  // the source of a chat's prompt

void read_stop(Fields& fields, SamplingParams& params, const RequestLimits& limits) {
  const json::Value* v = fields.get("stop");
  if (v == nullptr) return;
  json::Array one;
  if (v->is_string()) one.push_back(*v);
  if (!v->is_string() && !v->is_array())
    return fields.fail("stop", "'stop' must be a string or an array of strings");
  const json::Array& all = v->is_array() ? v->as_array() : one;
  if (all.size() > limits.max_stop_strings) {
    return fields.fail("stop",
                       fmt::format("'stop' has more than {} strings", limits.max_stop_strings));
  }
  for (const json::Value& s : all) {
    if (!s.is_string() || s.as_string().empty() || s.as_string().size() > limits.max_stop_bytes) {
      return fields.fail(
          "stop", fmt::format("'stop' must hold strings of 1 to {} bytes", limits.max_stop_bytes));
    }
    params.stop.push_back(s.as_string());
  }
}

void read_logit_bias(Fields& fields, SamplingParams& params, const RequestLimits& limits) {
  const json::Value* v = fields.get("logit_bias");
  if (v == nullptr) return;
  if (!v->is_object() || v->as_object().size() > limits.max_logit_bias) {
    return fields.fail("logit_bias",
                       fmt::format("'logit_bias' must be an object of at most {} token ids",
                                   limits.max_logit_bias));
  }
  for (const auto& [key, bias] : v->as_object()) {
    int32_t id = 0;
    const auto [end, ec] = std::from_chars(key.data(), key.data() + key.size(), id);
    const double b = bias.is_number() ? bias.as_double() : NAN;
    if (ec != std::errc() || end != key.data() + key.size() || id < 0 ||
        !(b >= -100.0 && b <= 100.0)) {
      return fields.fail("logit_bias",
                         "'logit_bias' must map token ids to numbers from -100 to 100");
    }
    params.logit_bias.emplace_back(id, static_cast<float>(b));
  }
}

// Fields of generation_config.json, by transformers' names.
void read_bans(Fields& fields, SamplingParams& p) {
  constexpr size_t kMost = 4096;
  fields.read("no_repeat_ngram_size", p.no_repeat_ngram_size, 0, 1 << 20);
  fields.read("begin_suppress_tokens", p.begin_suppress_tokens, kMost);
  std::vector<int32_t> suppressed;
  fields.read("suppress_tokens", suppressed, kMost);
  for (const int32_t id : suppressed) p.bad_words_ids.push_back({id});
  const json::Value* words = fields.get("bad_words_ids");
  if (words == nullptr) return;
  if (!words->is_array() || words->as_array().size() > kMost)
    return fields.fail("bad_words_ids", "'bad_words_ids' must be an array of lists of token ids");
  for (const json::Value& word : words->as_array()) {
    json::Object one;
    one["bad_words_ids"] = word;
    const json::Value object(std::move(one));
    Fields inner(object);
    inner.read("bad_words_ids", p.bad_words_ids.emplace_back(), kMost);
    if (!inner.ok() || p.bad_words_ids.back().empty())
      return fields.fail("bad_words_ids", "'bad_words_ids' must be an array of lists of token ids");
  }
}

// vLLM's restrictions of the vocabulary.
void read_words(Fields& fields, CommonRequest& r, const RequestLimits& limits) {
  fields.read("allowed_token_ids", r.params.allowed_token_ids, size_t{1} << 20);
  const json::Value* allowed = fields.get("allowed_token_ids");
  if (allowed != nullptr && r.params.allowed_token_ids.empty())
    fields.fail("allowed_token_ids", "'allowed_token_ids' must not be empty: leave it out");
  const json::Value* words = fields.get("bad_words");
  if (words == nullptr) return;
  const std::string wrong =
      fmt::format("'bad_words' must be an array of at most {} words", limits.max_bad_words);
  if (!words->is_array() || words->as_array().size() > limits.max_bad_words)
    return fields.fail("bad_words", wrong);
  for (const json::Value& word : words->as_array()) {
    if (!word.is_string() || word.as_string().size() > limits.max_stop_bytes)
      return fields.fail("bad_words", wrong);
    r.bad_words.push_back(word.as_string());
  }
}

void read_seed(Fields& fields, SamplingParams& params) {
  const json::Value* v = fields.get("seed");
  if (v == nullptr) return;
  const auto seed = v->is_number() ? v->as_int64() : std::nullopt;
  if (!seed) return fields.fail("seed", "'seed' must be a 64-bit integer");
  params.seed = static_cast<uint64_t>(*seed);
}

void read_beam(Fields& fields, SamplingParams& params) {
  bool beam = false;
  fields.read("use_beam_search", beam);
  if (beam) params.beam_width = params.n;
  fields.read("length_penalty", params.length_penalty, -10, 10);
  fields.read("early_stopping", params.early_stopping);
  fields.read("renormalize_logits", params.renormalize_logits);
}

void read_acceptance(Fields& fields, SamplingParams& params) {
  std::string name;
  fields.read("rejection_sample_method", name);
  if (name.empty()) return;
  params.rejection_sample_method = speculative::acceptance_by_name(name);
  if (!params.rejection_sample_method) {
    fields.fail("rejection_sample_method",
                "'rejection_sample_method' must be match, rejection, standard, block or typical");
  }
}

void read_sampling(Fields& fields, SamplingParams& p, const RequestLimits& limits) {
  fields.read("temperature", p.temperature, 0, 100);
  fields.read("top_k", p.top_k, -1, kMaxTokens);
  if (p.top_k == -1) p.top_k = 0;
  fields.read("top_p", p.top_p, 0, 1);
  if (p.top_p <= 0) fields.fail("top_p", "'top_p' must be greater than 0");
  fields.read("min_p", p.min_p, 0, 1);
  fields.read("typical_p", p.typical_p, 0, 1);
  if (p.typical_p <= 0) fields.fail("typical_p", "'typical_p' must be greater than 0");
  fields.read("repeat_penalty", p.repetition_penalty, 1e-3, 100);  // llama-server's name for it
  if (fields.has("repetition_penalty") || !fields.has("repeat_penalty"))
    fields.read("repetition_penalty", p.repetition_penalty, 1e-3, 100);
  fields.read("presence_penalty", p.presence_penalty, -2, 2);
  fields.read("frequency_penalty", p.frequency_penalty, -2, 2);
  fields.read("n", p.n, 1, limits.max_n);
  fields.read("min_tokens", p.min_tokens, 0, kMaxTokens);
  fields.read("ignore_eos", p.ignore_eos);
  fields.read("include_stop_str_in_output", p.include_stop_str_in_output);
  fields.read("skip_special_tokens", p.skip_special_tokens);
  fields.read("stop_token_ids", p.stop_token_ids, 1024);
  fields.read("prompt_logprobs", p.prompt_logprobs, 0, limits.max_logprobs);
  read_stop(fields, p, limits);
  read_logit_bias(fields, p, limits);
  read_bans(fields, p);
  read_seed(fields, p);
  read_beam(fields, p);
  read_acceptance(fields, p);
}

void read_stream_options(Fields& fields, CommonRequest& r) {
  const json::Value* options = fields.get("stream_options");
  if (options == nullptr) return;
  if (!r.stream) return fields.fail("stream_options", "'stream_options' needs 'stream': true");
  if (!options->is_object())
    return fields.fail("stream_options", "'stream_options' must be an object");
  Fields inner(*options);
  inner.read("include_usage", r.include_usage);
  inner.read("continuous_usage_stats", r.continuous_usage);
  if (!inner.ok()) fields.fail("stream_options", "'stream_options': " + inner.error()->message);
}

// The names of max_tokens. A negative n_predict (llama-server's name) means as much as fits.
void read_max_tokens(Fields& fields, CommonRequest& r, int least) {
  for (const char* name : {"n_predict", "max_tokens", "max_completion_tokens"}) {
    const json::Value* v = fields.get(name);
    if (v == nullptr) continue;
    if (std::string_view(name) == "max_completion_tokens" && r.prompt_field != kMessages) continue;
    r.max_tokens_field = name;
    r.max_tokens_given = true;
    if (std::string_view(name) == "n_predict" && v->is_number() && v->as_double() < 0) {
      r.params.max_tokens = kMaxTokens;
    } else {
      fields.read(name, r.params.max_tokens, least, kMaxTokens);
    }
  }
}

// llama-server's penalty window. Here it is always the whole text; 0 turns penalties off.
void read_penalty_window(Fields& fields, SamplingParams& p) {
  const json::Value* v = fields.get("repeat_last_n");
  const bool penalised =
      p.repetition_penalty != 1.0F || p.presence_penalty != 0.0F || p.frequency_penalty != 0.0F;
  if (v == nullptr || !penalised) return;
  int window = -1;
  fields.read("repeat_last_n", window, -1, kMaxTokens);
  if (window == 0) {
    p.repetition_penalty = 1.0F;
    p.presence_penalty = p.frequency_penalty = 0.0F;
  } else if (window > 0) {
    fields.fail("repeat_last_n",
                "'repeat_last_n' must be -1 or 0: penalties look at all of the text");
  }
}

// `least`: the minimum of max_tokens.
void read_common(Fields& fields, CommonRequest& r, const RequestLimits& limits, int least) {
  refuse_unsupported_fields(fields);
  fields.read("model", r.model);
  fields.read("stream", r.stream);
  read_stream_options(fields, r);
  fields.read("priority", r.priority, std::numeric_limits<int>::min(), kMaxTokens);
  fields.read("request_id", r.request_id, 256);
  fields.read("user", r.user, 1024);
  fields.read("cache_salt", r.cache_salt, 1024);
  fields.read("id_slot", r.id_slot, -1, SlotTexts::kSlots - 1);
  if (const json::Value* eviction = fields.get("kv_eviction"))
    r.kv_eviction = json::write(*eviction);
  if (const json::Value* sparse = fields.get("sparse_attention"))
    r.sparse_attention = json::write(*sparse);
  fields.read("return_token_ids", r.return_token_ids);
  fields.read("return_tokens_as_token_ids", r.tokens_as_ids);
  read_truncation(fields, r);
  fields.read("timeout", r.timeout_s, 0, 1e9);
  read_max_tokens(fields, r, least);
  read_sampling(fields, r.params, limits);
  read_words(fields, r, limits);
  if (r.stream && r.params.prompt_logprobs >= 0)
    fields.fail("prompt_logprobs", "'prompt_logprobs' cannot be streamed");
  read_penalty_window(fields, r.params);
  StructuredRequest structured = read_structured(fields);
  r.structured = std::move(structured.description);
  r.structure_field = structured.field;
}

// Template variables of some models besides messages and tools.
void read_template_fields(Fields& fields, ChatRequest& r) {
  if (const json::Value* kwargs = fields.get("chat_template_kwargs")) {
    if (kwargs->is_object()) r.template_kwargs = kwargs->as_object();
    if (!kwargs->is_object())
      fields.fail("chat_template_kwargs", "'chat_template_kwargs' must be an object");
  }
  const json::Value* documents = fields.get("documents");
  if (documents != nullptr && !documents->is_array())
    return fields.fail("documents", "'documents' must be an array");
  std::string effort;
  std::string verbosity;
  fields.read("reasoning_effort", effort, 64);
  fields.read("verbosity", verbosity, 64);
  // As in llama-server; other values are for templates that read them.
  if (effort == "none" && r.template_kwargs.find("enable_thinking") == nullptr)
    r.template_kwargs["enable_thinking"] = false;
  for (const char* name : {"documents", "reasoning_effort", "verbosity"}) {
    const json::Value* v = fields.get(name);
    if (v != nullptr && r.template_kwargs.find(name) == nullptr) r.template_kwargs[name] = *v;
  }
}

// Converts OpenAI's message forms that templates do not know: the older function calls, and
// refusals beside an empty content.
std::optional<ApiError> take_older_forms(json::Object& message, const std::string& where) {
  const auto given = [&](const char* name) {
    const json::Value* v = message.find(name);
    return v != nullptr && !v->is_null() ? v : nullptr;
  };
  if (given("audio") != nullptr && given("content") == nullptr)
    return bad_request(where, where + ".audio is not supported: this model reads text only");
  if (const json::Value* refusal = given("refusal");
      refusal != nullptr && refusal->is_string() && given("content") == nullptr) {
    json::Value text = *refusal;
    message["content"] = std::move(text);
  }
  message.erase("refusal");
  if (const json::Value* call = given("function_call")) {
    if (!call->is_object() || call->get_string("name", "").empty())
      return bad_request(where, where + ".function_call needs a name");
    json::Object one;
    one["id"] = "call_" + call->get_string("name", "");
    one["type"] = "function";
    one["function"] = *call;
    if (given("tool_calls") == nullptr) message["tool_calls"] = json::Array{json::Value(one)};
  }
  message.erase("function_call");
  if (const json::Value* role = given("role"); *role == json::Value("function")) {
    message["role"] = "tool";
    if (const json::Value* name = given("name"); name != nullptr && name->is_string())
      message["tool_call_id"] = "call_" + name->as_string();
  }
  return std::nullopt;
}

// Removes empty members that clients send back: templates would see them as present.
void leave_out_nothings(json::Object& message) {
  std::vector<std::string> names;
  for (const auto& [name, value] : message) {
    const bool no_calls = name == "tool_calls" && value.is_array() && value.as_array().empty();
    if (no_calls || (value.is_null() && name != "content")) names.emplace_back(name);
  }
  for (const std::string& name : names) message.erase(name);
}

void read_chat_logprobs(Fields& fields, ChatRequest& r, const RequestLimits& limits) {
  bool logprobs = false;
  int top = 0;
  fields.read("logprobs", logprobs);
  fields.read("top_logprobs", top, 0, limits.max_logprobs);
  if (top > 0 && !logprobs) fields.fail("top_logprobs", "'top_logprobs' needs 'logprobs': true");
  if (logprobs) r.params.logprobs = top;
}

// The defaults that concern a request: beam search ignores those of sampling.
json::Object defaults_for(const json::Value& body, const json::Object* defaults) {
  json::Object out;
  if (defaults == nullptr) return out;
  const bool beams = body.get_bool("use_beam_search", false);
  for (const auto& [name, value] : *defaults) {
    if (!beams || !recommends_sampling(name)) out[name] = value;
  }
  return out;
}

}  // namespace

void read_truncation(Fields& fields, CommonRequest& r) {
  const json::Value* v = fields.get("truncate_prompt_tokens");
  if (v == nullptr) return;
  const int64_t n = v->is_number() ? v->as_int64().value_or(0) : 0;
  if (n < -1 || n == 0 || n > kMaxTokens) {
    return fields.fail("truncate_prompt_tokens",
                       "'truncate_prompt_tokens' must be -1 or a number of tokens");
  }
  r.truncate_prompt_tokens = static_cast<int>(n);
}

std::string name_of_field(const CommonRequest& request, const std::string& field) {
  if (field == "prompt") return request.prompt_field;
  if (field == "grammar") return request.structure_field;
  if (field == "beam_width") return "n";
  if (field == "deadline_s") return "timeout";
  if (field == "max_tokens") return request.max_tokens_field;
  return field;
}

Parsed<json::Array> parse_messages(const json::Value& messages, const RequestLimits& limits) {
  if (!messages.is_array() || messages.as_array().empty()) {
    return bad_request("messages", "'messages' must be a non-empty array");
  }
  json::Array out = messages.as_array();
  for (size_t i = 0; i < out.size(); ++i) {
    json::Value& m = out[i];
    const std::string where = fmt::format("messages[{}]", i);
    if (!m.is_object() || m.get_string("role", "").empty())
      return bad_request(where, where + " needs a role");
    json::Object& object = m.as_object();
    if (auto error = take_older_forms(object, where)) return *error;
    leave_out_nothings(object);
    json::Value* content = object.find("content");
    if (content != nullptr && content->is_array()) {
      json::Array read;
      if (auto error = read_parts(content->as_array(), limits, read))
        return bad_request(where, *error);
      *content = std::move(read);
    } else if (content != nullptr && !content->is_string() && !content->is_null()) {
      return bad_request(where, where + ".content must be a string or an array of parts");
    } else if (content == nullptr && object.find("tool_calls") == nullptr) {
      return bad_request(where, where + " needs a content");
    }
  }
  return out;
}

Parsed<std::vector<Prompt>> parse_prompts(const json::Value& body, const char* field,
                                          const RequestLimits& limits) {
  ApiError wrong = bad_request(
      field, fmt::format("'{}' must be a string, an array of strings, or token ids", field));
  const json::Value* v = body.find(field);
  if (v == nullptr || v->is_null())
    return bad_request(field, fmt::format("'{}' is missing", field));
  std::vector<Prompt> out;
  if (v->is_string()) out.emplace_back(v->as_string());
  if (v->is_string()) return out;
  if (!v->is_array() || v->as_array().empty()) return wrong;
  const json::Array& items = v->as_array();
  if (!items.front().is_number() && items.size() > limits.max_prompts) {
    return bad_request(field,
                       fmt::format("'{}' has more than {} prompts", field, limits.max_prompts));
  }
  const auto add_ids = [&](const json::Array& list) {
    std::vector<int32_t> ids;
    ids.reserve(list.size());
    for (const json::Value& e : list) {
      const auto id = e.is_number() ? e.as_int64() : std::nullopt;
      if (!id || *id < 0 || *id > kMaxTokens) return false;
      ids.push_back(static_cast<int32_t>(*id));
    }
    out.emplace_back(std::move(ids));
    return true;
  };
  ApiError wrong_ids =
      bad_request(field, fmt::format("a '{}' of numbers must hold token ids", field));
  if (items.front().is_number()) {
    if (!add_ids(items)) return wrong_ids;
    return out;
  }
  for (const json::Value& item : items) {
    if (item.is_string()) {
      out.emplace_back(item.as_string());
    } else if (!item.is_array() || item.as_array().empty()) {
      return wrong;
    } else if (!add_ids(item.as_array())) {
      return wrong_ids;
    }
  }
  return out;
}

Parsed<CompletionRequest> parse_completion(const json::Value& body, const RequestLimits& limits,
                                           const json::Object* defaults) {
  if (!body.is_object()) return bad_request("", "the body must be a JSON object");
  CompletionRequest r;
  const json::Object own_defaults = defaults_for(body, defaults);
  Fields fields(body, &own_defaults);
  read_common(fields, r, limits, /*least=*/0);
  fields.read("echo", r.echo);
  fields.read("add_special_tokens", r.add_special_tokens);
  fields.read("source_language", r.source_language, 64);
  fields.read("target_language", r.target_language, 64);
  fields.read("logprobs", r.params.logprobs, 0, limits.max_logprobs);
  int best_of = r.params.n;
  fields.read("best_of", best_of, 1, limits.max_n);
  if (best_of != r.params.n) fields.fail("best_of", "'best_of' other than 'n' is not supported");
  std::string suffix;
  fields.read("suffix", suffix);
  if (!suffix.empty()) fields.fail("suffix", "'suffix' is not supported here: use /infill");
  if (r.echo && r.stream) fields.fail("echo", "'echo' cannot be streamed");
  if (r.echo && r.params.logprobs >= 0)
    r.params.prompt_logprobs = std::max(r.params.prompt_logprobs, r.params.logprobs);
  r.prompt_only = r.params.max_tokens == 0;
  if (r.prompt_only) r.params.max_tokens = 1;  // the engine generates at least one
  if (fields.error()) return *fields.error();
  auto prompts = parse_prompts(body, "prompt", limits);
  if (auto* error = std::get_if<ApiError>(&prompts)) return *error;
  r.prompts = std::get<std::vector<Prompt>>(std::move(prompts));
  return r;
}

Parsed<ChatRequest> parse_chat(const json::Value& body, const RequestLimits& limits,
                               const json::Object* defaults) {
  if (!body.is_object()) return bad_request("", "the body must be a JSON object");
  ChatRequest r;
  r.prompt_field = kMessages;
  const json::Object own_defaults = defaults_for(body, defaults);
  Fields fields(body, &own_defaults);
  read_common(fields, r, limits, /*least=*/1);
  bool echo = false;
  fields.read("echo", echo);
  if (echo) fields.fail("echo", "'echo' is not supported in chats");
  r.add_special_tokens = false;  // the template writes them
  fields.read("add_special_tokens", r.add_special_tokens);
  fields.read("add_generation_prompt", r.add_generation_prompt);
  fields.read("continue_final_message", r.continue_final_message);
  if (r.continue_final_message && fields.get("add_generation_prompt") == nullptr)
    r.add_generation_prompt = false;
  if (r.continue_final_message && r.add_generation_prompt) {
    fields.fail("continue_final_message",
                "'continue_final_message' cannot be combined with 'add_generation_prompt'");
  }
  fields.read("parallel_tool_calls", r.parallel_tool_calls);
  fields.read("include_reasoning", r.include_reasoning);
  if (fields.get("chat_template") != nullptr) {
    fields.fail("chat_template",
                "templates in requests are not accepted: start the server with --chat-template");
  }
  read_template_fields(fields, r);
  read_tools(fields, r);
  read_chat_logprobs(fields, r, limits);
  if (fields.error()) return *fields.error();
  const json::Value* messages = fields.get("messages");
  auto parsed = parse_messages(messages != nullptr ? *messages : json::Value(), limits);
  if (auto* error = std::get_if<ApiError>(&parsed)) return *error;
  r.messages = std::get<json::Array>(std::move(parsed));
  r.pictures = take_pictures(r.messages);
  const auto most = static_cast<size_t>(limits.max_pictures.value_or(0));
  if (r.pictures.size() > most) {
    return bad_request(kMessages, fmt::format("the messages have {} pictures: at most {} are "
                                              "allowed (--limit-mm-per-prompt)",
                                              r.pictures.size(), most));
  }
  return r;
}

}  // namespace freshet::server

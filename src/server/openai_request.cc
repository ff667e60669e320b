#include "server/openai_request.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include "server/fields.h"

namespace freshet::server {
namespace {

constexpr int kMaxTokens = std::numeric_limits<int32_t>::max();

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
                       fmt::format("'stop' holds more than {} strings", limits.max_stop_strings));
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
  read_seed(fields, p);
  read_beam(fields, p);
}

// response_format, vLLM's structured_outputs and its older guided_* become one description.
void read_structured(Fields& fields, json::Value& out) {
  if (const json::Value* format = fields.get("response_format")) {
    const std::string type = format->is_object() ? format->get_string("type", "") : "";
    if (type == "json_object") {
      json::Object o;
      o["json_object"] = true;
      out = std::move(o);
    } else if (type == "json_schema") {
      const json::Value* outer = format->find("json_schema");
      const json::Value* schema = outer != nullptr ? outer->find("schema") : nullptr;
      if (schema == nullptr)
        return fields.fail("response_format", "'response_format.json_schema.schema' is missing");
      json::Object o;
      o["json"] = *schema;
      out = std::move(o);
    } else if (type != "text") {
      return fields.fail("response_format",
                         "'response_format.type' must be text, json_object or json_schema");
    }
  }
  const json::Value* structured = fields.get("structured_outputs");
  if (structured != nullptr && !structured->is_object())
    return fields.fail("structured_outputs", "'structured_outputs' must be an object");
  json::Object chosen;
  for (const std::string kind : {"json", "regex", "choice", "grammar", "json_object"}) {
    const json::Value* v = structured != nullptr ? structured->find(kind) : nullptr;
    if (structured == nullptr) v = fields.get("guided_" + kind);
    if (v != nullptr && !v->is_null() && !(v->is_bool() && !v->as_bool())) chosen[kind] = *v;
  }
  if (structured == nullptr && chosen.empty()) return;
  if (chosen.size() != 1 || !out.is_null()) {
    return fields.fail(
        "structured_outputs",
        "give exactly one of json, regex, choice, grammar and json_object, and no response_format");
  }
  out = std::move(chosen);
}

// What OpenAI's or vLLM's servers would do and this one does not: ignored, the answer would be one
// to another question.
void refuse_what_is_not_done(Fields& fields) {
  static constexpr std::pair<const char*, const char*> kMends[] = {
      {"allowed_token_ids", "'structured_outputs' or 'logit_bias' restrict what is written"},
      {"bad_words", "a 'logit_bias' of -100 keeps a token out"},
      {"functions", "send 'tools'"},
      {"logits_processors", "'logit_bias' changes logits"},
      {"prompt_embeds", "send 'prompt'"},
  };
  for (const auto& [name, mend] : kMends) {
    const json::Value* v = fields.get(name);
    if (v == nullptr || (v->is_array() && v->as_array().empty())) continue;
    fields.fail(name, fmt::format("'{}' is not supported: {}", name, mend));
  }
}

void read_common(Fields& fields, CommonRequest& r, const RequestLimits& limits) {
  refuse_what_is_not_done(fields);
  fields.read("model", r.model);
  fields.read("stream", r.stream);
  if (const json::Value* options = fields.get("stream_options")) {
    if (!r.stream) fields.fail("stream_options", "'stream_options' needs 'stream': true");
    if (!options->is_object()) fields.fail("stream_options", "'stream_options' must be an object");
    r.include_usage = options->get_bool("include_usage", false);
    r.continuous_usage = options->get_bool("continuous_usage_stats", false);
  }
  fields.read("priority", r.priority, std::numeric_limits<int>::min(), kMaxTokens);
  fields.read("request_id", r.request_id, 256);
  fields.read("user", r.user, 1024);
  fields.read("cache_salt", r.cache_salt, 1024);
  fields.read("return_token_ids", r.return_token_ids);
  fields.read("return_tokens_as_token_ids", r.tokens_as_ids);
  read_truncation(fields, r);
  fields.read("timeout", r.timeout_s, 0, 1e9);
  r.max_tokens_given =
      fields.get("max_tokens") != nullptr || fields.get("max_completion_tokens") != nullptr;
  bool echo = false;  // of completions, where it may stand without anything generated
  fields.read("echo", echo);
  fields.read("max_tokens", r.params.max_tokens, echo ? 0 : 1, kMaxTokens);
  read_sampling(fields, r.params, limits);
  if (r.stream && r.params.prompt_logprobs >= 0)
    fields.fail("prompt_logprobs", "'prompt_logprobs' cannot be streamed");
  read_structured(fields, r.structured);
}

// What templates of some models read besides messages and tools.
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
  fields.read("reasoning_effort", effort, 64);
  for (const char* name : {"documents", "reasoning_effort"}) {
    const json::Value* v = fields.get(name);
    if (v != nullptr && r.template_kwargs.find(name) == nullptr) r.template_kwargs[name] = *v;
  }
}

// A message's content: a string, null, or text parts, which come out as {"type", "text"}.
std::optional<std::string> read_parts(const json::Array& parts, json::Array& out) {
  for (const json::Value& part : parts) {
    const std::string type = part.is_object() ? part.get_string("type", "") : "";
    const json::Value* text = part.is_object() ? part.find("text") : nullptr;
    const bool is_text = type == "text" || type == "input_text" || type == "output_text";
    if (!is_text || text == nullptr || !text->is_string()) {
      return fmt::format("content of type '{}' is not supported: this model reads text only", type);
    }
    json::Object plain;
    plain["type"] = "text";
    plain["text"] = *text;
    out.emplace_back(std::move(plain));
  }
  return std::nullopt;
}

// Members that say nothing, as clients send them back: to templates they would be there.
void leave_out_nothings(json::Object& message) {
  std::vector<std::string> names;
  for (const auto& [name, value] : message) {
    const bool no_calls = name == "tool_calls" && value.is_array() && value.as_array().empty();
    if (no_calls || (value.is_null() && name != "content")) names.emplace_back(name);
  }
  for (const std::string& name : names) message.erase(name);
}

bool has_tool(const json::Value& tools, const std::string& name) {
  if (!tools.is_array()) return false;
  return std::any_of(tools.as_array().begin(), tools.as_array().end(),
                     [&](const json::Value& tool) {
                       return tool.find("function")->get_string("name", "") == name;
                     });
}

void read_tools(Fields& fields, ChatRequest& r) {
  if (const json::Value* tools = fields.get("tools")) {
    if (!tools->is_array() || tools->as_array().size() > 1024) {
      return fields.fail("tools", "'tools' must be an array of at most 1024 tools");
    }
    for (const json::Value& tool : tools->as_array()) {
      const json::Value* function = tool.is_object() ? tool.find("function") : nullptr;
      if (function == nullptr || !function->is_object() ||
          function->get_string("name", "").empty()) {
        return fields.fail("tools",
                           "each tool needs 'type': \"function\" and a 'function' with a name");
      }
      const json::Value* parameters = function->find("parameters");
      if (parameters != nullptr && !parameters->is_null() && !parameters->is_object())
        return fields.fail("tools", "a tool's 'parameters' must be a JSON schema, an object");
    }
    if (!tools->as_array().empty()) r.tools = *tools;
  }
  const json::Value* choice = fields.get("tool_choice");
  if (choice == nullptr) {
    if (r.tools.is_null()) r.tool_choice = ChatRequest::ToolChoice::kNone;
  } else if (choice->is_string() && choice->as_string() == "none") {
    r.tool_choice = ChatRequest::ToolChoice::kNone;
  } else if (choice->is_string() && choice->as_string() == "auto") {
    r.tool_choice = ChatRequest::ToolChoice::kAuto;
  } else if (choice->is_string() && choice->as_string() == "required") {
    r.tool_choice = ChatRequest::ToolChoice::kRequired;
  } else if (choice->is_object() && choice->find("function") != nullptr) {
    r.tool_choice = ChatRequest::ToolChoice::kNamed;
    r.tool_name = choice->find("function")->get_string("name", "");
    if (!has_tool(r.tools, r.tool_name))
      return fields.fail("tool_choice", fmt::format("'tools' has no function '{}'", r.tool_name));
  } else {
    return fields.fail("tool_choice",
                       "'tool_choice' must be none, auto, required or a named function");
  }
  const bool needs_tools = r.tool_choice == ChatRequest::ToolChoice::kRequired ||
                           r.tool_choice == ChatRequest::ToolChoice::kNamed;
  if (needs_tools && r.tools.is_null())
    fields.fail("tool_choice", "'tool_choice' asks for a tool, but 'tools' is empty");
}

void read_chat_logprobs(Fields& fields, ChatRequest& r, const RequestLimits& limits) {
  bool logprobs = false;
  int top = 0;
  fields.read("logprobs", logprobs);
  fields.read("top_logprobs", top, 0, limits.max_logprobs);
  if (top > 0 && !logprobs) fields.fail("top_logprobs", "'top_logprobs' needs 'logprobs': true");
  if (logprobs) r.params.logprobs = top;
}

bool samples(const json::Value& body) {
  return !body.get_bool("use_beam_search", false);
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
  return field;
}

Parsed<json::Array> parse_messages(const json::Value& messages) {
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
    leave_out_nothings(object);
    json::Value* content = object.find("content");
    if (content != nullptr && content->is_array()) {
      json::Array read;
      if (auto error = read_parts(content->as_array(), read)) return bad_request(where, *error);
      *content = std::move(read);
    } else if (content != nullptr && !content->is_string() && !content->is_null()) {
      return bad_request(where, where + ".content must be a string or an array of text parts");
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
                       fmt::format("'{}' holds more than {} prompts", field, limits.max_prompts));
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
  Fields fields(body, samples(body) ? defaults : nullptr);
  read_common(fields, r, limits);
  fields.read("echo", r.echo);
  fields.read("add_special_tokens", r.add_special_tokens);
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
  r.scores_only = r.echo && r.params.max_tokens == 0;
  if (r.scores_only) r.params.max_tokens = 1;  // the least that the engine does
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
  r.prompt_field = "messages";
  Fields fields(body, samples(body) ? defaults : nullptr);
  read_common(fields, r, limits);
  fields.read("max_completion_tokens", r.params.max_tokens, 1, kMaxTokens);
  r.add_special_tokens = false;  // the template writes them
  fields.read("add_special_tokens", r.add_special_tokens);
  fields.read("add_generation_prompt", r.add_generation_prompt);
  fields.read("continue_final_message", r.continue_final_message);
  if (r.continue_final_message && fields.get("add_generation_prompt") == nullptr)
    r.add_generation_prompt = false;
  if (r.continue_final_message && r.add_generation_prompt) {
    fields.fail("continue_final_message",
                "'continue_final_message' excludes 'add_generation_prompt'");
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
  auto parsed = parse_messages(messages != nullptr ? *messages : json::Value());
  if (auto* error = std::get_if<ApiError>(&parsed)) return *error;
  r.messages = std::get<json::Array>(std::move(parsed));
  return r;
}

}  // namespace freshet::server

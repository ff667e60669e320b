#include "server/responses_request.h"

#include <map>
#include <utility>

#include <fmt/format.h>

namespace freshet::server {
namespace {

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size()))
    text.replace(at, from.size(), to);
}

// Converts the items of `input` to chat messages.
class Conversation {
 public:
  explicit Conversation(const RequestLimits& limits) : limits_(limits) {}
  std::optional<ApiError> add(const json::Value& item, size_t index) {
    const std::string where = fmt::format("input[{}]", index);
    if (!item.is_object()) return bad_request(where, where + " must be an object");
    const std::string type = item.get_string("type", "message");
    if (type == "message") return add_message(item, where);
    if (type == "function_call") return add_call(item, where);
    if (type == "function_call_output") return add_output(item, where);
    if (type == "reasoning") return add_reasoning(item);
    return bad_request(where, fmt::format("{} of type '{}' is not supported", where, type));
  }
  json::Array take() { return std::move(messages_); }

 private:
  std::optional<ApiError> push(json::Object message, const std::string& where) {
    auto parsed = parse_messages(json::Array{std::move(message)}, limits_);
    if (auto* error = std::get_if<ApiError>(&parsed)) {
      replace_all(error->message, "messages[0]", where);
      error->param = where;
      return *error;
    }
    messages_.push_back(std::move(std::get<json::Array>(parsed).front()));
    return std::nullopt;
  }

  std::optional<ApiError> add_message(const json::Value& item, const std::string& where) {
    json::Object message;
    for (const char* name : {"role", "content"}) {
      if (const json::Value* v = item.find(name)) message[name] = *v;
    }
    if (item.get_string("role", "") == "assistant") tell_reasoning(message);
    reasoning_.clear();  // it belonged to an earlier turn
    return push(std::move(message), where);
  }

  // Reasoning belongs to the assistant's message or call that follows it.
  std::optional<ApiError> add_reasoning(const json::Value& item) {
    const json::Value* parts = item.find("content");
    if (parts == nullptr || !parts->is_array()) return std::nullopt;
    for (const json::Value& part : parts->as_array()) {
      if (part.is_object() && part.get_string("type", "") == "reasoning_text")
        reasoning_ += part.get_string("text", "");
    }
    return std::nullopt;
  }

  void tell_reasoning(json::Object& message) {
    if (reasoning_.empty()) return;
    message["reasoning"] = reasoning_;
    message["reasoning_content"] = std::exchange(reasoning_, {});
  }

  // Calls belong to the assistant's message before them, if there is one.
  std::optional<ApiError> add_call(const json::Value& item, const std::string& where) {
    const std::string id = item.get_string("call_id", "");
    const std::string name = item.get_string("name", "");
    const json::Value* arguments = item.find("arguments");
    if (id.empty() || name.empty() || arguments == nullptr || !arguments->is_string())
      return bad_request(where, where + " needs a call_id, a name and arguments");
    names_[id] = name;
    json::Object function;
    function["name"] = name;
    function["arguments"] = *arguments;
    json::Object call;
    call["id"] = id;
    call["type"] = "function";
    call["function"] = std::move(function);
    if (messages_.empty() || messages_.back().get_string("role", "") != "assistant") {
      json::Object message;
      message["role"] = "assistant";
      message["content"] = "";
      tell_reasoning(message);
      messages_.emplace_back(std::move(message));
    }
    json::Value& calls = messages_.back().as_object()["tool_calls"];
    if (calls.is_null()) calls = json::Array();
    calls.as_array().emplace_back(std::move(call));
    return std::nullopt;
  }

  std::optional<ApiError> add_output(const json::Value& item, const std::string& where) {
    const std::string id = item.get_string("call_id", "");
    const json::Value* output = item.find("output");
    if (id.empty() || output == nullptr)
      return bad_request(where, where + " needs a call_id and an output");
    json::Object message;
    message["role"] = "tool";
    message["tool_call_id"] = id;
    if (const auto name = names_.find(id); name != names_.end()) message["name"] = name->second;
    message["content"] = *output;
    return push(std::move(message), where);
  }

  const RequestLimits& limits_;
  json::Array messages_;
  std::string reasoning_;                     // its message has not come yet
  std::map<std::string, std::string> names_;  // names of called functions, by call id
};

Parsed<json::Array> messages_of(const json::Value& body, const RequestLimits& limits) {
  const json::Value* input = body.find("input");
  Conversation conversation(limits);
  if (input != nullptr && input->is_string()) {
    json::Object message;
    message["role"] = "user";
    message["content"] = *input;
    if (auto error = conversation.add(std::move(message), 0)) return *error;
  } else if (input != nullptr && input->is_array() && !input->as_array().empty()) {
    for (size_t i = 0; i < input->as_array().size(); ++i) {
      if (auto error = conversation.add(input->as_array()[i], i)) return *error;
    }
  } else {
    return bad_request("input", "'input' must be a string or a non-empty array of items");
  }
  json::Array messages = conversation.take();
  if (const json::Value* text = body.find("instructions"); text != nullptr && !text->is_null()) {
    if (!text->is_string()) return bad_request("instructions", "'instructions' must be a string");
    json::Object message;
    message["role"] = "system";
    message["content"] = *text;
    messages.insert(messages.begin(), std::move(message));
  }
  if (messages.empty()) return bad_request("input", "'input' has no message");
  return messages;
}

// {"type": "function", "name", ...} as {"type": "function", "function": {"name", ...}}
json::Value nested(const json::Value& tool) {
  json::Object function;
  for (const char* name : {"name", "description", "parameters", "strict"}) {
    const json::Value* v = tool.find(name);
    if (v != nullptr && !v->is_null()) function[name] = *v;
  }
  json::Object out;
  out["type"] = "function";
  out["function"] = std::move(function);
  return out;
}

std::optional<ApiError> read_tools(const json::Value& body, json::Object& chat) {
  if (const json::Value* tools = body.find("tools"); tools != nullptr && tools->is_array()) {
    json::Array out;
    for (const json::Value& tool : tools->as_array()) {
      const std::string type = tool.is_object() ? tool.get_string("type", "") : "";
      if (type != "function") {
        return bad_request("tools", fmt::format("tools of type '{}' are not supported: only those "
                                                "of type 'function' are, which the client runs",
                                                type));
      }
      if (tool.get_string("name", "").empty())
        return bad_request("tools", "each tool needs a name");
      out.push_back(nested(tool));
    }
    chat["tools"] = std::move(out);
  }
  if (const json::Value* choice = body.find("tool_choice");
      choice != nullptr && choice->is_object()) {
    const std::string type = choice->get_string("type", "");
    if (type == "allowed_tools") {
      json::Object allowed;
      allowed["mode"] = choice->get_string("mode", "");
      json::Array names;
      const json::Value* list = choice->find("tools");
      for (const json::Value& tool :
           list != nullptr && list->is_array() ? list->as_array() : json::Array())
        names.push_back(nested(tool));
      allowed["tools"] = std::move(names);
      json::Object out;
      out["type"] = type;
      out["allowed_tools"] = std::move(allowed);
      chat["tool_choice"] = std::move(out);
      return std::nullopt;
    }
    if (type != "function") {
      return bad_request("tool_choice",
                         fmt::format("a 'tool_choice' of type '{}' is not supported", type));
    }
    json::Value named = nested(*choice);
    chat["tool_choice"] = std::move(named);
  }
  return std::nullopt;
}

std::optional<ApiError> read_text(const json::Value& body, json::Object& chat) {
  const json::Value* text = body.find("text");
  if (text == nullptr || text->is_null()) return std::nullopt;
  if (!text->is_object()) return bad_request("text", "'text' must be an object");
  if (const json::Value* verbosity = text->find("verbosity")) chat["verbosity"] = *verbosity;
  const json::Value* format = text->find("format");
  if (format == nullptr || format->is_null()) return std::nullopt;
  json::Object out;
  out["type"] = format->is_object() ? format->get_string("type", "") : "";
  if (out["type"].as_string() == "json_schema") out["json_schema"] = *format;
  chat["response_format"] = std::move(out);
  return std::nullopt;
}

std::optional<ApiError> refuse_what_is_not_done(const json::Value& body) {
  static constexpr std::pair<const char*, const char*> kFixes[] = {
      {"previous_response_id", "responses are not stored: send the conversation as 'input'"},
      {"conversation", "conversations are not stored: send them as 'input'"},
      {"background", "stream the response, or wait for it"},
      {"context_management", "send a shorter conversation, or 'truncation': \"auto\""},
      {"prompt", "send 'instructions' and 'input'"},
      {"n", "a response is one answer"},
      {"use_beam_search", "/v1/chat/completions has it"},
      // Names of chat fields: ignoring them silently would change the answer.
      {"messages", "send 'input'"},
      {"max_tokens", "send 'max_output_tokens'"},
      {"max_completion_tokens", "send 'max_output_tokens'"},
      {"response_format", "send 'text.format'"},
      {"logprobs", "'include' \"message.output_text.logprobs\""},
  };
  for (const auto& [name, fix] : kFixes) {
    const json::Value* v = body.find(name);
    if (v == nullptr || v->is_null() || *v == json::Value(false) ||
        (std::string_view(name) == "n" && *v == json::Value(1)))
      continue;
    return bad_request(name, fmt::format("'{}' is not supported: {}", name, fix));
  }
  return std::nullopt;
}

bool wants_logprobs(const json::Value& body) {
  const json::Value* include = body.find("include");
  if (include == nullptr || !include->is_array()) return false;
  for (const json::Value& name : include->as_array()) {
    if (name.is_string() && name.as_string() == "message.output_text.logprobs") return true;
  }
  return false;
}

// The body of the chat without its messages.
Parsed<json::Object> chat_of(const json::Value& body) {
  json::Object chat = body.as_object();
  for (const char* name : {"input", "instructions", "include", "text", "stream_options", "n",
                           "background", "metadata", "logprobs", "top_logprobs", "messages",
                           "max_tokens", "max_completion_tokens", "response_format"})
    chat.erase(name);
  if (const json::Value* most = body.find("max_output_tokens"); most != nullptr && !most->is_null())
    chat["max_tokens"] = *most;
  if (auto error = read_tools(body, chat)) return *error;
  if (auto error = read_text(body, chat)) return *error;
  if (wants_logprobs(body)) {
    chat["logprobs"] = true;
    if (const json::Value* top = body.find("top_logprobs")) chat["top_logprobs"] = *top;
  }
  const json::Value* reasoning = body.find("reasoning");
  if (reasoning != nullptr && reasoning->is_object()) {
    if (const json::Value* effort = reasoning->find("effort")) chat["reasoning_effort"] = *effort;
  }
  const json::Value* truncation = body.find("truncation");
  const std::string cut =
      truncation != nullptr && truncation->is_string() ? truncation->as_string() : "disabled";
  if (cut == "auto") {
    chat["truncate_prompt_tokens"] = -1;
  } else if (cut != "disabled") {
    return bad_request("truncation", "'truncation' must be auto or disabled");
  }
  return chat;
}

// The values of the request, or their defaults.
json::Object repeated_of(const json::Value& body, const ChatRequest& chat) {
  json::Object plain;
  plain["format"] = json::Object();
  plain["format"].as_object()["type"] = "text";
  json::Object reasoning;
  reasoning["effort"] = nullptr;
  reasoning["summary"] = nullptr;
  const std::pair<const char*, json::Value> fields[] = {
      {"instructions", nullptr},      {"max_output_tokens", nullptr},
      {"max_tool_calls", nullptr},    {"metadata", json::Object()},
      {"parallel_tool_calls", true},  {"reasoning", std::move(reasoning)},
      {"text", std::move(plain)},     {"tool_choice", "auto"},
      {"tools", json::Array()},       {"top_logprobs", 0},
      {"truncation", "disabled"},     {"user", nullptr},
      {"safety_identifier", nullptr}, {"prompt_cache_key", nullptr},
  };
  json::Object out;
  for (const auto& [name, otherwise] : fields) {
    const json::Value* v = body.find(name);
    out[name] = v != nullptr && !v->is_null() ? *v : otherwise;
  }
  out["temperature"] = static_cast<double>(chat.params.temperature);
  out["top_p"] = static_cast<double>(chat.params.top_p);
  out["presence_penalty"] = static_cast<double>(chat.params.presence_penalty);
  out["frequency_penalty"] = static_cast<double>(chat.params.frequency_penalty);
  out["background"] = false;
  out["store"] = false;
  out["previous_response_id"] = nullptr;
  out["service_tier"] = "default";
  return out;
}

}  // namespace

ApiError in_words_of_responses(ApiError error) {
  static constexpr std::pair<std::string_view, std::string_view> kNames[] = {
      {"response_format.json_schema", "text.format"},
      {"response_format", "text.format"},
      {"max_tokens", "max_output_tokens"},
      {"messages", "input"},
      {"reasoning_effort", "reasoning.effort"},
      {"verbosity", "text.verbosity"},
  };
  for (const auto& [chat, here] : kNames) {
    if (error.param == chat) error.param = here;
    replace_all(error.message, fmt::format("'{}'", chat), fmt::format("'{}'", here));
    replace_all(error.message, fmt::format("'{}.", chat), fmt::format("'{}.", here));
  }
  return error;
}

Parsed<ResponseRequest> parse_response(const json::Value& body, const RequestLimits& limits,
                                       const json::Object* defaults) {
  if (!body.is_object()) return bad_request("", "the body must be a JSON object");
  if (auto error = refuse_what_is_not_done(body)) return *error;
  auto chat = chat_of(body);
  if (auto* error = std::get_if<ApiError>(&chat)) return *error;
  auto messages = messages_of(body, limits);
  if (auto* error = std::get_if<ApiError>(&messages)) return *error;
  auto& fields = std::get<json::Object>(chat);
  fields["messages"] = std::get<json::Array>(std::move(messages));
  auto parsed = parse_chat(json::Value(std::move(fields)), limits, defaults);
  if (auto* error = std::get_if<ApiError>(&parsed)) return in_words_of_responses(std::move(*error));
  ResponseRequest request{std::get<ChatRequest>(std::move(parsed)), {}};
  request.chat.prompt_field = "input";
  if (std::string_view(request.chat.structure_field) == "response_format")
    request.chat.structure_field = "text.format";
  request.chat.max_tokens_field = "max_output_tokens";
  request.repeated = repeated_of(body, request.chat);
  return request;
}

}  // namespace freshet::server

// llama-server's routes: /completion, /infill, /props, /slots, /apply-template.
#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "server/app.h"
#include "server/fields.h"
#include "server/infill.h"

namespace freshet::server {
namespace {

// {"content", "stop", "tokens_predicted", ...}; streamed, one such event a delta.
class LlamaFormat final : public AnswerFormat {
 public:
  LlamaFormat(std::string model, bool return_tokens, bool prompt_only)
      : model_(std::move(model)), return_tokens_(return_tokens), prompt_only_(prompt_only) {}

  json::Value whole(const AnswerState& state) override {
    if (prompt_only_) return last(state, "", {});
    return last(state, state.choices.front().text, state.choices.front().ids);
  }
  void stream_begin(const AnswerState&, std::string&) override {}
  void stream_delta(const AnswerState&, size_t, const Delta& delta, std::string& out) override {
    if (prompt_only_ || (delta.text.empty() && !return_tokens_)) return;
    json::Object o;
    o["index"] = 0;
    o["content"] = delta.text;
    o["tokens"] = tokens(delta.ids);
    o["stop"] = false;
    append_event(o, out);
  }
  void stream_end(const AnswerState& state, std::string& out) override {
    append_event(last(state, "", {}), out);
  }

 private:
  json::Array tokens(const std::vector<int32_t>& ids) const {
    json::Array a;
    if (return_tokens_) {
      for (int32_t id : ids) a.emplace_back(static_cast<int64_t>(id));
    }
    return a;
  }
  json::Object last(const AnswerState& state, const std::string& text,
                    const std::vector<int32_t>& ids) const {
    const Choice& c = state.choices.front();
    const int written = prompt_only_ ? 0 : state.usage.completion_tokens;
    json::Object o;
    o["index"] = 0;
    o["content"] = text;
    o["tokens"] = tokens(ids);
    o["stop"] = true;
    o["model"] = model_;
    o["tokens_predicted"] = written;
    o["tokens_evaluated"] = state.usage.prompt_tokens;
    o["tokens_cached"] = state.usage.cached_tokens;
    o["truncated"] = false;
    const bool limit = prompt_only_ || c.finish == FinishReason::kLength;
    o["stop_type"] = limit ? "limit" : (c.stop_reason.empty() ? "eos" : "word");
    o["stopping_word"] = limit ? "" : c.stop_reason;
    o["timings"] = timings(state, written);
    return o;
  }
  json::Object timings(const AnswerState& state, int written) const {
    const Clock::time_point now = Clock::now();
    const Clock::time_point first = state.first_token.value_or(now);
    json::Object o;
    o["cache_n"] = state.usage.cached_tokens;
    const auto add = [&](const std::string& what, int tokens, double seconds) {
      const bool any = tokens > 0 && seconds > 0;
      o[what + "_n"] = tokens;
      o[what + "_ms"] = seconds * 1e3;
      o[what + "_per_token_ms"] = any ? seconds * 1e3 / tokens : 0.0;
      o[what + "_per_second"] = any ? tokens / seconds : 0.0;
    };
    add("prompt", state.usage.prompt_tokens - state.usage.cached_tokens,
        seconds_between(begin_, first));
    add("predicted", written, seconds_between(first, now));
    o["total_ms"] = seconds_between(begin_, now) * 1e3;
    return o;
  }
  const std::string model_;
  const bool return_tokens_;
  const bool prompt_only_;
  const Clock::time_point begin_ = Clock::now();
};

// [[id, bias], ...], where false forbids the token, as OpenAI's object; what is not of that shape
// stays, and is refused there.
json::Value with_openai_bias(const json::Value& bias) {
  if (!bias.is_array()) return bias;
  json::Object out;
  for (const json::Value& pair : bias.as_array()) {
    if (!pair.is_array() || pair.as_array().size() != 2) return bias;
    const json::Value& id = pair.as_array()[0];
    const json::Value& value = pair.as_array()[1];
    const auto number = id.is_number() ? id.as_int64() : std::nullopt;
    if (!number) return bias;
    out[std::to_string(*number)] =
        value.is_bool() && !value.as_bool() ? json::Value(-100.0) : value;
  }
  return out;
}

// Of llama-server's samplers and answers, what is not there; 0 turns each off.
std::optional<ApiError> refuse_what_is_not_done(const json::Value& body) {
  for (const char* name :
       {"n_probs", "mirostat", "dry_multiplier", "xtc_probability", "dynatemp_range"}) {
    const json::Value* v = body.find(name);
    if (v != nullptr && v->is_number() && v->as_double() > 0)
      return bad_request(name, fmt::format("'{}' is not supported: leave it out or send 0", name));
  }
  return std::nullopt;
}

// llama-server's names for what the OpenAI routes call otherwise.
json::Value with_openai_names(const json::Value& body) {
  json::Value out = body;
  json::Object& o = out.as_object();
  const auto rename = [&](const char* from, const char* to) {
    if (const json::Value* v = o.find(from); v != nullptr && o.find(to) == nullptr) {
      json::Value copy = *v;
      o[to] = std::move(copy);
    }
    o.erase(from);
  };
  rename("n_predict", "max_tokens");
  rename("repeat_penalty", "repetition_penalty");
  if (const json::Value* n = o.find("max_tokens");
      n != nullptr && n->is_number() && n->as_double() < 0)
    o.erase("max_tokens");
  if (const json::Value* seed = o.find("seed");
      seed != nullptr && seed->is_number() && seed->as_double() < 0)
    o.erase("seed");
  json::Object structured;
  for (const auto& [from, to] : {std::pair{"grammar", "grammar"}, {"json_schema", "json"}}) {
    const json::Value* v = o.find(from);
    const bool given = v != nullptr && !v->is_null() && !(v->is_string() && v->as_string().empty());
    if (given) structured[to] = *v;
    o.erase(from);
  }
  if (!structured.empty()) o["structured_outputs"] = std::move(structured);
  if (const json::Value* bias = o.find("logit_bias")) {
    json::Value copy = with_openai_bias(*bias);
    o["logit_bias"] = std::move(copy);
  }
  for (const char* name : {"logprobs", "prompt_logprobs"}) o.erase(name);
  return out;
}

// Answers a request whose prompt is in place, in llama-server's shape.
void complete(App& app, App::Exchanges exchange, json::Value body) {
  if (auto error = refuse_what_is_not_done(body)) return send_error(exchange, *error);
  // Editors send 0 to have a prompt in the cache by the time they need it.
  json::Object& fields = body.as_object();
  const json::Value* wanted = fields.find("max_tokens");
  const bool prompt_only =
      wanted != nullptr && wanted->is_number() && wanted->as_int64() == int64_t{0};
  if (prompt_only) fields["max_tokens"] = 1;  // the least that the engine does
  auto parsed = parse_completion(body, app.options().limits, &app.options().sampling_defaults);
  if (auto* error = std::get_if<ApiError>(&parsed)) return send_error(exchange, *error);
  auto& request = std::get<CompletionRequest>(parsed);
  if (request.prompts.size() != 1 || request.params.n != 1) {
    return send_error(exchange,
                      bad_request("prompt", "this route takes one prompt and gives one answer"));
  }
  auto ids = app.encode(request.prompts.front(), request);
  if (auto* error = std::get_if<ApiError>(&ids)) return send_error(exchange, *error);
  std::vector<std::vector<int32_t>> prompts;
  prompts.push_back(std::get<std::vector<int32_t>>(std::move(ids)));
  if (!request.max_tokens_given) {
    request.params.max_tokens =
        std::max(1, app.engine().max_model_len() - static_cast<int>(prompts.front().size()));
  }
  auto format = std::make_unique<LlamaFormat>(app.model_name(),
                                              body.get_bool("return_tokens", false), prompt_only);
  app.answer(std::move(exchange), request, request.params, std::move(prompts), std::move(format));
}

void completion(App& app, App::Exchanges exchange, const json::Value& body) {
  if (!body.is_object())
    return send_error(exchange, bad_request("", "the body must be a JSON object"));
  complete(app, std::move(exchange), with_openai_names(body));
}

void infill(App& app, App::Exchanges exchange, const json::Value& body) {
  if (!body.is_object())
    return send_error(exchange, bad_request("", "the body must be a JSON object"));
  json::Value request = with_openai_names(body);
  const Tokenizer& tokenizer = app.engine().tokenizer();
  // First of all whether the model can do it at all: clients find out by an empty request.
  if (const auto probe = infill_prompt(tokenizer, {}, 0); std::holds_alternative<ApiError>(probe))
    return send_error(exchange, std::get<ApiError>(probe));
  auto parsed = parse_infill(body);
  if (auto* error = std::get_if<ApiError>(&parsed)) return send_error(exchange, *error);
  // Room for the answer: what is asked for, at most a quarter of the context.
  const int context = app.engine().max_model_len();
  const json::Value* wanted = request.find("max_tokens");
  const int64_t answer =
      wanted != nullptr && wanted->is_number() ? wanted->as_int64().value_or(context) : context;
  const auto room = static_cast<size_t>(context - std::clamp<int64_t>(answer, 1, context / 4));
  auto ids = infill_prompt(tokenizer, std::get<InfillRequest>(parsed), room);
  if (auto* error = std::get_if<ApiError>(&ids)) return send_error(exchange, *error);
  json::Array prompt;
  for (const int32_t id : std::get<std::vector<int32_t>>(ids))
    prompt.emplace_back(static_cast<int64_t>(id));
  request.as_object()["prompt"] = std::move(prompt);
  complete(app, std::move(exchange), std::move(request));
}

void props(App& app, const App::Exchanges& exchange) {
  const Tokenizer& tokenizer = app.engine().tokenizer();
  const auto text_of = [&](std::optional<int32_t> id) {
    return id ? json::Value(tokenizer.token_text(*id)) : json::Value("");
  };
  json::Object settings;
  settings["n_ctx"] = app.engine().max_model_len();
  json::Object o;
  o["default_generation_settings"] = std::move(settings);
  o["total_slots"] = 1;
  o["model_alias"] = app.model_name();
  o["chat_template"] = app.renderer().source(false);
  if (app.renderer().has_tool_use()) o["chat_template_tool_use"] = app.renderer().source(true);
  o["bos_token"] = text_of(tokenizer.bos());
  o["eos_token"] = text_of(tokenizer.eos());
  o["build_info"] = "freshet " FRESHET_VERSION;
  o["is_sleeping"] = false;
  send_json(exchange, o);
}

// Sequences are not bound to slots here: one entry a running or waiting request.
void slots(App& app, const App::Exchanges& exchange) {
  const EngineStats stats = app.engine().stats();
  json::Array all;
  for (int i = 0; i < stats.running + stats.waiting; ++i) {
    json::Object slot;
    slot["id"] = i;
    slot["n_ctx"] = app.engine().max_model_len();
    slot["is_processing"] = i < stats.running;
    all.emplace_back(std::move(slot));
  }
  send_json(exchange, all);
}

void apply_template(App& app, const App::Exchanges& exchange, const json::Value& body) {
  auto parsed = parse_chat(body, app.options().limits);
  if (auto* error = std::get_if<ApiError>(&parsed)) return send_error(exchange, *error);
  auto text = app.render_chat(std::get<ChatRequest>(parsed));
  if (auto* error = std::get_if<ApiError>(&text)) return send_error(exchange, *error);
  json::Object o;
  o["prompt"] = std::get<std::string>(std::move(text));
  send_json(exchange, o);
}

}  // namespace

void add_llama_routes(App& app, std::vector<App::Route>& routes) {
  using X = App::Exchanges;
  for (const char* path : {"/completion", "/completions"}) {
    routes.push_back({"POST", path, false,
                      [&app](X x, const json::Value& b) { completion(app, std::move(x), b); }});
  }
  routes.push_back({"POST", "/infill", false,
                    [&app](X x, const json::Value& b) { infill(app, std::move(x), b); }});
  routes.push_back(
      {"GET", "/props", false, [&app](const X& x, const json::Value&) { props(app, x); }});
  routes.push_back(
      {"GET", "/slots", false, [&app](const X& x, const json::Value&) { slots(app, x); }});
  routes.push_back({"POST", "/apply-template", false,
                    [&app](const X& x, const json::Value& b) { apply_template(app, x, b); }});
}

}  // namespace freshet::server

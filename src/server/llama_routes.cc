// llama-server's routes: /completion, /infill, /props, /slots, /apply-template.
#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include <fmt/format.h>

#include "server/app.h"
#include "server/fields.h"
#include "server/infill.h"
#include "server/llama_request.h"
#include "server/sampling_defaults.h"

namespace freshet::server {
namespace {

// {"content", "stop", "tokens_predicted", ...}; a stream has one such event per delta.
class LlamaFormat final : public AnswerFormat {
 public:
  LlamaFormat(std::string model, TokenBytes token_bytes, LlamaRequest request, bool prompt_only)
      : model_(std::move(model)),
        token_bytes_(std::move(token_bytes)),
        request_(std::move(request)),
        prompt_only_(prompt_only) {}

  json::Value whole(const AnswerState& state) override {
    if (prompt_only_) return last(state, "", {}, {});
    const Choice& choice = state.choices.front();
    return last(state, choice.text, choice.ids, choice.logprobs);
  }
  void stream_begin(const AnswerState&, std::string&) override {}
  void stream_delta(const AnswerState&, size_t, const Delta& delta, std::string& out) override {
    const bool silent = delta.text.empty() && !request_.return_tokens && delta.logprobs.empty();
    if (prompt_only_ || silent) return;
    json::Object o;
    o["index"] = 0;
    o["content"] = delta.text;
    o["tokens"] = tokens(delta.ids);
    o["stop"] = false;
    add_probabilities(delta.logprobs, o);
    append_event(o, out);
  }
  void stream_end(const AnswerState& state, std::string& out) override {
    append_event(last(state, "", {}, {}), out);
  }

 private:
  json::Array tokens(const std::vector<int32_t>& ids) const {
    json::Array a;
    if (request_.return_tokens) {
      for (int32_t id : ids) a.emplace_back(static_cast<int64_t>(id));
    }
    return a;
  }
  json::Object probability(const TokenLogprob& t) const {
    json::Object o;
    o["id"] = static_cast<int64_t>(t.id);
    const std::string bytes = token_bytes_(t.id);
    o["token"] = bytes;
    json::Array numbers;
    for (const char c : bytes) numbers.emplace_back(static_cast<int64_t>(static_cast<uint8_t>(c)));
    o["bytes"] = std::move(numbers);
    o["logprob"] = std::max(static_cast<double>(t.logprob), -9999.0);  // JSON has no infinities
    return o;
  }
  void add_probabilities(const std::vector<std::vector<TokenLogprob>>& logprobs,
                         json::Object& o) const {
    if (request_.n_probs == 0) return;
    json::Array all;
    for (const auto& position : logprobs) {
      if (position.empty()) continue;
      json::Object token = probability(position.front());
      json::Array top;
      for (size_t i = 1; i < position.size(); ++i) top.emplace_back(probability(position[i]));
      token["top_logprobs"] = std::move(top);
      all.emplace_back(std::move(token));
    }
    o["completion_probabilities"] = std::move(all);
  }
  json::Object last(const AnswerState& state, const std::string& text,
                    const std::vector<int32_t>& ids,
                    const std::vector<std::vector<TokenLogprob>>& logprobs) const {
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
    const bool limit = prompt_only_ || c.finish == FinishReason::kLength ||
                       c.finish == FinishReason::kCancelled;  // because of t_max_predict_ms
    o["stop_type"] = limit ? "limit" : (c.stop_reason.empty() ? "eos" : "word");
    o["stopping_word"] = limit ? "" : c.stop_reason;
    o["timings"] = timings(state, written);
    if (!text.empty()) add_probabilities(logprobs, o);
    return selected_fields(o, request_.response_fields);
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
    if (const Usage::Speculation& s = state.usage.speculation; s.steps > 0) {
      o["draft_n"] = s.drafted_tokens;
      o["draft_n_accepted"] = s.accepted_tokens;
    }
    return o;
  }
  const std::string model_;
  const TokenBytes token_bytes_;
  const LlamaRequest request_;
  const bool prompt_only_;
  const Clock::time_point begin_ = Clock::now();
};

// Answers a request whose prompt is set, in llama-server's format.
void complete(App& app, App::Exchanges exchange, LlamaRequest llama) {
  auto parsed =
      parse_completion(llama.body, app.options().limits, &app.options().sampling_defaults);
  if (auto* error = std::get_if<ApiError>(&parsed)) return send_error(exchange, *error);
  auto& request = std::get<CompletionRequest>(parsed);
  if (request.prompts.size() != 1 || request.params.n != 1) {
    return send_error(exchange, bad_request(request.params.n != 1 ? "n" : "prompt",
                                            "this route takes one prompt and gives one answer"));
  }
  request.max_predict_s = llama.max_predict_s;
  auto ids = app.encode(request.prompts.front(), request);
  if (auto* error = std::get_if<ApiError>(&ids)) return send_error(exchange, *error);
  std::vector<std::vector<int32_t>> prompts;
  prompts.push_back(std::get<std::vector<int32_t>>(std::move(ids)));
  if (!request.max_tokens_given) {
    request.params.max_tokens =
        std::max(1, app.engine().max_model_len() - static_cast<int>(prompts.front().size()));
  }
  FormatContext context = app.format_context("cmpl", request);
  // Editors send n_predict 0 to put a prompt into the cache before they need it.
  auto format = std::make_unique<LlamaFormat>(app.model_name(), std::move(context.token_bytes),
                                              std::move(llama), request.prompt_only);
  app.answer(std::move(exchange), request, request.params, std::move(prompts), std::move(format));
}

void completion(App& app, App::Exchanges exchange, const json::Value& body) {
  if (!body.is_object())
    return send_error(exchange, bad_request("", "the body must be a JSON object"));
  auto llama = parse_llama_request(body, app.engine().tokenizer(), app.options().limits);
  if (auto* error = std::get_if<ApiError>(&llama)) return send_error(exchange, *error);
  complete(app, std::move(exchange), std::get<LlamaRequest>(std::move(llama)));
}

void infill(App& app, App::Exchanges exchange, const json::Value& body) {
  if (!body.is_object())
    return send_error(exchange, bad_request("", "the body must be a JSON object"));
  const Tokenizer& tokenizer = app.engine().tokenizer();
  // First check whether the model supports infill: clients probe with an empty request.
  if (const auto probe = infill_prompt(tokenizer, {}, 0); std::holds_alternative<ApiError>(probe))
    return send_error(exchange, std::get<ApiError>(probe));
  auto parsed = parse_infill(body);
  if (auto* error = std::get_if<ApiError>(&parsed)) return send_error(exchange, *error);
  auto llama = parse_llama_request(body, tokenizer, app.options().limits);
  if (auto* error = std::get_if<ApiError>(&llama)) return send_error(exchange, *error);
  auto& request = std::get<LlamaRequest>(llama);
  // Room for the answer: the requested tokens, at most a quarter of the context.
  const int context = app.engine().max_model_len();
  const json::Value* wanted = request.body.find("max_tokens");
  if (wanted == nullptr) wanted = request.body.find("n_predict");
  const int64_t answer =
      wanted != nullptr && wanted->is_number() ? wanted->as_int64().value_or(context) : context;
  const auto room = static_cast<size_t>(context - std::clamp<int64_t>(answer, 1, context / 4));
  auto ids = infill_prompt(tokenizer, std::get<InfillRequest>(parsed), room);
  if (auto* error = std::get_if<ApiError>(&ids)) return send_error(exchange, *error);
  json::Array prompt;
  for (const int32_t id : std::get<std::vector<int32_t>>(ids))
    prompt.emplace_back(static_cast<int64_t>(id));
  request.body.as_object()["prompt"] = std::move(prompt);
  complete(app, std::move(exchange), std::move(request));
}

// The sampling of requests that do not set it, under llama-server's names.
json::Object default_sampling(const json::Object& defaults) {
  json::Object params;
  for (const auto& [name, shown, off] : {std::tuple{"temperature", "temperature", 1},
                                         {"top_k", "top_k", 0},
                                         {"top_p", "top_p", 1},
                                         {"min_p", "min_p", 0},
                                         {"typical_p", "typical_p", 1},
                                         {"repetition_penalty", "repeat_penalty", 1}}) {
    const json::Value* value = defaults.find(name);
    params[shown] = value != nullptr ? *value : json::Value(off);
  }
  return params;
}

void props(App& app, const App::Exchanges& exchange) {
  const Tokenizer& tokenizer = app.engine().tokenizer();
  const auto text_of = [&](std::optional<int32_t> id) {
    return id ? json::Value(tokenizer.token_text(*id)) : json::Value("");
  };
  json::Object settings;
  settings["n_ctx"] = app.engine().max_model_len();
  settings["params"] = default_sampling(app.options().sampling_defaults);
  json::Object o;
  o["default_generation_settings"] = std::move(settings);
  o["chat_sampling"] = chat_sampling(app.options().sampling_defaults);
  o["total_slots"] = 1;
  o["model_alias"] = app.model_name();
  o["chat_template"] = app.renderer().source(false);
  if (app.renderer().has_tool_use()) o["chat_template_tool_use"] = app.renderer().source(true);
  json::Object modalities;
  modalities["vision"] = app.engine().pictures() != nullptr;
  modalities["audio"] = false;
  o["modalities"] = std::move(modalities);
  o["bos_token"] = text_of(tokenizer.bos());
  o["eos_token"] = text_of(tokenizer.eos());
  o["build_info"] = "freshet " FRESHET_VERSION;
  o["is_sleeping"] = false;
  send_json(exchange, o);
}

// Sequences are not bound to slots: one entry per running or waiting request.
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

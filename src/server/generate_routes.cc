// /v1/generate: a minimal route. {"prompt", "max_tokens": 100, "temperature": 1.0, "stream": false}
// returns {"text", "tokens_generated", "latency_ms", "tokens_per_second"}. A stream has one event
// per delta ({"text"}) and ends with that object plus "done": true.
#include <utility>

#include "server/app.h"

namespace freshet::server {
namespace {

class PlainFormat final : public AnswerFormat {
 public:
  explicit PlainFormat(bool prompt_only) : prompt_only_(prompt_only) {}
  json::Value whole(const AnswerState& state) override { return result(state); }
  void stream_begin(const AnswerState&, std::string&) override {}
  void stream_delta(const AnswerState&, size_t, const Delta& delta, std::string& out) override {
    if (delta.text.empty() || prompt_only_) return;
    json::Object o;
    o["text"] = delta.text;
    append_event(o, out);
  }
  void stream_end(const AnswerState& state, std::string& out) override {
    json::Object o = result(state);
    o["done"] = true;
    append_event(o, out);
    out += "data: [DONE]\n\n";
  }

 private:
  json::Object result(const AnswerState& state) const {
    const Choice& choice = state.choices.front();
    const double seconds = seconds_between(begin_, Clock::now());
    const int tokens = prompt_only_ ? 0 : state.usage.completion_tokens;
    json::Object o;
    o["text"] = prompt_only_ ? "" : choice.text;
    o["tokens_generated"] = tokens;
    o["latency_ms"] = seconds * 1e3;
    o["tokens_per_second"] = seconds > 0 ? tokens / seconds : 0.0;
    o["finish_reason"] = finish_reason_json(prompt_only_ ? FinishReason::kLength : choice.finish);
    return o;
  }
  const bool prompt_only_;
  const Clock::time_point begin_ = Clock::now();
};

void generate(App& app, App::Exchanges exchange, const json::Value& body) {
  auto parsed = parse_completion(body, app.options().limits, &app.options().sampling_defaults);
  if (auto* error = std::get_if<ApiError>(&parsed)) return send_error(exchange, *error);
  auto& request = std::get<CompletionRequest>(parsed);
  if (request.prompts.size() != 1 || request.params.n != 1) {
    return send_error(exchange,
                      bad_request("prompt", "this route takes one prompt and gives one answer"));
  }
  if (!request.max_tokens_given) request.params.max_tokens = 100;
  auto ids = app.encode(request.prompts.front(), request);
  if (auto* error = std::get_if<ApiError>(&ids)) return send_error(exchange, *error);
  std::vector<std::vector<int32_t>> prompts;
  prompts.push_back(std::get<std::vector<int32_t>>(std::move(ids)));
  app.answer(std::move(exchange), request, request.params, std::move(prompts),
             std::make_unique<PlainFormat>(request.prompt_only));
}

}  // namespace

void add_generate_routes(App& app, std::vector<App::Route>& routes) {
  routes.push_back({"POST", "/v1/generate", false, [&app](App::Exchanges x, const json::Value& b) {
                      generate(app, std::move(x), b);
                    }});
  routes.push_back(
      {"GET", "/v1/metrics", false, [&app](const App::Exchanges& x, const json::Value&) {
         send_json(x, app.metrics().summary());
       }});
}

}  // namespace freshet::server

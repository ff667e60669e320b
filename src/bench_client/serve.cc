#include "bench_client/serve.h"

#include <chrono>
#include <cmath>
#include <deque>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "bench_client/server_vocabulary.h"
#include "http/client.h"

namespace freshet::bench_client {
namespace {

namespace asio = boost::asio;
using asio::awaitable;
using Clock = std::chrono::steady_clock;

constexpr auto kLookEvery = std::chrono::milliseconds(50);

// Passes exceptions of a coroutine to the caller that runs the io_context.
struct Rethrow {
  void operator()(std::exception_ptr error) const {
    if (error) std::rethrow_exception(error);
  }
};

// The model according to /v1/models.
struct ModelInfo {
  std::string id;
  int max_model_len = 0;
  int vocab_size = 0;
};

Result<ModelInfo> first_model(http::Client& client) {
  FRESHET_ASSIGN_OR_RETURN(const http::Reply reply, client.request_now("/v1/models"));
  if (reply.status == 401 || reply.status == 403)
    return invalid_argument("the server asks for an API key: set OPENAI_API_KEY");
  if (reply.status != 200)
    return io_error("/v1/models answers {}: give the model's name with --model", reply.status);
  const auto parsed = json::parse(reply.body);
  const json::Value* data = parsed.ok() ? parsed->find("data") : nullptr;
  if (data == nullptr || !data->is_array() || data->as_array().empty())
    return io_error("/v1/models names no model: give its name with --model");
  const json::Value& model = data->as_array().front();
  ModelInfo info;
  info.id = model.get_string("id", "");
  info.max_model_len = static_cast<int>(model.get_int("max_model_len", 0));
  if (const json::Value* meta = model.find("meta"); meta != nullptr) {
    info.vocab_size = static_cast<int>(meta->get_int("n_vocab", 0));
    if (info.max_model_len == 0)
      info.max_model_len = static_cast<int>(meta->get_int("n_ctx_train", 0));
  }
  return info;
}

class Runner {
 public:
  Runner(const ServeOptions& options, const ServeHooks& hooks, const std::string& model,
         const std::vector<Sample>& samples, asio::io_context& io, http::Client& client)
      : o_(options), hooks_(hooks), io_(io), client_(client), samples_(samples) {
    endpoint_ = !o_.endpoint.empty() ? o_.endpoint
                : o_.chat            ? "/v1/chat/completions"
                                     : "/v1/completions";
    // Write the body before the clock starts.
    for (const Sample& sample : samples) bodies_.push_back(request_body(o_, model, sample));
  }

  Status warm_up();
  Status run(const std::vector<double>& times, BenchRun& result);

 private:
  double now() const { return std::chrono::duration<double>(Clock::now() - begin_).count(); }
  awaitable<void> one(size_t index, Outcome& outcome);
  awaitable<void> place(size_t index);
  awaitable<void> dispatch(const std::vector<double>& times);
  awaitable<void> watch();
  Status drive();

  const ServeOptions& o_;
  const ServeHooks& hooks_;
  asio::io_context& io_;
  http::Client& client_;
  const std::vector<Sample>& samples_;
  std::string endpoint_;
  std::vector<std::string> bodies_;
  Clock::time_point begin_ = Clock::now();
  std::vector<Outcome> outcomes_;
  std::deque<size_t> waiting_;  // due, but all slots are in use
  int active_ = 0;
  size_t done_ = 0;
  size_t expected_ = 0;
  double end_ = 0.0;
  bool stopped_ = false;
};

awaitable<void> Runner::one(size_t index, Outcome& outcome) {
  outcome.start = now();
  outcome.input_tokens = samples_[index].input_tokens;
  AnswerReader reader(o_.chat, outcome);
  const http::Client::Sink sink = [&](std::string_view bytes) { reader.push(bytes, now()); };
  auto reply = co_await client_.request(endpoint_, bodies_[index], sink);
  if (!reply.ok()) {
    outcome.error = reply.status().message();
  } else if (reply->status != 200) {
    const auto body = json::parse(reply->body);
    const json::Value* error = body.ok() ? body->find("error") : nullptr;
    const std::string why = error != nullptr ? error->get_string("message", "") : "";
    outcome.error =
        fmt::format("{} {}{}{}", reply->status, reply->reason, why.empty() ? "" : ": ", why);
  } else {
    reader.finish();
  }
}

// Sends requests one after the other as long as some are due.
awaitable<void> Runner::place(size_t index) {
  for (;;) {
    co_await one(index, outcomes_[index]);
    end_ = now();
    hooks_.progress(++done_, expected_);
    if (waiting_.empty()) break;
    index = waiting_.front();
    waiting_.pop_front();
  }
  --active_;
}

awaitable<void> Runner::dispatch(const std::vector<double>& times) {
  asio::steady_timer timer(io_);
  for (size_t i = 0; i < samples_.size(); ++i) {
    if (times[i] > now()) {
      timer.expires_at(begin_ + std::chrono::duration_cast<Clock::duration>(
                                    std::chrono::duration<double>(times[i])));
      co_await timer.async_wait(asio::use_awaitable);
    }
    outcomes_[i].arrival = now();
    if (o_.max_concurrency && active_ >= *o_.max_concurrency) {
      waiting_.push_back(i);
    } else {
      ++active_;
      asio::co_spawn(io_, place(i), Rethrow{});
    }
  }
}

awaitable<void> Runner::watch() {
  asio::steady_timer timer(io_);
  while (done_ < expected_) {
    if (hooks_.stop != nullptr && *hooks_.stop) {
      stopped_ = true;
      io_.stop();
      co_return;
    }
    timer.expires_after(kLookEvery);
    co_await timer.async_wait(asio::use_awaitable);
  }
}

Status Runner::drive() {
  asio::co_spawn(io_, watch(), Rethrow{});
  io_.restart();
  io_.run();
  if (stopped_) return cancelled("interrupted");
  return {};
}

Status Runner::warm_up() {
  // All use the first prompt, as in vLLM.
  std::vector<Outcome> outcomes(static_cast<size_t>(o_.warmups));
  expected_ = outcomes.size();
  done_ = 0;
  for (Outcome& outcome : outcomes) {
    asio::co_spawn(
        io_,
        [this, &outcome]() -> awaitable<void> {
          co_await one(0, outcome);
          ++done_;
        },
        Rethrow{});
  }
  FRESHET_RETURN_IF_ERROR(drive());
  for (const Outcome& outcome : outcomes) {
    if (!outcome.success) return io_error("warm-up: {}", outcome.error);
  }
  return {};
}

Status Runner::run(const std::vector<double>& times, BenchRun& result) {
  outcomes_.assign(samples_.size(), {});
  expected_ = samples_.size();
  done_ = 0;
  begin_ = Clock::now();
  asio::co_spawn(io_, dispatch(times), Rethrow{});
  FRESHET_RETURN_IF_ERROR(drive());
  result.duration = end_;
  result.outcomes = std::move(outcomes_);
  return {};
}

// Polls until the server answers or the time is up.
Status wait_until_ready(http::Client& client, const ServeOptions& o, const ServeHooks& hooks) {
  const auto deadline = Clock::now() + std::chrono::duration<double>(o.ready_timeout_s);
  for (;;) {
    const auto reply = client.request_now("/v1/models");
    if (reply.ok() && reply->status < 500) return {};
    if (Clock::now() >= deadline) {
      return reply.ok() ? io_error("the server answers {}", reply->status) : reply.status();
    }
    if (hooks.stop != nullptr && *hooks.stop) return cancelled("interrupted");
    asio::io_context pause;
    asio::steady_timer timer(pause, std::chrono::milliseconds(200));
    timer.wait();
  }
}

std::optional<SpecDecode> spec_decode_now(http::Client& client) {
  const auto reply = client.request_now("/metrics");
  if (!reply.ok() || reply->status != 200) return std::nullopt;
  return parse_spec_decode(reply->body);
}

Status check(const ServeOptions& o) {
  FRESHET_RETURN_IF_ERROR(check(o.dataset));
  FRESHET_RETURN_IF_ERROR(check(o.arrivals));
  if (o.max_concurrency && *o.max_concurrency < 1)
    return invalid_argument("--max-concurrency {}: must be at least 1", *o.max_concurrency);
  if (!o.endpoint.empty() && o.endpoint.front() != '/')
    return invalid_argument("--endpoint {}: must begin with a slash", o.endpoint);
  return {};
}

}  // namespace

std::string request_body(const ServeOptions& o, const std::string& model, const Sample& sample) {
  json::Object body;
  body["model"] = model;
  const auto* text = std::get_if<std::string>(&sample.prompt);
  if (o.chat) {
    json::Object message;
    message["role"] = "user";
    message["content"] = text != nullptr ? *text : "";
    json::Array messages;
    messages.emplace_back(std::move(message));
    body["messages"] = std::move(messages);
    body["max_completion_tokens"] = sample.output_tokens;
    if (o.logprobs) {
      body["logprobs"] = true;
      body["top_logprobs"] = *o.logprobs;
    }
  } else {
    if (text != nullptr) {
      body["prompt"] = *text;
    } else {
      json::Array ids;
      for (const int32_t id : std::get<Ids>(sample.prompt)) ids.emplace_back(id);
      body["prompt"] = std::move(ids);
    }
    body["max_tokens"] = sample.output_tokens;
    if (o.logprobs) body["logprobs"] = *o.logprobs;
  }
  body["stream"] = true;
  json::Object usage;
  usage["include_usage"] = true;
  body["stream_options"] = std::move(usage);
  if (o.ignore_eos) body["ignore_eos"] = true;
  for (const auto& [key, value] : o.extra_body) body[key] = value;
  return json::write(body);
}

Result<ServeResult> bench_serve(const ServeOptions& options, Vocabulary* vocabulary,
                                const ServeHooks& hooks) {
  ServeOptions o = options;
  o.dataset.as_text = o.dataset.as_text || o.chat;
  FRESHET_RETURN_IF_ERROR(check(o));
  asio::io_context io(1);
  http::ClientOptions client_options;
  FRESHET_ASSIGN_OR_RETURN(client_options.url, http::parse_url(o.base_url));
  client_options.user_agent = "freshet-bench/" FRESHET_VERSION;
  client_options.bearer = o.api_key;
  client_options.headers = o.headers;
  client_options.verify_tls = !o.insecure;
  FRESHET_ASSIGN_OR_RETURN(const auto client, http::Client::create(io, client_options));
  if (o.ready_timeout_s > 0.0) FRESHET_RETURN_IF_ERROR(wait_until_ready(*client, o, hooks));
  auto info = first_model(*client);
  if (!info.ok() && (o.model.empty() || info.status().code() == StatusCode::kInvalidArgument))
    return info.status();
  const ModelInfo model = info.ok() ? *info : ModelInfo{};
  ServeResult result;
  result.model = o.model.empty() ? model.id : o.model;
  if (o.dataset.max_model_len == 0) o.dataset.max_model_len = model.max_model_len;
  ServerVocabulary server_vocabulary(*client, result.model,
                                     o.vocab_size > 0 ? o.vocab_size : model.vocab_size);
  hooks.say(
      fmt::format("Model: {}. Generating {} prompts ...", result.model, o.dataset.num_prompts));
  FRESHET_ASSIGN_OR_RETURN(
      const Dataset dataset,
      make_dataset(o.dataset, vocabulary != nullptr ? *vocabulary : server_vocabulary));
  if (dataset.left_out > 0)
    hooks.say(fmt::format("{} rows were left out: too long or too short", dataset.left_out));
  const bool own_times = dataset.timed && o.self_timed;
  std::vector<double> times = arrival_times(dataset.samples.size(), o.arrivals);
  for (size_t i = 0; own_times && i < times.size(); ++i) times[i] = dataset.samples[i].time;
  Runner runner(o, hooks, result.model, dataset.samples, io, *client);
  if (o.warmups > 0) {
    hooks.say(fmt::format("Warming up with {} requests ...", o.warmups));
    FRESHET_RETURN_IF_ERROR(runner.warm_up());
  }
  const auto before = spec_decode_now(*client);
  hooks.say(own_times ? std::string("Traffic: as in the trace")
                      : fmt::format("Traffic: {} requests/s, burstiness {}", o.arrivals.rate,
                                    o.arrivals.burstiness));
  result.run.request_rate = o.arrivals.rate;
  result.run.burstiness = o.arrivals.burstiness;
  result.run.max_concurrency = o.max_concurrency;
  result.run.goodput = o.goodput;
  FRESHET_RETURN_IF_ERROR(runner.run(times, result.run));
  const auto after = before ? spec_decode_now(*client) : std::nullopt;
  if (after) result.run.spec_decode = difference(*after, *before);
  return result;
}

}  // namespace freshet::bench_client

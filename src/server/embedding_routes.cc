// /v1/embeddings: pooled hidden states of a decoder, in OpenAI's format with vLLM's extra fields.
//
// Vectors are normalized to length 1 unless the request has "normalize": false. The engine's
// callbacks only store their results; the last one posts a task to a worker, which writes the
// answer.
#include <cmath>
#include <cstring>
#include <mutex>
#include <utility>

#include <fmt/format.h>
#include <openssl/evp.h>

#include "server/app.h"
#include "server/fields.h"

namespace freshet::server {
namespace {

struct EmbeddingOptions {
  std::string model;
  bool base64 = false;
  bool normalize = true;
  Request request;  // the fields common to all engine requests
};

std::string base64_of(const std::vector<float>& v) {
  static_assert(sizeof(float) == 4);
  std::string bytes(v.size() * sizeof(float), '\0');
  std::memcpy(bytes.data(), v.data(), bytes.size());  // OpenAI's clients expect little-endian F32
  std::string out((bytes.size() + 2) / 3 * 4 + 1, '\0');  // EVP_EncodeBlock ends with a NUL
  const int size = EVP_EncodeBlock(reinterpret_cast<unsigned char*>(out.data()),
                                   reinterpret_cast<const unsigned char*>(bytes.data()),
                                   static_cast<int>(bytes.size()));
  out.resize(static_cast<size_t>(size));
  return out;
}

void normalize(std::vector<float>& v) {
  double squares = 0.0;
  for (const float x : v) squares += static_cast<double>(x) * x;
  if (squares <= 0.0) return;
  const double length = std::sqrt(squares);
  for (float& x : v) x = static_cast<float>(x / length);
}

class EmbeddingAnswer : public std::enable_shared_from_this<EmbeddingAnswer> {
 public:
  EmbeddingAnswer(App& app, App::Exchanges exchange, EmbeddingOptions options)
      : app_(app), exchange_(std::move(exchange)), options_(std::move(options)) {}

  void run(std::vector<std::vector<int32_t>> prompts) {
    records_.resize(prompts.size());
    vectors_.resize(prompts.size());
    open_ = prompts.size() + 1;  // one for this function: nothing is sent before it is done
    exchange_->on_gone([weak = weak_from_this()] {
      if (auto self = weak.lock()) self->cancel_all();
    });
    for (size_t i = 0; i < prompts.size(); ++i) {
      if (!submit(i, std::move(prompts[i]))) {
        release(prompts.size() - i);  // those that were not submitted
        break;
      }
    }
    release(1);
  }

 private:
  bool submit(size_t i, std::vector<int32_t> prompt) {
    Request request = options_.request;
    request.prompt = std::move(prompt);
    records_[i].arrival = Clock::now();
    const auto self = shared_from_this();
    request.on_embedding = [self, i](const std::vector<float>& v) { self->vectors_[i] = v; };
    request.on_delta = [self](const Delta& d) {
      if (d.finish == FinishReason::kError) self->fail(from_status(d.error));
      if (d.finish == FinishReason::kCancelled) self->fail({503, "the request was cancelled", ""});
    };
    request.on_done = [self, i](const Usage& u) { self->done(i, u); };
    auto submitted = app_.engine().submit(std::move(request));
    if (!submitted.ok()) {
      if (submitted.status().code() == StatusCode::kResourceExhausted) app_.metrics().refused();
      fail(from_status(submitted.status(), "input"));
      cancel_all();
      return false;
    }
    std::lock_guard lock(mutex_);
    requests_.push_back(*submitted);
    if (cancelled_) app_.engine().cancel(*submitted);
    return true;
  }

  void done(size_t i, const Usage& usage) {
    RequestRecord& record = records_[i];
    record.end = Clock::now();
    record.prompt_tokens = usage.prompt_tokens;
    record.cached_tokens = usage.cached_tokens;
    record.preemptions = usage.preemptions;
    record.finish = vectors_[i].empty() ? FinishReason::kCancelled : FinishReason::kStop;
    for (const auto& [reason, seconds] : usage.waited) record.queue_s += seconds;
    app_.metrics().finished(record);
    release(1);
  }

  void release(size_t count) {
    {
      std::lock_guard lock(mutex_);
      open_ -= count;
      if (open_ > 0) return;
    }
    app_.post([self = shared_from_this()] { self->send(); });
  }

  void fail(const ApiError& error) {
    std::lock_guard lock(mutex_);
    if (!error_) error_ = error;
  }

  void cancel_all() {
    std::lock_guard lock(mutex_);
    cancelled_ = true;
    for (const uint64_t r : requests_) app_.engine().cancel(r);
  }

  // All requests are done: their results can be read without the lock.
  void send() {
    if (error_) return send_error(exchange_, *error_);
    Usage usage;
    json::Array data;
    for (size_t i = 0; i < vectors_.size(); ++i) {
      usage.prompt_tokens += records_[i].prompt_tokens;
      usage.cached_tokens += records_[i].cached_tokens;
      if (options_.normalize) normalize(vectors_[i]);
      json::Object o;
      o["object"] = "embedding";
      o["index"] = static_cast<int64_t>(i);
      if (options_.base64) {
        o["embedding"] = base64_of(vectors_[i]);
      } else {
        json::Array numbers;
        numbers.reserve(vectors_[i].size());
        for (const float x : vectors_[i]) numbers.emplace_back(static_cast<double>(x));
        o["embedding"] = std::move(numbers);
      }
      data.emplace_back(std::move(o));
    }
    json::Object o;
    o["object"] = "list";
    o["data"] = std::move(data);
    o["model"] = options_.model;
    o["usage"] = usage_json(usage);
    send_json(exchange_, o);
  }

  App& app_;
  const App::Exchanges exchange_;
  const EmbeddingOptions options_;
  std::vector<RequestRecord> records_;
  std::vector<std::vector<float>> vectors_;

  std::mutex mutex_;  // guards the members below
  size_t open_ = 0;
  bool cancelled_ = false;
  std::vector<uint64_t> requests_;
  std::optional<ApiError> error_;
};

// The options of the request besides its input.
std::optional<ApiError> read_options(App& app, const json::Value& body, CommonRequest& common,
                                     EmbeddingOptions& options) {
  Fields fields(body);
  std::string format = "float";
  int dimensions = app.embedding_size();
  fields.read("model", common.model);
  fields.read("encoding_format", format);
  fields.read("dimensions", dimensions, 1, 1 << 24);
  fields.read("normalize", options.normalize);
  fields.read("add_special_tokens", common.add_special_tokens);
  read_truncation(fields, common);
  fields.read("priority", common.priority, -(1 << 30), 1 << 30);
  fields.read("cache_salt", common.cache_salt, 1024);
  fields.read("timeout", common.timeout_s, 0, 1e9);
  if (fields.get("messages") != nullptr)
    fields.fail("messages", "'messages' are not supported here: send 'input'");
  for (const auto& [name, only] : {std::pair{"embed_dtype", "float32"}, {"endianness", "little"}}) {
    std::string value = only;
    fields.read(name, value);
    if (value != only && value != "native")
      fields.fail(name, fmt::format("'{}' must be {}", name, only));
  }
  if (format != "float" && format != "base64")
    fields.fail("encoding_format", "'encoding_format' must be float or base64");
  if (dimensions != app.embedding_size()) {
    fields.fail("dimensions",
                fmt::format("'dimensions' must be left out or {}: this model's vectors cannot be "
                            "shortened",
                            app.embedding_size()));
  }
  options.base64 = format == "base64";
  return fields.error();
}

void embeddings(App& app, App::Exchanges exchange, const json::Value& body) {
  if (!body.is_object())
    return send_error(exchange, bad_request("", "the body must be a JSON object"));
  CommonRequest common;
  common.prompt_field = "input";
  EmbeddingOptions options;
  if (auto error = read_options(app, body, common, options)) return send_error(exchange, *error);
  if (auto error = app.check_model(common.model)) return send_error(exchange, *error);
  if (app.draining()) return send_error(exchange, {503, "the server is shutting down", ""});
  auto inputs = parse_prompts(body, "input", app.options().limits);
  if (auto* error = std::get_if<ApiError>(&inputs)) return send_error(exchange, *error);
  std::vector<std::vector<int32_t>> prompts;
  for (const Prompt& input : std::get<std::vector<Prompt>>(inputs)) {
    auto ids = app.encode(input, common);
    if (auto* error = std::get_if<ApiError>(&ids)) return send_error(exchange, *error);
    prompts.push_back(std::get<std::vector<int32_t>>(std::move(ids)));
  }
  options.model = common.model.empty() ? app.model_name() : common.model;
  options.request.pooling = app.options().pooling;
  options.request.priority = common.priority;
  options.request.deadline_s = common.timeout_s;
  app.set_tenant(exchange->request(), common, options.request);
  std::make_shared<EmbeddingAnswer>(app, std::move(exchange), std::move(options))
      ->run(std::move(prompts));
}

}  // namespace

void add_embedding_routes(App& app, std::vector<App::Route>& routes) {
  routes.push_back(
      {"POST", "/v1/embeddings", false,
       [&app](App::Exchanges x, const json::Value& b) { embeddings(app, std::move(x), b); }});
}

}  // namespace freshet::server

#include "server/pooled_answer.h"

#include <mutex>
#include <utility>

namespace freshet::server {
namespace {

class PooledAnswer : public std::enable_shared_from_this<PooledAnswer> {
 public:
  PooledAnswer(App& app, App::Exchanges exchange, Request request, const char* field,
               PooledFormat format)
      : app_(app),
        exchange_(std::move(exchange)),
        request_(std::move(request)),
        field_(field),
        format_(std::move(format)) {}

  void run(std::vector<PooledInput> inputs) {
    records_.resize(inputs.size());
    vectors_.resize(inputs.size());
    open_ = inputs.size() + 1;  // one for this function: nothing is sent before it is done
    exchange_->on_gone([weak = weak_from_this()] {
      if (auto self = weak.lock()) self->cancel_all();
    });
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (!submit(i, std::move(inputs[i]))) {
        release(inputs.size() - i);  // those that were not submitted
        break;
      }
    }
    release(1);
  }

 private:
  bool submit(size_t i, PooledInput input) {
    Request request = request_;
    request.prompt = std::move(input.prompt);
    request.token_type_ids = std::move(input.token_types);
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
      fail(from_status(submitted.status(), field_));
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
    for (const RequestRecord& record : records_) {
      usage.prompt_tokens += record.prompt_tokens;
      usage.cached_tokens += record.cached_tokens;
    }
    send_json(exchange_, format_(vectors_, usage));
  }

  App& app_;
  const App::Exchanges exchange_;
  const Request request_;
  const char* const field_;
  const PooledFormat format_;
  std::vector<RequestRecord> records_;
  std::vector<std::vector<float>> vectors_;

  std::mutex mutex_;  // guards the members below
  size_t open_ = 0;
  bool cancelled_ = false;
  std::vector<uint64_t> requests_;
  std::optional<ApiError> error_;
};

}  // namespace

void answer_pooled(App& app, App::Exchanges exchange, Request request,
                   std::vector<PooledInput> inputs, const char* field, PooledFormat format) {
  std::make_shared<PooledAnswer>(app, std::move(exchange), std::move(request), field,
                                 std::move(format))
      ->run(std::move(inputs));
}

void read_pooled_fields(Fields& fields, CommonRequest& common) {
  fields.read("model", common.model);
  fields.read("add_special_tokens", common.add_special_tokens);
  read_truncation(fields, common);
  fields.read("priority", common.priority, -(1 << 30), 1 << 30);
  fields.read("cache_salt", common.cache_salt, 1024);
  fields.read("timeout", common.timeout_s, 0, 1e9);
  fields.read("request_id", common.request_id, 256);
}

Request pooled_request(App& app, const App::Exchanges& exchange, const CommonRequest& common) {
  Request request;
  request.priority = common.priority;
  request.deadline_s = common.timeout_s;
  app.set_tenant(exchange->request(), common, request);
  return request;
}

}  // namespace freshet::server

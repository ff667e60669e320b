// The state of an Exchange, shared by its producer (any thread) and its connection (one strand).
// One mutex guards everything; callbacks run outside it. Private to the HTTP server.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "server/http_server.h"

namespace freshet::server {

class ExchangeState {
 public:
  // `wake` makes the connection call next() again; called from any thread, cheap and idempotent.
  ExchangeState(HttpRequest request, bool http11, bool keep_alive, size_t max_queued,
                std::function<void()> wake);

  const HttpRequest& request() const { return request_; }

  // For the producer.
  void send(HttpResponse response);
  void start(HttpResponse response);
  void write(std::string piece);
  void finish();
  void
  abandon();  // the last handle is gone: an unfinished answer becomes a 500 or a closed connection
  void on_gone(std::function<void()> callback);
  void on_complete(std::function<void(int, size_t)> callback);
  bool gone() const;

  // For the connection.
  enum class Next { kWrite, kWait, kDone, kCut };
  Next next(std::string& piece);  // kWrite: `piece` is to be sent now
  void mark_gone();
  void complete(size_t bytes_sent);
  bool keep_alive() const;

 private:
  void append_head(const HttpResponse& response, bool chunked, size_t length);
  void append_chunk(std::string_view piece);
  void mark_gone_locked(std::unique_lock<std::mutex>& lock);

  const HttpRequest request_;
  const bool http11_;
  const size_t max_queued_;
  const std::function<void()> wake_;
  mutable std::mutex mutex_;
  bool keep_alive_;
  bool started_ = false;
  bool finished_ = false;
  bool gone_ = false;
  bool completed_ = false;
  int status_ = 0;
  std::string out_;
  std::function<void()> on_gone_;
  std::function<void(int, size_t)> on_complete_;
};

// The handle given to the handler.
class ExchangeHandle final : public Exchange {
 public:
  explicit ExchangeHandle(std::shared_ptr<ExchangeState> state) : state_(std::move(state)) {}
  ~ExchangeHandle() override { state_->abandon(); }
  const HttpRequest& request() const override { return state_->request(); }
  void send(HttpResponse response) override { state_->send(std::move(response)); }
  void start(HttpResponse response) override { state_->start(std::move(response)); }
  void write(std::string piece) override { state_->write(std::move(piece)); }
  void finish() override { state_->finish(); }
  void on_gone(std::function<void()> callback) override { state_->on_gone(std::move(callback)); }
  bool gone() const override { return state_->gone(); }
  void on_complete(std::function<void(int, size_t)> callback) override {
    state_->on_complete(std::move(callback));
  }

 private:
  std::shared_ptr<ExchangeState> state_;
};

}  // namespace freshet::server

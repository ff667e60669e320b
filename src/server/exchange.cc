#include "server/exchange.h"

#include <utility>

#include <fmt/format.h>

namespace freshet::server {

ExchangeState::ExchangeState(HttpRequest request, bool http11, bool keep_alive, size_t max_queued,
                             std::function<void()> wake)
    : request_(std::move(request)),
      http11_(http11),
      max_queued_(max_queued),
      wake_(std::move(wake)),
      keep_alive_(keep_alive) {}

void ExchangeState::append_head(const HttpResponse& response, bool chunked, size_t length) {
  status_ = response.status;
  out_ += fmt::format("HTTP/1.1 {} {}\r\n", response.status, reason_phrase(response.status));
  if (!response.content_type.empty())
    out_ += fmt::format("Content-Type: {}\r\n", response.content_type);
  for (const auto& [name, value] : response.headers) out_ += fmt::format("{}: {}\r\n", name, value);
  if (chunked) {
    out_ += "Transfer-Encoding: chunked\r\n";
  } else if (response.status != 204 && response.status != 304 && length != std::string::npos) {
    out_ += fmt::format("Content-Length: {}\r\n", length);
  }
  out_ += keep_alive_ ? "Connection: keep-alive\r\n\r\n" : "Connection: close\r\n\r\n";
}

void ExchangeState::append_chunk(std::string_view piece) {
  if (piece.empty() || request_.method == "HEAD") return;
  if (http11_) {
    out_ += fmt::format("{:x}\r\n", piece.size());
    out_ += piece;
    out_ += "\r\n";
  } else {
    out_ += piece;
  }
}

void ExchangeState::send(HttpResponse response) {
  {
    std::lock_guard lock(mutex_);
    if (started_ || gone_) return;
    started_ = finished_ = true;
    append_head(response, false, response.body.size());
    if (request_.method != "HEAD" && response.status != 204) out_ += response.body;
  }
  wake_();
}

void ExchangeState::start(HttpResponse response) {
  {
    std::lock_guard lock(mutex_);
    if (started_ || gone_) return;
    started_ = true;
    if (!http11_) keep_alive_ = false;  // closing the connection ends such an answer
    append_head(response, http11_, std::string::npos);
    append_chunk(response.body);
  }
  wake_();
}

void ExchangeState::write(std::string piece) {
  {
    std::unique_lock lock(mutex_);
    if (!started_ || finished_ || gone_) return;
    append_chunk(piece);
    if (out_.size() > max_queued_) {
      keep_alive_ = false;
      mark_gone_locked(lock);
    }
  }
  wake_();
}

void ExchangeState::finish() {
  {
    std::lock_guard lock(mutex_);
    if (!started_ || finished_ || gone_) return;
    finished_ = true;
    if (http11_ && request_.method != "HEAD") out_ += "0\r\n\r\n";
  }
  wake_();
}

void ExchangeState::abandon() {
  bool started = false;
  {
    std::unique_lock lock(mutex_);
    if (finished_ || gone_) return;
    started = started_;
    if (started) {
      keep_alive_ = false;
      mark_gone_locked(lock);
    }
  }
  if (started) {
    wake_();
  } else {
    send(
        {500,
         {},
         "application/json",
         R"({"error":{"message":"the request was dropped","type":"internal_error","param":null,"code":500}})"});
  }
}

void ExchangeState::on_gone(std::function<void()> callback) {
  {
    std::lock_guard lock(mutex_);
    if (!gone_) {
      on_gone_ = std::move(callback);
      return;
    }
  }
  callback();
}

void ExchangeState::on_complete(std::function<void(int, size_t)> callback) {
  std::lock_guard lock(mutex_);
  on_complete_ = std::move(callback);
}

bool ExchangeState::gone() const {
  std::lock_guard lock(mutex_);
  return gone_;
}

ExchangeState::Next ExchangeState::next(std::string& piece) {
  std::lock_guard lock(mutex_);
  if (gone_) return Next::kCut;
  if (!out_.empty()) {
    piece.clear();
    std::swap(piece, out_);
    return Next::kWrite;
  }
  return finished_ ? Next::kDone : Next::kWait;
}

void ExchangeState::mark_gone_locked(std::unique_lock<std::mutex>& lock) {
  if (gone_ || completed_) return;
  gone_ = true;
  out_.clear();
  auto callback = std::exchange(on_gone_, nullptr);
  if (!callback) return;
  lock.unlock();
  callback();
  lock.lock();
}

void ExchangeState::mark_gone() {
  std::unique_lock lock(mutex_);
  keep_alive_ = false;
  mark_gone_locked(lock);
}

void ExchangeState::complete(size_t bytes_sent) {
  std::function<void(int, size_t)> callback;
  int status = 0;
  {
    std::lock_guard lock(mutex_);
    if (completed_) return;
    completed_ = true;
    callback = std::exchange(on_complete_, nullptr);
    on_gone_ = nullptr;
    status = gone_ ? 499 : status_;
  }
  if (callback) callback(status, bytes_sent);
}

bool ExchangeState::keep_alive() const {
  std::lock_guard lock(mutex_);
  return keep_alive_ && !gone_;
}

}  // namespace freshet::server

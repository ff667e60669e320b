// One request to the engine as a loop: submit it, then read deltas until it is done.
//
// The engine's callbacks fill a queue; next() waits for it on the caller's thread. Destroying a
// Generation cancels a running request and waits for its end. cancel() is thread-safe.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>

#include "base/status.h"
#include "freshet/engine.h"

namespace freshet::cli {

class Generation {
 public:
  // Fills in the request's callbacks.
  static Result<std::unique_ptr<Generation>> start(Engine& engine, Request request);
  ~Generation();
  Generation(const Generation&) = delete;
  Generation& operator=(const Generation&) = delete;

  std::optional<Delta> next();  // nullopt: the request is done
  void cancel();

  // After the end:
  const Usage& usage() const { return state_->usage; }
  double first_token_s() const { return state_->first_s; }  // since start()
  double last_token_s() const { return state_->last_s; }
  // The first error that ended a sample; ok if there was none.
  const Status& status() const { return error_; }

 private:
  // Shared with the callbacks.
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Delta> deltas;
    bool done = false;
    Usage usage;
    double first_s = 0.0;
    double last_s = 0.0;
  };
  explicit Generation(Engine& engine) : engine_(engine), state_(std::make_shared<State>()) {}

  Engine& engine_;
  std::optional<uint64_t> id_;  // nullopt: the engine did not accept the request
  std::shared_ptr<State> state_;
  Status error_;
};

// "24 tokens of prompt in 0.10 s (240.0/s), 128 tokens in 2.00 s (64.0/s)"
std::string speed_line(const Generation& generation);

}  // namespace freshet::cli

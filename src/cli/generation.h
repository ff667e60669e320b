// One request to the engine as a loop: submit it, then read deltas until it is done.
//
// The engine's callbacks fill a queue; next() waits for it on the caller's thread. Destroying a
// Generation cancels a running request and waits for its end. cancel() is thread-safe.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "base/status.h"
#include "cli/output.h"
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
  // The same; calls `idle` a few times a second while it waits.
  std::optional<Delta> next(const std::function<void()>& idle);
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

// Shows how much of a prompt is computed, once it takes longer than half a second. For a request
// that runs alone. Used by one thread.
class PromptProgress {
 public:
  // Made before the request is submitted.
  PromptProgress(const Engine& engine, size_t prompt_tokens);
  void update();
  // The answer has begun: from now on nothing is shown, as the line would erase its text.
  void done() {
    done_ = true;
    line_.clear();
  }

 private:
  const Engine& engine_;
  double tokens_;
  int64_t computed_before_, cached_before_;
  std::chrono::steady_clock::time_point began_;
  bool done_ = false;
  ProgressLine line_;
};

// "the context is full (8192 tokens)" or "stopped after 256 tokens (-n)" if that ended the text.
std::string why_cut(FinishReason finish, const Usage& usage, int max_model_len);

// "24 tokens of prompt in 0.10 s (240.0/s), 128 tokens in 2.00 s (64.0/s)"
std::string speed_line(const Generation& generation);

}  // namespace freshet::cli

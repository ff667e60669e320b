// Ctrl-C (SIGINT) and SIGTERM, turned into calls.
//
// One Interrupts exists, made first thing in main(); it also ignores SIGPIPE and SIGXFSZ, so that
// such writes fail and are told of. While a Handler lives, a signal calls its function on a thread
// of its own; where none lives the program ends at once with 130. So does a second signal that
// comes before clear() has acknowledged the first, and a first one that a handler with patience was
// called for, when its command goes on that much longer: a step of the model cannot be broken off,
// and may take a minute. Signals within kEcho of one are that one: timeout(1) and others send it to
// the program and once more to its group.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <thread>

namespace freshet::cli {

class Interrupts {
 public:
  Interrupts();
  ~Interrupts();
  Interrupts(const Interrupts&) = delete;
  Interrupts& operator=(const Interrupts&) = delete;

  static constexpr std::chrono::milliseconds kPatience{1000};  // for what leaves nothing behind
  static constexpr std::chrono::milliseconds kEcho{30};

  // Handlers nest: the newest is called. Patience 0: as long as it takes.
  class Handler {
   public:
    Handler(Interrupts& owner, std::function<void()> call, std::chrono::milliseconds patience = {});
    ~Handler();  // waits for a call in progress
    Handler(const Handler&) = delete;
    Handler& operator=(const Handler&) = delete;

   private:
    friend class Interrupts;
    Interrupts& owner_;
    std::function<void()> call_;
    std::chrono::milliseconds patience_;
    Handler* below_;
  };

  // A flag that the signal sets, for loops that look at it.
  const std::atomic<bool>& requested() const { return requested_; }
  void clear() { requested_ = false; }

 private:
  void loop();
  // Whether the newest handler's patience ran out before another signal.
  bool out_of_patience(std::chrono::milliseconds patience);

  std::mutex mutex_;
  Handler* top_ = nullptr;
  std::atomic<bool> requested_ = false;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

}  // namespace freshet::cli

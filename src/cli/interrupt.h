// Ctrl-C (SIGINT) and SIGTERM, turned into calls.
//
// One Interrupts exists, made first thing in main(); it also ignores SIGPIPE. While a Handler
// lives, a signal calls its function on a thread of its own; where none lives the program ends at
// once with 130. So does a second signal that comes before clear() has acknowledged the first.
#pragma once

#include <atomic>
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

  // Handlers nest: the newest is called.
  class Handler {
   public:
    Handler(Interrupts& owner, std::function<void()> call);
    ~Handler();  // waits for a call in progress
    Handler(const Handler&) = delete;
    Handler& operator=(const Handler&) = delete;

   private:
    friend class Interrupts;
    Interrupts& owner_;
    std::function<void()> call_;
    Handler* below_;
  };

  // A flag that the signal sets, for loops that look at it.
  const std::atomic<bool>& requested() const { return requested_; }
  void clear() { requested_ = false; }

 private:
  void loop();

  std::mutex mutex_;
  Handler* top_ = nullptr;
  std::atomic<bool> requested_ = false;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

}  // namespace freshet::cli

// Turns Ctrl-C (SIGINT) and SIGTERM into function calls.
//
// main() creates the only Interrupts first. It also ignores SIGPIPE and SIGXFSZ, so that such
// writes fail with an error that can be reported. While a Handler exists, a signal calls its
// function on a separate thread. The program exits at once with 130 if
// - there is no Handler;
// - a second signal comes before clear() has acknowledged the first;
// - the handler has a patience, and the command still runs that long after the signal: a step of
//   the model cannot be aborted and may take a minute.
// Before that it calls the exit hook. A signal within kEcho of the previous one is ignored as a
// duplicate: timeout(1) and others signal the program and then its process group.
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

  static constexpr std::chrono::milliseconds kPatience{
      1000};  // for commands that leave nothing behind
  static constexpr std::chrono::milliseconds kEcho{100};

  // Handlers nest: the newest one is called. Patience 0: unlimited.
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

  // A flag that the signal sets, for loops to poll.
  const std::atomic<bool>& requested() const { return requested_; }
  // Whether SIGTERM came, which ends commands that only stop an answer at Ctrl-C.
  bool terminated() const { return terminated_; }
  // `hook` puts back what must not be left behind, such as modes of the terminal. nullptr: none.
  void set_exit_hook(void (*hook)()) { exit_hook_ = hook; }
  void clear() { requested_ = false; }

 private:
  void loop();
  [[noreturn]] void exit_now();
  // Waits; returns whether the patience of the newest handler ran out before another signal came.
  bool out_of_patience(std::chrono::milliseconds patience);

  std::mutex mutex_;
  Handler* top_ = nullptr;
  std::atomic<bool> requested_ = false;
  std::atomic<bool> terminated_ = false;
  std::atomic<bool> stop_ = false;
  std::atomic<void (*)()> exit_hook_ = nullptr;
  std::thread thread_;
};

}  // namespace freshet::cli

#include "cli/interrupt.h"

#include <cerrno>
#include <csignal>
#include <utility>

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include "base/status.h"

namespace freshet::cli {
namespace {

constexpr int kInterrupted = 130;
// Written to by the signal handler; -1 while there is no Interrupts.
volatile int wake_fd = -1;

// With the time when it came: on a busy machine the thread gets to it later.
struct Arrival {
  int number;
  std::chrono::steady_clock::time_point at;
};

void on_signal(int number) {
  const int saved = errno;
  const Arrival signal{number, std::chrono::steady_clock::now()};
  if (wake_fd >= 0) (void)!::write(wake_fd, &signal, sizeof signal);
  errno = saved;
}

int pipe_ends[2] = {-1, -1};

}  // namespace

Interrupts::Interrupts() {
  FRESHET_CHECK(wake_fd < 0, "one Interrupts at a time");
  FRESHET_CHECK(::pipe2(pipe_ends, O_CLOEXEC) == 0);
  wake_fd = pipe_ends[1];
  struct sigaction action{};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);
  action.sa_handler = SIG_IGN;
  ::sigaction(SIGPIPE, &action, nullptr);
  ::sigaction(SIGXFSZ, &action, nullptr);
  thread_ = std::thread([this] { loop(); });
}

Interrupts::~Interrupts() {
  struct sigaction action{};
  action.sa_handler = SIG_DFL;
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);
  stop_ = true;
  on_signal(0);
  thread_.join();
  wake_fd = -1;
  ::close(pipe_ends[0]);
  ::close(pipe_ends[1]);
}

void Interrupts::loop() {
  std::chrono::steady_clock::time_point last;
  std::chrono::milliseconds patience{};
  for (;;) {
    Arrival signal;
    const ssize_t n = ::read(pipe_ends[0], &signal, sizeof signal);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0 || stop_) return;
    if (signal.number == SIGTERM) terminated_ = true;
    const bool again = requested_.exchange(true);
    if (!again || signal.at - last >= kEcho) {
      const std::lock_guard lock(mutex_);
      if (top_ == nullptr || again) exit_now();
      top_->call_();
      patience = top_->patience_;
      last = signal.at;
    }
    if (patience.count() > 0 && out_of_patience(patience)) exit_now();
  }
}

void Interrupts::exit_now() {
  if (const auto hook = exit_hook_.load()) hook();
  ::_exit(kInterrupted);
}

bool Interrupts::out_of_patience(std::chrono::milliseconds patience) {
  pollfd next{.fd = pipe_ends[0], .events = POLLIN, .revents = 0};
  if (::poll(&next, 1, static_cast<int>(patience.count())) != 0) return false;
  const std::lock_guard lock(mutex_);
  return top_ != nullptr && top_->patience_ == patience && requested_;
}

Interrupts::Handler::Handler(Interrupts& owner, std::function<void()> call,
                             std::chrono::milliseconds patience)
    : owner_(owner), call_(std::move(call)), patience_(patience) {
  const std::lock_guard lock(owner_.mutex_);
  below_ = std::exchange(owner_.top_, this);
}

Interrupts::Handler::~Handler() {
  const std::lock_guard lock(owner_.mutex_);
  owner_.top_ = below_;
}

}  // namespace freshet::cli

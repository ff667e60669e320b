#include "cli/output.h"

#include <cerrno>
#include <climits>
#include <mutex>
#include <system_error>

#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/env.h"
#include "base/whole_file.h"

namespace freshet::cli {
namespace {

constexpr size_t kBuffer = size_t{1} << 16;

// 0, or the error.
int write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = ::write(fd, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno;
    text.remove_prefix(static_cast<size_t>(n));
  }
  return 0;
}

// Serialises lines on standard error.
std::mutex& error_mutex() {
  static std::mutex mutex;
  return mutex;
}
const ProgressLine* progress_shown = nullptr;  // the line on the screen; guarded by error_mutex()

void erase_progress() {
  if (progress_shown != nullptr) (void)write_all(2, "\r\x1b[K");
  progress_shown = nullptr;
}

}  // namespace

Output::~Output() {
  (void)flush();
}

void Output::write(std::string_view text) {
  if (!status_.ok()) return;
  buffer_ += text;
  if (buffer_.size() >= kBuffer) (void)flush();
}

Status Output::flush() {
  if (status_.ok() && !buffer_.empty()) {
    if (const int error = write_all(fd_, buffer_); error != 0) {
      status_ =
          io_error("cannot write to standard output: {}", std::generic_category().message(error));
    }
  }
  buffer_.clear();
  return status_;
}

Status write_text_file(const std::string& path, const std::string& text, bool append) {
  struct stat there{};
  // Pipes, terminals and links are written in place: a rename would replace them.
  const bool exists = ::lstat(path.c_str(), &there) == 0;
  if (!append && (!exists || S_ISREG(there.st_mode))) return write_whole_file(path, text);
  const int flags = O_WRONLY | O_CREAT | O_CLOEXEC | (append ? O_APPEND : O_TRUNC);
  const int fd = ::open(path.c_str(), flags, 0666);
  int error = fd < 0 ? errno : write_all(fd, text);
  if (fd >= 0 && ::close(fd) != 0 && error == 0) error = errno;
  if (error == 0) return {};
  return io_error("cannot write {}: {}", path, std::generic_category().message(error));
}

bool Output::is_terminal() const {
  return ::isatty(fd_) == 1;
}
int Output::columns() const {
  winsize size{};
  return ::ioctl(fd_, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}
TerminalLook look_of(bool is_terminal) {
  const bool terminal = is_terminal && env(EnvVar::kTerm).value_or("") != "dumb";
  return {terminal, terminal && !env(EnvVar::kNoColor)};
}
bool stderr_is_terminal() {
  return ::isatty(2) == 1;
}
bool stdin_is_terminal() {
  return ::isatty(0) == 1;
}

void say(std::string_view line) {
  std::string text(line);
  text += '\n';
  const std::lock_guard lock(error_mutex());
  erase_progress();
  (void)write_all(2, text);
}

void say_dimmed(std::string_view line) {
  const TerminalLook look = look_of(stderr_is_terminal());
  say(fmt::format("{}{}{}", look.dim(), line, look.plain()));
}

bool say_unless_it_blocks(std::string_view line) {
  pollfd error{.fd = 2, .events = POLLOUT, .revents = 0};
  if (::poll(&error, 1, 0) <= 0) return false;
  say(line.substr(0, PIPE_BUF - 1));  // a pipe that is ready accepts this much
  return true;
}

void log_to_stderr(LogLevel minimum) {
  const LogSink sink = stderr_log_sink(look_of(stderr_is_terminal()).styles);
  set_log_sink(minimum, [sink](LogLevel level, std::string_view line) {
    const std::lock_guard lock(error_mutex());
    erase_progress();
    sink(level, line);
  });
}

ProgressLine::ProgressLine() : enabled_(look_of(stderr_is_terminal()).terminal) {}

ProgressLine::~ProgressLine() {
  clear();
}

void ProgressLine::clear() {
  const std::lock_guard lock(error_mutex());
  if (progress_shown == this) erase_progress();
}

void ProgressLine::update(std::string_view stage, double fraction) {
  text(fmt::format("{} {:3} %", stage, static_cast<int>(fraction * 100.0)));
}

void ProgressLine::text(std::string_view text) {
  if (!enabled_) return;
  const std::lock_guard lock(error_mutex());
  if (progress_shown == this && text == shown_) return;
  progress_shown = this;
  shown_ = text;
  (void)write_all(2, fmt::format("\r\x1b[K{}", text));
}

}  // namespace freshet::cli

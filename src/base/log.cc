#include "base/log.h"

#include <atomic>
#include <cstdio>
#include <mutex>

namespace freshet {
namespace {

// The only process-wide state: the program installs the sink once, and passing a logger through
// every call would gain nothing.
struct Log {
  std::atomic<LogLevel> minimum{LogLevel::kOff};
  std::mutex mutex;
  LogSink sink;  // guarded by mutex
};

Log& the_log() {
  static Log log;
  return log;
}

}  // namespace

std::string_view name_of(LogLevel level) {
  static constexpr std::string_view kNames[] = {"debug", "info", "warning", "error", "off"};
  return kNames[static_cast<size_t>(level)];
}

void set_log_sink(LogLevel minimum, LogSink sink) {
  Log& log = the_log();
  const std::scoped_lock lock(log.mutex);
  log.minimum = sink ? minimum : LogLevel::kOff;
  log.sink = std::move(sink);
}

LogSink stderr_log_sink(bool color) {
  return [color](LogLevel level, std::string_view line) {
    std::string text;
    if (level != LogLevel::kInfo) {
      const char* code = level == LogLevel::kError     ? "\x1b[31m"
                         : level == LogLevel::kWarning ? "\x1b[33m"
                                                       : "\x1b[2m";
      text = color ? fmt::format("{}{}:\x1b[0m ", code, name_of(level))
                   : fmt::format("{}: ", name_of(level));
    }
    text += line;
    text += '\n';
    std::fwrite(text.data(), 1, text.size(), stderr);
  };
}

bool log_enabled(LogLevel level) {
  return level >= the_log().minimum.load(std::memory_order_relaxed);
}

void log_line(LogLevel level, std::string_view line) {
  Log& log = the_log();
  const std::scoped_lock lock(log.mutex);
  if (log.sink && level >= log.minimum) log.sink(level, line);
}

}  // namespace freshet

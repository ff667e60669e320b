// Log lines for the person who runs a program.
//
// The library prints nothing itself: lines go to the sink that the program installs. Without a sink
// a line costs a load and a compare (its arguments are not formatted). Thread-safe; the sink is
// called by one thread at a time and must not log.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <utility>

#include <fmt/format.h>

namespace freshet {

enum class LogLevel { kDebug, kInfo, kWarning, kError, kOff };

std::string_view name_of(LogLevel level);

using LogSink = std::function<void(LogLevel level, std::string_view line)>;

// Sends lines of `minimum` and above to `sink`; an empty sink turns logging off.
void set_log_sink(LogLevel minimum, LogSink sink);

// Writes "warning: text\n" in one call, coloured by level if asked; info lines have no prefix.
LogSink stderr_log_sink(bool color);

bool log_enabled(LogLevel level);
void log_line(LogLevel level, std::string_view line);

template <class... Args>
void log_debug(fmt::format_string<Args...> f, Args&&... args) {
  if (log_enabled(LogLevel::kDebug))
    log_line(LogLevel::kDebug, fmt::format(f, std::forward<Args>(args)...));
}
template <class... Args>
void log_info(fmt::format_string<Args...> f, Args&&... args) {
  if (log_enabled(LogLevel::kInfo))
    log_line(LogLevel::kInfo, fmt::format(f, std::forward<Args>(args)...));
}
template <class... Args>
void log_warning(fmt::format_string<Args...> f, Args&&... args) {
  if (log_enabled(LogLevel::kWarning))
    log_line(LogLevel::kWarning, fmt::format(f, std::forward<Args>(args)...));
}
template <class... Args>
void log_error(fmt::format_string<Args...> f, Args&&... args) {
  if (log_enabled(LogLevel::kError))
    log_line(LogLevel::kError, fmt::format(f, std::forward<Args>(args)...));
}

}  // namespace freshet

// Standard output that detects write errors.
//
// Writes are buffered until flush(). After a failure (disk full, broken pipe) all further output is
// dropped and status() has the error. SIGPIPE must be ignored (cli/interrupt.h does so). Used by
// one thread at a time.
#pragma once

#include <string>
#include <string_view>

#include "base/log.h"
#include "base/status.h"

namespace freshet::cli {

class Output {
 public:
  explicit Output(int fd = 1) : fd_(fd) {}
  ~Output();

  void write(std::string_view text);
  template <class... Args>
  void print(fmt::format_string<Args...> f, Args&&... args) {
    write(fmt::format(f, std::forward<Args>(args)...));
  }
  Status flush();
  const Status& status() const { return status_; }
  bool is_terminal() const;

 private:
  int fd_;
  std::string buffer_;
  Status status_;
};

// Replaces a file, or appends to it. Replacing writes PATH.partial and renames it: the file keeps
// its mode, and after a failure its old contents.
Status write_text_file(const std::string& path, const std::string& text, bool append = false);

// Whether standard error / input is a terminal.
bool stderr_is_terminal();
bool stdin_is_terminal();
// Writes a line to standard error, in place of a progress line; errors are ignored.
void say(std::string_view line);
// The same, with at most 4,095 bytes of the line. Returns false and writes nothing if standard
// error is a full pipe that nobody reads.
bool say_unless_it_blocks(std::string_view line);
// Sends the library's messages of this level and above to standard error, each in place of a
// progress line.
void log_to_stderr(LogLevel minimum);

// A progress line on standard error, overwritten by each update. Silent unless it is a terminal.
// Thread-safe. At most one line is shown: say() and log lines erase it, and the next update() draws
// it again below them.
class ProgressLine {
 public:
  ProgressLine();
  ~ProgressLine();  // erases the line
  void update(std::string_view stage, double fraction);
  void clear();  // erases the line until the next update()

 private:
  const bool enabled_;
  int percent_ = -1;  // of what was drawn last; guarded by the mutex of all lines, as is stage_
  std::string stage_;
};

}  // namespace freshet::cli

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
  int columns() const;  // of the terminal; 80 if it does not say

 private:
  int fd_;
  std::string buffer_;
  Status status_;
};

// What a stream can show. A terminal of the kind "dumb" counts as none.
struct TerminalLook {
  bool terminal = false;
  bool styles = false;  // colours, bold ...: a terminal, and NO_COLOR is not set
  std::string_view dim() const { return styles ? "\x1b[2m" : ""; }
  std::string_view plain() const { return styles ? "\x1b[0m" : ""; }
};
TerminalLook look_of(bool is_terminal);

// Replaces a file, or appends to it. Replacing writes PATH.partial and renames it: the file keeps
// its mode, and after a failure its old contents.
Status write_text_file(const std::string& path, const std::string& text, bool append = false);

// Whether standard error / input is a terminal.
bool stderr_is_terminal();
bool stdin_is_terminal();
// Writes a line to standard error, above a progress line if there is one; errors are ignored.
void say(std::string_view line);
// The same, dimmed on a terminal.
void say_dimmed(std::string_view line);
// The same, with at most 4,095 bytes of the line. Returns false and writes nothing if standard
// error is a full pipe that nobody reads.
bool say_unless_it_blocks(std::string_view line);
// Sends the library's messages of this level and above to standard error, each in place of a
// progress line.
void log_to_stderr(LogLevel minimum);

// A progress line on standard error, overwritten by each update. Silent unless it is a terminal
// that can erase a line.
// say() and messages of the library erase it first. Thread-safe.
class ProgressLine {
 public:
  ProgressLine();
  ~ProgressLine();  // erases the line
  void update(std::string_view stage, double fraction);
  void text(std::string_view text);
  void clear();  // erases the line until the next update()

 private:
  bool enabled_;
  std::string shown_;  // guarded by the mutex of standard error
};

}  // namespace freshet::cli

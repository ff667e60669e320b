// Standard output that notices when it cannot be written.
//
// Writes are buffered until flush(). After a failure (a full disk, a reader that left) everything
// else is dropped and status() says why. SIGPIPE must be ignored (cli/interrupt.h does so). Used by
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

// Writes a whole file, which keeps its mode, and what was in it where that fails, or appends to it.
// Meanwhile there is a file named like it with ".partial" behind.
Status write_text_file(const std::string& path, const std::string& text, bool append = false);

// Whether standard error / input is a terminal.
bool stderr_is_terminal();
bool stdin_is_terminal();
// Writes to standard error, whatever happens.
void say(std::string_view line);
// The same with 4,095 bytes of it at most, unless standard error is a pipe that is full because
// nobody reads it: returns false.
bool say_unless_it_blocks(std::string_view line);
// Has the library's remarks from this level on written there.
void log_to_stderr(LogLevel minimum);

// A line on a terminal's standard error that is overwritten as work goes on; silent elsewhere.
class ProgressLine {
 public:
  ProgressLine();
  ~ProgressLine();  // erases the line
  void update(std::string_view stage, double fraction);
  void clear();  // erases the line until the next update()

 private:
  bool enabled_;
  int percent_ = -1;
  std::string stage_;
};

}  // namespace freshet::cli

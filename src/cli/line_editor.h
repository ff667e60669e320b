// Reads lines from the user: with editing and history on a terminal, as plain lines elsewhere.
//
// At most one exists at a time. Used by one thread, except that cancel() is thread-safe.
#pragma once

#include <memory>
#include <optional>
#include <string>

namespace freshet::cli {

class LineEditor {
 public:
  // `prompt` is shown on a terminal only. `history`: a file, or "" for none.
  LineEditor(std::string prompt, std::string history);
  ~LineEditor();
  LineEditor(const LineEditor&) = delete;
  LineEditor& operator=(const LineEditor&) = delete;

  enum class Event { kLine, kEnd, kCancelled };
  // Waits for a line (without its line break). A line that ends in a backslash continues on
  // the next one.
  Event read(std::string& line);
  // Makes a read() that is waiting on a terminal return kCancelled.
  void cancel();
  // Drops a cancel() that came while no read() was waiting; it would end the next read().
  void forget_cancel();
  bool is_terminal() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace freshet::cli

// Reads messages from the user: with editing and history on a terminal, as plain lines elsewhere.
//
// A message has several lines if a line ends in a backslash, if it is enclosed in """, after
// Alt-Enter, or if it was pasted. Text is UTF-8 whatever the locale says. At most one exists at a
// time. Used by one thread, except that cancel() is thread-safe.
#pragma once

#include <memory>
#include <string>

namespace freshet::cli {

class LineEditor {
 public:
  // `prompt` is shown on a terminal only. `history`: a file, or "" for none.
  LineEditor(std::string prompt, std::string history);
  ~LineEditor();
  LineEditor(const LineEditor&) = delete;
  LineEditor& operator=(const LineEditor&) = delete;

  enum class Event {
    kLine,
    kEnd,        // Ctrl-D, two Ctrl-C at an empty prompt, or the end of the input
    kCancelled,  // Ctrl-C dropped the text, or cancel() was called
  };
  // Waits for a message (without its line break).
  Event read(std::string& message);
  // Whether the last message begins with typed text, so that it may be a command.
  bool typed() const;
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

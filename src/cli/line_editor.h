// Reads lines from a person: with editing and a history on a terminal, plainly elsewhere.
//
// One at a time; used by one thread, but cancel() may be called from any.
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
  // Waits for a line (without its line break). A line that ends in a backslash goes on in the next.
  Event read(std::string& line);
  // Makes a read() in progress, on a terminal, return kCancelled.
  void cancel();
  // A cancel() that met no read() would end the next one: this takes it back.
  void forget_cancel();
  bool is_terminal() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace freshet::cli

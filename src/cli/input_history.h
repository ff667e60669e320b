// The messages that the user sent before, kept in a file with one JSON string per line.
//
// Several programs may append to the file; it is shortened when it is read. Only its owner may read
// it. Errors are ignored: a history is a convenience. Not synchronised.
#pragma once

#include <string>
#include <vector>

namespace freshet::cli {

class InputHistory {
 public:
  static constexpr size_t kMost = 500;

  explicit InputHistory(std::string file);  // "": none
  void add(const std::string& message);

  // The older and newer neighbour of the entry shown; `current`, what is being edited, comes back
  // after the newest one. nullptr: there is none.
  const std::string* older(const std::string& current);
  const std::string* newer();
  // The next older entry that contains `part`.
  const std::string* find_older(const std::string& current, const std::string& part);
  void rewind() { at_ = entries_.size(); }

 private:
  std::string file_;
  std::vector<std::string> entries_;
  size_t at_ = 0;
  std::string draft_;
};

}  // namespace freshet::cli

#include "cli/input_history.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

#include "base/json.h"
#include "cli/output.h"

namespace freshet::cli {
namespace {

std::string line_of(const std::string& entry) {
  return json::write(json::Value(entry)) + "\n";
}

}  // namespace

InputHistory::InputHistory(std::string file) : file_(std::move(file)) {
  if (file_.empty()) return;
  std::ifstream in(file_);
  std::string line;
  while (std::getline(in, line)) {
    const auto entry = json::parse(line);
    if (entry.ok() && entry->is_string()) entries_.push_back(entry->as_string());
  }
  if (entries_.size() > kMost) {
    entries_.erase(entries_.begin(), entries_.end() - static_cast<std::ptrdiff_t>(kMost));
    std::string all;
    for (const std::string& entry : entries_) all += line_of(entry);
    (void)write_text_file(file_, all);
  }
  rewind();
}

void InputHistory::add(const std::string& message) {
  if (message.empty() || (!entries_.empty() && entries_.back() == message)) {
    rewind();
    return;
  }
  entries_.push_back(message);
  rewind();
  if (file_.empty()) return;
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(file_).parent_path(), error);
  const int fd = ::open(file_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (fd < 0) return;
  const std::string line = line_of(message);
  (void)!::write(fd, line.data(), line.size());
  ::close(fd);
}

const std::string* InputHistory::older(const std::string& current) {
  if (at_ == 0) return nullptr;
  if (at_ == entries_.size()) draft_ = current;
  return &entries_[--at_];
}

const std::string* InputHistory::newer() {
  if (at_ == entries_.size()) return nullptr;
  ++at_;
  return at_ == entries_.size() ? &draft_ : &entries_[at_];
}

const std::string* InputHistory::find_older(const std::string& current, const std::string& part) {
  for (size_t i = at_; i > 0; --i) {
    if (entries_[i - 1].find(part) == std::string::npos || entries_[i - 1] == current) continue;
    if (at_ == entries_.size()) draft_ = current;
    at_ = i - 1;
    return &entries_[at_];
  }
  return nullptr;
}

}  // namespace freshet::cli

#include "bench_client/sse.h"

namespace freshet::bench_client {

void SseParser::end_line(const std::function<void(std::string_view)>& event) {
  if (line_.empty()) {
    if (has_data_) event(data_);
    data_.clear();
    has_data_ = false;
    return;
  }
  std::string_view line = line_;
  const size_t colon = std::min(line.find(':'), line.size());
  if (line.substr(0, colon) == "data") {
    std::string_view value = line.substr(std::min(colon + 1, line.size()));
    if (value.starts_with(' ')) value.remove_prefix(1);
    if (has_data_) data_ += '\n';
    data_ += value;
    has_data_ = true;
  }
  line_.clear();
}

bool SseParser::push(std::string_view bytes,
                     const std::function<void(std::string_view data)>& event) {
  while (!bytes.empty() && !too_long_) {
    if (after_cr_ && bytes.front() == '\n') bytes.remove_prefix(1);
    after_cr_ = false;
    const size_t end = bytes.find_first_of("\r\n");
    line_ += bytes.substr(0, end);
    too_long_ = line_.size() + data_.size() > max_event_;
    if (end == std::string_view::npos) break;
    after_cr_ = bytes[end] == '\r';
    bytes.remove_prefix(end + 1);
    if (!too_long_) end_line(event);
  }
  return !too_long_;
}

}  // namespace freshet::bench_client

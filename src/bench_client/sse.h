// An incremental parser of server-sent events (the parts of the HTML standard's event stream that
// APIs use).
//
// Bytes may be split anywhere; lines end with LF, CRLF or CR. Only the data of an event is kept.
// Not synchronised.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

namespace freshet::bench_client {

class SseParser {
 public:
  // After an event with more than `max_event` bytes, push() returns false.
  explicit SseParser(size_t max_event = size_t{64} << 20) : max_event_(max_event) {}

  // Calls `event` with the data of each complete event.
  bool push(std::string_view bytes, const std::function<void(std::string_view data)>& event);

 private:
  void end_line(const std::function<void(std::string_view)>& event);

  const size_t max_event_;
  std::string line_;
  std::string data_;
  bool has_data_ = false;
  bool after_cr_ = false;
  bool too_long_ = false;
};

}  // namespace freshet::bench_client

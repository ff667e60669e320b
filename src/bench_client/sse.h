// Server-sent events, parsed as they come (the HTML standard's event stream, as far as APIs use
// it).
//
// Bytes may be cut anywhere; lines end with LF, CRLF or CR. Of an event only its data is kept.
// One thread an object.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

namespace freshet::bench_client {

class SseParser {
 public:
  // An event with more bytes than `max_event` is given up: push() returns false from then on.
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

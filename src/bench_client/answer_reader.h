// One streamed answer of an OpenAI-compatible server, and the times at which it came.
//
// An event that carries text, a thought or a part of a tool call is a token: the first sets the
// time to first token, each later one an inter-token latency; the latency ends with the last of
// them. Events that only open an answer (a role) or close it (a reason to finish) are none. As in
// vLLM's benchmark client, events without text behind the first token are tokens too where the
// usage counts more tokens than came with text. Token counts come from the usage that closes the
// stream, else from these events. One thread an object.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "bench_client/sse.h"

namespace freshet::bench_client {

struct Outcome {
  bool success = false;
  std::string error;
  double arrival = 0.0;  // when it was due: seconds since the start of the run
  double start = 0.0;    // when it was sent
  double latency = 0.0;  // seconds from start to the last token
  double ttft = 0.0;
  std::vector<double> itl;
  int input_tokens = 0;
  int output_tokens = 0;
  std::string text;

  double queue_time() const { return start - arrival; }  // in the client, for a free place
};

class AnswerReader {
 public:
  // `outcome.start` and input_tokens (an estimate) are set; the rest is filled in.
  AnswerReader(bool chat, Outcome& outcome) : chat_(chat), outcome_(outcome) {}

  // Bytes of the body, which came at `now` (seconds since the start of the run).
  void push(std::string_view bytes, double now);
  // The body is complete.
  void finish();

 private:
  void event(std::string_view data, double now);

  const bool chat_;
  Outcome& outcome_;
  SseParser parser_;
  struct Event {  // with a choice
    double at;
    bool text;
  };
  std::vector<Event> events_;
  bool usage_seen_ = false;
};

}  // namespace freshet::bench_client

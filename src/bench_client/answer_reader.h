// One streamed answer of an OpenAI-compatible server, with its timings.
//
// An event with text, reasoning or a part of a tool call counts as a token. The first one sets the
// time to first token, each later one an inter-token latency; the last one ends the latency. Events
// that only open an answer (a role) or close it (a finish reason) do not count. As in vLLM's
// benchmark client, events without text after the first token also count if the usage has more
// tokens than there were events with text. Token counts come from the usage at the end of the
// stream, or else from these events. Not synchronised.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "bench_client/sse.h"

namespace freshet::bench_client {

struct Outcome {
  bool success = false;
  std::string error;
  double arrival = 0.0;  // scheduled time, in seconds since the start of the run
  double start = 0.0;    // time it was sent
  double latency = 0.0;  // seconds from start to the last token
  double ttft = 0.0;
  std::vector<double> itl;
  int input_tokens = 0;
  int output_tokens = 0;
  std::string text;

  double queue_time() const { return start - arrival; }  // waiting in the client for a free slot
};

class AnswerReader {
 public:
  // The caller has set `outcome.start` and input_tokens (an estimate); the rest is filled in here.
  AnswerReader(bool chat, Outcome& outcome) : chat_(chat), outcome_(outcome) {}

  // Takes bytes of the body that arrived at `now` (seconds since the start of the run).
  void push(std::string_view bytes, double now);
  // The body is complete.
  void finish();

 private:
  void event(std::string_view data, double now);

  const bool chat_;
  Outcome& outcome_;
  SseParser parser_;
  struct Event {  // an event that has a choice
    double at;
    bool text;
  };
  std::vector<Event> events_;
  bool usage_seen_ = false;
};

}  // namespace freshet::bench_client

// One HTTP answer made of one or more engine requests.
//
// An Answer submits the requests, collects their deltas, and lets an AnswerFormat turn them into
// one JSON body or a stream of server-sent events. Engine callbacks only queue an event. The
// server's workers process the events, one worker at a time per answer, so the step thread never
// writes JSON. If the client disconnects or a request cannot be admitted, all requests of the
// answer are cancelled. The callbacks of running requests keep the Answer alive.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/picture_text.h"
#include "freshet/engine.h"
#include "server/api_error.h"
#include "server/http_server.h"
#include "server/metrics.h"

namespace freshet::server {

// A sample of a request, with the output so far.
struct Choice {
  int prompt = 0;  // index of the engine request
  std::string text;
  std::vector<int32_t> ids;
  std::vector<std::vector<TokenLogprob>> logprobs;
  FinishReason finish = FinishReason::kNone;
  std::string stop_reason;
};

struct AnswerState {
  std::vector<std::vector<int32_t>> prompts;
  std::vector<std::vector<std::vector<TokenLogprob>>>
      prompt_logprobs;          // one list per prompt; may be empty
  std::vector<Choice> choices;  // prompt * n + sample
  Usage usage;                  // sum over the finished requests
  Usage so_far;                 // prompt tokens, and the tokens generated so far
  std::optional<Clock::time_point> first_token;
};

// The output format of a route. Called by one thread at a time.
class AnswerFormat {
 public:
  virtual ~AnswerFormat() = default;
  virtual json::Value whole(const AnswerState& state) = 0;
  // Each function appends complete events ("data: ...\n\n") to `out`.
  virtual void stream_begin(const AnswerState& state, std::string& out) = 0;
  virtual void stream_delta(const AnswerState& state, size_t choice, const Delta& delta,
                            std::string& out) = 0;
  virtual void stream_end(const AnswerState& state, std::string& out) = 0;
  // The last event of a stream that cannot continue.
  virtual void stream_error(const ApiError& error, std::string& out);
};

void append_event(const json::Value& value, std::string& out);  // "data: {...}\n\n"

class Answer : public std::enable_shared_from_this<Answer> {
 public:
  using Post = std::function<void(std::function<void()>)>;  // runs a task on a worker
  struct Options {
    bool stream = false;
    int n = 1;
    int priority = 0;
    std::string request_id;
    std::string tenant;  // for fair scheduling between callers
    std::string cache_salt;
    std::string kv_eviction;
    std::string sparse_attention;
    double timeout_s = 0.0;
    double max_predict_s = 0.0;  // since the first token, then to the end of the line. 0: none
    // Gets the prompt and the answer of a request for one sample when it has ended.
    std::function<void(std::vector<int32_t> tokens)> ended;
  };

  Answer(std::shared_ptr<Exchange> exchange, Engine& engine, Metrics& metrics, Post post,
         std::unique_ptr<AnswerFormat> format, Options options);

  // Submits one request per prompt. Failures are sent as an error. `pictures`: of a single prompt.
  // `encoder_ids`: empty, or what an encoder reads beside each prompt.
  void run(std::vector<std::vector<int32_t>> prompts, const SamplingParams& params,
           std::vector<engine::Picture> pictures = {},
           std::vector<std::vector<int32_t>> encoder_ids = {});

 private:
  struct Event {
    enum class Kind { kDelta, kDone, kPromptLogprobs } kind;
    size_t prompt = 0;
    Delta delta;
    Usage usage;
    std::vector<std::vector<TokenLogprob>> prompt_logprobs;
    Clock::time_point at;
  };

  void push(Event event);
  void drain();
  void handle(Event& event, std::string& out);
  void handle_delta(Event& event, std::string& out);
  void handle_done(const Event& event);
  void start_stream(std::string& out);
  void complete(std::string& out);
  void fail(const ApiError& error, std::string& out);
  void cancel_all();
  void stop_when_late(const Event& event);

  const std::shared_ptr<Exchange> exchange_;
  Engine& engine_;
  Metrics& metrics_;
  const Post post_;
  const std::unique_ptr<AnswerFormat> format_;
  const Options options_;

  std::mutex mutex_;  // guards the members up to the blank line
  std::deque<Event> events_;
  bool draining_ = false;
  bool cancelled_ = false;
  std::vector<uint64_t> requests_;

  AnswerState state_;  // these are used by run(), then by the draining thread
  std::vector<RequestRecord> records_;
  size_t done_ = 0;
  bool started_ = false;
  bool failed_ = false;
  bool line_seen_ = false;
};

}  // namespace freshet::server

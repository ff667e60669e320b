#include "eval/bench_engine.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>

namespace freshet::eval {
namespace {

double seconds_now() {
  const auto t = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(t).count();
}

// Requests that run at the same time.
class Together {
 public:
  Together(Engine& engine, int count) : engine_(engine), sequences_(static_cast<size_t>(count)) {}

  // Returns once all requests have ended. The prompts differ in their tokens after the first
  // `shared` ones.
  Status run(int64_t shared, int64_t prompt, int64_t tokens, uint64_t& seed) {
    begin_ = seconds_now();
    running_ = sequences_.size();
    for (size_t i = 0; i < sequences_.size(); ++i) {
      const auto sent = engine_.submit(request(i, shared, prompt, tokens, seed));
      if (sent.ok()) continue;
      const std::lock_guard lock(mutex_);
      running_ -= sequences_.size() - i;
      error_ = sent.status();
      break;
    }
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return running_ == 0; });
    return error_;
  }

  const Usage::Speculation& drafting() const { return drafting_; }
  double since_submission() const { return last_ - begin_; }
  // The time in which all sequences decode, scaled to `tokens` tokens.
  double decoding(int64_t tokens) const {
    double begin = 0.0;
    for (const Sequence& s : sequences_) begin = std::max(begin, s.times.front());
    int64_t came = 0;
    for (const Sequence& s : sequences_) {
      for (size_t d = 0; d < s.times.size(); ++d) came += s.times[d] > begin ? s.counts[d] : 0;
    }
    return (last_ - begin) * static_cast<double>(tokens) /
           static_cast<double>(std::max<int64_t>(1, came));
  }

 private:
  struct Sequence {  // what its callbacks saw
    std::vector<double> times;
    std::vector<int64_t> counts;
  };

  Request request(size_t i, int64_t shared, int64_t prompt, int64_t tokens, uint64_t& seed) {
    Request r;
    r.prompt = some_tokens(shared, engine_.model().spec().vocab_size, 1);
    const std::vector<int32_t> own =
        some_tokens(shared + prompt > 0 ? prompt : 1, engine_.model().spec().vocab_size, ++seed);
    r.prompt.insert(r.prompt.end(), own.begin(), own.end());
    r.params.max_tokens = static_cast<int>(tokens);
    r.params.temperature = 0.0f;
    r.params.ignore_eos = true;
    r.on_delta = [this, i](const Delta& delta) {
      const double now = seconds_now();
      const std::lock_guard lock(mutex_);
      last_ = now;
      sequences_[i].times.push_back(now);
      sequences_[i].counts.push_back(std::ssize(delta.ids));
      if (!delta.error.ok()) error_ = delta.error;
    };
    r.on_done = [this](const Usage& usage) {
      const std::lock_guard lock(mutex_);
      drafting_.add(usage.speculation);
      --running_;
      changed_.notify_one();
    };
    return r;
  }

  Engine& engine_;
  std::vector<Sequence> sequences_;
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t running_ = 0;
  Status error_;
  Usage::Speculation drafting_;
  double begin_ = 0.0, last_ = 0.0;
};

}  // namespace

Result<EngineBench> run_engine_bench(Engine& engine, const BenchTest& test, int repetitions,
                                     const std::function<bool()>& goes_on) {
  EngineBench bench;
  bench.result.test = test;
  EngineStats::Speculation before;
  uint64_t seed = 1;
  // A prompt gives the first token; the others are decoded.
  const int64_t tokens = int64_t{test.generate} + 1;
  for (int i = -1; i < repetitions; ++i) {  // once untimed
    if (!goes_on()) return cancelled("interrupted");
    Together requests(engine, test.sequences);
    FRESHET_RETURN_IF_ERROR(requests.run(test.depth, test.prompt, tokens, seed));
    if (i < 0) {
      before = engine.stats().speculation;
      continue;
    }
    bench.drafting.add(requests.drafting());
    bench.result.seconds.push_back(test.prompt > 0 ? requests.since_submission()
                                                   : requests.decoding(test.tokens()));
  }
  bench.gauge = engine.stats().speculation;
  bench.gauge.step_seconds -= before.step_seconds;
  bench.gauge.plain_seconds -= before.plain_seconds;
  bench.gauge.predicted_step_seconds -= before.predicted_step_seconds;
  bench.gauge.predicted_plain_seconds -= before.predicted_plain_seconds;
  return bench;
}

}  // namespace freshet::eval

// The engine's inside: one thread that schedules, runs, samples and commits, step after step.
//
// Where the model draws tokens itself and no request needs more (a grammar, log-probabilities), a
// step is scheduled and started while the one in front still runs: sequences are expected to go on,
// and their tokens, which are not known yet, are taken where the model left them. What a sequence
// that ended meanwhile brings is dropped.
//
// submit() and cancel() put orders into an inbox that the step thread empties before each step;
// with nothing to do it sleeps until the inbox or a deadline wakes it. All callbacks of requests
// run on the step thread, without a lock held. Everything a request's tokens depend on is its own:
// prompt, parameters, seed; sampling runs in parallel, one row a worker.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/thread_pool.h"
#include "engine/live_request.h"
#include "engine/model_runner.h"
#include "freshet/engine.h"
#include "scheduler/scheduler.h"

namespace freshet::engine {

struct StepLoopOptions {
  scheduler::SchedulerOptions scheduler;
  std::vector<int32_t> blocks;  // [groups] of the cache
  bool share_prefixes = true;
  double timed_share = 0.0;     // of the cache's blocks
  std::vector<int32_t> eos;     // ids that end a text, ascending
  uint64_t seed = 0;            // requests without a seed draw theirs from this
  int max_queued_requests = 0;  // 0: no limit
  int64_t max_queued_tokens = 0;
};

class StepLoop {
 public:
  // `model`, `tokenizer` (may be nullptr) and `pool` must outlive the loop; the pool is the loop's
  // alone while it lives. The model must have reserved what steps of these sizes need.
  static Result<std::unique_ptr<StepLoop>> start(const StepLoopOptions& options, Model& model,
                                                 KvStorage cache, const Tokenizer* tokenizer,
                                                 ThreadPool& pool, Memory* host_memory = nullptr);
  ~StepLoop();  // cancels what runs and joins

  // From any thread.
  Result<uint64_t> submit(Request request);
  std::optional<RequestError> check(const Request& request) const;
  void cancel(uint64_t request);
  EngineStats stats() const;

 private:
  static constexpr int32_t kSentenceComplete = -2;  // as a choice: the grammar allows nothing more

  // A choice to make: which token follows in `sample`, from a row of logits.
  struct Choice {
    uint64_t request = 0;
    LiveRequest* live = nullptr;
    Sample* sample = nullptr;
    size_t item = 0;        // of the step
    int32_t k = 0;          // which of its rows
    bool shared = false;    // other choices read the same row
    bool expected = false;  // the scheduler counts on the token already
    int64_t position = 0;
    std::span<float> row;
    int32_t named = StepResults::kSeeLogits;  // or the token, chosen already
    int32_t token = -1;
    std::vector<TokenLogprob> logprobs;
  };
  // A row that gives the log-probability of a prompt's token.
  struct PromptRow {
    LiveRequest* live = nullptr;
    size_t item = 0;
    int32_t k = 0;
    int32_t position = 0;  // of the token
    std::span<const float> row;
  };
  struct Worker {
    explicit Worker(int64_t vocab) : scratch(vocab), row(static_cast<size_t>(vocab)) {}
    SamplerScratch scratch;
    std::vector<float> row;
  };

  StepLoop(const StepLoopOptions& options, const Tokenizer* tokenizer, ThreadPool& pool,
           std::unique_ptr<kv_cache::BlockCache> blocks, ModelRunner runner);

  void loop();
  void empty_inbox();
  void begin(uint64_t id, Request request);
  void furnish(LiveRequest& live, scheduler::SequenceId sequence);
  bool step();  // false: nothing to run
  void complete();
  int64_t prompt_tokens(const scheduler::Step& step) const;
  int64_t chosen_tokens() const;
  void count_step(int64_t tokens);
  void count_evicted_blocks();
  void publish();        // what stats() tells, and how much waits
  void publish_stats();  // before a request's last callback: whoever got its answer sees it counted

  void fill_masks(const scheduler::Step& step);
  ops::SampleRow describe(const scheduler::StepItem& item, std::vector<int32_t>& words) const;
  void gather();
  void gather_prompt_rows(LiveRequest& live, const scheduler::StepItem& item, size_t index);
  bool may_run_ahead() const;
  void expect_tokens();
  void take_rows();
  void choose(Choice& choice, Worker& worker);
  static void see_end(Choice& choice);
  void sample_all();
  void embed(const scheduler::Step& step);
  void deliver_prompt_logprobs();
  void apply(Choice& choice);
  void fork_samples(LiveRequest& live);
  void advance_beams(LiveRequest& live, scheduler::SequenceId sequence, std::span<const float> row);
  void continue_beams(LiveRequest& live, std::span<const BeamSearch::Step> steps);
  void end_beams(LiveRequest& live);
  void end_request(uint64_t id, FinishReason reason, const Status& status);
  void finish_if_over(LiveRequest& live);
  void record_usage(LiveRequest& live);

  const StepLoopOptions options_;
  const Tokenizer* tokenizer_;
  ThreadPool& pool_;
  std::unique_ptr<kv_cache::BlockCache> blocks_;
  std::unique_ptr<scheduler::Scheduler> scheduler_;
  ModelRunner runner_;
  std::vector<Worker> workers_;

  // Of the step thread alone.
  std::unordered_map<uint64_t, std::unique_ptr<LiveRequest>> live_;
  std::vector<Choice> choices_;
  std::vector<PromptRow> prompt_rows_;
  std::vector<std::pair<LiveRequest*, Sample*>> masked_;
  scheduler::Step step_;       // the last one
  int64_t prompt_tokens_ = 0;  // of it
  bool ahead_ = false;         // it runs, and its results were not taken yet
  int embeddings_ = 0;         // live requests that want one
  EngineStats counted_;
  int64_t wake_at_ = 0;

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  std::vector<std::pair<uint64_t, Request>> arrived_;
  std::vector<uint64_t> left_;
  uint64_t next_id_ = 1;
  EngineStats published_;
  int64_t queued_requests_ = 0;  // in the inbox or the scheduler's queue
  int64_t queued_tokens_ = 0;

  std::thread thread_;  // last: starts when all else is there
};

}  // namespace freshet::engine

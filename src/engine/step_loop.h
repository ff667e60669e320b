// The engine core: one thread that makes steps. A step has five phases:
//
//   draft     a drafter, if there is one, proposes tokens for the sequences that decode
//   schedule  the scheduler decides which tokens of which sequences run
//   run       the model starts on them
//   verify    rows of results become accepted tokens, in parallel
//   commit    tokens go to the scheduler and to the clients
//
// Requests implement their part of a step as outputs (outputs/request_output.h); the loop doesn't
// depend on the kind of a request. If the model samples tokens itself and no output needs more (a
// grammar, log-probabilities), a step runs ahead: the next one is scheduled and started before its
// tokens are known. It assumes that all sequences go on, and the model reads their new tokens where
// it wrote them. Results of a sequence that ended meanwhile are dropped.
//
// submit() and cancel() put orders into an inbox that the step thread empties before each step;
// with nothing to do it sleeps until the inbox or a deadline wakes it. All callbacks of requests
// run on the step thread, without a lock held. Towers for pictures, and encoders of sound and of
// long texts, run before the request starts; between their layers, the thread takes orders and
// makes steps (prepare_next). A request's tokens depend on its own prompt,
// parameters and seed only.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/thread_pool.h"
#include "engine/encoder_content.h"
#include "engine/live_request.h"
#include "engine/model_runner.h"
#include "engine/request_check.h"
#include "engine/tower_rows.h"
#include "freshet/engine.h"
#include "kv_cache/tier_store.h"
#include "scheduler/scheduler.h"
#include "speculative/acceptance.h"
#include "speculative/draft_lengths.h"
#include "speculative/drafter.h"

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
  // Must outlive the loop. No steps run ahead with one. The model must capture what it needs.
  speculative::Drafter* drafter = nullptr;
  int max_drafts = 15;  // of a sequence in a step
  // How many drafts are asked for; must outlive the loop. nullptr: always max_drafts.
  speculative::DraftLengths* lengths = nullptr;
  speculative::AcceptanceOptions acceptance;
  PooledHeads heads;                   // of embeddings and scores
  std::vector<int32_t> decoder_start;  // what the decoder of an encoder-decoder begins with
  // Draft trees are asked for while at most this many sequences draft; beyond, chains.
  int tree_max_batch = 0;
  // Over the cache that start() gets; must outlive the loop, which stops it. nullptr: none.
  kv_cache::TierStore* tiers = nullptr;
  bool save_prompts_only = false;
  // Of requests that name none; nullptr: they keep all keys. Goes with the scheduler's max_slots.
  kv_cache::Retention retention;
  size_t picture_cache_bytes = 0;  // of what the tower made of pictures
  // Of requests that name none. If it selects, the cache bounds its keys.
  kv_cache::SparseAttention sparse;
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
  // Runs `order` on the step thread between two steps; it must be quick. False: the loop is ending.
  // Every order that was taken is run.
  bool post(std::function<void()> order);
  kv_cache::BlockCache& blocks() { return *blocks_; }  // for orders only
  const KvStorage& cache() const { return runner_.cache(); }

 private:
  struct Arrival {
    uint64_t id = 0;
    Request request;
    std::string encoder_content;  // encoder_content.h
  };

  // A step between schedule() and commit().
  struct StepInFlight {
    scheduler::Step plan;
    std::vector<LiveRequest*> requests;       // [plan.items] valid while the item's sequence exists
    std::vector<RowTask> tasks;               // whose rows verify() reads
    std::vector<uint64_t> request_ids;        // [plan.items]
    scheduler::SequenceId next_sequence = 0;  // those from here on came with the step's tokens
    int64_t prompt_tokens = 0;                // computed
    bool runs_ahead = false;                  // the next step may start before its tokens are known
    bool scores = false;                      // keys, for evictions
    int64_t started_at = 0;                   // in microseconds
    std::vector<TowerRows> pictures;          // that the step reads
  };

  StepLoop(const StepLoopOptions& options, const Tokenizer* tokenizer, ThreadPool& pool,
           std::unique_ptr<kv_cache::BlockCache> blocks,
           std::unique_ptr<scheduler::Scheduler> scheduler, ModelRunner runner, Model& model);

  void loop();
  void empty_inbox();
  void begin(uint64_t id, Request request, const std::string& encoder_content);

  bool step();  // false: nothing to run
  void draft();
  bool schedule();  // false: no sequence can run
  void run();
  void verify(StepInFlight& step);
  void commit(StepInFlight& step);

  Status begin_pictures(LiveRequest& live, scheduler::NewRequest& order);
  void find_rows(StepInFlight& step);
  ModelRunner::Pictures pictures_of(const LiveRequest& live);
  EncoderInput encoder_input(const LiveRequest& live) const;
  TowerRows rows_now(const media::ImageInput& picture);
  bool prepare_next();
  bool prepare_pictures(const scheduler::Sequence& next);
  bool encode_ahead(uint64_t id);
  bool step_between(uint64_t id);
  static int64_t now_us();
  int32_t drafts_left(const scheduler::Sequence& s) const;
  void propose();
  void time_step(const StepInFlight& step, int64_t tokens);
  void show_rows(const StepInFlight& step);
  bool tokens_due(bool scheduled) const;
  void fill_masks(const StepInFlight& step);
  bool wants_states(const StepInFlight& step) const;
  void list_rows(StepInFlight& step);
  bool may_run_ahead(const StepInFlight& step) const;
  bool precedes_eviction(const StepInFlight& step) const;
  void end_request(uint64_t id, FinishReason reason, const Status& status);
  void retire(uint64_t id);

  void count_encoded(const scheduler::StepItem& item, const LiveRequest& live);
  void count_step(int64_t tokens);
  void count_evicted_blocks();
  void publish();        // the numbers of stats(), and how many requests wait
  void publish_stats();  // before a request's last callback, so that stats() counts the request

  const StepLoopOptions options_;
  const bool has_tokenizer_;
  const bool generates_, whole_prompts_;  // of the model
  const int token_types_;
  const EncoderLimits encoder_;
  const kv_cache::BlockSecret secret_ = random_secret();  // of encoders' inputs
  const ModelSpec& spec_;
  const bool sees_;
  Model& model_;
  // Whether towers and encoders run ahead of the steps that read their output: on hosts without
  // tiers, from which a prefix may come that needs no picture.
  const bool prepares_;
  TowerCache tower_;  // of the step thread alone
  std::vector<const VisionRows*> shown_;
  ThreadPool& pool_;
  std::unique_ptr<kv_cache::BlockCache> blocks_;
  std::unique_ptr<scheduler::Scheduler> scheduler_;
  ModelRunner runner_;
  std::vector<VerifyScratch> scratch_;  // [threads]

  // Of the step thread alone.
  EngineStats counted_;
  const OutputServices services_;
  std::unordered_map<uint64_t, std::unique_ptr<LiveRequest>> live_;
  std::deque<StepInFlight> in_flight_;  // at most two, oldest first
  std::vector<MaskTask> masks_;
  speculative::StateNeeds needs_;  // of the drafter
  std::vector<speculative::DraftRequest> drafts_;
  std::vector<RequestOutput*> drafted_;  // [drafts_] whose sequence it is
  std::vector<speculative::TargetRows> rows_;
  int64_t wake_at_ = 0;
  int64_t committed_at_ = 0;  // the step before
  int64_t drafts_us_ = 0;     // StepDone::more_seconds of the next step, in microseconds
  int64_t other_since_ = 0;   // when the tower or the encoder began or went on
  int64_t last_step_us_ = 0;  // what the last step between its layers took

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  std::vector<Arrival> arrived_;
  std::vector<uint64_t> left_;
  std::vector<std::function<void()>> orders_;
  bool loaded_ = false;  // a load of the tiers has ended
  uint64_t next_id_ = 1;
  EngineStats published_;
  int64_t queued_requests_ = 0;  // in the inbox or the scheduler's queue
  int64_t queued_tokens_ = 0;

  std::thread thread_;  // last: starts when all else is there
};

}  // namespace freshet::engine

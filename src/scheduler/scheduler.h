// Decides, step by step, which tokens of which sequences run.
//
// Integers only: no tensor, no clock (time is passed in), no thread. The same calls give the same
// steps. A step takes sequences in order of Rank: one token (and its drafts) of each sequence that
// decodes, and chunks of prompts within the token budget. Then it admits new requests:
// waiting_queue.h decides who is next, batching_policy.h how many may start, and the whole prompt
// must fit the cache. When blocks run out, the sequence with the worst rank loses its blocks and is
// computed again later. The best-ranked sequence always gets the blocks that it needs, so every
// request ends. The caller's cycle:
//
//   step = schedule(now);  do step.copies;  run step.items;  ran(step);
//   for every item with logits whose sequence awaits a token: fork()/commit()/finish()
//
// With expect(), a step may be scheduled and run before the previous step's tokens are known:
//
//   ran(a); expect(...);  b = schedule(now);  run b.items;  known(...) or finish();  ran(b); ...
//
// A sequence that awaits a token keeps its running slot and is not part of steps until it gets one,
// so that beams can move in lockstep. Not synchronised.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "kv_cache/block_cache.h"
#include "kv_cache/encoder_cache.h"
#include "scheduler/batching_policy.h"
#include "scheduler/offload.h"
#include "scheduler/sequence.h"
#include "scheduler/waiting_queue.h"

namespace freshet::scheduler {

struct SchedulerOptions {
  int32_t max_num_seqs = 256;
  int32_t max_num_batched_tokens = 2048;
  int32_t max_chunk = 0;  // most prompt tokens of one sequence in a step; 0: the token budget
  int32_t max_logit_rows = 256;  // rows of logits a step may ask for
  int32_t max_model_len = 0;     // most tokens of a sequence; its blocks must fit the pools
  int32_t encoder_blocks = 0;    // blocks for encoders' outputs, of all requests together
  bool share_encoders = true;    // keep these outputs for later requests with the same input
  // > 0: every request evicts to hold at most this many slots, for which the pools must suffice.
  int32_t max_slots = 0;
  int32_t max_queued_requests = 0;  // 0: no limit
  int64_t max_queued_tokens = 0;
  int64_t ageing_us = 30'000'000;  // so much waiting is worth one level of priority; 0: no ageing
  bool fair_share = true;
  // A sequence starts only if the cache will probably have room until the running sequences end,
  // estimated from the output lengths of recent requests. This avoids preemptions.
  bool look_ahead = false;
  // Of models with states (kv_cache/block_cache.h): checkpoints are kept at this distance in
  // tokens, rounded to blocks, besides those at the ends of prompts and where prompts part.
  int32_t checkpoint_interval = 512;
  int32_t kept_checkpoints = 0;  // slots that starting sequences leave them
  BatchingOptions batching;
};

struct SchedulerStats {
  int32_t running = 0;
  int32_t waiting = 0;          // sequences that want to run and cannot
  int32_t deferred = 0;         // of those, held back by the batching policy
  int32_t queued_requests = 0;  // of those, requests that have not started
  int64_t queued_tokens = 0;    // of their prompts
  int64_t preemptions = 0;
  int64_t evictions = 0;          // of keys of live sequences
  int64_t prompt_tokens = 0;      // of admitted requests
  int64_t cached_tokens = 0;      // of those, found in the cache at admission
  int64_t recomputed_tokens = 0;  // last tokens of fully cached prompts, which run again
  int64_t loading = 0;            // sequences whose prefixes are being loaded
  int64_t tier_queries = 0;       // prompt tokens that were looked for below the cache
  int64_t tier_hits = 0;          // of those, loaded; not part of cached_tokens
  int64_t branch_rows = 0;        // rows of branches of draft trees
  int64_t repeated_rows = 0;      // of those, rows that another path of the tree has too
  int64_t encoder_queries = 0;    // requests that started with an encoder's input
  int64_t encoder_hits = 0;       // of those, whose output was in the cache
  double encoder_usage = 0.0;     // share of its blocks that requests hold
};

class Scheduler {
 public:
  // `cache` must outlive the scheduler. Errors: options with which no request could run.
  static Result<std::unique_ptr<Scheduler>> create(const SchedulerOptions& options,
                                                   kv_cache::BlockCache& cache);

  // Returns the first sequence. Errors: kInvalidArgument (it could never run),
  // kResourceExhausted (the queue is full).
  Result<SequenceId> submit(NewRequest request, int64_t now);
  Step schedule(int64_t now);
  // Uses a store below the cache from now on. Must be called before the first request.
  void set_store(kv_cache::BlockStore& store, bool prompt_only);

  // The step's tokens are computed now, except drafts: commit() says which were accepted.
  void ran(const Step& step);
  // Adds tokens to a sequence that awaits one: the accepted drafts and the token after them.
  void commit(SequenceId sequence, std::span<const int32_t> tokens);
  // Adds a token that is not known yet, so that the next step can be scheduled. known() supplies it
  // before that step's ran().
  void expect(SequenceId sequence);
  void known(SequenceId sequence, int32_t token);
  // Returns a copy of a sequence that awaits a token; it shares its blocks. If no running slot is
  // free, the copy queues for one after its commit(). Slots for NewRequest::samples are reserved.
  SequenceId fork(SequenceId sequence);
  // Proposes tokens to follow those of the sequence in its next step, and other paths of a draft
  // tree. They are dropped if the step has no room for them, or the sequence loses its blocks
  // before. A branch never costs anyone else a block or a place in the step. commit() keeps the
  // blocks of the path whose drafts were accepted. Drafts end where an eviction is due; a sequence
  // that evicts has no branches.
  void set_draft(SequenceId sequence, std::vector<int32_t> draft,
                 std::vector<std::vector<int32_t>> branches = {});
  // The running sequences that have one token to compute, all of them known: drafts may follow it.
  std::vector<SequenceId> decoding() const;
  // The sequence that is next to start but for its request not being ready; nullptr: none.
  const Sequence* next_unready() const;
  void set_ready(RequestId request);
  // What begin() of the cache would find for the sequence now, and whether the output of its
  // request's encoder is there or will be with the next step.
  int32_t cached_prefix(const Sequence& s) const;
  bool has_encoder_output(const Request& r) const;
  void unpin_all();                  // pinned prefixes may be evicted again
  void finish(SequenceId sequence);  // the request ends with its last sequence
  bool cancel(RequestId request);    // false: unknown (ended already)
  SequenceId next_sequence() const { return next_sequence_; }  // numbers only grow
  // The sequences that ended since the last call.
  std::vector<SequenceId> take_ended();

  bool has(SequenceId sequence) const { return sequences_.contains(sequence); }
  const Sequence& sequence(SequenceId sequence) const { return *sequences_.at(sequence); }
  const Request* request(RequestId request) const;  // nullptr when unknown
  // How long the request has waited, by reason, up to `now`.
  WaitTimes waits(RequestId request, int64_t now) const;
  SchedulerStats stats() const;
  int32_t chunk() const;  // most tokens of a prompt in a step
  bool idle() const { return sequences_.empty(); }
  // Runs BlockCache::check() with this scheduler's tables and `others`, and checks its own counts.
  Status check(std::span<const kv_cache::BlockTable* const> others = {}) const;

 private:
  struct ByRank {
    bool operator()(const Sequence* a, const Sequence* b) const { return a->rank < b->rank; }
  };
  struct Budget {
    int32_t tokens = 0;
    int32_t rows = 0;
    int32_t decodes_left = 0;  // decoding sequences that are not planned yet
  };

  Scheduler(const SchedulerOptions& options, kv_cache::BlockCache& cache,
            std::unique_ptr<BatchingPolicy> policy);

  Status check_pictures(const NewRequest& request) const;
  int32_t slots(const Sequence& s) const { return 1 + s.pending_forks; }
  Sequence& at(SequenceId id) { return *sequences_.at(id); }

  void account_waiting(int64_t now);
  void expire(Step& step);
  void restart_evictions(Sequence& s);
  void own_scores(Sequence& s);
  void plan_scores(Sequence& s, const StepItem& item);
  void take_draft_scores(Sequence& s);
  void evict_due(Step& step);
  void evict(Sequence& s, Step& step);
  std::vector<Sequence*> twins(const Sequence& s);
  bool make_room_to_evict(const Sequence& s, const std::vector<Sequence*>& twins, Step& step);
  int32_t slots_end(const Sequence& s, int group, int32_t end) const;
  Status fits_pools(const NewRequest& request) const;
  void renew_grant();
  void make_way(Step& step);
  bool break_standstill(Step& step);
  int64_t wake_time() const;
  std::span<const int32_t> may_be_cached(const Sequence& s) const;
  static int64_t behind_others(const Request& r, int64_t now);
  void plan_running(Step& step, Budget& budget);
  void admit(Step& step, Budget& budget);
  Sequence* candidate(bool fresh_allowed) const;
  bool fits_whole(const Sequence& s) const;
  bool fits_ahead(const Sequence& s) const;
  int32_t to_come(const Sequence& s) const;
  WaitReason obstacle(Sequence& s);
  void finish_loads();
  bool start_load(Sequence& s);
  int32_t take_prefix(Sequence& s, std::vector<kv_cache::BlockCopy>& copies);
  void give_back_prefix(Sequence& s);
  bool drop_loaded(const Sequence& for_whom);
  void count_start(const Sequence& s, int32_t cached);
  void forget_load(Sequence& s);
  void pin(Sequence& s);
  bool unpin_oldest();
  WaitReason start(Sequence& s, Step& step, Budget& budget);
  bool has_encoder_blocks(const Request& r) const;
  bool take_encoder_blocks(Request& r);
  void free_encoder_blocks(Request& r);
  void begin_encoded(Request& r, StepItem& item);
  WaitReason plan(Sequence& s, Step& step, Budget& budget);
  bool reserve(Sequence& s, StepItem& item, Step& step);
  bool keep_pictures_whole(const Sequence& s, StepItem& item, const Budget& budget) const;
  void keep_states(Sequence& s, const StepItem& item);
  void plan_branches(Step& step, Budget& budget);
  void plan_branch(Sequence& s, size_t index, Step& step, Budget& budget);
  void take_branch(Sequence& s, std::span<const int32_t> accepted);
  void drop_branches(Sequence& s);
  Sequence* victim(const Sequence& for_whom) const;
  void preempt(Sequence& s, Step& step);
  void stop_running(Sequence& s);
  void enqueue(Sequence& s);
  void dequeue(Sequence& s);
  void drop(Sequence& s);

  SchedulerOptions options_;
  kv_cache::BlockCache& cache_;
  kv_cache::EncoderCache encoders_;
  std::unique_ptr<BatchingPolicy> policy_;
  WaitingQueue queue_;
  std::unordered_map<SequenceId, std::unique_ptr<Sequence>> sequences_;
  std::unordered_map<RequestId, std::unique_ptr<Request>> requests_;
  std::set<Sequence*, ByRank> running_;
  std::set<Sequence*, ByRank> resumed_;  // started, lost their blocks, want to run again
  std::set<Sequence*, ByRank> loading_;  // their running slots are taken
  std::optional<Offload> offload_;       // if there is a store
  std::set<std::pair<int64_t, RequestId>> deadlines_;
  std::unordered_map<uint64_t, int32_t> batches_;  // live sequences of each admission
  Grant grant_;                                    // the unused part of the policy's last answer
  uint64_t grant_batch_ = 0;
  bool grant_unused_ = true;
  bool batch_cut_short_ = false;
  std::deque<kv_cache::BlockTable> pins_;  // oldest use first
  SequenceId head_ = 0;                    // the next sequence, which could not start
  int32_t slots_taken_ = 0;
  // Output lengths of the sequences that ended last: in order of their ends, and ascending.
  std::array<int32_t, 64> outputs_, sorted_outputs_;
  size_t ended_ = 0;
  int64_t now_ = 0;  // never goes back
  uint64_t steps_ = 0;
  SequenceId next_sequence_ = 1;
  std::vector<SequenceId> gone_;  // for take_ended()
  SchedulerStats stats_;
};

}  // namespace freshet::scheduler

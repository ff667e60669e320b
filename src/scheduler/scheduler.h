// Decides, step by step, which tokens of which sequences run.
//
// Integers only: no tensor, no clock (time is passed in), no thread; the same calls give the same
// steps. A step takes, in order of Rank, one token (and its drafts) of every sequence that decodes
// and chunks of prompts as far as the token budget goes, then lets in new requests (waiting_queue.h
// says who, batching_policy.h how many, and the whole prompt must find room). When blocks run out,
// the sequence with the worst rank gives up its own and is computed again later; since the
// best-ranked sequence can always take what it needs, everything ends. The cycle of the caller:
//
//   step = schedule(now);  do step.copies;  run step.items;  ran(step);
//   for every item with logits whose sequence awaits a token: fork()/commit()/finish()
//
// With expect() a step may be scheduled and run before the tokens of the one in front are known:
//
//   ran(a); expect(...);  b = schedule(now);  run b.items;  known(...) or finish();  ran(b); ...
//
// A sequence that awaits a token holds its place and does nothing until it gets one (so that beams
// can go in lockstep). Not synchronised.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <set>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "kv_cache/block_cache.h"
#include "scheduler/batching_policy.h"
#include "scheduler/sequence.h"
#include "scheduler/waiting_queue.h"

namespace freshet::scheduler {

struct SchedulerOptions {
  int32_t max_num_seqs = 256;
  int32_t max_num_batched_tokens = 2048;
  int32_t max_chunk = 0;  // most prompt tokens of one sequence in a step; 0: the token budget
  int32_t max_logit_rows = 256;     // rows of logits a step may ask for
  int32_t max_model_len = 0;        // most tokens of a sequence; its blocks must fit the pools
  int32_t max_queued_requests = 0;  // 0: no limit
  int64_t max_queued_tokens = 0;
  int64_t ageing_us = 30'000'000;  // waiting so long makes up for one level of priority; 0: never
  bool fair_share = true;
  // A sequence starts only if the cache is likely to have room until those that run have ended, by
  // the lengths of those that ended lately: fewer lose their blocks and are computed twice.
  bool look_ahead = false;
  BatchingOptions batching;
};

struct SchedulerStats {
  int32_t running = 0;
  int32_t waiting = 0;          // sequences that want to run and do not
  int32_t deferred = 0;         // of those, kept out by the batching policy
  int32_t queued_requests = 0;  // of those, requests that never ran
  int64_t queued_tokens = 0;    // of their prompts
  int64_t preemptions = 0;
  int64_t prompt_tokens = 0;      // asked for, at first admission
  int64_t cached_tokens = 0;      // of those, found in the cache
  int64_t recomputed_tokens = 0;  // of prompts cached to their end: the last, which runs again
};

class Scheduler {
 public:
  // `cache` must outlive the scheduler. Errors: options that no request could be served with.
  static Result<std::unique_ptr<Scheduler>> create(const SchedulerOptions& options,
                                                   kv_cache::BlockCache& cache);

  // Errors: kInvalidArgument (never possible), kResourceExhausted (queue full). Returns its
  // sequence.
  Result<SequenceId> submit(NewRequest request, int64_t now);
  Step schedule(int64_t now);

  // The step's tokens are computed now (drafts excepted: commit() says which were right).
  void ran(const Step& step);
  // Adds tokens to a sequence that awaits some: the accepted drafts and the one after them.
  void commit(SequenceId sequence, std::span<const int32_t> tokens);
  // Adds a token to a sequence that awaits one before it is known, so that the next step can be
  // scheduled; known() says which it is, before the tokens behind it are computed (ran()).
  void expect(SequenceId sequence);
  void known(SequenceId sequence, int32_t token);
  // A copy of a sequence that awaits a token; shares its blocks. Returns its number. When no seat
  // is free (samples that the request announced have theirs kept) it queues for one after its
  // commit().
  SequenceId fork(SequenceId sequence);
  // Proposes tokens to follow those of the sequence in its next step. They are dropped if the step
  // has no room for them, or the sequence loses its blocks before.
  void set_draft(SequenceId sequence, std::vector<int32_t> draft);
  // The running sequences that have one token to compute, all of them known: drafts may follow it.
  std::vector<SequenceId> decoding() const;
  void unpin_all();                  // forgets which prefixes are to stay
  void finish(SequenceId sequence);  // the request goes with its last sequence
  bool cancel(RequestId request);    // false: unknown (ended already)

  bool has(SequenceId sequence) const { return sequences_.contains(sequence); }
  const Sequence& sequence(SequenceId sequence) const { return *sequences_.at(sequence); }
  const Request* request(RequestId request) const;  // nullptr when unknown
  // How long the request waited for what; what it waits for now is counted up to `now`.
  WaitTimes waits(RequestId request, int64_t now) const;
  SchedulerStats stats() const;
  bool idle() const { return sequences_.empty(); }
  // The cache's check with this scheduler's tables and `others`, and that of its own books.
  Status check(std::span<const kv_cache::BlockTable* const> others = {}) const;

 private:
  struct ByRank {
    bool operator()(const Sequence* a, const Sequence* b) const { return a->rank < b->rank; }
  };
  struct Budget {
    int32_t tokens = 0;
    int32_t rows = 0;
    int32_t decodes_left = 0;  // sequences further down that want one token each
  };

  Scheduler(const SchedulerOptions& options, kv_cache::BlockCache& cache,
            std::unique_ptr<BatchingPolicy> policy);

  int32_t chunk() const;
  int32_t seats(const Sequence& s) const { return 1 + s.pending_forks; }
  Sequence& at(SequenceId id) { return *sequences_.at(id); }

  void account_waiting(int64_t now);
  void expire(Step& step);
  void renew_grant();
  void make_way(Step& step);
  bool break_standstill(Step& step);
  int64_t wake_time() const;
  static std::span<const int32_t> may_be_cached(const Sequence& s);
  static int64_t behind_others(const Request& r, int64_t now);
  void plan_running(Step& step, Budget& budget);
  void admit(Step& step, Budget& budget);
  Sequence* candidate(bool fresh_allowed) const;
  bool fits_whole(const Sequence& s) const;
  bool fits_ahead(const Sequence& s) const;
  int32_t to_come(const Sequence& s) const;
  WaitReason obstacle(Sequence& s);
  void pin(Sequence& s);
  bool unpin_oldest();
  WaitReason start(Sequence& s, Step& step, Budget& budget);
  WaitReason plan(Sequence& s, Step& step, Budget& budget);
  bool reserve(Sequence& s, StepItem& item, Step& step);
  Sequence* victim(const Sequence& for_whom) const;
  void preempt(Sequence& s, Step& step);
  void stop_running(Sequence& s);
  void enqueue(Sequence& s);
  void dequeue(Sequence& s);
  void drop(Sequence& s);

  SchedulerOptions options_;
  kv_cache::BlockCache& cache_;
  std::unique_ptr<BatchingPolicy> policy_;
  WaitingQueue queue_;
  std::unordered_map<SequenceId, std::unique_ptr<Sequence>> sequences_;
  std::unordered_map<RequestId, std::unique_ptr<Request>> requests_;
  std::set<Sequence*, ByRank> running_;
  std::set<Sequence*, ByRank> resumed_;  // started, lost their blocks, want to run again
  std::set<std::pair<int64_t, RequestId>> deadlines_;
  std::unordered_map<uint64_t, int32_t> batches_;  // live sequences of each admission
  Grant grant_;                                    // what is left of the policy's word
  uint64_t grant_batch_ = 0;
  bool grant_unused_ = true;
  bool batch_cut_short_ = false;
  std::deque<kv_cache::BlockTable> pins_;  // oldest use first
  SequenceId head_ = 0;                    // who was next and could not start
  int32_t seats_taken_ = 0;
  // Tokens that sequences which ended lately had added: as they came, and ascending.
  std::array<int32_t, 64> outputs_, sorted_outputs_;
  size_t ended_ = 0;
  int64_t now_ = 0;  // never goes back
  uint64_t steps_ = 0;
  SequenceId next_sequence_ = 1;
  SchedulerStats stats_;
};

}  // namespace freshet::scheduler

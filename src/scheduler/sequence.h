// What the scheduler knows of requests and sequences: integers.
//
// A request has one prompt and one or more sequences (samples, or beams). A sequence is its tokens,
// how many of them are computed (have their keys and values in the cache) and the blocks it holds.
// It has work to do while tokens.size() > computed; when all is computed it awaits the next token
// (Scheduler::commit) or its end. Times are microseconds of a clock that the caller keeps.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "kv_cache/block_cache.h"

namespace freshet::scheduler {

using RequestId = uint64_t;
using SequenceId = uint64_t;

// Why something waits, for the request's own record.
enum class WaitReason : uint8_t {
  kNone,
  kQueued,       // others go first
  kSeats,        // max_num_seqs sequences run already
  kBlocks,       // the cache is full
  kTokenBudget,  // the step has no tokens left
  kBatchPolicy,  // the batching policy is collecting a batch
  kPreempted,    // gave its blocks to another
  kCount,
};
const char* name_of(WaitReason reason);
using WaitTimes = std::array<int64_t, static_cast<size_t>(WaitReason::kCount)>;  // microseconds

struct NewRequest {
  RequestId id = 0;
  std::vector<int32_t> prompt;  // not empty
  int32_t max_tokens = 0;       // most tokens a sequence may add
  int32_t samples = 1;          // sequences it will become (n, or the beam width)
  int32_t priority = 0;         // lower goes first
  uint64_t tenant = 0;          // who shares the machine fairly
  std::string salt;             // prefixes are shared within one salt
  int64_t deadline = 0;         // > 0: expires then
  int32_t logits_from = -1;     // >= 0: logits of every position from here on are wanted
  bool compute_all = false;     // no cached prefix: every position's state is wanted
  int32_t pin_tokens = 0;       // so many first tokens stay in the cache while there is room
};

// A total order that never changes: who keeps blocks when they run out.
struct Rank {
  int64_t major = 0;
  int64_t minor = 0;
  SequenceId sequence = 0;
  auto operator<=>(const Rank&) const = default;
};

enum class State : uint8_t {
  kWaiting,    // queued, holds nothing
  kRunning,    // holds a seat and blocks
  kSuspended,  // lost its blocks while awaiting a token; queued again by commit()
};

struct Request;

constexpr int32_t kExpected = -1;  // the place of a token that is not known yet

struct Sequence {
  SequenceId id = 0;
  Request* request = nullptr;
  State state = State::kWaiting;
  Rank rank;
  std::vector<int32_t> tokens;  // prompt and what was committed
  int32_t prompt_tokens = 0;
  int32_t max_tokens = 0;  // most that it may add
  int32_t computed = 0;
  std::vector<int32_t> draft;  // proposed for the next step, not committed
  kv_cache::BlockTable blocks;
  int32_t pending_forks = 0;  // seats kept for samples that share the prompt
  int32_t pin_tokens = 0;     // to be pinned when they are computed
  bool compute_all = false;
  int32_t logits_from = -1;
  bool started = false;  // was admitted once
  int64_t queued_at = 0;
  WaitReason waits_for = WaitReason::kQueued;
  uint64_t planned_in = 0;  // number of the last step that it took part in

  // The last token is counted on, but not known yet (Scheduler::expect).
  bool expects() const { return !tokens.empty() && tokens.back() == kExpected; }
  int32_t size() const { return static_cast<int32_t>(tokens.size()); }
  bool awaits_token() const { return computed == size(); }
};

struct Request {
  RequestId id = 0;
  int32_t priority = 0;
  uint64_t tenant = 0;
  std::string salt;
  int64_t arrival = 0;
  int64_t deadline = 0;
  uint64_t batch = 0;         // which admission it came with
  int32_t cached_tokens = 0;  // of the prompt, found in the cache at first admission
  int32_t preemptions = 0;
  std::vector<SequenceId> sequences;
  WaitTimes waited{};  // of all its sequences together
};

// A sequence's part of a step: tokens [first, first + count) are run. The last `draft` of them are
// proposals. Logits are wanted for the last `logits` of them.
struct StepItem {
  SequenceId sequence = 0;
  int32_t first = 0;
  int32_t count = 0;
  int32_t draft = 0;
  int32_t logits = 0;
};

struct Step {
  uint64_t number = 0;
  std::vector<StepItem> items;
  std::vector<kv_cache::BlockCopy> copies;  // to be done in order, before the run
  std::vector<SequenceId> preempted;
  std::vector<RequestId> expired;  // deadlines that passed; these requests are gone
  int32_t tokens = 0;
  int32_t logit_rows = 0;
  int64_t wake_at = 0;  // with no items: when to ask again; 0: only something new can change that
};

}  // namespace freshet::scheduler

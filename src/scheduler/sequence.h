// The scheduler's records of requests and sequences. Integers only.
//
// A request has one prompt and one or more sequences (samples or beams). A sequence has tokens, a
// count of computed tokens (their keys and values are in the cache) and the blocks that it holds.
// It has work to do while tokens.size() > computed. Then it awaits its next token
// (Scheduler::commit) or its end. Times are microseconds of a clock that the caller keeps.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kv_cache/block_cache.h"
#include "kv_cache/block_key.h"
#include "kv_cache/retention/schedule.h"
#include "kv_cache/sparse_attention.h"
#include "scheduler/pictures.h"

namespace freshet {
struct CrossWeights;
}

namespace freshet::scheduler {

using RequestId = uint64_t;
using SequenceId = uint64_t;

// Why a sequence waits; reported in the usage of its request.
enum class WaitReason : uint8_t {
  kNone,
  kQueued,       // other requests go first
  kSlots,        // no running slot is free: max_num_seqs sequences run already
  kBlocks,       // the cache is full
  kTokenBudget,  // the step has no tokens left
  kBatchPolicy,  // the batching policy is collecting a batch
  kPreempted,    // its blocks went to another sequence
  kKvLoad,       // its prefix is being loaded from host memory or disk
  kEncoder,      // what it reads of pictures or sound is being computed
  kCount,
};
const char* name_of(WaitReason reason);
using WaitTimes = std::array<int64_t, static_cast<size_t>(WaitReason::kCount)>;  // microseconds

struct NewRequest {
  RequestId id = 0;
  std::vector<int32_t> prompt;  // not empty
  int32_t max_tokens = 0;       // most tokens a sequence may add
  int32_t samples = 1;          // sequences it will fork into (n, or the beam width)
  int32_t priority = 0;         // lower goes first
  uint64_t tenant = 0;          // tenants get fair shares
  std::string salt;             // cached prefixes are shared within one salt only
  int64_t deadline = 0;         // > 0: the request expires at this time
  int32_t logits_from = -1;     // >= 0: logits of every position from here on are wanted
  bool compute_all = false;     // use no cached prefix, because every position's state is wanted
  bool logits = true;           // the last token's logits are wanted
  bool whole = false;           // the prompt runs in one step and is never cut
  std::vector<int32_t> token_types;  // of the prompt's tokens, or empty
  int32_t pin_tokens = 0;            // this many first tokens stay cached while there is room
  int32_t encoder_tokens = 0;        // positions of the encoder's output, of encoder-decoders
  // nullptr: all keys are kept. Such a request has no branches of draft trees.
  std::shared_ptr<const kv_cache::EvictionSchedule> eviction;
  std::vector<PictureSpan> pictures;  // rows of the prompt that are pictures'; ascending
  kv_cache::SparseAttention sparse;   // what queries read
  // What the encoder reads, or a digest of it: requests with the same content and salt share the
  // encoder's output. "": nobody shares it.
  std::string encoder_content;
  // It starts, and starts again after a preemption, only when the caller has made it ready.
  bool prepares = false;
  CrossWeights* cross_weights = nullptr;  // as in Request
};

// A fixed total order of sequences. When blocks run out, better ranks keep theirs.
struct Rank {
  int64_t major = 0;
  int64_t minor = 0;
  SequenceId sequence = 0;
  auto operator<=>(const Rank&) const = default;
};

enum class State : uint8_t {
  kWaiting,    // queued; holds no blocks
  kRunning,    // holds a running slot and blocks
  kSuspended,  // lost its blocks while awaiting a token; queued again by commit()
  kLoading,    // its prefix is being loaded; holds a running slot and blocks (TierState)
};

struct Request;

// A path of a draft tree beside the main one (Sequence::draft). Both begin behind the sequence's
// last token and may begin alike. In a step a branch is an item of its own, over blocks of its own:
// those that are complete before the step are the sequence's, the others are copies. So a row reads
// the keys of the tokens before it in its path and no others, as in a sequence without drafts.
struct Branch {
  std::vector<int32_t> draft;
  int32_t shared = 0;  // this many drafts begin a path in front, whose rows give the logits
  int32_t item = -1;   // its index in Step::items; -1: it is not part of the step
  kv_cache::BlockTable blocks;  // empty unless it is part of the step
};

// A sequence's part of a step. Tokens [first, first + count) run; the last `draft` of them are
// drafts, and the last `logits` of them need logits.
struct StepItem {
  SequenceId sequence = 0;
  int32_t first = 0;
  int32_t count = 0;
  int32_t draft = 0;
  int32_t logits = 0;
  int32_t branch = -1;   // index in Sequence::branches; -1: the main path
  bool encodes = false;  // the encoder runs for the request first
};

// What a sequence has to do with the tiers below the cache (offload.h).
struct TierState {
  std::vector<kv_cache::BlockKey> keys;  // of its first full blocks, as far as they were needed
  int32_t saved = 0;                     // full blocks that were offered to the store
  bool looked = false;                   // the store was asked for a prefix since it was queued
  uint64_t ticket = 0;                   // of its load; 0: none
  kv_cache::BlockTable loaded;           // blocks that are being loaded, or that it starts with
  int32_t loaded_tokens = 0;             // that these hold
  int32_t from_store = 0;                // of those, not from the cache
  bool taken = false;                    // the blocks it started with are these
};

constexpr int32_t kExpected = -1;  // stands for a token that is not known yet

struct Sequence {
  SequenceId id = 0;
  Request* request = nullptr;
  State state = State::kWaiting;
  Rank rank;
  std::vector<int32_t> tokens;  // prompt and committed tokens
  int32_t prompt_tokens = 0;
  int32_t max_tokens = 0;  // most tokens that it may add
  int32_t computed = 0;
  std::vector<int32_t> draft;    // proposed for the next step, not committed
  std::vector<Branch> branches;  // of the draft tree, none of which begins an earlier path
  int32_t accepted_branch = -1;  // whose blocks the last commit() took over; -1: none
  kv_cache::BlockTable blocks;
  int32_t pending_forks = 0;  // running slots reserved for its samples
  int32_t pin_tokens = 0;     // to pin once they are computed
  bool compute_all = false;
  bool logits = true;
  bool whole = false;
  std::vector<int32_t> token_types;  // of the prompt's tokens, or empty
  int32_t logits_from = -1;
  // With Request::eviction: the position where its next eviction is due, the first query that is
  // scored for it, and the sums of the scores so far, which forks share until they add to them.
  int32_t evict_at = kv_cache::kNeverEvicts;
  int32_t scored_from = kv_cache::kNeverEvicts;
  std::shared_ptr<kv_cache::KeyScores> scores;
  // Of the queries from draft_scored_from on, which a step with drafts runs; commit() adds to the
  // sums those that stay.
  std::shared_ptr<kv_cache::KeyScores> draft_scores;
  int32_t draft_scored_from = 0;
  bool started = false;  // was admitted before
  int64_t queued_at = 0;
  WaitReason waits_for = WaitReason::kQueued;
  uint64_t planned_in = 0;  // the last step that it was part of
  TierState tier;
  std::vector<PictureSpan> pictures;  // in the prompt
  std::vector<int32_t> keys;          // key_tokens() of all tokens, if there are pictures

  // The tokens as the prefix cache knows them.
  const std::vector<int32_t>& cached_as() const { return pictures.empty() ? tokens : keys; }
  // Whether the last token is expected, but not known yet (Scheduler::expect).
  bool expects() const { return !tokens.empty() && tokens.back() == kExpected; }
  int32_t size() const { return static_cast<int32_t>(tokens.size()); }
  // Of the first `count` tokens, those whose keys and values follow from the tokens alone and may
  // be shared.
  int32_t sharable(int32_t count) const;
  bool awaits_token() const { return computed == size(); }
  const Branch* branch_of(const StepItem& item) const {
    return item.branch < 0 ? nullptr : &branches[static_cast<size_t>(item.branch)];
  }
  // What the item's drafts are, and where its keys and values go.
  const std::vector<int32_t>& draft_of(const StepItem& item) const {
    const Branch* const branch = branch_of(item);
    return branch == nullptr ? draft : branch->draft;
  }
  const kv_cache::BlockTable& blocks_of(const StepItem& item) const {
    const Branch* const branch = branch_of(item);
    return branch == nullptr ? blocks : branch->blocks;
  }
};

struct Request {
  RequestId id = 0;
  int32_t priority = 0;
  uint64_t tenant = 0;
  std::string salt;
  int64_t arrival = 0;
  int64_t deadline = 0;
  uint64_t batch = 0;  // the step that admitted it
  std::shared_ptr<const kv_cache::EvictionSchedule> eviction;
  kv_cache::SparseAttention sparse;
  int32_t cached_tokens = 0;  // of the prompt, found in the cache at first admission
  int32_t preemptions = 0;
  // The encoder's output: all sequences read it, from the first start to the request's end.
  int32_t encoder_tokens = 0;
  std::vector<int32_t> encoder_blocks;    // with one reference each
  bool encoded = false;                   // the output is there: a step computes it, or has
  std::string encoder_key;                // of the output in the cache; "": it is not shared
  bool encoder_found = false;             // the blocks held the output when they were taken
  bool prepares = false;                  // NewRequest::prepares
  bool prepared = false;                  // the caller has made it ready
  CrossWeights* cross_weights = nullptr;  // who reads the weights of cross-attention, or none
  std::vector<SequenceId> sequences;
  WaitTimes waited{};  // of all its sequences together

  bool ready() const { return !prepares || prepared; }  // it may start
};

inline int32_t Sequence::sharable(int32_t count) const {
  return request->sparse.sharable(prompt_tokens, count);
}

// Keys of a sequence that are evicted: of each group that has a table in `before`, slots of these
// blocks go to the blocks `after`.
struct Eviction {
  RequestId request = 0;
  std::vector<std::vector<int32_t>> before, after;  // [groups][blocks]
  std::vector<int32_t> slots, kept;                 // [groups]
  std::shared_ptr<kv_cache::KeyScores> scores;      // of the slots in `before`; may be nullptr
  // Where the sums of kept keys go, of the sequence and of its twins, each its own; may be empty.
  std::vector<std::shared_ptr<kv_cache::KeyScores>> left;
  // Empty, or [groups][blocks]: where coarse tokens are, and where they are after the eviction with
  // the evicted ones behind them.
  std::vector<std::vector<int32_t>> coarse_before, coarse_after;
  std::vector<int32_t> coarse_slots;  // [groups] before
};

struct Step {
  uint64_t number = 0;
  std::vector<Eviction> evictions;          // to do in order, before the copies, also without items
  std::vector<StepItem> items;              // branches of draft trees come last
  std::vector<kv_cache::BlockCopy> copies;  // to do in order, before the run
  std::vector<SequenceId> preempted;
  std::vector<RequestId> expired;  // their deadlines passed; the scheduler has dropped them
  int32_t tokens = 0;
  int32_t logit_rows = 0;
  int64_t wake_at = 0;  // without items: when to schedule again; 0: after new input only
};

}  // namespace freshet::scheduler

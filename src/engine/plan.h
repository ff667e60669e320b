// The memory plan of a model, made before any weight is read.
//
// All sizes follow from shapes: weights as stored, the KV cache of each group, the workspace of the
// largest step, its logits, and a fixed amount for the program and its vocabulary. make_plan()
// chooses the size of the cache and the longest sequence so that everything fits, or returns an
// error that says in one line what would fit. The cache counts in full, although the system commits
// its pages only when they are used. Pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/status.h"
#include "kv_cache/kv_storage.h"

namespace freshet::engine {

// The default size of a step. A few cores are busy with 512 tokens; longer steps only take more
// memory and delay other requests. A GPU needs more sequences and tokens, if their workspace is
// small.
enum class Steps { kShort, kUsual, kLarge };

struct PlanRequest {
  size_t weights = 0;         // bytes
  int64_t model_context = 0;  // longest sequence that the model allows
  int vocab_size = 0;
  int hidden_size = 0;
  KvCacheSpec kv;
  int32_t max_slots = 0;  // > 0: the most slots that a sequence holds in groups that may evict
  // Of models with states: slots of a running sequence, one and one for each draft; and the share
  // of the cache for checkpoints (kv_cache/block_cache.h).
  int state_slots = 1;
  double checkpoint_share = 0.25;
  int drafts = 0;                      // most drafts of a sequence in a step: rows of logits
  size_t drafter_weights = 0;          // bytes
  size_t drafter_bytes_per_token = 0;  // of a drafter's cache, for each token that the cache holds
  size_t available = 0;                // 0: unknown, everything fits
  // The default share of the cache in the memory that weights and workspaces leave: a quarter on a
  // host, so that its first model does not fill it; all of a GPU.
  double kv_share = 0.25;
  // As in EngineOptions; 0: chosen by the plan.
  int max_model_len = 0;
  size_t kv_cache_memory = 0;
  int max_num_seqs = 0;
  int max_num_batched_tokens = 0;
  // Sequences live for one step, in which they are computed whole: a step has room for the longest
  // one, and the cache holds one step.
  bool one_step = false;
  Steps steps = Steps::kUsual;
  // Workspace of the forward pass for a step.
  std::function<size_t(int64_t tokens, int64_t logit_rows, int64_t context)> workspace;
};

struct MemoryPlan {
  int max_model_len = 0;
  int max_num_seqs = 0;
  int max_num_batched_tokens = 0;
  int max_logit_rows = 0;
  std::vector<int32_t> blocks;        // [groups]
  std::vector<size_t> kv;             // bytes, [groups]
  std::vector<KvGroup> groups;        // [groups]
  int32_t checkpoints = 0;            // of the blocks of the state group
  std::vector<std::string> kv_types;  // [groups]
  size_t weights = 0;
  size_t workspace = 0;
  size_t logits = 0;   // and states, for embeddings
  size_t drafter = 0;  // its weights and its cache
  size_t fixed = 0;
  size_t available = 0;

  size_t kv_bytes() const;
  int64_t cache_tokens() const;  // that the largest group holds
  size_t total() const;
  std::string describe() const;  // readable text: one line per part
};

Result<MemoryPlan> make_plan(const PlanRequest& request);

}  // namespace freshet::engine

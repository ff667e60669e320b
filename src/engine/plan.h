// How much memory a model will take, known before any weight is read.
//
// All sizes follow from shapes: weights as stored, the pool of keys and values for each cache
// group, the workspace of the largest step, its logits, and a fixed share for the program and its
// vocabulary. make_plan() sizes the pool and the longest sequence so that everything fits, or says
// in one line what would. The pool counts whole, though the system commits its pages only as they
// are used. Pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/status.h"
#include "kv_cache/kv_storage.h"

namespace freshet::engine {

// The size of a step if the user gives none. 512 tokens keep a few cores busy: longer steps only
// take more memory, and make other sequences wait. A GPU wants more sequences and tokens, if their
// workspace is small beside its memory.
enum class Steps { kShort, kUsual, kLarge };

struct PlanRequest {
  size_t weights = 0;         // bytes
  int64_t model_context = 0;  // longest sequence that the model allows
  int vocab_size = 0;
  int hidden_size = 0;
  KvCacheSpec kv;
  size_t available = 0;  // 0: unknown, everything fits
  // The share of the memory beside weights and workspaces that keys and values get if the user
  // gives none: a quarter, so that one model does not fill a machine; a GPU is filled.
  double kv_share = 0.25;
  // As in EngineOptions; 0: chosen by the plan.
  int max_model_len = 0;
  size_t kv_cache_memory = 0;
  int max_num_seqs = 0;
  int max_num_batched_tokens = 0;
  Steps steps = Steps::kUsual;
  // Workspace of the forward pass for a step.
  std::function<size_t(int64_t tokens, int64_t logit_rows, int64_t context)> workspace;
};

struct MemoryPlan {
  int max_model_len = 0;
  int max_num_seqs = 0;
  int max_num_batched_tokens = 0;
  int max_logit_rows = 0;
  std::vector<int32_t> blocks;  // [groups]
  std::vector<size_t> kv;       // bytes, [groups]
  std::vector<int> windows;     // [groups]
  std::string kv_type;
  size_t weights = 0;
  size_t workspace = 0;
  size_t logits = 0;  // and states, for embeddings
  size_t fixed = 0;
  size_t available = 0;

  size_t kv_bytes() const;
  size_t total() const;
  std::string describe() const;  // for people: one line a part
};

Result<MemoryPlan> make_plan(const PlanRequest& request);

}  // namespace freshet::engine

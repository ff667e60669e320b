// One step's context, and the branches of layers as functions of it.
//
// Each function takes scratch from the arena, gives it back, and enqueues ops; none allocates. The
// *_bytes functions return the most scratch that a call takes for `tokens` tokens: the memory plan
// adds them up. `cache_layer` is the layer of the cache where the branch stores its keys and
// values. layers/branch_kinds.h lists all kinds of branches.
#pragma once

#include <vector>

#include "layers/batch.h"
#include "layers/spec.h"
#include "layers/weights.h"

namespace freshet {

struct Step {
  ops::Ops& ops;
  const ModelSpec& spec;
  const ForwardBatch& batch;
  const KvStorage& cache;
  Arena& arena;
  std::vector<const float*>& cos_sin;  // [ropes]: [tokens, 2, rotary_dim / 2]
  std::span<const KeyView> key_views;  // [groups]: what each token attends to
  bool stored = false;                 // the keys and values of the tokens are in the cache already
};

// What to do with the result of a branch: out = [out +] scale * branch.
struct Into {
  Matrix out;
  bool add = false;
  float scale = 1.0f;
  ops::PrefetchNext prefetch_next = {};  // weights of the branch that follows
};

// Scratch is given back when this goes out of scope.
class Scratch {
 public:
  explicit Scratch(Arena& arena) : arena_(arena), mark_(arena.mark()) {}
  ~Scratch() { arena_.rewind(mark_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

 private:
  Arena& arena_;
  size_t mark_;
};

// The bytes that Arena::matrix(rows, cols) takes.
inline size_t matrix_bytes(int64_t rows, int64_t cols) {
  return (static_cast<size_t>(rows * cols) * sizeof(float) + 63) / 64 * 64;
}

ops::Norm norm_of(const NormSpec& spec, const NormWeights& weights);
ops::Product product_of(const Linear& linear, const Matrix& out);
ops::Product product_of(const Linear& linear, const Into& into);
// The step's batch with the block tables for a cache layer: to store keys and values
// (stored_batch_of), and to attend (batch_of), which also has the key ranges of view_of.
ops::AttentionBatch stored_batch_of(const Step& step, int cache_layer);
const KeyView& view_of(const Step& step, int cache_layer);
ops::AttentionBatch batch_of(const Step& step, int cache_layer);
// The states of a cache layer, and which of them the step reads and writes.
ops::StateView states_of(const Step& step, int cache_layer);
ops::StateBatch state_batch_of(const Step& step, int cache_layer);
// The tokens of the step whose attention weights are summed per key (key_scores) in a cache layer.
// `room` holds the result.
std::span<const ops::ScoredQueries> scored_of(const Step& step, int cache_layer,
                                              std::vector<ops::ScoredQueries>& room);
// How the step's sequences select blocks in a cache layer; empty: every query reads all blocks.
std::span<const ops::BlockSelection> selections_of(const Step& step, int cache_layer,
                                                   std::vector<ops::BlockSelection>& room);
// The model's rope with this index; nullptr for -1 (no rotation).
const RopeSpec* rope_of(const Step& step, int rope);

// attention_layer.cc: multi-head and grouped-query attention; gqa_store() only computes and stores
// keys and values.
void gqa_attention(Step& step, const AttentionSpec& spec, const AttentionWeights& w,
                   int cache_layer, const ops::Input& in, const Into& into);
void gqa_store(Step& step, const AttentionSpec& spec, const AttentionWeights& w, int cache_layer,
               const ops::Input& in);
size_t gqa_attention_bytes(const AttentionSpec& spec, int64_t tokens);
// mla.cc: multi-head latent attention, absorbed: scores are taken against the latent itself.
void mla_attention(Step& step, const MlaSpec& spec, const MlaWeights& w, int cache_layer,
                   const ops::Input& in, const Into& into);
void mla_store(Step& step, const MlaSpec& spec, const MlaWeights& w, int cache_layer,
               const ops::Input& in);
size_t mla_attention_bytes(const MlaSpec& spec, int64_t tokens);
// mlp.cc
void mlp(Step& step, const MlpSpec& spec, const MlpWeights& w, const ops::Input& in,
         const Into& into);
size_t mlp_bytes(const MlpSpec& spec, int64_t tokens);
// moe.cc. REQUIRES: into.scale == 1.
void moe(Step& step, const MoeSpec& spec, const MoeWeights& w, const ops::Input& in,
         const Into& into);
size_t moe_bytes(const MoeSpec& spec, int64_t hidden, int64_t tokens);

}  // namespace freshet

// One step's context, and the layers as functions of it.
//
// Each function reads its spec and weights, takes scratch from the arena and gives it back, and
// enqueues ops. The *_bytes functions say what a call takes at most for `tokens` tokens: the plan
// is made of them. None allocates. Inputs and `out` are [tokens, hidden].
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
  bool stored = false;                 // attention finds its tokens' keys and values in the cache
};

// How a branch ends: out = [out +] scale * branch.
struct Into {
  Matrix out;
  bool add = false;
  float scale = 1.0f;
  ops::PrefetchNext prefetch_next = {};  // of what comes after the branch
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

// What Arena::matrix(rows, cols) takes.
inline size_t matrix_bytes(int64_t rows, int64_t cols) {
  return (static_cast<size_t>(rows * cols) * sizeof(float) + 63) / 64 * 64;
}

ops::Norm norm_of(const NormSpec& spec, const NormWeights& weights);
ops::Product product_of(const Linear& linear, const Matrix& out);
ops::Product product_of(const Linear& linear, const Into& into);
// The step's batch as a layer's attention sees it.
ops::AttentionBatch batch_of(const Step& step, int layer);
// The layer's rotation; nullptr: it has none.
const RopeSpec* rope_of(const Step& step, const AttentionSpec& spec);

// attention_layer.cc: queries, keys and values of equal heads; or keys and values alone.
void gqa_attention(Step& step, int layer, const AttentionWeights& w, const ops::Input& in,
                   const Into& into);
void gqa_store(Step& step, int layer, const AttentionWeights& w, const ops::Input& in);
size_t gqa_attention_bytes(const AttentionSpec& spec, int64_t tokens);
// mla.cc: multi-head latent attention, absorbed: scores are taken against the latent itself.
void mla_attention(Step& step, int layer, const AttentionWeights& w, const ops::Input& in,
                   const Into& into);
void mla_store(Step& step, int layer, const AttentionWeights& w, const ops::Input& in);
size_t mla_attention_bytes(const AttentionSpec& spec, int64_t tokens);
// mlp.cc
void mlp(Step& step, const MlpSpec& spec, const MlpWeights& w, const ops::Input& in,
         const Into& into);
size_t mlp_bytes(const MlpSpec& spec, int64_t tokens);
// moe.cc. REQUIRES: into.scale == 1.
void moe(Step& step, const MoeSpec& spec, const MoeWeights& w, const ops::Input& in,
         const Into& into);
size_t moe_bytes(const MoeSpec& spec, int64_t hidden, int64_t tokens);

}  // namespace freshet

#include "layers/step.h"

namespace freshet {

ops::Norm norm_of(const NormSpec& spec, const NormWeights& weights) {
  return {spec.kind, weights.weight.data(), weights.bias.data(), spec.eps};
}

ops::Product product_of(const Linear& linear, const Matrix& out) {
  ops::Product product;
  product.weight = &linear.weight;
  product.out = out;
  product.bias = linear.bias.data();
  return product;
}

ops::Product product_of(const Linear& linear, const Into& into) {
  ops::Product product = product_of(linear, into.out);
  product.scale = into.scale;
  product.add = into.add;
  product.prefetch_next = into.prefetch_next;
  return product;
}

ops::AttentionBatch batch_of(const Step& step, int layer) {
  return step.batch.attention(step.cache.group_of(layer));
}

const RopeSpec* rope_of(const Step& step, const AttentionSpec& spec) {
  return spec.rope < 0 ? nullptr : &step.spec.ropes[static_cast<size_t>(spec.rope)];
}

namespace {

// Queries or keys. `norm` is kept by the caller.
ops::Heads::Part part_of(const Step& step, const AttentionSpec& spec, const Matrix& x, int heads,
                         const ops::Norm& norm) {
  ops::Heads::Part part;
  part.x = x;
  part.heads = heads;
  part.head_dim = spec.head_dim;
  if (spec.qk_norm != QkNorm::kNone) part.norm = &norm;
  part.norm_per_head = spec.qk_norm == QkNorm::kHeadDistinct;
  part.norm_all_heads = spec.qk_norm == QkNorm::kFull;
  if (const RopeSpec* rope = rope_of(step, spec)) {
    part.rotary_dim = rope->rotary_dim;
    part.interleaved = rope->interleaved;
  }
  return part;
}

// Takes what is asked for, queries or keys and values, from the input to the cache and on.
void run(Step& step, int layer, const AttentionWeights& w, const ops::Input& in, bool attends,
         bool stores, const Into& into) {
  const Scratch scratch(step.arena);
  const AttentionSpec& spec = step.spec.layers[static_cast<size_t>(layer)].attention;
  const int64_t tokens = in.x.rows;
  const ops::Norm q_norm = norm_of(spec.qk_norm_spec, w.q_norm);
  const ops::Norm k_norm = norm_of(spec.qk_norm_spec, w.k_norm);
  ops::QkvAttention all;
  all.in = in;
  ops::Heads& heads = all.attend.heads;
  heads.cache = step.cache.layer(layer);
  heads.batch = batch_of(step, layer);
  if (spec.rope >= 0) heads.cos_sin = step.cos_sin[static_cast<size_t>(spec.rope)];
  if (attends) {
    const Matrix q = step.arena.matrix(tokens, int64_t{spec.heads} * spec.head_dim);
    all.q = product_of(w.q, q);
    heads.q = part_of(step, spec, q, spec.heads, q_norm);
  }
  if (stores) {
    const Matrix k = step.arena.matrix(tokens, int64_t{spec.kv_heads} * spec.head_dim);
    heads.v = step.arena.matrix(tokens, int64_t{spec.kv_heads} * spec.value_dim);
    all.k = product_of(w.k, k);
    all.v = product_of(w.v, heads.v);
    heads.k = part_of(step, spec, k, spec.kv_heads, k_norm);
  }
  if (attends) {
    all.attend.out = step.arena.matrix(tokens, int64_t{spec.heads} * spec.value_dim);
    all.attend.params = {spec.heads, spec.scale, spec.softcap, spec.window, w.sinks.data()};
    all.attend.o = product_of(w.out, into);
  }
  step.ops.qkv_attention(all);
}

}  // namespace

void gqa_store(Step& step, int layer, const AttentionWeights& w, const ops::Input& in) {
  run(step, layer, w, in, false, true, {});
}

void gqa_attention(Step& step, int layer, const AttentionWeights& w, const ops::Input& in,
                   const Into& into) {
  run(step, layer, w, in, true, !step.stored, into);
}

size_t gqa_attention_bytes(const AttentionSpec& spec, int64_t tokens) {
  return matrix_bytes(tokens, int64_t{spec.heads} * spec.head_dim) +
         matrix_bytes(tokens, int64_t{spec.kv_heads} * spec.head_dim) +
         matrix_bytes(tokens, int64_t{spec.kv_heads} * spec.value_dim) +
         matrix_bytes(tokens, int64_t{spec.heads} * spec.value_dim);
}

}  // namespace freshet

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
  return product;
}

const ops::Weight* reader_of(const ops::Ops& ops, int64_t rows,
                             std::initializer_list<const Linear*> products) {
  const ops::Weight* first = &(*products.begin())->weight;
  for (const Linear* l : products) {
    if (!ops.read_alike(l->weight.format, first->format, rows)) return nullptr;
  }
  return first;
}

namespace {

void qk_norm(Step& step, const AttentionSpec& spec, const NormWeights& w, const Matrix& x,
             int heads) {
  const ops::Norm norm = norm_of(spec.qk_norm_spec, w);
  switch (spec.qk_norm) {
    case QkNorm::kNone:
      break;
    case QkNorm::kHead:
      step.ops.norm_heads(x, heads, spec.head_dim, norm, false);
      break;
    case QkNorm::kHeadDistinct:
      step.ops.norm_heads(x, heads, spec.head_dim, norm, true);
      break;
    case QkNorm::kFull:
      step.ops.norm(x, x, norm);
      break;
  }
}

}  // namespace

void gqa_attention(Step& step, int layer, const AttentionWeights& w, const Matrix& x,
                   const Into& into) {
  const AttentionSpec& spec = step.spec.layers[static_cast<size_t>(layer)].attention;
  const Scratch scratch(step.arena);
  const int64_t tokens = x.rows;
  const Matrix q = step.arena.matrix(tokens, int64_t{spec.heads} * spec.head_dim);
  const Matrix k = step.arena.matrix(tokens, int64_t{spec.kv_heads} * spec.head_dim);
  const Matrix v = step.arena.matrix(tokens, int64_t{spec.kv_heads} * spec.value_dim);
  const ops::Product products[] = {product_of(w.q, q), product_of(w.k, k), product_of(w.v, v)};
  step.ops.matmul(x, products);
  qk_norm(step, spec, w.q_norm, q, spec.heads);
  qk_norm(step, spec, w.k_norm, k, spec.kv_heads);
  if (spec.rope >= 0) {
    const RopeSpec& rope = step.spec.ropes[static_cast<size_t>(spec.rope)];
    const float* cos_sin = step.cos_sin[static_cast<size_t>(spec.rope)];
    step.ops.rope(q, spec.heads, spec.head_dim, 0, rope.rotary_dim, rope.interleaved, cos_sin);
    step.ops.rope(k, spec.kv_heads, spec.head_dim, 0, rope.rotary_dim, rope.interleaved, cos_sin);
  }
  const ops::KvView cache = step.cache.layer(layer);
  const ops::AttentionBatch batch = step.batch.attention(step.cache.group_of(layer));
  step.ops.store_kv(cache, k, v, batch);
  const Matrix mixed = step.arena.matrix(tokens, int64_t{spec.heads} * spec.value_dim);
  step.ops.attention(mixed, q, cache, batch,
                     {spec.heads, spec.scale, spec.softcap, spec.window, w.sinks.data(),
                      reader_of(step.ops, tokens, {&w.out})});
  const ops::Product out[] = {product_of(w.out, into)};
  step.ops.matmul(mixed, out);
}

size_t gqa_attention_bytes(const AttentionSpec& spec, int64_t tokens) {
  return matrix_bytes(tokens, int64_t{spec.heads} * spec.head_dim) +
         matrix_bytes(tokens, int64_t{spec.kv_heads} * spec.head_dim) +
         matrix_bytes(tokens, int64_t{spec.kv_heads} * spec.value_dim) +
         matrix_bytes(tokens, int64_t{spec.heads} * spec.value_dim);
}

}  // namespace freshet

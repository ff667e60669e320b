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

ops::AttentionBatch batch_of(const Step& step, int layer) {
  return step.batch.attention(step.cache.group_of(layer));
}

void rotate(Step& step, const AttentionSpec& spec, const Matrix& x, int heads, int head_dim,
            int offset) {
  if (spec.rope < 0) return;
  const RopeSpec& rope = step.spec.ropes[static_cast<size_t>(spec.rope)];
  step.ops.rope(x, heads, head_dim, offset, rope.rotary_dim, rope.interleaved,
                step.cos_sin[static_cast<size_t>(spec.rope)]);
}

namespace {

// Queries or keys.
void norm_and_rotate(Step& step, const AttentionSpec& spec, const NormWeights& w, const Matrix& x,
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
  rotate(step, spec, x, heads, spec.head_dim, 0);
}

}  // namespace

void gqa_store(Step& step, int layer, const AttentionWeights& w, const Matrix& x) {
  const Scratch scratch(step.arena);
  const AttentionSpec& spec = step.spec.layers[static_cast<size_t>(layer)].attention;
  const Matrix k = step.arena.matrix(x.rows, int64_t{spec.kv_heads} * spec.head_dim);
  const Matrix v = step.arena.matrix(x.rows, int64_t{spec.kv_heads} * spec.value_dim);
  const ops::Product products[] = {product_of(w.k, k), product_of(w.v, v)};
  step.ops.matmul(x, products);
  norm_and_rotate(step, spec, w.k_norm, k, spec.kv_heads);
  step.ops.store_kv(step.cache.layer(layer), k, v, batch_of(step, layer));
}

void gqa_attention(Step& step, int layer, const AttentionWeights& w, const Matrix& x,
                   const Into& into) {
  const AttentionSpec& spec = step.spec.layers[static_cast<size_t>(layer)].attention;
  const Scratch scratch(step.arena);
  const int64_t tokens = x.rows;
  const ops::KvView cache = step.cache.layer(layer);
  const ops::AttentionBatch batch = batch_of(step, layer);
  const Matrix q = step.arena.matrix(tokens, int64_t{spec.heads} * spec.head_dim);
  if (!step.stored) {
    const Matrix k = step.arena.matrix(tokens, int64_t{spec.kv_heads} * spec.head_dim);
    const Matrix v = step.arena.matrix(tokens, int64_t{spec.kv_heads} * spec.value_dim);
    const ops::Product products[] = {product_of(w.q, q), product_of(w.k, k), product_of(w.v, v)};
    step.ops.matmul(x, products);
    norm_and_rotate(step, spec, w.q_norm, q, spec.heads);
    norm_and_rotate(step, spec, w.k_norm, k, spec.kv_heads);
    step.ops.store_kv(cache, k, v, batch);
  } else {
    const ops::Product products[] = {product_of(w.q, q)};
    step.ops.matmul(x, products);
    norm_and_rotate(step, spec, w.q_norm, q, spec.heads);
  }
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

#include "layers/step.h"

// With k = [W_k c, r] and v = W_v c for a latent c and a rotated part r,
//   q . k = (W_k^T q_nope) . c + q_rope . r   and   sum a v = W_v (sum a c),
// so the cache holds [c, r] once for all heads and no key or value is ever built.
namespace freshet {
namespace {

// k: what `kv_down` gave.
void store_latent(Step& step, int layer, const AttentionSpec& spec, const AttentionWeights& w,
                  const Matrix& k) {
  const Matrix latent = k.slice_cols(0, spec.kv_rank);
  step.ops.norm(latent, latent, norm_of(spec.qk_norm_spec, w.kv_latent_norm));
  rotate(step, spec, k, 1, static_cast<int>(k.cols), spec.kv_rank);
  step.ops.store_kv(step.cache.layer(layer), k, latent, batch_of(step, layer));
}

}  // namespace

void mla_store(Step& step, int layer, const AttentionWeights& w, const Matrix& x) {
  const Scratch scratch(step.arena);
  const AttentionSpec& spec = step.spec.layers[static_cast<size_t>(layer)].attention;
  const Matrix k = step.arena.matrix(x.rows, int64_t{spec.kv_rank} + spec.rope_dim);
  const ops::Product down[] = {product_of(w.kv_down, k)};
  step.ops.matmul(x, down);
  store_latent(step, layer, spec, w, k);
}

void mla_attention(Step& step, int layer, const AttentionWeights& w, const Matrix& x,
                   const Into& into) {
  const AttentionSpec& spec = step.spec.layers[static_cast<size_t>(layer)].attention;
  const Scratch scratch(step.arena);
  const int64_t tokens = x.rows;
  const int64_t key_dim = int64_t{spec.kv_rank} + spec.rope_dim;
  const bool narrows = spec.q_rank > 0;
  const Matrix q = step.arena.matrix(tokens, int64_t{spec.heads} * spec.head_dim);
  const Matrix k = step.arena.matrix(tokens, key_dim);
  const Matrix q_latent = step.arena.matrix(tokens, spec.q_rank);
  const ops::Product down[] = {narrows ? product_of(w.q_down, q_latent) : product_of(w.q, q),
                               product_of(w.kv_down, k)};
  step.ops.matmul(x, std::span(down).first(step.stored ? 1 : 2));
  if (narrows) {
    step.ops.norm(q_latent, q_latent, norm_of(spec.qk_norm_spec, w.q_latent_norm));
    const ops::Product up[] = {product_of(w.q_up, q)};
    step.ops.matmul(q_latent, up);
  }
  rotate(step, spec, q, spec.heads, spec.head_dim, spec.nope_dim);
  if (!step.stored) store_latent(step, layer, spec, w, k);
  const ops::KvView cache = step.cache.layer(layer);
  const Matrix absorbed = step.arena.matrix(tokens, spec.heads * key_dim);
  step.ops.matmul_heads(q, w.q_absorb, absorbed);
  const Matrix mixed = step.arena.matrix(tokens, int64_t{spec.heads} * spec.kv_rank);
  step.ops.attention(mixed, absorbed, cache, batch_of(step, layer),
                     {spec.heads, spec.scale, spec.softcap, spec.window, w.sinks.data()});
  const Matrix values = step.arena.matrix(tokens, int64_t{spec.heads} * spec.value_dim);
  step.ops.matmul_heads(mixed, w.v_up, values);
  const ops::Product out[] = {product_of(w.out, into)};
  step.ops.matmul(values, out);
}

size_t mla_attention_bytes(const AttentionSpec& spec, int64_t tokens) {
  const int64_t key_dim = int64_t{spec.kv_rank} + spec.rope_dim;
  return matrix_bytes(tokens, int64_t{spec.heads} * spec.head_dim) + matrix_bytes(tokens, key_dim) +
         matrix_bytes(tokens, spec.q_rank) + matrix_bytes(tokens, spec.heads * key_dim) +
         matrix_bytes(tokens, int64_t{spec.heads} * spec.kv_rank) +
         matrix_bytes(tokens, int64_t{spec.heads} * spec.value_dim);
}

}  // namespace freshet

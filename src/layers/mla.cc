#include "layers/step.h"

// With k = [W_k c, r] and v = W_v c for a latent c and a rotated part r,
//   q . k = (W_k^T q_nope) . c + q_rope . r   and   sum a v = W_v (sum a c),
// so the cache holds [c, r] once for all heads and no key or value is ever built.
namespace freshet {
namespace {

// What storing the latents takes. `norm` is kept by the caller.
ops::LatentAttention storing(const Step& step, int layer, const AttentionWeights& w,
                             const ops::Input& in, const ops::Norm& norm) {
  const AttentionSpec& spec = step.spec.layers[static_cast<size_t>(layer)].attention;
  ops::LatentAttention all;
  all.in = in;
  all.kv_norm = &norm;
  all.kv_rank = spec.kv_rank;
  all.head_dim = spec.head_dim;
  all.rope_offset = spec.nope_dim;
  if (const RopeSpec* rope = rope_of(step, spec)) {
    all.rotary_dim = rope->rotary_dim;
    all.interleaved = rope->interleaved;
    all.cos_sin = step.cos_sin[static_cast<size_t>(spec.rope)];
  }
  all.cache = step.cache.layer(layer);
  all.batch = batch_of(step, layer);
  const Matrix k = step.arena.matrix(in.x.rows, int64_t{spec.kv_rank} + spec.rope_dim);
  if (!step.stored) all.kv_down = product_of(w.kv_down, k);
  return all;
}

}  // namespace

void mla_store(Step& step, int layer, const AttentionWeights& w, const ops::Input& in) {
  const Scratch scratch(step.arena);
  const AttentionSpec& spec = step.spec.layers[static_cast<size_t>(layer)].attention;
  const ops::Norm norm = norm_of(spec.qk_norm_spec, w.kv_latent_norm);
  step.ops.latent_attention(storing(step, layer, w, in, norm));
}

void mla_attention(Step& step, int layer, const AttentionWeights& w, const ops::Input& in,
                   const Into& into) {
  const AttentionSpec& spec = step.spec.layers[static_cast<size_t>(layer)].attention;
  const Scratch scratch(step.arena);
  const int64_t tokens = in.x.rows;
  const int64_t key_dim = int64_t{spec.kv_rank} + spec.rope_dim;
  const ops::Norm kv_norm = norm_of(spec.qk_norm_spec, w.kv_latent_norm);
  const ops::Norm q_norm = norm_of(spec.qk_norm_spec, w.q_latent_norm);
  const Matrix q = step.arena.matrix(tokens, int64_t{spec.heads} * spec.head_dim);
  ops::LatentAttention all = storing(step, layer, w, in, kv_norm);
  if (spec.q_rank > 0) {
    all.q_down = product_of(w.q_down, step.arena.matrix(tokens, spec.q_rank));
    all.q_norm = &q_norm;
    all.q = product_of(w.q_up, q);
  } else {
    all.q = product_of(w.q, q);
  }
  all.q_absorb = w.q_absorb;
  all.v_up = w.v_up;
  all.absorbed = step.arena.matrix(tokens, spec.heads * key_dim);
  all.mixed = step.arena.matrix(tokens, int64_t{spec.heads} * spec.kv_rank);
  all.values = step.arena.matrix(tokens, int64_t{spec.heads} * spec.value_dim);
  all.params = {spec.heads, spec.scale, spec.softcap, spec.window, w.sinks.data()};
  all.o = product_of(w.out, into);
  step.ops.latent_attention(all);
}

size_t mla_attention_bytes(const AttentionSpec& spec, int64_t tokens) {
  const int64_t key_dim = int64_t{spec.kv_rank} + spec.rope_dim;
  return matrix_bytes(tokens, int64_t{spec.heads} * spec.head_dim) + matrix_bytes(tokens, key_dim) +
         matrix_bytes(tokens, spec.q_rank) + matrix_bytes(tokens, spec.heads * key_dim) +
         matrix_bytes(tokens, int64_t{spec.heads} * spec.kv_rank) +
         matrix_bytes(tokens, int64_t{spec.heads} * spec.value_dim);
}

}  // namespace freshet

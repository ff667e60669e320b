#include <algorithm>

#include "layers/branch_kinds.h"

// With k = [W_k c, r] and v = W_v c for a latent c and a rotated part r,
//   q . k = (W_k^T q_nope) . c + q_rope . r   and   sum a v = W_v (sum a c),
// so the cache holds [c, r] once for all heads and no key or value is ever built.
namespace freshet {
namespace {

// k: the output of `kv_down`.
void store_latent(Step& step, const MlaSpec& spec, const MlaWeights& w, int cache_layer,
                  const Matrix& k) {
  const Matrix latent = k.slice_cols(0, spec.kv_rank);
  step.ops.norm(latent, latent, norm_of(spec.latent_norm, w.kv_latent_norm));
  rotate(step, spec.rope, k, 1, static_cast<int>(k.cols), spec.kv_rank);
  step.ops.store_kv(step.cache.layer(cache_layer), k, latent, batch_of(step, cache_layer));
}

}  // namespace

void mla_store(Step& step, const MlaSpec& spec, const MlaWeights& w, int cache_layer,
               const Matrix& x) {
  const Scratch scratch(step.arena);
  const Matrix k = step.arena.matrix(x.rows, int64_t{spec.kv_rank} + spec.rope_dim);
  const ops::Product down[] = {product_of(w.kv_down, k)};
  step.ops.matmul(x, down);
  store_latent(step, spec, w, cache_layer, k);
}

void mla_attention(Step& step, const MlaSpec& spec, const MlaWeights& w, int cache_layer,
                   const Matrix& x, const Into& into) {
  const Scratch scratch(step.arena);
  const int64_t tokens = x.rows;
  const int64_t key_dim = int64_t{spec.kv_rank} + spec.rope_dim;
  const bool narrows = spec.q_rank > 0;
  const Matrix q = step.arena.matrix(tokens, int64_t{spec.heads} * spec.head_dim());
  const Matrix k = step.arena.matrix(tokens, key_dim);
  const Matrix q_latent = step.arena.matrix(tokens, spec.q_rank);
  const ops::Product down[] = {narrows ? product_of(w.q_down, q_latent) : product_of(w.q, q),
                               product_of(w.kv_down, k)};
  step.ops.matmul(x, std::span(down).first(step.stored ? 1 : 2));
  if (narrows) {
    step.ops.norm(q_latent, q_latent, norm_of(spec.latent_norm, w.q_latent_norm));
    const ops::Product up[] = {product_of(w.q_up, q)};
    step.ops.matmul(q_latent, up);
  }
  rotate(step, spec.rope, q, spec.heads, spec.head_dim(), spec.nope_dim);
  if (!step.stored) store_latent(step, spec, w, cache_layer, k);
  const ops::KvView cache = step.cache.layer(cache_layer);
  const Matrix absorbed = step.arena.matrix(tokens, spec.heads * key_dim);
  step.ops.matmul_heads(q, w.q_absorb, absorbed);
  const Matrix mixed = step.arena.matrix(tokens, int64_t{spec.heads} * spec.kv_rank);
  step.ops.attention(mixed, absorbed, cache, batch_of(step, cache_layer),
                     {spec.heads, spec.scale, spec.softcap, spec.window, w.sinks.data()});
  const Matrix values = step.arena.matrix(tokens, int64_t{spec.heads} * spec.value_dim);
  step.ops.matmul_heads(mixed, w.v_up, values);
  const ops::Product out[] = {product_of(w.out, into)};
  step.ops.matmul(values, out);
}

size_t mla_attention_bytes(const MlaSpec& spec, int64_t tokens) {
  const int64_t key_dim = int64_t{spec.kv_rank} + spec.rope_dim;
  return matrix_bytes(tokens, int64_t{spec.heads} * spec.head_dim()) +
         matrix_bytes(tokens, key_dim) + matrix_bytes(tokens, spec.q_rank) +
         matrix_bytes(tokens, spec.heads * key_dim) +
         matrix_bytes(tokens, int64_t{spec.heads} * spec.kv_rank) +
         matrix_bytes(tokens, int64_t{spec.heads} * spec.value_dim);
}

namespace {

struct Kind {
  using Spec = MlaSpec;
  using Weights = MlaWeights;
  static constexpr std::string_view kName = "mla";

  static void run(Step& step, const Spec& spec, const Weights& w, int cache_layer, const Matrix& x,
                  const Into& into) {
    mla_attention(step, spec, w, cache_layer, x, into);
  }
  static void store(Step& step, const Spec& spec, const Weights& w, int cache_layer,
                    const Matrix& x) {
    mla_store(step, spec, w, cache_layer, x);
  }
  // The latent and the rotated part, once for all heads.
  static BranchCache cache(const Spec& spec, ops::KvType type) {
    return {{type, 1, spec.kv_rank + spec.rope_dim, spec.kv_rank, true}, spec.window};
  }
  static int64_t stored_outputs(const Spec& spec) { return int64_t{spec.kv_rank} + spec.rope_dim; }
  static size_t bytes(const Spec& spec, int64_t, int64_t tokens) {
    return mla_attention_bytes(spec, tokens);
  }
  static void limits(const Spec& spec, int64_t, ops::Ops::ShapeLimits& l) {
    raise_attention_limits(spec.heads, int64_t{spec.kv_rank} + spec.rope_dim, spec.kv_rank,
                           spec.head_dim(), l);
    l.max_cols = std::max(l.max_cols, int64_t{spec.q_rank});
  }
  static const ops::Weight* reader(const ops::Ops& ops, int64_t rows, const Spec& spec,
                                   const Weights& w, Reads reads) {
    const Linear* const q = spec.q_rank > 0 ? &w.q_down : &w.q;
    if (reads == Reads::kQueries) return reader_of(ops, rows, {q});
    return reader_of(ops, rows, {reads == Reads::kAll ? q : &w.kv_down, &w.kv_down});
  }
  static Status validate(const Spec& a, const ModelSpec& model, size_t layer) {
    if (!sane(a.heads)) return invalid_argument("layer {}: {} attention heads", layer, a.heads);
    if (!sane(a.kv_rank) || !sane(a.nope_dim) || !sane(a.rope_dim) || a.q_rank < 0 ||
        a.q_rank > kMaxSize) {
      return invalid_argument("layer {}: latent attention with ranks {} and {}, heads {} + {}",
                              layer, a.q_rank, a.kv_rank, a.nope_dim, a.rope_dim);
    }
    if (!sane(a.head_dim()) || !sane(a.value_dim) || a.heads > kMaxSize / a.head_dim()) {
      return invalid_argument("layer {}: attention heads of {} and {} features", layer,
                              a.head_dim(), a.value_dim);
    }
    if (a.window < 0) return invalid_argument("layer {}: sliding window of {}", layer, a.window);
    return validate_rotation(model, a.rope, a.rope_dim, layer);
  }
  static std::string describe(const Spec& a) {
    return fmt::format("latent attention, {} heads of {}+{}, rank {}{}", a.heads, a.nope_dim,
                       a.rope_dim, a.kv_rank,
                       describe_attention_options(a.window, a.sinks, a.rope));
  }
  static void fields(const Spec& a, json::Object& to) {
    to["attention"] = kName;
    to["heads"] = a.heads;
    to["kv_heads"] = a.heads;
    to["head_dim"] = a.head_dim();
    to["window"] = a.window;
  }
};

}  // namespace

constinit const BranchKind kMlaKind = branch_kind<Kind>();

}  // namespace freshet

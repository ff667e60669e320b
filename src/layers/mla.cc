#include <algorithm>

#include "layers/branch_kinds.h"

// With k = [W_k c, r] and v = W_v c for a latent c and a rotated part r,
//   q . k = (W_k^T q_nope) . c + q_rope . r   and   sum a v = W_v (sum a c),
// so the cache holds [c, r] once for all heads and no key or value is ever built.
namespace freshet {
namespace {

// The arguments for storing the latents. `norm` must outlive the result.
ops::LatentAttention storing(const Step& step, const MlaSpec& spec, const MlaWeights& w,
                             int cache_layer, const ops::Input& in, const ops::Norm& norm) {
  ops::LatentAttention all;
  all.in = in;
  all.kv_norm = &norm;
  all.kv_rank = spec.kv_rank;
  all.head_dim = spec.head_dim();
  all.rope_offset = spec.nope_dim;
  if (const RopeSpec* rope = rope_of(step, spec.rope)) {
    all.rotary_dim = rope->rotary_dim;
    all.interleaved = rope->interleaved;
    all.cos_sin = step.cos_sin[static_cast<size_t>(spec.rope)];
  }
  all.cache = step.cache.layer(cache_layer);
  all.batch = batch_of(step, cache_layer);
  const Matrix k = step.arena.matrix(in.x.rows, int64_t{spec.kv_rank} + spec.rope_dim);
  if (!step.stored) all.kv_down = product_of(w.kv_down, k);
  return all;
}

}  // namespace

void mla_store(Step& step, const MlaSpec& spec, const MlaWeights& w, int cache_layer,
               const ops::Input& in) {
  const Scratch scratch(step.arena);
  const ops::Norm norm = norm_of(spec.latent_norm, w.kv_latent_norm);
  step.ops.latent_attention(storing(step, spec, w, cache_layer, in, norm));
}

void mla_attention(Step& step, const MlaSpec& spec, const MlaWeights& w, int cache_layer,
                   const ops::Input& in, const Into& into) {
  const Scratch scratch(step.arena);
  const int64_t tokens = in.x.rows;
  const int64_t key_dim = int64_t{spec.kv_rank} + spec.rope_dim;
  const ops::Norm kv_norm = norm_of(spec.latent_norm, w.kv_latent_norm);
  const ops::Norm q_norm = norm_of(spec.latent_norm, w.q_latent_norm);
  const Matrix q = step.arena.matrix(tokens, int64_t{spec.heads} * spec.head_dim());
  ops::LatentAttention all = storing(step, spec, w, cache_layer, in, kv_norm);
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
  std::vector<ops::ScoredQueries> scored;
  all.scored = scored_of(step, cache_layer, scored);
  step.ops.latent_attention(all);
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

struct MlaKind {
  using Spec = MlaSpec;
  using Weights = MlaWeights;
  static constexpr std::string_view kName = "mla";

  static void run(Step& step, const Spec& spec, const Weights& w, int cache_layer,
                  const ops::Input& in, const Into& into) {
    mla_attention(step, spec, w, cache_layer, in, into);
  }
  static void store(Step& step, const Spec& spec, const Weights& w, int cache_layer,
                    const ops::Input& in) {
    mla_store(step, spec, w, cache_layer, in);
  }
  // The latent and the rotated part, which all heads share.
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
  static const ops::Weight& input_weight(const Spec& spec, const Weights& w) {
    return spec.q_rank > 0 ? w.q_down.weight : w.q.weight;
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

constinit const BranchKind kMlaKind = branch_kind<MlaKind>();

}  // namespace freshet

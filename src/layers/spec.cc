#include "layers/spec.h"

#include <algorithm>

namespace freshet {

ops::KvShape kv_shape(const AttentionSpec& attention, ops::KvType type) {
  ops::KvShape shape;
  shape.type = type;
  if (attention.kind == AttentionSpec::Kind::kMla) {
    shape.kv_heads = 1;
    shape.key_dim = attention.kv_rank + attention.rope_dim;
    shape.value_dim = attention.kv_rank;
    shape.value_is_key_prefix = true;
  } else {
    shape.kv_heads = attention.kv_heads;
    shape.key_dim = attention.head_dim;
    shape.value_dim = attention.value_dim;
  }
  return shape;
}

KvCacheSpec kv_cache_spec(const ModelSpec& spec, ops::KvType type) {
  KvCacheSpec cache;
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    const AttentionSpec& attention = spec.layers[i].attention;
    cache.layers.push_back(kv_shape(attention, type));
    auto group = std::find_if(cache.groups.begin(), cache.groups.end(),
                              [&](const KvGroup& g) { return g.window == attention.window; });
    if (group == cache.groups.end()) {
      group = cache.groups.insert(cache.groups.end(), KvGroup{attention.window, {}});
    }
    group->layers.push_back(static_cast<int>(i));
  }
  return cache;
}

namespace {

// Far above any published model, and low enough that products of three sizes fit in int64.
constexpr int kMaxSize = 1 << 20;
constexpr int kMaxVocab = 1 << 24;

bool sane(int size) {
  return size > 0 && size <= kMaxSize;
}

Status validate_attention(const ModelSpec& spec, const AttentionSpec& a, size_t layer) {
  if (!sane(a.heads) || !sane(a.kv_heads) || a.heads % a.kv_heads != 0) {
    return invalid_argument("layer {}: {} attention heads cannot share {} key-value heads", layer,
                            a.heads, a.kv_heads);
  }
  if (!sane(a.head_dim) || !sane(a.value_dim) || a.heads > kMaxSize / a.head_dim) {
    return invalid_argument("layer {}: attention heads of {} and {} features", layer, a.head_dim,
                            a.value_dim);
  }
  if (a.window < 0) return invalid_argument("layer {}: sliding window of {}", layer, a.window);
  int rotating = a.head_dim;
  if (a.kind == AttentionSpec::Kind::kMla) {
    if (!sane(a.kv_rank) || !sane(a.nope_dim) || !sane(a.rope_dim) || a.q_rank < 0 ||
        a.q_rank > kMaxSize || a.head_dim != a.nope_dim + a.rope_dim) {
      return invalid_argument("layer {}: latent attention with ranks {} and {}, heads {} + {}",
                              layer, a.q_rank, a.kv_rank, a.nope_dim, a.rope_dim);
    }
    rotating = a.rope_dim;
  }
  if (a.rope >= 0) {
    FRESHET_CHECK(static_cast<size_t>(a.rope) < spec.ropes.size(), "layer {} has no rope", layer);
    const RopeSpec& rope = spec.ropes[static_cast<size_t>(a.rope)];
    if (rope.rotary_dim <= 0 || rope.rotary_dim > rotating || rope.rotary_dim % 2 != 0) {
      return invalid_argument("layer {}: {} of a head's {} features are to rotate", layer,
                              rope.rotary_dim, rotating);
    }
  }
  return {};
}

Status validate_mlp(const LayerSpec& l, size_t layer) {
  if (!l.moe) {
    if (!sane(l.mlp.ff))
      return invalid_argument("layer {}: an MLP of {} features", layer, l.mlp.ff);
    return {};
  }
  const ops::Routing& r = l.moe->routing;
  if (!sane(r.experts) || r.top_k <= 0 || r.top_k > r.experts) {
    return invalid_argument("layer {}: {} of {} experts a token", layer, r.top_k, r.experts);
  }
  if (r.groups <= 0 || r.experts % r.groups != 0 || r.top_groups <= 0 || r.top_groups > r.groups ||
      r.group_score_top > r.experts / r.groups || r.top_k > r.experts / r.groups * r.top_groups) {
    return invalid_argument("layer {}: {} of {} groups of {} experts, {} experts a token", layer,
                            r.top_groups, r.groups, r.experts, r.top_k);
  }
  if (!sane(l.moe->expert_ff) || l.moe->shared_ff < 0 || l.moe->shared_ff > kMaxSize) {
    return invalid_argument("layer {}: experts of {} and {} features", layer, l.moe->expert_ff,
                            l.moe->shared_ff);
  }
  return {};
}

Status validate_rope(const RopeSpec& rope) {
  if (!(rope.theta > 0) || !(rope.factor > 0)) {
    return invalid_argument("rotary embedding with base {} and factor {}", rope.theta, rope.factor);
  }
  const auto pairs = static_cast<size_t>(rope.rotary_dim / 2);
  using S = RopeSpec::Scaling;
  if ((rope.scaling == S::kLongRope &&
       (rope.short_factors.size() != pairs || rope.long_factors.size() != pairs)) ||
      (rope.scaling == S::kFactors && rope.short_factors.size() != pairs)) {
    return invalid_argument("rotary embedding: {} frequencies, but {} short and {} long factors",
                            pairs, rope.short_factors.size(), rope.long_factors.size());
  }
  const bool needs_original =
      rope.scaling != S::kNone && rope.scaling != S::kLinear && rope.scaling != S::kFactors;
  if (needs_original && !(rope.original_context > 0)) {
    return invalid_argument("rotary embedding: scaling without original_max_position_embeddings");
  }
  return {};
}

}  // namespace

Status validate(const ModelSpec& spec) {
  if (spec.vocab_size <= 0 || spec.vocab_size > kMaxVocab) {
    return invalid_argument("a vocabulary of {} tokens", spec.vocab_size);
  }
  if (!sane(spec.hidden_size) || !sane(spec.embedding_size)) {
    return invalid_argument("hidden states of {} features", spec.hidden_size);
  }
  if (spec.layers.empty()) return invalid_argument("a model without layers");
  if (spec.max_context <= 0) return invalid_argument("a context of {} tokens", spec.max_context);
  for (const RopeSpec& rope : spec.ropes) FRESHET_RETURN_IF_ERROR(validate_rope(rope));
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    FRESHET_RETURN_IF_ERROR(validate_attention(spec, spec.layers[i].attention, i));
    FRESHET_RETURN_IF_ERROR(validate_mlp(spec.layers[i], i));
  }
  return {};
}

}  // namespace freshet

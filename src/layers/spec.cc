#include "layers/spec.h"

#include <algorithm>

#include "layers/branch_kinds.h"

namespace freshet {

KvCacheSpec kv_cache_spec(const ModelSpec& spec, ops::KvType type) {
  KvCacheSpec cache;
  for (const LayerSpec& layer : spec.layers) {
    for (const BranchSpec& branch : layer.branches) {
      const BranchKind& kind = kind_of(branch);
      if (kind.cache == nullptr) continue;
      const BranchCache stored = kind.cache(branch, type);
      const auto index = static_cast<int>(cache.layers.size());
      cache.layers.push_back(stored.shape);
      auto group = std::find_if(cache.groups.begin(), cache.groups.end(), [&](const KvGroup& g) {
        return g.window == stored.window && g.chunk == stored.chunk && g.two_way == stored.two_way;
      });
      if (group == cache.groups.end()) {
        group = cache.groups.insert(cache.groups.end(),
                                    {stored.window, {}, stored.chunk, stored.two_way});
      }
      group->layers.push_back(index);
    }
  }
  return cache;
}

BranchPlace last_stored(const ModelSpec& spec) {
  for (auto layer = static_cast<int>(spec.layers.size()) - 1; layer >= 0; --layer) {
    const std::vector<BranchSpec>& branches = spec.layers[static_cast<size_t>(layer)].branches;
    for (auto branch = static_cast<int>(branches.size()) - 1; branch >= 0; --branch) {
      if (kind_of(branches[static_cast<size_t>(branch)]).store != nullptr) return {layer, branch};
    }
  }
  return {};
}

namespace {

constexpr int kMaxVocab = 1 << 24;

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

Status validate_layer(const ModelSpec& spec, size_t index) {
  const LayerSpec& layer = spec.layers[index];
  if (layer.branches.empty() || layer.branches.size() > kMaxBranches) {
    return invalid_argument("layer {}: {} branches, must be 1 to {}", index, layer.branches.size(),
                            kMaxBranches);
  }
  // Otherwise the first branch would change the input of the others.
  if (layer.parallel && !layer.branches.front().norms.in) {
    return invalid_argument("layer {}: parallel branches without a norm in front", index);
  }
  for (const BranchSpec& branch : layer.branches) {
    FRESHET_RETURN_IF_ERROR(kind_of(branch).validate(branch, spec, index));
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
  if (spec.features) {
    if (!sane(spec.features->width)) {
      return invalid_argument("features of {} numbers", spec.features->width);
    }
    const AttentionSpec* const first = spec.layers.front().find<AttentionSpec>();
    const bool paired = spec.features->use == FeatureSpec::Use::kPaired;
    if (paired && (first == nullptr || first->input_size != 2 * spec.hidden_size)) {
      return invalid_argument("a draft head without attention over pairs");
    }
  }
  for (const RopeSpec& rope : spec.ropes) FRESHET_RETURN_IF_ERROR(validate_rope(rope));
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    FRESHET_RETURN_IF_ERROR(validate_layer(spec, i));
  }
  return {};
}

}  // namespace freshet

#include "layers/spec.h"

#include <algorithm>

#include "layers/branch_kinds.h"

namespace freshet {

KvCacheSpec kv_cache_spec(const ModelSpec& spec, const KvTypes& types) {
  KvCacheSpec cache;
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    const ops::KvType type = types.of(static_cast<int>(i));
    for (const BranchSpec& branch : spec.layers[i].branches) {
      const BranchKind& kind = kind_of(branch);
      if (kind.cache == nullptr) continue;
      const BranchCache stored = kind.cache(branch, type);
      const auto index = static_cast<int>(cache.layers.size());
      cache.layers.push_back({stored.shape, stored.state_bytes});
      const KvKind of = stored.state_bytes > 0 ? KvKind::kState
                        : stored.cross > 0     ? KvKind::kCross
                                               : KvKind::kTokens;
      auto group = std::find_if(cache.groups.begin(), cache.groups.end(), [&](const KvGroup& g) {
        return g.kind == of && g.window == stored.window && g.chunk == stored.chunk &&
               g.two_way == stored.two_way && g.cross == stored.cross && g.spans == stored.spans;
      });
      if (group == cache.groups.end()) {
        group = cache.groups.insert(
            cache.groups.end(),
            {stored.window, {}, stored.chunk, stored.two_way, stored.cross, of, stored.spans});
      }
      group->layers.push_back(index);
    }
  }
  return cache;
}

bool has_side_streams(const ModelSpec& spec) {
  return std::ranges::any_of(spec.layers, [](const LayerSpec& layer) {
    return std::ranges::any_of(layer.branches,
                               [](const BranchSpec& b) { return b.side != Side::kNone; });
  });
}

bool reads_both_ways(const ModelSpec& spec) {
  return std::ranges::any_of(spec.layers, [](const LayerSpec& layer) {
    const AttentionSpec* const attention = layer.find<AttentionSpec>();
    return attention != nullptr && attention->two_way;
  });
}

int RopeSpec::axis_count() const {
  return axes.empty() ? 1 : 1 + *std::ranges::max_element(axes);
}

int position_axes(const ModelSpec& spec) {
  int axes = 1;
  for (const RopeSpec& rope : spec.ropes) axes = std::max(axes, rope.axis_count());
  return axes;
}

bool sees_whole_pictures(const ModelSpec& spec) {
  return std::ranges::any_of(spec.layers, [](const LayerSpec& layer) {
    const AttentionSpec* const attention = layer.find<AttentionSpec>();
    return attention != nullptr && attention->spans == SpanUse::kAlso;
  });
}

BranchPlace last_stored(const ModelSpec& spec) {
  for (auto layer = static_cast<int>(spec.layers.size()) - 1; layer >= 0; --layer) {
    const std::vector<BranchSpec>& branches = spec.layers[static_cast<size_t>(layer)].branches;
    for (auto branch = static_cast<int>(branches.size()) - 1; branch >= 0; --branch) {
      const BranchKind& kind = kind_of(branches[static_cast<size_t>(branch)]);
      if (kind.cache != nullptr && kind.write_cross == nullptr) return {layer, branch};
    }
  }
  return {};
}

namespace {

constexpr int kMaxVocab = 1 << 24;
constexpr int kMaxTokenTypes = 256;
constexpr int kMaxPatch = 256, kMaxSide = 1 << 14, kMaxMerge = 64;  // of towers

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
  if (!rope.axes.empty() && rope.axes.size() != pairs) {
    return invalid_argument("rotary embedding: {} frequencies, but sections for {}", pairs,
                            rope.axes.size());
  }
  const bool needs_original =
      rope.scaling != S::kNone && rope.scaling != S::kLinear && rope.scaling != S::kFactors;
  if (needs_original && !(rope.original_context > 0)) {
    return invalid_argument("rotary embedding: scaling without original_max_position_embeddings");
  }
  return {};
}

// A side stream is opened, continued and closed within its layer. The branch that closes it keeps
// states, so that a step's rows that need no logits end behind it.
Status validate_side(const ModelSpec& spec, size_t index) {
  const LayerSpec& layer = spec.layers[index];
  bool open = false, any = false;
  for (const BranchSpec& branch : layer.branches) {
    const BranchKind& kind = kind_of(branch);
    const bool opens = branch.side == Side::kOpens, closes = branch.side == Side::kCloses;
    bool fits = branch.side == Side::kNone ? !open : open != opens;
    if (opens) {
      const auto* const a = std::get_if<AttentionSpec>(&branch.body);
      fits = fits && branch.norms.in && a != nullptr && a->input_size == 2 * spec.hidden_size;
    }
    if (closes) fits = fits && branch.norms.in && kind.cache != nullptr && kind.store == nullptr;
    if (opens || branch.side == Side::kContinues) {
      fits = fits && !branch.norms.out && !branch.norms.after && branch.scale == 1.0f &&
             branch.stream_scale == 1.0f;
    }
    if (!fits) return invalid_argument("layer {}: a side stream of another shape", index);
    any = any || branch.side != Side::kNone;
    if (opens || closes) open = opens;
  }
  if (open || (any && (layer.parallel || spec.features.has_value())))
    return invalid_argument("layer {}: a side stream without an end", index);
  return {};
}

Status validate_layer(const ModelSpec& spec, size_t index) {
  const LayerSpec& layer = spec.layers[index];
  if (layer.branches.empty() || layer.branches.size() > kMaxBranches) {
    return invalid_argument("layer {}: {} branches, must be 1 to {}", index, layer.branches.size(),
                            kMaxBranches);
  }
  if (layer.together < 0 || layer.together > std::ssize(layer.branches)) {
    return invalid_argument("layer {}: {} of {} branches are parallel", index, layer.together,
                            layer.branches.size());
  }
  // Otherwise the first branch would change the input of the others.
  if (layer.parallel && !layer.branches.front().norms.in) {
    return invalid_argument("layer {}: parallel branches without a norm in front", index);
  }
  for (const BranchSpec& branch : layer.branches) {
    FRESHET_RETURN_IF_ERROR(kind_of(branch).validate(branch, spec, index));
  }
  return validate_side(spec, index);
}

Status validate_vision(const ModelSpec& spec) {
  const VisionSpec& v = *spec.vision;
  if (spec.embedding_size != spec.hidden_size) {
    return unsupported("pictures for a model whose embeddings are narrower than its states");
  }
  const int64_t pixels = int64_t{v.patch} * v.patch;
  if (!sane(v.patch) || v.patch > kMaxPatch || v.patch_values <= 0 ||
      v.patch_values % (3 * pixels) != 0 || v.patch_values > 64 * pixels) {
    return invalid_argument("vision_config: patches of {} pixels with {} numbers", v.patch,
                            v.patch_values);
  }
  if (v.side < 0 || v.side > kMaxSide || (v.side > 0 && v.side < v.patch)) {
    return invalid_argument("vision_config: squares of {} pixels in patches of {}", v.side,
                            v.patch);
  }
  const int in_row = v.side / v.patch;
  if (v.merge < 1 || v.merge > kMaxMerge || (v.side > 0 && in_row % v.merge != 0)) {
    return invalid_argument("vision_config: {} patches in a row cannot be merged by {}", in_row,
                            v.merge);
  }
  const int64_t rows = int64_t{in_row} * in_row + (v.class_row ? 1 : 0);
  if (v.side > 0 && v.positions > 0 && !v.stretched_positions && v.positions != rows) {
    return invalid_argument("vision_config: {} positions for {} rows", v.positions, rows);
  }
  if (v.width != spec.hidden_size) {
    return invalid_argument("vision_config: rows of {} features for states of {}", v.width,
                            spec.hidden_size);
  }
  const auto layers = static_cast<int>(v.blocks.layers.size());
  for (const std::vector<int>* list : {&v.deep, &v.kept}) {
    for (size_t i = 0; i < list->size(); ++i) {
      const int before = i == 0 ? 0 : (*list)[i - 1];
      if ((*list)[i] <= before || (*list)[i] > layers) {
        return invalid_argument("vision_config: states behind layer {} of {}", (*list)[i], layers);
      }
    }
  }
  if (v.deep.size() >= spec.layers.size()) {
    return invalid_argument("vision_config: {} deep levels for {} layers of the language model",
                            v.deep.size(), spec.layers.size());
  }
  if ((v.newline_row && (v.side == 0 || v.merge != 1 || !v.deep.empty())) ||
      (v.merge_linear && (v.mean || v.norm_merged))) {
    return invalid_argument("vision_config: a connector of another shape than its tower");
  }
  if (v.image_token < 0) return invalid_argument("the id of image tokens is missing");
  FRESHET_RETURN_IF_ERROR(validate(v.blocks).with_context("vision_config"));
  if (!v.later) return {};
  if (v.tiles <= 0 || v.later->layers.size() > v.blocks.layers.size()) {
    return invalid_argument("vision_config: {} layers behind {}", v.later->layers.size(), layers);
  }
  return validate(*v.later).with_context("vision_config");
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
  if (spec.vision != nullptr) FRESHET_RETURN_IF_ERROR(validate_vision(spec));
  if (spec.token_types < 0 || spec.token_types > kMaxTokenTypes) {
    return invalid_argument("a table of {} token types", spec.token_types);
  }
  for (const RopeSpec& rope : spec.ropes) FRESHET_RETURN_IF_ERROR(validate_rope(rope));
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    FRESHET_RETURN_IF_ERROR(validate_layer(spec, i));
  }
  return {};
}

}  // namespace freshet

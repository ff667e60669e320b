#include "layers/branch_kinds.h"

#include <algorithm>

namespace freshet {
namespace {

constexpr const BranchKind* kKinds[] = {
    &kAttentionKind, &kMlaKind,    &kMlpKind,      &kMoeKind,       &kShortConvKind,
    &kMambaKind,     &kMamba2Kind, &kDeltaNetKind, &kLightningKind, &kCrossAttentionKind,
    &kLinearKind};
static_assert(std::size(kKinds) == std::variant_size_v<BranchBody>,
              "every kind of branch needs a row");
static_assert(std::variant_size_v<BranchBody> == std::variant_size_v<decltype(BranchWeights::body)>,
              "every kind of branch needs weights");

}  // namespace

std::span<const BranchKind* const> branch_kinds() {
  return kKinds;
}

double expert_share(const ModelSpec& spec) {
  double share = 1.0;
  for (const LayerSpec& layer : spec.layers) {
    for (const BranchSpec& branch : layer.branches) {
      if (const BranchKind& kind = kind_of(branch); kind.expert_share != nullptr) {
        share = kind.expert_share(branch);
      }
    }
  }
  return share;
}

Status validate_rotation(const ModelSpec& model, int rope, int features, size_t layer) {
  if (rope < 0) return {};
  FRESHET_CHECK(static_cast<size_t>(rope) < model.ropes.size(), "layer {} has no rope", layer);
  const int rotary_dim = model.ropes[static_cast<size_t>(rope)].rotary_dim;
  if (rotary_dim <= 0 || rotary_dim > features || rotary_dim % 2 != 0) {
    return invalid_argument("layer {}: {} of a head's {} features are to rotate", layer, rotary_dim,
                            features);
  }
  return {};
}

BranchCache state_of(int64_t floats) {
  constexpr size_t kLine = 64;
  BranchCache cache;
  cache.state_bytes = (static_cast<size_t>(floats) * sizeof(float) + kLine - 1) / kLine * kLine;
  return cache;
}

std::string describe_attention_options(int window, bool sinks, int rope) {
  std::string text;
  if (window > 0) text += fmt::format(", window {}", window);
  if (sinks) text += ", sinks";
  if (rope < 0) text += ", no rotation";
  return text;
}

void raise_attention_limits(int heads, int64_t key, int64_t value, int64_t query,
                            ops::Ops::ShapeLimits& l) {
  const int64_t widest = heads * std::max({key, value, query});
  l.heads = std::max(l.heads, heads);
  l.max_head_dim = std::max(l.max_head_dim, static_cast<int>(std::max(key, value)));
  l.max_cols = std::max(l.max_cols, widest);
  l.max_rows = std::max(l.max_rows, widest);
}

}  // namespace freshet

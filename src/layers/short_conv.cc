#include <algorithm>

#include "layers/branch_kinds.h"

namespace freshet {
namespace {

struct ShortConvBranch {
  using Spec = ShortConvSpec;
  using Weights = ShortConvWeights;
  static constexpr std::string_view kName = "short_conv";

  static void run(Step& step, const Spec& spec, const Weights& w, int cache_layer,
                  const ops::Input& in, const Into& into) {
    const Scratch scratch(step.arena);
    const int64_t channels = spec.channels;
    const Matrix all = step.arena.matrix(in.x.rows, 3 * channels);
    const ops::Product products[] = {product_of(w.in, all)};
    step.ops.project(in, products);
    const Matrix before = all.slice_cols(0, channels), behind = all.slice_cols(channels, channels),
                 u = all.slice_cols(2 * channels, channels);
    const ops::Glu plain{ops::Activation::kNone, 0.0f, 0.0f};
    step.ops.glu(u, before, u, plain);
    step.ops.causal_conv({u,
                          u,
                          w.conv.weight.data(),
                          w.conv.bias.data(),
                          spec.taps,
                          false,
                          {states_of(step, cache_layer), 0, state_batch_of(step, cache_layer)}});
    step.ops.glu(u, behind, u, plain);
    const ops::Product out[] = {product_of(w.out, into)};
    step.ops.matmul(u, out);
  }
  static BranchCache cache(const Spec& spec, ops::KvType) {
    return state_of(int64_t{spec.taps - 1} * spec.channels);
  }
  static size_t bytes(const Spec& spec, int64_t, int64_t tokens) {
    return matrix_bytes(tokens, 3 * int64_t{spec.channels});
  }
  static void limits(const Spec& spec, int64_t, ops::Ops::ShapeLimits& l) {
    l.max_cols = std::max(l.max_cols, int64_t{spec.channels});
    l.max_rows = std::max(l.max_rows, 3 * int64_t{spec.channels});
  }
  static const ops::Weight& input_weight(const Spec&, const Weights& w) { return w.in.weight; }
  static Status validate(const Spec& spec, const ModelSpec&, size_t layer) {
    if (sane(spec.channels) && spec.taps >= 2 && spec.taps <= ops::kMostTaps) return {};
    return invalid_argument("layer {}: a convolution of {} channels over {} tokens", layer,
                            spec.channels, spec.taps);
  }
  static std::string describe(const Spec& spec) {
    return fmt::format("short convolution of {} over {} tokens", spec.channels, spec.taps);
  }
  static void fields(const Spec& spec, json::Object& to) {
    to["state"] = kName;
    to["channels"] = spec.channels;
    to["taps"] = spec.taps;
  }
};

}  // namespace

constinit const BranchKind kShortConvKind = branch_kind<ShortConvBranch>();

}  // namespace freshet

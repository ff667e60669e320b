#include <algorithm>

#include "layers/branch_kinds.h"

namespace freshet {
namespace {

struct MambaBranch {
  using Spec = MambaSpec;
  using Weights = MambaWeights;
  static constexpr std::string_view kName = "mamba";

  static void run(Step& step, const Spec& spec, const Weights& w, int cache_layer,
                  const ops::Input& in, const Into& into) {
    const Scratch scratch(step.arena);
    const int64_t tokens = in.x.rows, inner = spec.inner, n = spec.state, rank = spec.dt_rank;
    ops::StateRef state{states_of(step, cache_layer), 0, state_batch_of(step, cache_layer)};
    const Matrix all = step.arena.matrix(tokens, 2 * inner);
    const ops::Product products[] = {product_of(w.in, all)};
    step.ops.project(in, products);
    const Matrix u = all.slice_cols(0, inner), gate = all.slice_cols(inner, inner);
    step.ops.causal_conv({u, u, w.conv.weight.data(), w.conv.bias.data(), spec.taps, true, state});
    const Matrix low = step.arena.matrix(tokens, rank + 2 * n);
    const ops::Product lows[] = {product_of(w.x, low)};
    step.ops.matmul(u, lows);
    const Matrix low_dt = low.slice_cols(0, rank), b = low.slice_cols(rank, n),
                 c = low.slice_cols(rank + n, n);
    if (spec.inner_norm) {
      step.ops.norm(low_dt, low_dt, norm_of(*spec.inner_norm, w.dt_norm));
      step.ops.norm(b, b, norm_of(*spec.inner_norm, w.b_norm));
      step.ops.norm(c, c, norm_of(*spec.inner_norm, w.c_norm));
    }
    const Matrix dt = step.arena.matrix(tokens, inner);
    const ops::Product steps[] = {product_of(w.dt, dt)};
    step.ops.matmul(low_dt, steps);
    state.offset = conv_bytes(spec);
    step.ops.selective_scan({u, dt, u, b, c, nullptr, w.a.data(), w.d.data(), state});
    step.ops.glu(u, gate, u, {ops::Activation::kSilu, 0.0f, 0.0f});
    const ops::Product out[] = {product_of(w.out, into)};
    step.ops.matmul(u, out);
  }
  // The last tokens of the convolution; the scan's state follows.
  static size_t conv_bytes(const Spec& spec) {
    return state_of(int64_t{spec.taps - 1} * spec.inner).state_bytes;
  }
  static BranchCache cache(const Spec& spec, ops::KvType) {
    BranchCache cache = state_of(int64_t{spec.state} * spec.inner);
    cache.state_bytes += conv_bytes(spec);
    return cache;
  }
  static size_t bytes(const Spec& spec, int64_t, int64_t tokens) {
    return matrix_bytes(tokens, 2 * int64_t{spec.inner}) + matrix_bytes(tokens, spec.inner) +
           matrix_bytes(tokens, int64_t{spec.dt_rank} + 2 * int64_t{spec.state});
  }
  static void limits(const Spec& spec, int64_t, ops::Ops::ShapeLimits& l) {
    l.max_cols = std::max<int64_t>({l.max_cols, spec.inner, spec.dt_rank});
    l.max_rows = std::max<int64_t>(
        {l.max_rows, 2 * int64_t{spec.inner}, int64_t{spec.dt_rank} + 2 * int64_t{spec.state}});
  }
  static const ops::Weight& input_weight(const Spec&, const Weights& w) { return w.in.weight; }
  static Status supported(const Spec& spec, const ops::Device& device) {
    if (spec.state <= device.most_selective_states()) return {};
    return unsupported("{} runs Mamba layers of up to {} states, not of {}: use --device cpu",
                       device.name(), device.most_selective_states(), spec.state);
  }
  static Status validate(const Spec& spec, const ModelSpec&, size_t layer) {
    if (sane(spec.inner) && sane(spec.dt_rank) && spec.state >= 1 &&
        spec.state <= ops::kMostState && spec.taps >= 2 && spec.taps <= ops::kMostTaps)
      return {};
    return invalid_argument(
        "layer {}: a state space of {} channels, {} states, rank {}, over {} tokens", layer,
        spec.inner, spec.state, spec.dt_rank, spec.taps);
  }
  static std::string describe(const Spec& spec) {
    return fmt::format("Mamba of {} channels, {} states each", spec.inner, spec.state);
  }
  static void fields(const Spec& spec, json::Object& to) {
    to["state"] = kName;
    to["inner"] = spec.inner;
    to["state_size"] = spec.state;
  }
};

}  // namespace

constinit const BranchKind kMambaKind = branch_kind<MambaBranch>();

}  // namespace freshet

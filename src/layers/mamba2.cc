#include <algorithm>

#include "layers/branch_kinds.h"

namespace freshet {
namespace {

struct Mamba2Branch {
  using Spec = Mamba2Spec;
  using Weights = Mamba2Weights;
  static constexpr std::string_view kName = "mamba2";

  static int64_t projected(const Spec& spec) {
    return int64_t{spec.inner()} + spec.conv_channels() + spec.heads;
  }

  static void run(Step& step, const Spec& spec, const Weights& w, int cache_layer,
                  const ops::Input& in, const Into& into) {
    const Scratch scratch(step.arena);
    const int64_t inner = spec.inner(), bc = int64_t{spec.groups} * spec.state;
    ops::StateRef state{states_of(step, cache_layer), 0, state_batch_of(step, cache_layer)};
    const Matrix all = step.arena.matrix(in.x.rows, projected(spec));
    const ops::Product products[] = {product_of(w.in, all)};
    step.ops.project(in, products);
    const Matrix gate = all.slice_cols(0, inner), x = all.slice_cols(inner, inner),
                 b = all.slice_cols(2 * inner, bc), c = all.slice_cols(2 * inner + bc, bc),
                 dt = all.slice_cols(2 * inner + 2 * bc, spec.heads),
                 xbc = all.slice_cols(inner, spec.conv_channels());
    const Matrix parts[] = {gate, x, b, c, dt};
    for (size_t i = 0; i < std::size(parts); ++i) {
      if (spec.part_scale[i] != 1.0f) step.ops.scale(parts[i], spec.part_scale[i]);
    }
    step.ops.causal_conv(
        {xbc, xbc, w.conv.weight.data(), w.conv.bias.data(), spec.taps, true, state});
    ops::LinearScan scan;
    scan.x = scan.out = x;
    scan.b = b;
    scan.c = c;
    scan.dt = dt;
    scan.dt_bias = w.dt_bias.data();
    scan.dt_min = spec.dt_min;
    scan.dt_max = spec.dt_max;
    scan.a = w.a.data();
    scan.d = w.d.data();
    scan.heads = spec.heads;
    scan.head_dim = spec.head_dim;
    scan.groups = spec.groups;
    scan.n = spec.state;
    scan.state = state;
    scan.state.offset = conv_bytes(spec);
    step.ops.linear_scan(scan);
    const auto normalise = [&] {
      if (!spec.norm) return;
      step.ops.norm_heads(x, spec.norm_groups, spec.inner() / spec.norm_groups,
                          norm_of(*spec.norm, w.norm), true);
    };
    if (spec.norm_before_gate) normalise();
    step.ops.glu(x, gate, x, {ops::Activation::kSilu, 0.0f, 0.0f});
    if (!spec.norm_before_gate) normalise();
    const ops::Product out[] = {product_of(w.out, into)};
    step.ops.matmul(x, out);
  }
  static size_t conv_bytes(const Spec& spec) {
    return state_of(int64_t{spec.taps - 1} * spec.conv_channels()).state_bytes;
  }
  static BranchCache cache(const Spec& spec, ops::KvType) {
    BranchCache cache = state_of(int64_t{spec.inner()} * spec.state);
    cache.state_bytes += conv_bytes(spec);
    return cache;
  }
  static size_t bytes(const Spec& spec, int64_t, int64_t tokens) {
    return matrix_bytes(tokens, projected(spec));
  }
  static void limits(const Spec& spec, int64_t, ops::Ops::ShapeLimits& l) {
    l.max_cols = std::max(l.max_cols, int64_t{spec.inner()});
    l.max_rows = std::max(l.max_rows, projected(spec));
  }
  static const ops::Weight& input_weight(const Spec&, const Weights& w) { return w.in.weight; }
  static Status validate(const Spec& spec, const ModelSpec&, size_t layer) {
    if (!sane(spec.heads) || !sane(spec.head_dim) || spec.heads > kMaxSize / spec.head_dim ||
        !sane(spec.groups) || spec.heads % spec.groups != 0 || spec.state < 1 ||
        spec.state > ops::kMostState) {
      return invalid_argument("layer {}: a state space of {} heads of {}, {} groups, {} states",
                              layer, spec.heads, spec.head_dim, spec.groups, spec.state);
    }
    if (spec.norm_groups < 1 || spec.inner() % spec.norm_groups != 0) {
      return invalid_argument("layer {}: a norm of {} features in {} parts", layer, spec.inner(),
                              spec.norm_groups);
    }
    if (spec.taps < 2 || spec.taps > ops::kMostTaps)
      return invalid_argument("layer {}: a convolution over {} tokens", layer, spec.taps);
    return {};
  }
  static std::string describe(const Spec& spec) {
    return fmt::format("Mamba-2, {} heads of {}, {} states each", spec.heads, spec.head_dim,
                       spec.state);
  }
  static void fields(const Spec& spec, json::Object& to) {
    to["state"] = kName;
    to["state_heads"] = spec.heads;
    to["state_head_dim"] = spec.head_dim;
    to["state_size"] = spec.state;
  }
};

}  // namespace

constinit const BranchKind kMamba2Kind = branch_kind<Mamba2Branch>();

}  // namespace freshet

#include <algorithm>
#include <array>
#include <span>

#include "layers/branch_kinds.h"

namespace freshet {
namespace {

struct DeltaNetBranch {
  using Spec = DeltaNetSpec;
  using Weights = DeltaNetWeights;
  static constexpr std::string_view kName = "gated_delta_net";

  static int64_t convolved(const Spec& spec) { return 2 * int64_t{spec.keys()} + spec.values(); }

  static void run(Step& step, const Spec& spec, const Weights& w, int cache_layer,
                  const ops::Input& in, const Into& into) {
    const Scratch scratch(step.arena);
    const int64_t keys = spec.keys(), values = spec.values();
    ops::StateRef state{states_of(step, cache_layer), 0, state_batch_of(step, cache_layer)};
    const Matrix all = step.arena.matrix(in.x.rows, 2 * keys + 2 * values);
    const Matrix gates = step.arena.matrix(in.x.rows, 2 * int64_t{spec.value_heads});
    const Matrix qkv = all.slice_cols(0, convolved(spec)),
                 gate = all.slice_cols(convolved(spec), values);
    project(step, spec, w, in, all, gates);
    step.ops.causal_conv(
        {qkv, qkv, w.conv.weight.data(), w.conv.bias.data(), spec.taps, true, state});
    ops::DeltaScan scan;
    scan.q = all.slice_cols(0, keys);
    scan.k = all.slice_cols(keys, keys);
    scan.v = scan.out = all.slice_cols(2 * keys, values);
    scan.b = gates.slice_cols(0, spec.value_heads);
    scan.alpha = gates.slice_cols(spec.value_heads, spec.value_heads);
    scan.a = w.a.data();
    scan.dt_bias = w.dt_bias.data();
    scan.key_heads = spec.key_heads;
    scan.value_heads = spec.value_heads;
    scan.key_dim = spec.key_dim;
    scan.value_dim = spec.value_dim;
    scan.tiled = spec.tiled;
    scan.state = state;
    scan.state.offset = conv_bytes(spec);
    step.ops.delta_scan(scan);
    step.ops.norm_heads(scan.out, spec.value_heads, spec.value_dim, norm_of(spec.norm, w.norm),
                        false);
    step.ops.glu(scan.out, gate, scan.out, {ops::Activation::kSilu, 0.0f, 0.0f});
    const ops::Product out[] = {product_of(w.out, into)};
    step.ops.matmul(scan.out, out);
  }
  static void project(Step& step, const Spec& spec, const Weights& w, const ops::Input& in,
                      const Matrix& all, const Matrix& gates) {
    const int64_t conv = convolved(spec), heads = spec.value_heads;
    const bool z = w.z.weight.rows > 0, alpha = w.alpha.weight.rows > 0;
    std::array<ops::Product, 4> products = {
        product_of(w.qkvz, z ? all.slice_cols(0, conv) : all),
        product_of(w.ba, alpha ? gates.slice_cols(0, heads) : gates)};
    size_t count = 2;
    if (z) products[count++] = product_of(w.z, all.slice_cols(conv, spec.values()));
    if (alpha) products[count++] = product_of(w.alpha, gates.slice_cols(heads, heads));
    step.ops.project(in, std::span(products).first(count));
  }
  static size_t conv_bytes(const Spec& spec) {
    return state_of((spec.taps - 1) * convolved(spec)).state_bytes;
  }
  static BranchCache cache(const Spec& spec, ops::KvType) {
    BranchCache cache = state_of(int64_t{spec.values()} * spec.key_dim);
    cache.state_bytes += conv_bytes(spec);
    return cache;
  }
  static size_t bytes(const Spec& spec, int64_t, int64_t tokens) {
    return matrix_bytes(tokens, convolved(spec) + spec.values()) +
           matrix_bytes(tokens, 2 * int64_t{spec.value_heads});
  }
  static void limits(const Spec& spec, int64_t, ops::Ops::ShapeLimits& l) {
    l.max_cols = std::max(l.max_cols, int64_t{spec.values()});
    l.max_rows = std::max(l.max_rows, convolved(spec) + spec.values());
  }
  static const ops::Weight& input_weight(const Spec&, const Weights& w) { return w.qkvz.weight; }
  static Status validate(const Spec& spec, const ModelSpec&, size_t layer) {
    if (!sane(spec.key_heads) || !sane(spec.value_heads) || !sane(spec.key_dim) ||
        !sane(spec.value_dim) || spec.value_heads % spec.key_heads != 0 ||
        spec.key_dim > ops::kMostState || spec.value_heads > kMaxSize / spec.value_dim) {
      return invalid_argument(
          "layer {}: a delta net of {} key heads of {} and {} value heads of {}", layer,
          spec.key_heads, spec.key_dim, spec.value_heads, spec.value_dim);
    }
    if (spec.taps < 2 || spec.taps > ops::kMostTaps)
      return invalid_argument("layer {}: a convolution over {} tokens", layer, spec.taps);
    return {};
  }
  static std::string describe(const Spec& spec) {
    return fmt::format("gated delta net, {} heads of {} over {} key heads of {}", spec.value_heads,
                       spec.value_dim, spec.key_heads, spec.key_dim);
  }
  static void fields(const Spec& spec, json::Object& to) {
    to["state"] = kName;
    to["state_heads"] = spec.value_heads;
    to["state_head_dim"] = spec.value_dim;
    to["state_size"] = spec.key_dim;
  }
};

}  // namespace

constinit const BranchKind kDeltaNetKind = branch_kind<DeltaNetBranch>();

}  // namespace freshet

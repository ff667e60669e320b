#include <algorithm>

#include "layers/branch_kinds.h"

namespace freshet {
namespace {

struct LightningBranch {
  using Spec = LightningSpec;
  using Weights = LightningWeights;
  static constexpr std::string_view kName = "lightning_attention";

  static int64_t inner(const Spec& spec) { return int64_t{spec.heads} * spec.head_dim; }

  static void run(Step& step, const Spec& spec, const Weights& w, int cache_layer,
                  const ops::Input& in, const Into& into) {
    const Scratch scratch(step.arena);
    const int64_t width = inner(spec);
    const Matrix qkv = step.arena.matrix(in.x.rows, 3 * width);
    const Matrix gate = step.arena.matrix(in.x.rows, width);
    const ops::Product products[] = {product_of(w.qkv, qkv), product_of(w.gate, gate)};
    step.ops.project(in, products);
    step.ops.activation(qkv, spec.activation);
    ops::LinearScan scan;
    scan.c = qkv.slice_cols(0, width);
    scan.b = qkv.slice_cols(width, width);
    scan.x = scan.out = qkv.slice_cols(2 * width, width);
    scan.a = w.decay.data();
    scan.heads = scan.groups = spec.heads;
    scan.head_dim = scan.n = spec.head_dim;
    scan.state = {states_of(step, cache_layer), 0, state_batch_of(step, cache_layer)};
    step.ops.linear_scan(scan);
    step.ops.norm(scan.out, scan.out, norm_of(spec.norm, w.norm));
    step.ops.sigmoid_product(scan.out, gate);
    const ops::Product out[] = {product_of(w.out, into)};
    step.ops.matmul(scan.out, out);
  }
  static BranchCache cache(const Spec& spec, ops::KvType) {
    return state_of(inner(spec) * spec.head_dim);
  }
  static size_t bytes(const Spec& spec, int64_t, int64_t tokens) {
    return matrix_bytes(tokens, 3 * inner(spec)) + matrix_bytes(tokens, inner(spec));
  }
  static void limits(const Spec& spec, int64_t, ops::Ops::ShapeLimits& l) {
    l.max_cols = std::max(l.max_cols, inner(spec));
    l.max_rows = std::max(l.max_rows, 3 * inner(spec));
  }
  static const ops::Weight& input_weight(const Spec&, const Weights& w) { return w.qkv.weight; }
  static Status validate(const Spec& spec, const ModelSpec&, size_t layer) {
    if (sane(spec.heads) && sane(spec.head_dim) && spec.head_dim <= ops::kMostState &&
        spec.heads <= kMaxSize / spec.head_dim)
      return {};
    return invalid_argument("layer {}: lightning attention of {} heads of {}", layer, spec.heads,
                            spec.head_dim);
  }
  static std::string describe(const Spec& spec) {
    return fmt::format("lightning attention, {} heads of {}", spec.heads, spec.head_dim);
  }
  static void fields(const Spec& spec, json::Object& to) {
    to["state"] = kName;
    to["state_heads"] = spec.heads;
    to["state_head_dim"] = spec.head_dim;
    to["state_size"] = spec.head_dim;
  }
};

}  // namespace

constinit const BranchKind kLightningKind = branch_kind<LightningBranch>();

}  // namespace freshet

#include <algorithm>

#include "layers/branch_kinds.h"

namespace freshet {

void mlp(Step& step, const MlpSpec& spec, const MlpWeights& w, const ops::Input& in,
         const Into& into) {
  const Scratch scratch(step.arena);
  const Matrix up = step.arena.matrix(in.x.rows, spec.ff);
  if (spec.gated) {
    const Matrix gate = step.arena.matrix(in.x.rows, spec.ff);
    ops::Product gates = product_of(w.gate, gate);
    gates.scale = spec.gate_scale;
    step.ops.gated(
        {in, gates, product_of(w.up, up), {spec.activation, 0.0f, 0.0f}, product_of(w.down, into)});
    return;
  }
  const ops::Product products[] = {product_of(w.up, up)};
  step.ops.project(in, products);
  if (spec.xielu) {
    step.ops.xielu(up, w.xielu);
  } else {
    step.ops.activation(up, spec.activation);
  }
  const ops::Product down[] = {product_of(w.down, into)};
  step.ops.matmul(up, down);
}

size_t mlp_bytes(const MlpSpec& spec, int64_t tokens) {
  return matrix_bytes(tokens, spec.ff) * (spec.gated ? 2 : 1);
}

namespace {

struct MlpKind {
  using Spec = MlpSpec;
  using Weights = MlpWeights;
  static constexpr std::string_view kName = "mlp";

  static void run(Step& step, const Spec& spec, const Weights& w, int, const ops::Input& in,
                  const Into& into) {
    mlp(step, spec, w, in, into);
  }
  static size_t bytes(const Spec& spec, int64_t, int64_t tokens) { return mlp_bytes(spec, tokens); }
  static void limits(const Spec& spec, int64_t hidden, ops::Ops::ShapeLimits& l) {
    l.max_cols = std::max(l.max_cols, int64_t{spec.ff});
    l.max_rows = std::max(l.max_rows, 2 * int64_t{spec.ff});
    if (spec.gated) l.max_gated_cols = std::max(l.max_gated_cols, hidden);
  }
  static const ops::Weight& input_weight(const Spec&, const Weights& w) { return w.up.weight; }
  static ops::PrefetchNext prefetch(const Spec& spec, const Weights& w) {
    if (!spec.gated) return {};
    return {&w.gate.weight, &w.up.weight};
  }
  static Status validate(const Spec& spec, const ModelSpec&, size_t layer) {
    if (sane(spec.ff)) return {};
    return invalid_argument("layer {}: an MLP of {} features", layer, spec.ff);
  }
  static std::string describe(const Spec& spec) {
    return fmt::format("{}MLP of {}{}", spec.gated ? "gated " : "", spec.ff,
                       spec.xielu ? " with xIELU" : "");
  }
  static void fields(const Spec& spec, json::Object& to) { to["ff"] = spec.ff; }
};

}  // namespace

constinit const BranchKind kMlpKind = branch_kind<MlpKind>();

}  // namespace freshet

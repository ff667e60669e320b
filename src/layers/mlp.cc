#include <algorithm>

#include "layers/branch_kinds.h"

namespace freshet {

namespace {

// Projections with adapters: gate += gate_adapter(down(x)), and up likewise.
void run_adapted(Step& step, const MlpSpec& spec, const MlpWeights& w, const ops::Input& in,
                 const Into& into) {
  const Scratch scratch(step.arena);
  const Matrix up = step.arena.matrix(in.x.rows, spec.ff);
  const Matrix gate = step.arena.matrix(in.x.rows, spec.ff);
  const Matrix narrow = step.arena.matrix(in.x.rows, spec.adapter_rank);
  const ops::Product products[] = {product_of(w.gate, gate), product_of(w.up, up),
                                   product_of(w.adapter_down, narrow)};
  step.ops.project(in, products);
  const ops::Product more[] = {product_of(w.gate_adapter, Into{gate, true}),
                               product_of(w.up_adapter, Into{up, true})};
  step.ops.matmul(narrow, more);
  step.ops.glu(up, gate, up, {spec.activation, 0.0f, 0.0f});
  const ops::Product down[] = {product_of(w.down, into)};
  step.ops.matmul(up, down);
}

void run_mlp(Step& step, const MlpSpec& spec, const MlpWeights& w, const ops::Input& in,
             const Into& into) {
  if (spec.adapter_rank > 0) return run_adapted(step, spec, w, in, into);
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

// Runs the MLP only for the tokens that see a picture.
void run_sighted(Step& step, const MlpSpec& spec, const MlpWeights& w, const ops::Input& in,
                 const Into& into) {
  FRESHET_CHECK(into.add, "an MLP for some tokens adds to the stream");
  std::vector<int32_t> tokens;
  for (size_t t = 0; t < step.batch.views.size(); ++t) {
    if (step.batch.views[t].end > step.batch.views[t].first)
      tokens.push_back(static_cast<int32_t>(t));
  }
  if (tokens.empty()) return;
  const Scratch scratch(step.arena);
  const Matrix x = step.arena.matrix(std::ssize(tokens), in.x.cols);
  step.ops.gather_rows(x, in.x, tokens);
  ops::Input some{x, in.norm};
  if (in.norm != nullptr) some.normed = step.arena.matrix(x.rows, x.cols);
  const Matrix out = step.arena.matrix(x.rows, into.out.cols);
  run_mlp(step, spec, w, some, {out, false, into.scale});
  step.ops.put_rows(into.out, tokens, out, true);
}

}  // namespace

void mlp(Step& step, const MlpSpec& spec, const MlpWeights& w, const ops::Input& in,
         const Into& into) {
  Into scaled = into;
  scaled.scale *= w.scale;
  spec.sighted ? run_sighted(step, spec, w, in, scaled) : run_mlp(step, spec, w, in, scaled);
}

size_t mlp_bytes(const MlpSpec& spec, int64_t tokens) {
  return matrix_bytes(tokens, spec.ff) * (spec.gated ? 2 : 1) +
         (spec.adapter_rank > 0 ? matrix_bytes(tokens, spec.adapter_rank) : 0);
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
  static size_t bytes(const Spec& spec, int64_t hidden, int64_t tokens) {
    return mlp_bytes(spec, tokens) + (spec.sighted ? 3 * matrix_bytes(tokens, hidden) : 0);
  }
  static void limits(const Spec& spec, int64_t hidden, ops::Ops::ShapeLimits& l) {
    l.max_cols = std::max({l.max_cols, int64_t{spec.ff}, int64_t{spec.adapter_rank}});
    l.max_rows = std::max(l.max_rows, 2 * int64_t{spec.ff});
    if (spec.gated) l.max_gated_cols = std::max(l.max_gated_cols, hidden);
  }
  static const ops::Weight& input_weight(const Spec&, const Weights& w) { return w.up.weight; }
  static ops::PrefetchNext prefetch(const Spec& spec, const Weights& w) {
    if (!spec.gated) return {};
    return {&w.gate.weight, &w.up.weight};
  }
  static Status validate(const Spec& spec, const ModelSpec&, size_t layer) {
    if (spec.adapter_rank < 0 || spec.adapter_rank > kMaxSize ||
        (spec.adapter_rank > 0 && (!spec.gated || spec.gate_scale != 1.0f)))
      return invalid_argument("layer {}: adapters of rank {}", layer, spec.adapter_rank);
    if (sane(spec.ff)) return {};
    return invalid_argument("layer {}: an MLP of {} features", layer, spec.ff);
  }
  static Status supported(const Spec& spec, const ops::Device& device) {
    if (spec.sighted || spec.tanh_gate)
      return unsupported("MLPs for pictures on {}: use --device cpu", device.name());
    return {};
  }
  static std::string describe(const Spec& spec) {
    return fmt::format("{}MLP of {}{}", spec.gated ? "gated " : "", spec.ff,
                       spec.xielu     ? " with xIELU"
                       : spec.sighted ? " for tokens that see pictures"
                       : spec.adapter_rank > 0
                           ? fmt::format(", adapters of rank {}", spec.adapter_rank)
                           : "");
  }
  static void fields(const Spec& spec, json::Object& to) { to["ff"] = spec.ff; }
};

}  // namespace

constinit const BranchKind kMlpKind = branch_kind<MlpKind>();

}  // namespace freshet

#include <algorithm>

#include "layers/branch_kinds.h"

namespace freshet {
namespace {

MlpSpec shared_mlp(const MoeSpec& spec) {
  MlpSpec shared;
  shared.ff = spec.shared_ff;
  shared.activation = spec.glu.activation;
  return shared;
}

// Adds the shared expert to the experts' sum, with or without a gate.
void add_shared_expert(Step& step, const MoeSpec& spec, const MoeWeights& w, const Matrix& out,
                       ops::MoeBlock& block) {
  const int64_t tokens = out.rows;
  const Into into = spec.shared_gate ? Into{step.arena.matrix(tokens, out.cols), false, 1.0f}
                                     : Into{out, true, 1.0f};
  if (spec.shared_gate) {
    block.shared_gate = product_of(w.shared_gate, step.arena.matrix(tokens, 1));
  }
  block.shared.up = product_of(w.shared.up, step.arena.matrix(tokens, spec.shared_ff));
  block.shared.gate = product_of(w.shared.gate, step.arena.matrix(tokens, spec.shared_ff));
  block.shared.glu = {spec.glu.activation, 0.0f, 0.0f};
  block.shared.down = product_of(w.shared.down, into);
}

}  // namespace

void moe(Step& step, const MoeSpec& spec, const MoeWeights& w, const ops::Input& in,
         const Into& into) {
  FRESHET_CHECK(into.scale == 1.0f, "experts cannot scale their sum by {}", into.scale);
  const Scratch scratch(step.arena);
  const int64_t tokens = in.x.rows;
  const int top_k = spec.routing.top_k;
  ops::MoeBlock block;
  block.in = in;
  block.router = product_of(w.router, step.arena.matrix(tokens, spec.routing.experts));
  block.ids = step.arena.allocate_array<int32_t>(tokens * top_k);
  block.weights = step.arena.allocate_array<float>(tokens * top_k);
  block.routing = spec.routing;
  block.routing.correction = w.correction.data();
  block.experts.gate_up = w.gate_up;
  block.experts.down = w.down;
  block.experts.gate_up_bias = w.gate_up_bias.data();
  block.experts.down_bias = w.down_bias.data();
  block.experts.glu = spec.glu;
  block.experts.weight_before = spec.weight_before;
  block.out = into.out;
  block.add = into.add;
  if (spec.shared_ff > 0) add_shared_expert(step, spec, w, into.out, block);
  step.ops.moe_block(block);
}

size_t moe_bytes(const MoeSpec& spec, int64_t hidden, int64_t tokens) {
  size_t bytes =
      matrix_bytes(tokens, spec.routing.experts) + 2 * matrix_bytes(tokens, spec.routing.top_k);
  if (spec.shared_ff > 0) bytes += mlp_bytes(shared_mlp(spec), tokens);
  if (spec.shared_gate) bytes += matrix_bytes(tokens, hidden) + matrix_bytes(tokens, 1);
  return bytes;
}

namespace {

struct MoeKind {
  using Spec = MoeSpec;
  using Weights = MoeWeights;
  static constexpr std::string_view kName = "moe";
  static constexpr bool kScales = false;

  static void run(Step& step, const Spec& spec, const Weights& w, int, const ops::Input& in,
                  const Into& into) {
    moe(step, spec, w, in, into);
  }
  static size_t bytes(const Spec& spec, int64_t hidden, int64_t tokens) {
    return moe_bytes(spec, hidden, tokens);
  }
  static void limits(const Spec& spec, int64_t hidden, ops::Ops::ShapeLimits& l) {
    const int64_t ff = std::max(spec.expert_ff, spec.shared_ff);
    l.max_cols = std::max(l.max_cols, ff);
    l.max_rows = std::max(l.max_rows, 2 * ff);
    l.max_gated_cols = std::max(l.max_gated_cols, hidden);
    l.max_expert_ff = std::max(l.max_expert_ff, int64_t{spec.expert_ff});
    l.top_k = std::max(l.top_k, spec.routing.top_k);
  }
  static const ops::Weight& input_weight(const Spec&, const Weights& w) { return w.router.weight; }
  static Status validate(const Spec& spec, const ModelSpec&, size_t layer) {
    const ops::Routing& r = spec.routing;
    if (!sane(r.experts) || r.top_k <= 0 || r.top_k > r.experts) {
      return invalid_argument("layer {}: {} of {} experts a token", layer, r.top_k, r.experts);
    }
    if (r.groups <= 0 || r.experts % r.groups != 0 || r.top_groups <= 0 ||
        r.top_groups > r.groups || r.group_score_top > r.experts / r.groups ||
        r.top_k > r.experts / r.groups * r.top_groups) {
      return invalid_argument("layer {}: {} of {} groups of {} experts, {} experts a token", layer,
                              r.top_groups, r.groups, r.experts, r.top_k);
    }
    if (!sane(spec.expert_ff) || spec.shared_ff < 0 || spec.shared_ff > kMaxSize) {
      return invalid_argument("layer {}: experts of {} and {} features", layer, spec.expert_ff,
                              spec.shared_ff);
    }
    return {};
  }
  static Status supported(const Spec& spec, const ops::Device& device) {
    return device.supports(spec.routing);
  }
  static double expert_share(const Spec& spec) {
    return static_cast<double>(spec.routing.top_k) / std::max(1, spec.routing.experts);
  }
  static std::string describe(const Spec& m) {
    std::string text =
        fmt::format("{} of {} experts of {}", m.routing.top_k, m.routing.experts, m.expert_ff);
    if (m.shared_ff > 0) text += fmt::format(" and a shared one of {}", m.shared_ff);
    return text;
  }
  static void fields(const Spec& m, json::Object& to) {
    to["experts"] = m.routing.experts;
    to["experts_per_token"] = m.routing.top_k;
    to["ff"] = m.expert_ff;
  }
};

}  // namespace

constinit const BranchKind kMoeKind = branch_kind<MoeKind>();

}  // namespace freshet

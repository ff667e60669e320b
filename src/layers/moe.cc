#include <algorithm>

#include "layers/step.h"

namespace freshet {
namespace {

MlpSpec shared_mlp(const MoeSpec& spec) {
  MlpSpec shared;
  shared.ff = spec.shared_ff;
  shared.activation = spec.glu.activation;
  return shared;
}

}  // namespace

void moe(Step& step, const MoeSpec& spec, const MoeWeights& w, const Matrix& x, const Into& into) {
  FRESHET_CHECK(into.scale == 1.0f, "experts cannot scale their sum by {}", into.scale);
  const Scratch scratch(step.arena);
  const int64_t tokens = x.rows;
  const int top_k = spec.routing.top_k;
  const Matrix logits = step.arena.matrix(tokens, spec.routing.experts);
  auto* ids = step.arena.allocate_array<int32_t>(tokens * top_k);
  auto* weights = step.arena.allocate_array<float>(tokens * top_k);
  const ops::Product router[] = {product_of(w.router, logits)};
  step.ops.matmul(x, router);
  ops::Routing routing = spec.routing;
  routing.correction = w.correction.data();
  step.ops.route(logits, routing, ids, weights);

  ops::Experts experts;
  experts.gate_up = w.gate_up;
  experts.down = w.down;
  experts.gate_up_bias = w.gate_up_bias.data();
  experts.down_bias = w.down_bias.data();
  experts.glu = spec.glu;
  step.ops.moe(into.out, x, ids, weights, top_k, experts, into.add);
  if (spec.shared_ff == 0) return;

  if (!spec.shared_gate) {
    mlp(step, shared_mlp(spec), w.shared, x, {into.out, true, 1.0f});
    return;
  }
  const Matrix shared = step.arena.matrix(tokens, into.out.cols);
  const Matrix gate = step.arena.matrix(tokens, 1);
  mlp(step, shared_mlp(spec), w.shared, x, {shared, false, 1.0f});
  const ops::Product gates[] = {product_of(w.shared_gate, gate)};
  step.ops.matmul(x, gates);
  step.ops.sigmoid_gate(shared, gate);
  step.ops.add(into.out, shared, 1.0f);
}

size_t moe_bytes(const MoeSpec& spec, int64_t hidden, int64_t tokens) {
  size_t bytes =
      matrix_bytes(tokens, spec.routing.experts) + 2 * matrix_bytes(tokens, spec.routing.top_k);
  if (spec.shared_ff > 0) bytes += mlp_bytes(shared_mlp(spec), tokens);
  if (spec.shared_gate) bytes += matrix_bytes(tokens, hidden) + matrix_bytes(tokens, 1);
  return bytes;
}

}  // namespace freshet

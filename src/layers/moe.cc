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

// The shared expert, which adds to the experts' sum by itself or through a gate.
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

}  // namespace freshet

#include "layers/step.h"

namespace freshet {

void mlp(Step& step, const MlpSpec& spec, const MlpWeights& w, const Matrix& x, const Into& into) {
  const Scratch scratch(step.arena);
  const Matrix up = step.arena.matrix(x.rows, spec.ff);
  if (spec.gated) {
    const Matrix gate = step.arena.matrix(x.rows, spec.ff);
    step.ops.gated(x, product_of(w.gate, gate), product_of(w.up, up), {spec.activation, 0.0f, 0.0f},
                   product_of(w.down, into));
    return;
  }
  const ops::Product products[] = {product_of(w.up, up)};
  step.ops.matmul(x, products);
  step.ops.activation(up, spec.activation);
  const ops::Product down[] = {product_of(w.down, into)};
  step.ops.matmul(up, down);
}

size_t mlp_bytes(const MlpSpec& spec, int64_t tokens) {
  return matrix_bytes(tokens, spec.ff) * (spec.gated ? 2 : 1);
}

}  // namespace freshet

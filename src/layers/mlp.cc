#include "layers/step.h"

namespace freshet {

void mlp(Step& step, const MlpSpec& spec, const MlpWeights& w, const ops::Input& in,
         const Into& into) {
  const Scratch scratch(step.arena);
  const Matrix up = step.arena.matrix(in.x.rows, spec.ff);
  if (spec.gated) {
    const Matrix gate = step.arena.matrix(in.x.rows, spec.ff);
    step.ops.gated({in,
                    product_of(w.gate, gate),
                    product_of(w.up, up),
                    {spec.activation, 0.0f, 0.0f},
                    product_of(w.down, into)});
    return;
  }
  const ops::Product products[] = {product_of(w.up, up)};
  step.ops.project(in, products);
  step.ops.activation(up, spec.activation);
  const ops::Product down[] = {product_of(w.down, into)};
  step.ops.matmul(up, down);
}

size_t mlp_bytes(const MlpSpec& spec, int64_t tokens) {
  return matrix_bytes(tokens, spec.ff) * (spec.gated ? 2 : 1);
}

}  // namespace freshet

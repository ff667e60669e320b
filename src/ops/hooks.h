// The places before and after a projection where others may look or take part: calibration sees
// inputs, and what goes to the cache, a LoRA adapter adds its delta, tensor parallelism sums over
// ranks.
//
// While hooks are set, every projection of a model comes by, whatever fused operation it belongs
// to: those of Ops::matmul(), each head's of matmul_heads(), and each expert's of moe() with the
// tokens that chose it. Inputs and outputs are there in F32, in the memory of the device. Hooks run
// on the step thread and may call single operations (not fused ones) of the same Ops, whose
// projections do not come by again. With hooks that change nothing, no bit of a result changes.
#pragma once

#include "ops/arguments.h"

namespace freshet::ops {

class ProjectionHooks {
 public:
  virtual ~ProjectionHooks() = default;
  // x: the projection's input, [tokens, weight.cols]. Weight::name and id say which weight it is.
  virtual void before(const Weight& /*weight*/, const Matrix& /*x*/) {}
  // p.out holds p.scale * (x W^T + bias) and may be changed. What it is to be added to (a residual)
  // comes after that: p.add is false.
  virtual void after(const Product& /*p*/, const Matrix& /*x*/) {}
  // Keys and values on their way to the cache, rotated: [tokens, kv heads * features].
  virtual void storing(const Matrix& /*k*/, const Matrix& /*v*/) {}
};

}  // namespace freshet::ops

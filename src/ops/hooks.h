// Hooks before and after each projection: calibration records inputs and what is stored in the
// cache, a LoRA adapter adds its delta, tensor parallelism sums over ranks.
//
// While hooks are set, they are called for every projection of a model, whatever fused operation it
// belongs to: those of Ops::matmul(), each head's of matmul_heads(), and each expert's of moe()
// with the tokens routed to it. Inputs and outputs are F32, in the memory of the device. Hooks run
// on the step thread and may call single operations (not fused ones) of the same Ops; hooks aren't
// called for the projections of these. Hooks that change nothing change no bit of a result.
#pragma once

#include "ops/arguments.h"

namespace freshet::ops {

class ProjectionHooks {
 public:
  virtual ~ProjectionHooks() = default;
  // x: the projection's input, [tokens, weight.cols]. Weight::name and id say which weight it is.
  virtual void before(const Weight& /*weight*/, const Matrix& /*x*/) {}
  // p.out holds p.scale * (x W^T + bias) and may be changed. A residual is added after that: p.add
  // is false.
  virtual void after(const Product& /*p*/, const Matrix& /*x*/) {}
  // Rotated keys, and values, before they are stored in the cache: [tokens, kv heads * features];
  // and the rotated queries of the same tokens, [tokens, heads * features], or nothing.
  virtual void storing(const Matrix& /*q*/, const Matrix& /*k*/, const Matrix& /*v*/) {}
};

}  // namespace freshet::ops

// Activations of GLU epilogues, shared by all kernels, so that results are bit-identical
// everywhere.
#pragma once

#include "backend/cuda/runtime/common.cuh"

namespace freshet::cuda {

// Accurate to about 22 bits, and branch-free: the branches of an exact division would keep the
// elements of a tile from overlapping.
__device__ __forceinline__ float sigmoid(float x) {
  float e, s;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(__fmul_rn(x, -1.4426950408889634f)));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(__fadd_rn(1.0f, e)));
  return s;
}

__device__ __forceinline__ float activate(float x, int kind) {  // same order as ops::Activation
  switch (kind) {
    case 1:
      return x * sigmoid(x);
    case 2:
      return 0.5f * x * erfcf(-x * 0.70710678118654752f);
    case 3:
      return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
    case 4:
      return fmaxf(x, 0.0f);
    case 5:
      return x > 0.0f ? x * x : 0.0f;
    case 6:
      return x * sigmoid(1.702f * x);
    default:
      return x;
  }
}

// GLU with clamped operands.
__device__ __forceinline__ float limited(float gate, float up, const GluArgs& a) {
  const float g = fminf(gate, a.limit);
  const float u = fminf(fmaxf(up, -a.limit), a.limit);
  return (u + 1.0f) * g * sigmoid(a.alpha * g);
}

__device__ __forceinline__ float gated(float gate, float up, const GluArgs& a) {
  return a.limit > 0.0f ? limited(gate, up, a) : activate(gate, a.activation) * up;
}

}  // namespace freshet::cuda

// Epilogue of the FP8 GEMMs on Hopper: each lane writes four adjacent rows, so that whole lines are
// written. Pairs of rows, as wgmma leaves them, would be 32-byte requests, whose rate per SM is
// low.
#pragma once

#include "backend/cuda/gemm/gemm.cuh"

namespace freshet::cuda {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Four adjacent rows of a token; some may be out of bounds.
struct Four {
  float4 bias;
  int count;
  bool whole;
};
__device__ __forceinline__ float4 load_some(const float* from, const Four& of) {
  if (of.whole) return *reinterpret_cast<const float4*>(from);
  return make_float4(from[0], of.count > 1 ? from[1] : 0.0f, of.count > 2 ? from[2] : 0.0f,
                     of.count > 3 ? from[3] : 0.0f);
}
// Rows `row` to `row` + 3; none unless `asked`.
__device__ __forceinline__ Four four_of(const ProductArgs& p, int64_t row, bool asked = true) {
  const int64_t left = p.weight.rows - row;
  Four of = {};
  of.count = asked && left > 0 ? static_cast<int>(left < 4 ? left : 4) : 0;
  of.whole = of.count == 4 && p.out_stride % 4 == 0 && reinterpret_cast<uintptr_t>(p.out) % 16 == 0;
  if (p.bias != nullptr && of.count > 0) {
    of.bias = load_some(p.bias + row, {{}, of.count, false});
  }
  return of;
}
__device__ __forceinline__ void write_some(float* to, const ProductArgs& p, const Four& of,
                                           const float4& sum, const float4& before) {
  const auto one = [&](float v, float bias, float old) {
    if (p.bias != nullptr) v = __fadd_rn(v, bias);
    v = __fmul_rn(v, p.scale);
    return p.add != 0 ? __fadd_rn(old, v) : v;
  };
  const float4 v = make_float4(one(sum.x, of.bias.x, before.x), one(sum.y, of.bias.y, before.y),
                               one(sum.z, of.bias.z, before.z), one(sum.w, of.bias.w, before.w));
  if (of.whole) {
    *reinterpret_cast<float4*>(to) = v;
    return;
  }
  to[0] = v.x;
  if (of.count > 1) to[1] = v.y;
  if (of.count > 2) to[2] = v.z;
  if (of.count > 3) to[3] = v.w;
}
#endif

}  // namespace freshet::cuda

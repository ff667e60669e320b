// Normalises a head, rotates it and converts it to the cache's type, by one warp. Used by
// qk_norm_rope_store.cu and, fused, by the decode kernels. The head's size fixes the order of sums
// of the norm.
#pragma once

#include "backend/cuda/attention/attention.cuh"

namespace freshet::cuda {

// INT8 codes and their scale, as ops::int8_scale() defines them, except that codes times scale are
// in F16's range. Encodes a lane's four adjacent features; (at most) eight lanes share the scale of
// 32 features.
__device__ __forceinline__ uint32_t int8_codes(const float4& v, int lanes, uint16_t* scale) {
  const auto lane = static_cast<int>(threadIdx.x % 32);
  float most = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
  for (int step = 1; step < 8; step <<= 1) {
    const float other = __shfl_xor_sync(0xffffffff >> (32 - lanes), most, step);
    if ((lane ^ step) < lanes) most = fmaxf(most, other);
  }
  const __half s = __float2half_rn(fminf(__fdiv_rn(most, 127.0f), 515.5f));
  const float its = __half2float(s), to_code = its > 0.0f ? __fdiv_rn(1.0f, its) : 0.0f;
  const auto code = [&](float x) {
    const float scaled = __fmul_rn(x, to_code);
    return static_cast<uint32_t>(__float2int_rn(fminf(fmaxf(scaled, -127.0f), 127.0f)) + 128);
  };
  *scale = __half_as_ushort(s);
  return code(v.x) | code(v.y) << 8 | code(v.z) << 16 | code(v.w) << 24;
}

__device__ __forceinline__ uint32_t e4m3_codes(const float4& v) {
  const auto most = [](float x) { return fminf(fmaxf(x, -448.0f), 448.0f); };  // no NaN remains
  return two_e4m3(most(v.x), most(v.y)) | two_e4m3(most(v.z), most(v.w)) << 16;
}

// Four adjacent features of a head, from feature c on, in the cache's type; for INT8 the lanes of
// 32 features must call this together.
struct Form {
  uint2 numbers;
  uint16_t scale;
};
__device__ __forceinline__ Form form_of_four(CacheType type, int c, int dim, const float4& v) {
  Form s = {};
  if (type == CacheType::kInt8) {
    s.numbers.x = int8_codes(v, min(32, (dim - c / 128 * 128) / 4), &s.scale);
  } else if (type == CacheType::kE4M3) {
    s.numbers.x = e4m3_codes(v);
  } else if (type == CacheType::kBF16) {
    s.numbers = make_uint2(pack_numbers<true>(v.x, v.y), pack_numbers<true>(v.z, v.w));
  } else {
    s.numbers = make_uint2(pack_numbers<false>(v.x, v.y), pack_numbers<false>(v.z, v.w));
  }
  return s;
}
// `scales` is relative to `to`.
__device__ __forceinline__ void put_four(CacheType type, uint8_t* to, int c, const Form& s,
                                         const ScalesAt& scales) {
  if (type == CacheType::kInt8 && c % 32 == 0) {
    *reinterpret_cast<uint16_t*>(to + scales.first + c / 32 * scales.apart) = s.scale;
  }
  to += feature_at(type, c);
  if (in_bytes(type)) {
    *reinterpret_cast<uint32_t*>(to) = s.numbers.x;
  } else {
    *reinterpret_cast<uint2*>(to) = s.numbers;
  }
}
__device__ __forceinline__ void store_four(CacheType type, uint8_t* to, int c, int dim,
                                           const float4& v, const ScalesAt& scales = {}) {
  put_four(type, to, c, form_of_four(type, c, dim, v), scales);
}

__device__ __forceinline__ float sum_of_warp(float v) {
  for (int step = 16; step > 0; step >>= 1) {
    v = __fadd_rn(v, __shfl_xor_sync(0xffffffff, v, step));
  }
  return v;
}

// Loads elements c to c + 3 of a row of `n`; zeros beyond the end.
__device__ __forceinline__ float4 load_four(const float* p, int c, int n, bool whole) {
  if (whole) return *reinterpret_cast<const float4*>(p + c);
  const auto at = [&](int i) { return c + i < n ? p[c + i] : 0.0f; };
  return make_float4(at(0), at(1), at(2), at(3));
}

// Normalises the head in shared memory. (Calls keep the code short for heads that need no norm.)
static __device__ __noinline__ void norm_head(float* head, int dim, const NormArgs& norm,
                                              int64_t offset) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  // Calls f for each of a lane's elements.
  const auto each = [&](const auto& f) {
    for (int c = lane * 4; c < dim; c += 128) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (c + i < dim) f(c + i, head[c + i]);
      }
    }
  };
  const auto count = static_cast<float>(dim);
  float mean = 0.0f, sum = 0.0f;
  if (norm.layer != 0) {
    each([&](int, float v) { sum = __fadd_rn(sum, v); });
    mean = sum_of_warp(sum) / count;
    sum = 0.0f;
  }
  each([&](int, float v) { sum = __fmaf_rn(v - mean, v - mean, sum); });
  const float scale = rsqrtf(sum_of_warp(sum) / count + norm.eps);
  each([&](int c, float v) {
    v = __fmul_rn(__fsub_rn(v, mean), scale);
    if (norm.weight != nullptr) v = __fmul_rn(v, norm.weight[offset + c]);
    if (norm.bias != nullptr) v = __fadd_rn(v, norm.bias[offset + c]);
    head[c] = v;
  });
}

// The usual heads: 128 features, rotated completely or not at all, with an RMS norm or none. A lane
// has four adjacent features.
inline constexpr int kUsualDim = 128;

inline bool usual(const HeadsArgs::Part& p) {
  const bool whole = reinterpret_cast<uintptr_t>(p.x) % 16 == 0 && p.stride % 4 == 0;
  const bool turns = p.offset == 0 && p.interleaved == 0 && p.rotary_dim == kUsualDim;
  const NormArgs& n = p.norm;
  const bool norms = n.layer == 0 && n.bias == nullptr && n.weight != nullptr &&
                     reinterpret_cast<uintptr_t>(n.weight) % 16 == 0;
  return p.head_dim == kUsualDim && (p.normed == 0 || norms) && whole &&
         (p.rotary_dim == 0 || turns);
}

// The norm's weights of a usual head.
__device__ __forceinline__ float4 weight_at(const HeadsArgs::Part& part, int head, int c) {
  return *reinterpret_cast<const float4*>(part.norm.weight +
                                          (part.norm_per_head != 0 ? head * kUsualDim : 0) + c);
}
// norm_head() for a usual head, of which a lane holds v.
__device__ __forceinline__ float norm_scale(const float4& v, float eps) {
  float sum = __fmaf_rn(v.x, v.x, 0.0f);
  sum = __fmaf_rn(v.y, v.y, sum);
  sum = __fmaf_rn(v.z, v.z, sum);
  sum = __fmaf_rn(v.w, v.w, sum);
  return rsqrtf(sum_of_warp(sum) / static_cast<float>(kUsualDim) + eps);
}
__device__ __forceinline__ void norm_four(float4& v, const float4& weight, float eps) {
  const float scale = norm_scale(v, eps);
  v.x = __fmul_rn(__fmul_rn(v.x, scale), weight.x);
  v.y = __fmul_rn(__fmul_rn(v.y, scale), weight.y);
  v.z = __fmul_rn(__fmul_rn(v.z, scale), weight.z);
  v.w = __fmul_rn(__fmul_rn(v.w, scale), weight.w);
}

// Feature c of a head, rotated: `partner` is the other element of its pair; `second` says which one
// this is.
__device__ __forceinline__ float rotated(float v, float partner, float cos, float sin,
                                         bool second) {
  return __fmaf_rn(v, cos, second ? __fmul_rn(partner, sin) : -__fmul_rn(partner, sin));
}

// Cosines and sines of four adjacent features from c on, if the two elements of a pair are half of
// the rotated part apart.
struct Turn {
  float4 cos, sin;
};
// For a usual head.
__device__ __forceinline__ Turn usual_turn(const float* table, int64_t token, int c) {
  const float* from = table + token * kUsualDim + c % (kUsualDim / 2);
  return {*reinterpret_cast<const float4*>(from),
          *reinterpret_cast<const float4*>(from + kUsualDim / 2)};
}
__device__ __forceinline__ void rotate_usual(float4& v, const Turn& turn) {
  const bool second = threadIdx.x % 32 >= 16;
  const auto one = [&](float& its, float cos, float sin) {
    its = rotated(its, __shfl_xor_sync(0xffffffff, its, 16), cos, sin, second);
  };
  one(v.x, turn.cos.x, turn.sin.x), one(v.y, turn.cos.y, turn.sin.y);
  one(v.z, turn.cos.z, turn.sin.z), one(v.w, turn.cos.w, turn.sin.w);
}
__device__ __forceinline__ bool turns_by_fours(const HeadsArgs::Part& part) {
  return part.interleaved == 0 && (part.rotary_dim / 2 | part.offset) % 4 == 0;
}
__device__ __forceinline__ Turn turn_at(const HeadsArgs::Part& part, const float* table, int c) {
  const int half = part.rotary_dim / 2, at = c - part.offset;
  if (!turns_by_fours(part) || at < 0 || at >= part.rotary_dim) return {};
  const float* from = table + (at >= half ? at - half : at);
  return {*reinterpret_cast<const float4*>(from), *reinterpret_cast<const float4*>(from + half)};
}

// Four adjacent features of the head in shared memory, from c on, rotated one by one.
static __device__ __noinline__ float4 rotate_each(const float* head, int c, int dim,
                                                  const HeadsArgs::Part& part, const float* table) {
  const float4 v = *reinterpret_cast<const float4*>(head + c);
  const int half = part.rotary_dim / 2, at = c - part.offset;
  const auto one = [&](float x, int i) {
    const int e = at + i;
    if (e < 0 || e >= part.rotary_dim || c + i >= dim) return x;
    const bool second = part.interleaved != 0 ? e % 2 != 0 : e >= half;
    const int k = part.interleaved != 0 ? e / 2 : (second ? e - half : e);
    const int apart = part.interleaved != 0 ? 1 : half;
    return rotated(x, head[c + i + (second ? -apart : apart)], table[k], table[half + k], second);
  };
  return make_float4(one(v.x, 0), one(v.y, 1), one(v.z, 2), one(v.w, 3));
}

// Four adjacent features of the head in shared memory, from c on, rotated.
__device__ __forceinline__ float4 rotate_four(const float* head, int c, int dim,
                                              const HeadsArgs::Part& part, const float* table,
                                              const Turn& turn) {
  float4 v = *reinterpret_cast<const float4*>(head + c);
  if (part.rotary_dim == 0) return v;
  const int half = part.rotary_dim / 2, at = c - part.offset;
  if (turns_by_fours(part)) {
    if (at < 0 || at >= part.rotary_dim) return v;
    const bool second = at >= half;
    const auto& [cos, sin] = turn;
    const float4 other = *reinterpret_cast<const float4*>(head + (second ? c - half : c + half));
    v.x = rotated(v.x, other.x, cos.x, sin.x, second);
    v.y = rotated(v.y, other.y, cos.y, sin.y, second);
    v.z = rotated(v.z, other.z, cos.z, sin.z, second);
    v.w = rotated(v.w, other.w, cos.w, sin.w, second);
    return v;
  }
  return rotate_each(head, c, dim, part, table);
}

// heads() whose results are only read by attention from the cache: stored parts need not be written
// back.
int heads_to_cache(const Context& ctx, const HeadsArgs& args);

}  // namespace freshet::cuda

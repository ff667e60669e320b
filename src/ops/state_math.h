// Vectors of sixteen floats for the operations on states, and the functions that these need.
//
// GCC's generic vectors: compiled for whatever registers a function may use. Products and sums are
// never contracted, so all instruction sets are bit-identical. Rows of fewer than sixteen elements
// are padded with zeros. Pure.
#pragma once

#include <cstdint>
#include <cstring>

namespace freshet::ops {

constexpr int kLanes = 16;
typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t IntLanes __attribute__((vector_size(kLanes * sizeof(int32_t))));

#define FRESHET_LANES_INLINE static inline __attribute__((always_inline))

FRESHET_LANES_INLINE void lanes_of(Lanes& out, float x) {
  for (int i = 0; i < kLanes; ++i) out[i] = x;
}
FRESHET_LANES_INLINE void load_lanes(Lanes& out, const float* from, int count) {
  if (count == kLanes) {
    std::memcpy(&out, from, sizeof out);
    return;
  }
  lanes_of(out, 0.0f);
  std::memcpy(&out, from, static_cast<size_t>(count) * sizeof(float));
}
FRESHET_LANES_INLINE void store_lanes(float* to, const Lanes& x, int count) {
  if (count == kLanes) {
    std::memcpy(to, &x, sizeof x);
  } else {
    std::memcpy(to, &x, static_cast<size_t>(count) * sizeof(float));
  }
}

// e^x, within 2 units in the last place; x is limited to [-87, 88]. The polynomials are those of
// Cephes.
FRESHET_LANES_INLINE void exp_lanes(Lanes& x) {
  x = x < -87.0f ? x * 0.0f - 87.0f : x;
  x = x > 88.0f ? x * 0.0f + 88.0f : x;
  const Lanes shifted = x * 1.44269504088896341f + 12582912.0f;  // rounds to an integer
  const Lanes n = shifted - 12582912.0f;
  const Lanes r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Lanes y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const IntLanes power = (__builtin_convertvector(n, IntLanes) + 127) << 23;
  Lanes scale;
  std::memcpy(&scale, &power, sizeof scale);
  x = y * scale;
}

// 1 / (1 + e^-x)
FRESHET_LANES_INLINE void sigmoid_lanes(Lanes& x) {
  Lanes e = -x;
  exp_lanes(e);
  x = 1.0f / (e + 1.0f);
}

// log(1 + e^x) = max(x, 0) + log(1 + u), u = e^-|x|. The logarithm of the rounded w = 1 + u is
// corrected by u / (w - 1).
FRESHET_LANES_INLINE void softplus_lanes(Lanes& x) {
  Lanes zero;
  lanes_of(zero, 0.0f);
  const Lanes top = x > 0.0f ? x : zero;
  Lanes u = x > 0.0f ? -x : x;
  exp_lanes(u);
  const Lanes w = u + 1.0f;
  const Lanes large = w > 1.41421356f ? zero + 1.0f : zero;  // then log(w) = log(2) + log(w / 2)
  const Lanes f = (w > 1.41421356f ? w * 0.5f : w) - 1.0f;
  const Lanes z = f * f;
  Lanes y = f * 7.0376836292e-2f - 1.1514610310e-1f;
  y = y * f + 1.1676998740e-1f;
  y = y * f - 1.2420140846e-1f;
  y = y * f + 1.4249322787e-1f;
  y = y * f - 1.6668057665e-1f;
  y = y * f + 2.0000714765e-1f;
  y = y * f - 2.4999993993e-1f;
  y = y * f + 3.3333331174e-1f;
  y = y * f * z - large * 2.12194440e-4f - z * 0.5f;
  const Lanes log = f + y + large * 0.693359375f;
  const Lanes t = w - 1.0f;
  const Lanes exact = log * (u / (t == 0.0f ? zero + 1.0f : t));
  x = top + (t == 0.0f ? u : exact);
}

FRESHET_LANES_INLINE float softplus_one(float x) {
  Lanes v;
  lanes_of(v, x);
  softplus_lanes(v);
  return v[0];
}
FRESHET_LANES_INLINE float exp_one(float x) {
  Lanes v;
  lanes_of(v, x);
  exp_lanes(v);
  return v[0];
}
FRESHET_LANES_INLINE float sigmoid_one(float x) {
  Lanes v;
  lanes_of(v, x);
  sigmoid_lanes(v);
  return v[0];
}

}  // namespace freshet::ops

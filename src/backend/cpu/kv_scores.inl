// The inner loops of Ops::key_scores() and Ops::selected_attention(), as plain code over vectors of
// 16 floats that the compiler maps to the instruction set of the including source. Define
// FRESHET_SCORES: the name of the row in C++.
#include <cstdint>
#include <cstring>
#include <limits>

#include "ops/kernel_table.h"

// Vectors are wider than some instruction sets' registers, but none crosses a translation unit.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

namespace freshet::cpu {
namespace FRESHET_SCORES {
namespace {

using F16x = float __attribute__((vector_size(64)));
using I16x = int32_t __attribute__((vector_size(64)));
using U16x = uint32_t __attribute__((vector_size(64)));
using Half16x = uint16_t __attribute__((vector_size(32)));

inline F16x load(const float* p) {
  F16x v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, F16x v) {
  std::memcpy(p, &v, sizeof v);
}

template <int R>
inline void dot_rows(const float* q, const float* keys, int key_dim, float* out, int64_t stride) {
  F16x acc[R] = {};
  for (int d = 0; d < key_dim; ++d) {
    const F16x k = load(keys + d * 16);
    for (int r = 0; r < R; ++r) acc[r] += q[r * key_dim + d] * k;
  }
  for (int r = 0; r < R; ++r) store(out + r * stride, acc[r]);
}

void dots(const float* q, int rows, const float* keys, int key_dim, float* out, int64_t stride) {
  int r = 0;
  for (; r + 4 <= rows; r += 4)
    dot_rows<4>(q + r * key_dim, keys, key_dim, out + r * stride, stride);
  for (; r < rows; ++r) dot_rows<1>(q + r * key_dim, keys, key_dim, out + r * stride, stride);
}

// e^x for x <= 0, within 2 units in the last place; about 0 below -87.
inline F16x exp_of(F16x x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const F16x low = x - x - 87.0f;
  x = x < low ? low : x;
  const F16x shifted = x * 1.44269504f + kRound;
  const F16x n = shifted - kRound;
  F16x r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  F16x p = r * 0.00139506f + 0.00836895f;
  p = p * r + 0.0416662f;
  p = p * r + 0.16666518f;
  p = p * r + 0.50000001f;
  p = r * r * p + r + 1.0f;
  I16x bits;
  std::memcpy(&bits, &p, sizeof bits);
  bits += __builtin_convertvector(n, I16x) << 23;
  std::memcpy(&p, &bits, sizeof p);
  return p;
}

void add_weights(float* scores, int64_t n, const float* sink, int64_t* sums) {
  F16x most = load(scores);
  for (int64_t i = 16; i < n; i += 16) {
    const F16x v = load(scores + i);
    most = v > most ? v : most;
  }
  float top = sink != nullptr ? *sink : most[0];
  for (int l = 0; l < 16; ++l) top = most[l] > top ? most[l] : top;
  double sum = 0.0;
  if (sink != nullptr) {
    const F16x zero = {};
    sum = static_cast<double>(exp_of(zero + (*sink - top))[0]);
  }
  for (int64_t i = 0; i < n; i += 16) {
    const F16x v = exp_of(load(scores + i) - top);
    store(scores + i, v);
    float part[8], four[4];
    for (int l = 0; l < 8; ++l) part[l] = v[l] + v[l + 8];
    for (int l = 0; l < 4; ++l) four[l] = part[l] + part[l + 4];
    sum += static_cast<double>((four[0] + four[2]) + (four[1] + four[3]));
  }
  const auto units = static_cast<float>(static_cast<double>(ops::kScoreUnits) / sum);
  for (int64_t i = 0; i < n; i += 16) {
    const I16x whole = __builtin_convertvector(load(scores + i) * units + 0.5f, I16x);
    for (int l = 0; l < 16; ++l) sums[i + l] += whole[l];
  }
}

// Loads sixteen BF16 values; zeros from `n` on.
inline F16x load_bf16(const uint16_t* p, int n) {
  Half16x half = {};
  if (n >= 16) {
    std::memcpy(&half, p, sizeof half);
  } else {
    std::memcpy(&half, p, static_cast<size_t>(n) * sizeof(uint16_t));
  }
  const U16x bits = __builtin_convertvector(half, U16x) << 16;
  F16x v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}

template <int R>
inline float promise_rows(const float* q, const uint16_t* least, const uint16_t* greatest,
                          int key_dim, float spread) {
  F16x acc[R] = {};
  for (int d = 0; d < key_dim; d += 16) {
    const int n = key_dim - d;
    const F16x low = load_bf16(least + d, n), high = load_bf16(greatest + d, n);
    const F16x middle = high + low, width = (high - low) * spread;
    for (int r = 0; r < R; ++r) {
      F16x x = {};
      if (n >= 16) {
        x = load(q + r * key_dim + d);
      } else {
        std::memcpy(&x, q + r * key_dim + d, static_cast<size_t>(n) * sizeof(float));
      }
      acc[r] += x * middle + (x < 0.0f ? -x : x) * width;
    }
  }
  F16x all = acc[0];
  for (int r = 1; r < R; ++r) all += acc[r];
  float part[8], four[4];
  for (int l = 0; l < 8; ++l) part[l] = all[l] + all[l + 8];
  for (int l = 0; l < 4; ++l) four[l] = part[l] + part[l + 4];
  return (four[0] + four[2]) + (four[1] + four[3]);
}

float promise(const float* q, int rows, const uint16_t* least, const uint16_t* greatest,
              int key_dim, float spread) {
  float sum = 0.0f;
  int r = 0;
  for (; r + 4 <= rows; r += 4)
    sum += promise_rows<4>(q + r * key_dim, least, greatest, key_dim, spread);
  for (; r < rows; ++r) sum += promise_rows<1>(q + r * key_dim, least, greatest, key_dim, spread);
  return sum == sum ? sum : std::numeric_limits<float>::infinity();
}

}  // namespace
}  // namespace FRESHET_SCORES
}  // namespace freshet::cpu

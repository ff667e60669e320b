// Rows of weights for the GEMM tests: random rows as a checkpoint stores them, and the values that
// the kernels effectively use for them. Pure.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "quant/format.h"
#include "tensor/dtype.h"

namespace freshet::cpu {

using quant::Format;

// Offsets of the f16 scales in a stored block.
inline std::vector<int> scale_offsets(Format f) {
  switch (f) {
    case Format::kQ4_0:
    case Format::kQ5_0:
    case Format::kQ8_0:
    case Format::kIQ4_NL:
    case Format::kIQ4_XS:
    case Format::kIQ1_S:
    case Format::kIQ2_XXS:
    case Format::kIQ2_XS:
    case Format::kIQ2_S:
    case Format::kIQ3_XXS:
    case Format::kIQ3_S:
      return {0};
    case Format::kTQ1_0:
      return {52};
    case Format::kTQ2_0:
      return {64};
    case Format::kQ4_1:
    case Format::kQ5_1:
    case Format::kQ4_K:
    case Format::kQ5_K:
      return {0, 2};
    case Format::kQ2_K:
      return {80, 82};
    case Format::kQ3_K:
      return {108};
    case Format::kQ6_K:
      return {208};
    default:
      return {};
  }
}

// Writes the f16 scale of a block of IQ1_M: a nibble is at the top of each of the last four words.
inline void put_scale_of_iq1_m(uint8_t* block, uint16_t d) {
  for (int i = 0; i < 4; ++i) {
    uint8_t& high = block[49 + 2 * i];
    high = static_cast<uint8_t>((high & 15) | (d >> (4 * i) & 15) << 4);
  }
}

enum class Values { kUsual, kExtreme, kLargest, kBadScale };

inline float some_scale(Values values, std::mt19937& rng) {
  std::normal_distribution<float> normal;
  const float extreme[] = {0.0f, -0.0f, 1e-40f, 1e30f};
  return values == Values::kExtreme ? extreme[rng() % 4] : 0.01f * normal(rng);
}

// Makes random bytes a block of a format whose scale is an F32 or a power of two.
inline void published_block(Format f, Values values, bool odd, std::mt19937& rng, uint8_t* block) {
  const auto size = static_cast<size_t>(quant::info(f).block_bytes);
  const float d = some_scale(values, rng);
  uint32_t bits = std::bit_cast<uint32_t>(d);
  if (f == Format::kMXFP8 || f == Format::kFP8G32) {
    for (size_t i = 0; i < 32; ++i) {
      if ((block[i] & 0x7f) == 0x7f) block[i] &= 0xfe;  // no NaN
    }
  }
  if (f == Format::kMXFP8) {
    const uint8_t extreme[] = {0, 1, 127, 226};
    block[32] =
        values == Values::kExtreme ? extreme[rng() % 4] : static_cast<uint8_t>(118 + rng() % 8);
    return;
  }
  const std::string_view name = quant::info(f).name;
  const int bits_of = name.starts_with("int") ? name[3] - '0' : 0;
  if (bits_of > 0) {
    const uint32_t top = (1u << bits_of) - 1;
    bits = (bits & 0xffffff00) | (values == Values::kLargest ? (odd ? top : 0) : rng() % (top + 1));
  }
  std::memcpy(block + size - 4, &bits, 4);
}

constexpr size_t kBadRow = 3;  // row that has the bad scale of kBadScale

// Rows of random blocks: any bits in the values (for kLargest all set or none set, alternating),
// scales of a usual or an extreme size, or NaN as the first scale of a row.
inline std::vector<std::vector<uint8_t>> random_rows(Format f, int64_t rows, int64_t cols,
                                                     Values values, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  const auto& info = quant::info(f);
  const size_t bytes = quant::row_bytes(f, cols);
  std::vector<std::vector<uint8_t>> out(static_cast<size_t>(rows), std::vector<uint8_t>(bytes));
  const uint16_t extremes[] = {0, 1, 0x8001, 0x03ff, 0x7bff, 0xfbff, 0x8000, 0x3c00};
  for (auto& row : out) {
    for (auto& b : row) b = static_cast<uint8_t>(rng());
    const bool odd = (&row - out.data()) % 2 != 0;
    if (values == Values::kLargest) std::fill(row.begin(), row.end(), odd ? 0 : 0xff);
    if (f == Format::kFP8) {
      for (auto& b : row) b = (b & 0x7f) == 0x7f ? static_cast<uint8_t>(b & 0xfe) : b;  // no NaN
      for (size_t at = 128; at < bytes; at += 132) {
        const float extreme[] = {0.0f, -0.0f, 1e-40f, 1e30f};
        const float d = values == Values::kExtreme ? extreme[rng() % 4] : 0.01f * normal(rng);
        std::memcpy(&row[at], &d, 4);
      }
      continue;
    }
    if (f == Format::kInt4G128 || f == Format::kInt4G32) {
      for (size_t at = 0; at < bytes; at += static_cast<size_t>(info.block_bytes)) {
        const float extreme[] = {0.0f, -0.0f, 1e-40f, 1e30f};
        const float d = values == Values::kExtreme ? extreme[rng() % 4] : 0.01f * normal(rng);
        const auto bits = std::bit_cast<uint32_t>(d);
        const auto zero = values == Values::kLargest ? (odd ? 15u : 0u) : rng() % 16u;
        row[at] = static_cast<uint8_t>(bits >> 16);
        row[at + 1] = static_cast<uint8_t>(bits >> 24);
        row[at + 2] = static_cast<uint8_t>((bits >> 8 & 0xf0) | zero);
      }
      continue;
    }
    if (f == Format::kNVFP4) {
      for (size_t at = 4; at < bytes; at += 9) {
        if ((row[at] & 0x7f) == 0x7f) row[at] &= 0xfe;  // no NaN
      }
      const float d = some_scale(values, rng) * 0.01f;
      std::memcpy(row.data(), &d, sizeof d);
      continue;
    }
    if (info.head_bytes == 0 && scale_offsets(f).empty() && info.block_size > 1 &&
        f != Format::kMXFP4) {
      for (size_t at = 0; at < bytes; at += static_cast<size_t>(info.block_bytes)) {
        published_block(f, values, odd, rng, &row[at]);
      }
      continue;
    }
    if (f == Format::kINT8) {
      if (values == Values::kLargest) std::fill(row.begin(), row.end(), odd ? 0x80 : 0x7f);
      const float extreme[] = {0.0f, -0.0f, 1e-40f, 1e30f};
      const float d = values == Values::kExtreme ? extreme[rng() % 4] : 0.01f * normal(rng);
      std::memcpy(row.data(), &d, sizeof d);
      continue;
    }
    if (info.block_size == 1) {
      for (int64_t k = 0; k < cols; ++k) {
        const float v = normal(rng);
        const uint16_t bf = f32_to_bf16(v), h = f32_to_f16(v);
        if (f == Format::kF32) std::memcpy(&row[static_cast<size_t>(k) * 4], &v, 4);
        if (f == Format::kF16) std::memcpy(&row[static_cast<size_t>(k) * 2], &h, 2);
        if (f == Format::kBF16) std::memcpy(&row[static_cast<size_t>(k) * 2], &bf, 2);
      }
      continue;
    }
    for (size_t at = 0; at < bytes; at += static_cast<size_t>(info.block_bytes)) {
      for (const int offset : scale_offsets(f)) {
        const uint16_t d =
            values == Values::kExtreme ? extremes[rng() % 8] : f32_to_f16(0.01f * normal(rng));
        std::memcpy(&row[at + static_cast<size_t>(offset)], &d, 2);
      }
      if (f == Format::kIQ1_M) {
        put_scale_of_iq1_m(&row[at], values == Values::kExtreme ? extremes[rng() % 8]
                                                                : f32_to_f16(0.01f * normal(rng)));
      }
      if (f == Format::kMXFP4 && values != Values::kExtreme) {
        row[at] = static_cast<uint8_t>(118 + rng() % 8);
      }
    }
  }
  if (values == Values::kBadScale) {
    const uint16_t nan = 0x7e00;
    uint8_t* const block = out[kBadRow].data();
    if (f == Format::kIQ1_M) {
      put_scale_of_iq1_m(block, nan);
    } else {
      std::memcpy(block + scale_offsets(f)[0], &nan, 2);
    }
  }
  return out;
}

// For a format with blocks of 32: the bits to which the scales of eight blocks are rounded, and a
// block's scale and offset. 0 bits: the format is computed as it decodes.
inline int scale_bits(Format f) {
  switch (f) {
    case Format::kQ4_0:
      return 12;
    case Format::kQ4_1:
    case Format::kQ5_0:
    case Format::kMXFP4:
      return 11;
    case Format::kQ5_1:
      return 10;
    case Format::kQ8_0:
    case Format::kIQ4_NL:
      return 8;
    default:
      return 0;
  }
}
inline double half_at(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return static_cast<double>(f16_to_f32(h));
}

// Rounds values[0, n) to multiples of one power of two, with the largest at `bits` bits.
inline void round_together(double* values, int n, int bits) {
  double most = 0.0;
  for (int i = 0; i < n; ++i) most = std::max(most, std::fabs(values[i]));
  double unit = std::ldexp(1.0, -126);
  while (std::nearbyint(most / unit) >= std::ldexp(1.0, bits)) unit *= 2.0;
  for (int i = 0; i < n; ++i) values[i] = std::nearbyint(values[i] / unit) * unit;
}

// The effective values of a Q4_0 row in tile GEMMs with one plane of activations: per eight blocks
// the scales become integers up to 127, and scale times value becomes a byte that counts eight.
inline std::vector<double> rounded_q4_0(const std::vector<uint8_t>& row, int64_t cols) {
  std::vector<double> w(static_cast<size_t>(cols));
  for (int64_t b = 0; b < cols / 32; b += 8) {
    const int n = static_cast<int>(std::min<int64_t>(8, cols / 32 - b));
    float scale[8] = {}, most = 0.0f;
    for (int i = 0; i < n; ++i) {
      scale[i] = static_cast<float>(half_at(row.data() + (b + i) * 18));
      most = std::max(most, std::fabs(scale[i]));
    }
    const float inverse = most > 0.0f ? 127.0f / most : 0.0f, unit = most * (8.0f / 127.0f);
    for (int i = 0; i < n * 32; ++i) {
      const uint8_t byte = row[static_cast<size_t>((b + i / 32) * 18 + 2 + i % 16)];
      const int number = (i % 32 < 16 ? byte & 15 : byte >> 4) - 8;
      const double whole = std::nearbyint(double{scale[i / 32]} * inverse);
      w[static_cast<size_t>(b * 32 + i)] = std::floor((whole * number + 4.0) / 8.0) * unit;
    }
  }
  return w;
}

// The nearest BF16, ties away from zero.
inline double bf16_of(double v) {
  const auto bits = std::bit_cast<uint32_t>(static_cast<float>(v));
  return static_cast<double>(bf16_to_f32(static_cast<uint16_t>((bits + 0x8000) >> 16)));
}

// The same for Q4_K, times x: scale times value becomes a quarter of itself, rounded; minima are
// BF16, and so are their factors.
inline double rounded_q4_k_product(const std::vector<uint8_t>& row, const std::vector<double>& x) {
  double sum = 0.0, of_group = 0.0;
  for (size_t k = 0; k < x.size(); ++k) {
    const uint8_t* const block = row.data() + k / 256 * 144;
    const uint8_t* const s = block + 4;
    const size_t g = k % 256 / 32;
    const int scale = g < 4 ? s[g] & 63 : (s[g + 4] & 15) | s[g - 4] >> 6 << 4;
    const int low = g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4 | s[g] >> 6 << 4;
    const int number = block[16 + g / 2 * 32 + k % 32] >> (g % 2 * 4) & 15;
    sum += half_at(block) * 4.0 * ((scale * number + 2) / 4) * x[k];
    of_group += x[k];
    if (k % 32 < 31) continue;
    sum -= bf16_of(half_at(block + 2) * low) * bf16_of(of_group);
    of_group = 0.0;
  }
  return sum;
}

// The effective values of a stored row in the kernels.
inline std::vector<double> weights_of(Format f, const std::vector<uint8_t>& row, int64_t cols) {
  std::vector<float> decoded(static_cast<size_t>(cols));
  quant::info(f).decode(row.data(), decoded.data(), cols);
  std::vector<double> w(decoded.begin(), decoded.end());
  if (scale_bits(f) == 0) return w;
  const auto bytes = static_cast<size_t>(quant::info(f).block_bytes);
  const bool affine = f == Format::kQ4_1 || f == Format::kQ5_1;
  const int64_t blocks = cols / 32;
  for (int64_t b = 0; b < blocks; b += 8) {
    const int n = static_cast<int>(std::min<int64_t>(8, blocks - b));
    double scale[8] = {}, low[8] = {}, whole[8], whole_low[8];
    for (int i = 0; i < n; ++i) {
      const uint8_t* block = row.data() + static_cast<size_t>(b + i) * bytes;
      scale[i] = f == Format::kMXFP4 ? std::ldexp(1.0, *block - 128) : half_at(block);
      if (affine) low[i] = half_at(block + 2);
    }
    std::copy_n(scale, 8, whole);
    std::copy_n(low, 8, whole_low);
    round_together(whole, n, scale_bits(f));
    round_together(whole_low, n, 15);
    for (int i = 0; i < n * 32; ++i) {
      double& v = w[static_cast<size_t>(b * 32 + i)];
      const int at = i / 32;
      v = scale[at] == 0.0 ? whole_low[at] : (v - low[at]) / scale[at] * whole[at] + whole_low[at];
    }
  }
  return w;
}

}  // namespace freshet::cpu

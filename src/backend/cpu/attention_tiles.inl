// Attention of one tile of rows on byte tiles, for F16 caches.
//
// The key and the value of a token are each stored as 16-bit integers times a power of two of their
// own. An F16 element that is at least a sixteenth of the largest is exact; others lose at most
// 2^-15 of the largest. An integer is 256 high + low, both signed bytes. Queries and weights are
// 16-bit integers as well, with one scale per row (and split). The sums of products high x high and
// high x low are exact, in any order and with any number of rows; low x low is left out.
//
// A head's block has first the keys: per 64 features one tile of high and one of low bytes, whose
// rows are four features of 16 tokens. Then the values: per 16 features four rows of high and four
// of low bytes, each row four tokens of 16 features. The lowest bits of a key's first 16 features
// hold the powers of two of the key and of its value.
//
// FRESHET_TILES: tiles_amx.h or tiles_emulated.h.
#pragma once

#include <cstring>

#include "backend/cpu/attention_merge.h"
#include "backend/cpu/vector_simd_avx512.h"

#define FRESHET_INLINE static inline __attribute__((always_inline))
#define FRESHET_INLINE_MEMBER inline __attribute__((always_inline))
#define FRESHET_UNROLL _Pragma("GCC unroll 64")
#include FRESHET_TILES

namespace freshet::cpu {
namespace {

inline constexpr int64_t kTileBytes = 1024;
inline constexpr int64_t kPlanes = 2 * kTileBytes;  // a tile of high bytes, then one of low bytes
inline constexpr int kTop = 127 * 256;              // the largest code; low bytes add to it
inline constexpr int kNoNumber = 127;               // the power that marks NaN

struct Bytes {
  __m128i high, low;
};
FRESHET_INLINE Bytes bytes_of(__m512i codes) {
  const __m512i up = _mm512_add_epi32(codes, _mm512_set1_epi32(128));
  return {_mm512_cvtepi32_epi8(_mm512_srai_epi32(up, 8)), _mm512_cvtepi32_epi8(codes)};
}
// Joins the sums of high x high and of high x low bytes to one value, in units of 256.
FRESHET_INLINE __m512 joined(const int32_t* high, const int32_t* middle) {
  const __m512i up = _mm512_slli_epi32(_mm512_load_si512(high), 8);
  return _mm512_cvtepi32_ps(_mm512_add_epi32(up, _mm512_load_si512(middle)));
}
FRESHET_INLINE __m512i powers_of_two(__m512i power) {
  return _mm512_slli_epi32(_mm512_add_epi32(power, _mm512_set1_epi32(127)), 23);
}

// Rounds to F16; saturates.
FRESHET_INLINE __m512 as_f16(const float* x) {
  const __m512 most = _mm512_set1_ps(65504.0f), least = _mm512_set1_ps(-65504.0f);
  const __m512 v = _mm512_max_ps(least, _mm512_min_ps(most, _mm512_loadu_ps(x)));  // NaN stays NaN
  return _mm512_cvtph_ps(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// The power of two that scales n values to codes.
inline int power_for(const float* x, int n) {
  __m512i largest = _mm512_setzero_si512();
  for (int i = 0; i < n; i += 16) {
    largest = _mm512_max_epu32(largest, _mm512_castps_si512(_mm512_abs_ps(as_f16(x + i))));
  }
  const uint32_t bits = _mm512_reduce_max_epu32(largest);
  if (bits > 0x7f800000u) return kNoNumber;
  // The largest code is in 2^14 .. kTop: mantissas of 1.984375 and more need the next power.
  const int power = static_cast<int>((bits + (1u << 17)) >> 23) - 127 - 14;
  return power < -40 ? -40 : power;
}
FRESHET_INLINE __m512i codes_of(const float* x, int power) {
  if (power == kNoNumber) return _mm512_setzero_si512();
  const __m512 scale = _mm512_castsi512_ps(powers_of_two(_mm512_set1_epi32(-power)));
  return _mm512_cvtps_epi32(_mm512_mul_ps(as_f16(x), scale));
}

class TiledAttention : SplitMerger<Avx512> {
  static constexpr int kTogether = 16;  // rows
  static constexpr int kChunk = 64;     // tokens per tile of values

  const int64_t key_tiles_ = key_dim_ / 64;
  const int64_t value_tiles_ = value_dim_ / 16;
  float* const x_ = free_;  // [kTogether, kSplit], log2 of scores, value powers added
  float* const key_scale_ = x_ + kTogether * kSplit;  // per token of the split
  float* const value_power_ = key_scale_ + kSplit;
  float* const value_inverse_ = value_power_ + kSplit;
  float* const row_scale_ = value_inverse_ + kSplit;
  int32_t* const sums_ = reinterpret_cast<int32_t*>(row_scale_ + kAttendRows);  // eight tiles
  uint8_t* const q_ = reinterpret_cast<uint8_t*>(sums_ + 8 * 256);  // [rows / 16, key_tiles]
  uint8_t* const weights_ = q_ + kAttendRows / kTogether * key_tiles_ * kPlanes;  // [chunks]
  uint8_t* const values_ = weights_ + kSplit / kChunk * kPlanes;  // [chunks, value_tiles]
  Tiles tiles_;

  explicit TiledAttention(const AttentionTile& tile) : SplitMerger(tile) {
    tiles_.configure(tile.rows < kTogether ? tile.rows : kTogether, 64);
    load_queries();
  }

  void load_queries() {
    for (int r = 0; r < t_.rows; ++r) {
      const int64_t row = t_.first_row + r;
      const float* from = t_.q + row / t_.group * t_.q_stride + row % t_.group * key_dim_;
      __m512 largest = _mm512_setzero_ps();
      for (int d = 0; d < key_dim_; d += 16) {
        const __m512 v = _mm512_abs_ps(_mm512_loadu_ps(from + d));
        largest = _mm512_max_ps(largest, v);
      }
      const float top = _mm512_reduce_max_ps(largest);
      const __m512 inverse = _mm512_set1_ps(top > 1e-30f ? kTop / top : 0.0f);
      __m512 sum = _mm512_setzero_ps();  // becomes NaN if an element is not finite
      uint8_t* const to = q_ + r / kTogether * key_tiles_ * kPlanes + r % kTogether * 64;
      for (int d = 0; d < key_dim_; d += 16) {
        const __m512 v = _mm512_mul_ps(_mm512_loadu_ps(from + d), inverse);
        sum = _mm512_add_ps(sum, _mm512_sub_ps(v, v));
        const Bytes b = bytes_of(_mm512_cvtps_epi32(v));
        uint8_t* const at = to + d / 64 * kPlanes + d % 64;
        _mm_store_si128(reinterpret_cast<__m128i*>(at), b.high);
        _mm_store_si128(reinterpret_cast<__m128i*>(at + kTileBytes), b.low);
      }
      row_scale_[r] = top / kTop * 256.0f * t_.scale * (t_.softcap > 0.0f ? 1.0f : kLog2E) +
                      _mm512_reduce_add_ps(sum);
    }
  }

  // With few rows it is faster to read values in place than to gather them for tiles.
  bool few() const { return t_.rows <= 8; }
  int groups() const { return (t_.rows + kTogether - 1) / kTogether; }
  Group group(int g, int64_t split) const { return group_at(g * kTogether, kTogether, split); }

  // Loads the scales of the tokens' keys and values; zeros for blocks that are not needed.
  void load_scales(const Group& need, int64_t split) {
    const __m512i ones = _mm512_set1_epi8(1), some = _mm512_set1_epi32(0x08040201),
                  rest = _mm512_set1_epi32(static_cast<int>(0x80402010));
    const __m512i no_number = _mm512_set1_epi32(kNoNumber), most = _mm512_set1_epi32(64),
                  least = _mm512_set1_epi32(-64);
    const __m512 nan = _mm512_set1_ps(__builtin_nanf(""));
    for (int t = 0; t < kSplit; t += 16) {
      if (t < need.from || t >= need.to) {
        _mm512_store_ps(value_inverse_ + t, _mm512_setzero_ps());
        continue;
      }
      const uint8_t* const low = block(split, t) + kTileBytes;
      __m512i power[2];
      FRESHET_UNROLL
      for (int i = 0; i < 2; ++i) {
        const __m512i a = _mm512_and_si512(_mm512_load_si512(low + i * 128), ones);
        const __m512i b = _mm512_and_si512(_mm512_load_si512(low + i * 128 + 64), ones);
        power[i] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), a, some);
        power[i] = _mm512_dpbusd_epi32(power[i], b, rest);
      }
      const __mmask16 no_key = _mm512_cmpeq_epi32_mask(power[0], no_number);
      const __mmask16 no_value = _mm512_cmpeq_epi32_mask(power[1], no_number);
      FRESHET_UNROLL
      for (__m512i& p : power) p = _mm512_max_epi32(least, _mm512_min_epi32(most, p));
      const __m512 key = _mm512_castsi512_ps(powers_of_two(power[0]));
      _mm512_store_ps(key_scale_ + t, _mm512_mask_mov_ps(key, no_key, nan));
      _mm512_store_ps(value_power_ + t,
                      _mm512_mask_mov_ps(_mm512_cvtepi32_ps(power[1]), no_value, nan));
      const __m512i minus = _mm512_sub_epi32(_mm512_setzero_si512(), power[1]);
      _mm512_store_si512(value_inverse_ + t, powers_of_two(minus));
    }
  }

  template <int kTile>
  FRESHET_INLINE_MEMBER void load(const uint8_t* from) {
    tile_load<kTile>(from, 64);
    tile_load_gap();
  }
  template <int kTile, int kRow, int kColumn>
  FRESHET_INLINE_MEMBER void multiply() {
    tile_dp_i8<kTile, kRow, kColumn>();
    tile_product_gap();
  }
  FRESHET_INLINE_MEMBER void load_rows(const uint8_t* q) {
    load<4>(q);
    load<5>(q + kTileBytes);
  }
  // Multiplies a block of keys; sums go to tiles kSet and the next.
  template <int kSet>
  FRESHET_INLINE_MEMBER void multiply_keys(const uint8_t* q, const uint8_t* k, int32_t* sums) {
    tile_zero<kSet>();
    tile_zero<kSet + 1>();
    for (int64_t i = 0; i < key_tiles_; ++i, q += kPlanes, k += kPlanes) {
      if (key_tiles_ > 1) load_rows(q);
      load<6>(k);
      multiply<kSet, 4, 6>();
      multiply<kSet + 1, 5, 6>();
      load<7>(k + kTileBytes);
      multiply<kSet + 1, 4, 7>();
    }
    tile_store<kSet>(sums);
    tile_store<kSet + 1>(sums + 256);
  }
  int32_t* key_sums(int token) const { return sums_ + token % 64 / 16 * 512; }
  FRESHET_INLINE_MEMBER void multiply_keys(const uint8_t* q, int64_t split, int token) {
    if (token % 32 == 0) {
      multiply_keys<0>(q, block(split, token), key_sums(token));
    } else {
      multiply_keys<2>(q, block(split, token), key_sums(token));
    }
  }

  // Converts the sums of a block to scores as powers of two, plus the powers of the values.
  template <bool kCap>
  FRESHET_INLINE_MEMBER void scores_of(const Group& g, int token, int rows) {
    const int32_t* const sums = key_sums(token);
    const __m512 scale = _mm512_load_ps(key_scale_ + token);
    const __m512 power = _mm512_load_ps(value_power_ + token);
    float* const to = x_ + token;
    const float* const row_scale = row_scale_ + g.first;
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      const __m512 dot = joined(sums + r * 16, sums + 256 + r * 16);
      const __m512 row = _mm512_set1_ps(row_scale[r]);
      __m512 x = _mm512_mul_ps(dot, scale);
      if constexpr (kCap) {
        const __m512 cap = _mm512_set1_ps(t_.softcap);
        const __m512 v = _mm512_div_ps(_mm512_mul_ps(x, row), cap);
        x = _mm512_mul_ps(cap, Math<Avx512>::tanh(v));
        x = _mm512_fmadd_ps(x, _mm512_set1_ps(kLog2E), power);
      } else {
        x = _mm512_fmadd_ps(x, row, power);
      }
      _mm512_store_ps(to + r * kSplit, x);
    }
  }

  // Computes x_ of the group's rows. The tiles run two blocks ahead.
  void score(const Group& g, int64_t split) {
    const uint8_t* const q = q_ + g.first / kTogether * key_tiles_ * kPlanes;
    if (key_tiles_ == 1) load_rows(q);
    for (int t = g.from; t < g.from + 32 && t < g.to; t += 16) multiply_keys(q, split, t);
    for (int t = g.from; t < g.to; t += 16) {
      if (t + 32 < g.to) multiply_keys(q, split, t + 32);
      if (t_.softcap > 0.0f) {
        scores_of<true>(g, t, g.rows);
      } else if (g.rows == kTogether) {
        scores_of<false>(g, t, kTogether);
      } else {
        scores_of<false>(g, t, g.rows);
      }
    }
  }

  // Prefetches a block's values while scores become weights. Only with few rows: then the memory
  // would otherwise be idle.
  void fetch_values(const Group& g, int64_t split, int token) const {
    if (!few() || token >= g.to) return;
    const uint8_t* const from = block(split, token) + t_.values_at;
    for (int64_t i = 0; i < 32 * int64_t{value_dim_}; i += 64) __builtin_prefetch(from + i);
  }

  // Masks scores that row r of the group must not attend to, and records the largest.
  void find_max(const Group& g, int r, int64_t split) {
    fetch_values(g, split, g.from + 16 * r);
    float* const x = x_ + r * kSplit;
    const int row = g.first + r, from = g.from & -kChunk, to = (g.to + kChunk - 1) & -kChunk;
    const int64_t start = split * kSplit;
    const int64_t first = t_.first_seen(row) - start, end = t_.last_seen(row) + 1 - start;
    const __m512 none = _mm512_set1_ps(kNone);
    const auto mask = [&](int begin, int stop) {
      for (int i = begin; i < stop; i += 16) {
        const __m512 v = i >= g.from && i < g.to ? _mm512_load_ps(x + i) : none;
        _mm512_store_ps(x + i, Avx512::keep_range(v, first - i, end - i, none));
      }
    };
    const int seen = static_cast<int>(most(from, least(to, (first + 15) & -16)));
    mask(from, seen);
    mask(static_cast<int>(most(seen, least(to, end & -16))), to);
    __m512 max = none;
    for (int i = from; i < to; i += 16) max = _mm512_max_ps(max, _mm512_load_ps(x + i));
    split_max_[row] = _mm512_reduce_max_ps(max);
  }

  // kTop * 2^x for x <= 0. The polynomial in x - floor(x) has an error of 2.9e-6, and is exactly
  // kTop at 0.
  FRESHET_INLINE __m512 weight(__m512 x) {
    const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 p = _mm512_set1_ps(kTop * 0.0134266844f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(kTop * 0.0522424739f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(kTop * 0.241280205f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(kTop * 0.693044845f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(kTop));
    return _mm512_scalef_ps(p, x);  // scales by 2^floor(x)
  }

  // Row r of the group: turns x into weights and records their sum. The sum is taken before the
  // weights are rounded to integers, because the integers may be too coarse for the weights of
  // small values.
  void weigh(const Group& g, int r, int64_t split) {
    fetch_values(g, split, g.from + 16 * (g.rows + r));
    float* const x = x_ + r * kSplit;
    const int row = g.first + r, from = g.from & -kChunk, to = (g.to + kChunk - 1) & -kChunk;
    const float max = split_max_[row];
    const bool seen = !(max <= 0.5f * kNone);
    const __m512 base = _mm512_set1_ps(seen ? max : 0.0f);
    __m512 sum = _mm512_setzero_ps();
    uint8_t* to_bytes = weights_ + from / kChunk * kPlanes + r * 64;
    for (int i = from; i < to; i += kChunk, to_bytes += kPlanes) {
      __m512i code[4];
      FRESHET_UNROLL
      for (int j = 0; j < 4; ++j) {
        const __m512 p = weight(_mm512_sub_ps(_mm512_load_ps(x + i + 16 * j), base));
        code[j] = _mm512_cvtps_epi32(p);
        sum = _mm512_fmadd_ps(p, _mm512_load_ps(value_inverse_ + i + 16 * j), sum);
      }
      const __m512i a = _mm512_packs_epi32(code[0], code[1]),
                    b = _mm512_packs_epi32(code[2], code[3]);
      const __m512i up = _mm512_set1_epi16(128), low = _mm512_set1_epi16(255);
      const __m512i a_high = _mm512_srli_epi16(_mm512_add_epi16(a, up), 8);
      const __m512i b_high = _mm512_srli_epi16(_mm512_add_epi16(b, up), 8);
      _mm512_store_si512(to_bytes, _mm512_packus_epi16(a_high, b_high));
      _mm512_store_si512(to_bytes + kTileBytes,
                         _mm512_packus_epi16(_mm512_and_si512(a, low), _mm512_and_si512(b, low)));
    }
    split_max_[row] = seen ? max * kLn2 : kNegInf;
    split_sum_[row] = Avx512::reduce_add(sum) * (1.0f / kTop);
  }

  // Loads the split's values as tiles of 64 tokens. Row 4 q + b of a tile is quad q of block b, the
  // order in which weights are packed.
  void load_values(const Group& need, int64_t split) {
    for (int t = need.from; t < need.to; t += 16) {
      const uint8_t* from = block(split, t) + t_.values_at;
      uint8_t* to = values_ + t / kChunk * value_tiles_ * kPlanes + t % kChunk / 16 * 64;
      for (int64_t f = 0; f < 2 * value_tiles_; ++f, from += 256, to += kTileBytes) {
        FRESHET_UNROLL
        for (int q = 0; q < 4; ++q) {
          _mm512_store_si512(to + q * 256, _mm512_load_si512(from + q * 64));
        }
      }
    }
  }

  // Multiplies two tiles of features (or one) from f on; sums go to sums_ from tile kAt on.
  template <int kAt>
  FRESHET_INLINE_MEMBER void multiply_values(const Group& g, int64_t f, bool two) {
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
    for (int c = g.from / kChunk; c * kChunk < g.to; ++c) {
      const uint8_t* const v = values_ + (c * value_tiles_ + f) * kPlanes;
      load_rows(weights_ + c * kPlanes);
      load<6>(v);
      multiply<0, 4, 6>();
      multiply<1, 5, 6>();
      load<7>(v + kTileBytes);
      multiply<1, 4, 7>();
      if (!two) continue;
      load<6>(v + kPlanes);
      multiply<2, 4, 6>();
      multiply<3, 5, 6>();
      load<7>(v + kPlanes + kTileBytes);
      multiply<3, 4, 7>();
    }
    tile_store<0>(sums_ + kAt * 256);
    tile_store<1>(sums_ + (kAt + 1) * 256);
    tile_store<2>(sums_ + (kAt + 2) * 256);
    tile_store<3>(sums_ + (kAt + 3) * 256);
  }
  // The same sums for kRows rows from row `first` on, directly from the cache.
  template <int kRows, int kTwo>
  void sum_values(const Group& g, int64_t split, int first, int64_t f) {
    __m512i high[kTwo][kRows], middle[kTwo][kRows];
    const __m512i up = _mm512_set1_epi8(-128);  // adds 128, giving an unsigned byte
    __m512i too_much[kTwo];                     // correction for low bytes that are 128 too high
    FRESHET_UNROLL
    for (__m512i& v : too_much) v = _mm512_setzero_si512();
    FRESHET_UNROLL
    for (int i = 0; i < kTwo * kRows; ++i) {
      high[i / kRows][i % kRows] = middle[i / kRows][i % kRows] = _mm512_setzero_si512();
    }
    for (int t = g.from; t < g.to; t += 16) {
      const uint8_t* const v = block(split, t) + t_.values_at + f * 512;
      const uint8_t* const w = weights_ + t / kChunk * kPlanes + t % kChunk / 4 + first * 64;
      for (int q = 0; q < 4; ++q) {
        __m512i v_high[kTwo], v_low[kTwo];
        FRESHET_UNROLL
        for (int i = 0; i < kTwo; ++i) {
          v_high[i] = _mm512_load_si512(v + i * 512 + q * 64);
          v_low[i] = _mm512_load_si512(v + i * 512 + q * 64 + 256);
          too_much[i] = _mm512_dpbusd_epi32(too_much[i], up, v_high[i]);
        }
        FRESHET_UNROLL
        for (int r = 0; r < kRows; ++r) {
          const __m512i w_high = four_bytes(w + r * 64 + q * 16);
          const __m512i w_low = _mm512_xor_si512(four_bytes(w + r * 64 + q * 16 + kTileBytes), up);
          FRESHET_UNROLL
          for (int i = 0; i < kTwo; ++i) {
            high[i][r] = _mm512_dpbusd_epi32(high[i][r], w_high, v_high[i]);
            middle[i][r] = _mm512_dpbusd_epi32(middle[i][r], w_low, v_high[i]);
            middle[i][r] = _mm512_dpbusd_epi32(middle[i][r], w_high, v_low[i]);
          }
        }
      }
    }
    FRESHET_UNROLL
    for (int i = 0; i < kTwo * kRows; ++i) {
      int32_t* const to = sums_ + (f + i / kRows) % 4 * 512 + (first + i % kRows) * 16;
      _mm512_store_si512(to, high[i / kRows][i % kRows]);
      _mm512_store_si512(to + 256,
                         _mm512_sub_epi32(middle[i / kRows][i % kRows], too_much[i / kRows]));
    }
  }
  FRESHET_INLINE __m512i four_bytes(const uint8_t* from) {
    int32_t four;
    std::memcpy(&four, from, 4);
    return _mm512_set1_epi32(four);
  }
  template <int kRows>
  void sum_values(const Group& g, int64_t split, int first, int64_t f) {
    if (f + 1 < value_tiles_) {
      sum_values<kRows, 2>(g, split, first, f);
    } else {
      sum_values<kRows, 1>(g, split, first, f);
    }
  }
  void multiply_values(const Group& g, int64_t split, int64_t f) {
    if (few()) {
      for (int r = 0; r < g.rows; r += 4) {
        switch (g.rows - r) {
          case 1:
            sum_values<1>(g, split, r, f);
            break;
          case 2:
            sum_values<2>(g, split, r, f);
            break;
          case 3:
            sum_values<3>(g, split, r, f);
            break;
          default:
            sum_values<4>(g, split, r, f);
        }
      }
      return;
    }
    const bool two = f + 1 < value_tiles_;
    if (f % 4 == 0) {
      multiply_values<0>(g, f, two);
    } else {
      multiply_values<4>(g, f, two);
    }
  }

  // Adds the group's weighted values to total_, or writes them to `partial`.
  void add_values(const Group& g, int64_t split, float* partial) {
    const __m512 unit = _mm512_set1_ps(256.0f / kTop);
    multiply_values(g, split, 0);
    for (int64_t f = 0; f < value_tiles_; ++f) {
      if (f % 2 == 0 && f + 2 < value_tiles_) multiply_values(g, split, f + 2);
      const int32_t* const sums = sums_ + f % 4 * 512;
      for (int r = 0; r < g.rows; ++r) {
        const int row = g.first + r;
        const __m512 v = _mm512_mul_ps(joined(sums + r * 16, sums + 256 + r * 16), unit);
        const int64_t at = row * value_stride_ + f * 16;
        if (partial != nullptr) {
          _mm512_storeu_ps(partial + at, v);
        } else {
          const __m512 take = _mm512_set1_ps(take_[row]), keep = _mm512_set1_ps(keep_[row]);
          const __m512 old = _mm512_load_ps(total_ + at);
          _mm512_store_ps(total_ + at, _mm512_fmadd_ps(old, keep, _mm512_mul_ps(v, take)));
        }
      }
    }
  }

  void do_split(int64_t split, float* partial) {
    const Group first = group(0, split), last = group(groups() - 1, split);
    const Group need{0, t_.rows, first.from, last.to};
    load_scales(need, split);
    bool loaded = false;
    for (int i = 0; i < groups(); ++i) {
      const Group g = group(i, split);
      score(g, split);
      for (int r = 0; r < g.rows; ++r) find_max(g, r, split);
      for (int r = 0; r < g.rows; ++r) weigh(g, r, split);
      if (g.from >= g.to) continue;
      if (partial == nullptr) {
        advance(g.first, g.rows, split_max_ + g.first, split_sum_ + g.first);
      }
      if (!few() && !loaded) load_values(need, split);
      loaded = true;
      add_values(g, split, partial);
    }
  }

 public:
  static void attend(const AttentionTile& tile) {
    TiledAttention a(tile);
    a.begin();
    for (int64_t s = tile.first_split(); s <= tile.last_split(); ++s) a.do_split(s, nullptr);
    a.finish();
  }

  static void attend_splits(const AttentionTile& tile, int64_t first, float* partials,
                            int64_t partial_floats) {
    TiledAttention a(tile);
    a.each_partial(first, partials, partial_floats,
                   [&](int64_t split, float* partial) { a.do_split(split, partial); });
  }

  // Stores one token's key and value of a head, whose block is at `head`.
  static void store_head(const ops::KvShape& s, const float* k, const float* v, int64_t slot,
                         size_t values_at, uint8_t* head) {
    const int key = power_for(k, s.key_dim), value = power_for(v, s.value_dim);
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i one = _mm512_set1_epi32(1);
    const __m512i powers = _mm512_set1_epi32((key & 255) | (value & 255) << 8);
    alignas(16) uint8_t bytes[2][16];
    for (int d = 0; d < s.key_dim; d += 16) {
      __m512i code = codes_of(k + d, key);
      if (d == 0) {
        const __m512i bits = _mm512_and_si512(_mm512_srlv_epi32(powers, lanes), one);
        code = _mm512_or_si512(_mm512_andnot_si512(one, code), bits);
      }
      put(code, bytes);
      uint8_t* const to = head + d / 64 * kPlanes + d % 64 * 16 + slot * 4;
      for (int p = 0; p < 2; ++p) {
        for (int i = 0; i < 4; ++i) std::memcpy(to + p * kTileBytes + i * 64, bytes[p] + i * 4, 4);
      }
    }
    // The slot's byte of every four.
    const __m128i up = _mm_cvtsi32_si128(static_cast<int>(slot % 4 * 8));
    const __mmask64 mine = __mmask64{0x1111111111111111} << (slot % 4);
    for (int d = 0; d < s.value_dim; d += 16) {
      const __m512i code = codes_of(v + d, value);
      const __m512i high = _mm512_srli_epi32(_mm512_add_epi32(code, _mm512_set1_epi32(128)), 8);
      uint8_t* const to = head + values_at + d * 32 + slot / 4 * 64;
      _mm512_mask_storeu_epi8(to, mine, _mm512_sll_epi32(high, up));
      _mm512_mask_storeu_epi8(to + 256, mine, _mm512_sll_epi32(code, up));
    }
  }

  // The sum over at most 256 features of codes needs up to 31 bits.
  static bool supports(const ops::KvShape& s) {
    return s.type == ops::KvType::kF16 && !s.biased && !s.value_is_key_prefix &&
           s.key_dim % 64 == 0 && s.key_dim <= 256 && s.value_dim % 16 == 0 && s.value_dim <= 256;
  }

  static constexpr AttentionIsa isa() {
    return {attend, attend_splits, merge, nullptr, store_head, nullptr, supports};
  }

 private:
  static constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;
  static constexpr float kNone = -1e30f;  // score of a masked token
  static void put(__m512i codes, uint8_t (&to)[2][16]) {
    const Bytes b = bytes_of(codes);
    _mm_store_si128(reinterpret_cast<__m128i*>(to[0]), b.high);
    _mm_store_si128(reinterpret_cast<__m128i*>(to[1]), b.low);
  }
};

}  // namespace
}  // namespace freshet::cpu

// The inner loops of attention over a Simd type: register tiles of rows x tokens (scores) and of
// rows x features (values). An element of a tile is one chain of FMAs in ascending order of feature
// or position, whatever the tile's shape. With INT8, a score is such a chain over the sums of 32
// features, each times its scale, and a weight is multiplied by the scale of the 32 features that
// it applies to.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/cpu/attention_isa.h"

namespace freshet::cpu {
namespace {

// The cache's element types, as distinct C++ types.
struct F16Bits {
  uint16_t bits;
};
struct BF16Bits {
  uint16_t bits;
};
struct E4M3Bits {
  uint8_t bits;
};
struct Int8 {
  int8_t code;
};
template <class T>
inline constexpr bool kHasScales = false;
template <>
inline constexpr bool kHasScales<Int8> = true;

// The values of a split's tokens in the cache blocks, and the keys of the next split, which are
// prefetched while these values are read.
template <class T>
struct PagedRows {
  using Element = T;
  static constexpr bool kStored = true;
  const uint8_t* data;   // of block 0, at the first row
  const int32_t* table;  // from the split's first block
  size_t block_bytes;
  int64_t stride;             // elements per row
  const uint8_t* keys;        // of block 0
  const int32_t* next_table;  // from the next split's first block
  int next;                   // tokens of the next split
  int64_t key_bytes;          // bytes per token
  const uint8_t* scales;      // of block 0: F16 [value_dim / 32, 16]
  float* scaled;              // [kScaledRows, kSplit], for weights times scales

  const T* row(int token) const {
    const uint8_t* block = data + static_cast<size_t>(table[token / 16]) * block_bytes;
    return reinterpret_cast<const T*>(block) + (token % 16) * stride;
  }
  // The scales of features from d on, for `token` and the tokens after it in its block.
  const uint16_t* scale(int token, int d) const {
    const uint8_t* block = scales + static_cast<size_t>(table[token / 16]) * block_bytes;
    return reinterpret_cast<const uint16_t*>(block) + d / ops::kScaledFeatures * 16 + token % 16;
  }
  // The keys to prefetch: the block of the next split that corresponds to the block of `token`.
  const uint8_t* fetch_from(int token) const {
    if (token >= next) return nullptr;
    return keys + static_cast<size_t>(next_table[token / 16]) * block_bytes;
  }
};

// Where a tile of weighted values goes: to = to * keep + take * tile, or to = tile if keep is null.
struct ValueTarget {
  float* to;
  int64_t stride;  // floats per row
  const float* keep;
  const float* take;

  ValueTarget at_column(int d) const { return {to + d, stride, keep, take}; }
};

template <class S>
struct AttentionKernels {
  using F = typename S::F;
  static constexpr int kLanes = S::kLanes;

#define FRESHET_KERNEL static inline __attribute__((always_inline))
  FRESHET_KERNEL F load(const float* p) { return S::load(p); }
  FRESHET_KERNEL F load(const F16Bits* p) { return S::load_f16(&p->bits); }
  FRESHET_KERNEL F load(const BF16Bits* p) { return S::load_bf16(&p->bits); }
  FRESHET_KERNEL F load(const E4M3Bits* p) { return S::load_e4m3(&p->bits); }
  FRESHET_KERNEL F load(const Int8* p) { return S::load_i8(&p->code); }
  FRESHET_KERNEL F load_n(const float* p, int n) { return S::load_n(p, n < kLanes ? n : kLanes); }
  FRESHET_KERNEL F load_n(const F16Bits* p, int n) { return S::load_f16_n(&p->bits, n); }
  FRESHET_KERNEL F load_n(const BF16Bits* p, int n) { return S::load_bf16_n(&p->bits, n); }
  FRESHET_KERNEL F load_n(const E4M3Bits* p, int n) { return S::load_e4m3_n(&p->bits, n); }
  FRESHET_KERNEL F load_n(const Int8* p, int n) { return S::load_i8_n(&p->code, n); }

  // Converts n values, a multiple of 16.
  template <class T>
  static void load_all(const T* from, int64_t n, float* to) {
    for (int64_t i = 0; i < n; i += kLanes) S::store(to + i, load(from + i));
  }
  // Converts n values, and writes zeros up to `padded`.
  template <class T>
  static void load_row(const T* from, int n, float* to, int64_t padded) {
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) S::store(to + i, load(from + i));
    for (; i < padded; i += kLanes) S::store(to + i, i < n ? load_n(from + i, n - i) : S::zero());
  }
  // Loads features [d, d + n) of tokens [from, to), n <= 2 * kLanes, as rows of two vectors.
  template <class Rows>
  static void load_columns(const Rows& rows, int from, int to, int d, int n, float* out) {
    for (int t = from; t < to; ++t, out += 2 * kLanes) {
      load_row(rows.row(t) + d, n, out, 2 * kLanes);
    }
  }

  // out[r, token] for R rows of q [key_dim, R] and N vectors of tokens whose keys start at k[v],
  // [key_dim, 16], with their scales, if any, at scales[v], [key_dim / 32, 16]. If keys come from
  // the cache (kStored), where the blocks of a head are not contiguous, the loop also prefetches
  // their values, which follow the keys, and the keys from next[v] on.
  template <int R, int N, bool kStored, bool kScaled, class T>
  FRESHET_KERNEL void score_tile(const float* q, const T* const (&keys)[N],
                                 const T* const (&next)[N], const uint16_t* const (&scales)[N],
                                 int key_dim, float* out) {
    const T* k[N];
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) k[v] = keys[v];
    int d = 0;
    do {
      const int from = d;
      const int end =
          kScaled && key_dim - d > ops::kScaledFeatures ? d + ops::kScaledFeatures : key_dim;
      F acc[R][N];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < N; ++v) acc[r][v] = S::zero();
      }
      for (; d < end; ++d, q += R) {
        if (kStored && d % static_cast<int>(4 / sizeof(T)) == 0) {
#pragma GCC unroll 8
          for (int v = 0; v < N; v += kLanes == 16 ? 1 : 2) {
            __builtin_prefetch(k[v] + 16 * key_dim);
            __builtin_prefetch(next[v] + 16 * d);
          }
        }
        F kv[N];
#pragma GCC unroll 8
        for (int v = 0; v < N; ++v) {
          kv[v] = load(k[v]);
          k[v] += 16;
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const F x = S::set(q[r]);
#pragma GCC unroll 8
          for (int v = 0; v < N; ++v) acc[r][v] = S::fma(x, kv[v], acc[r][v]);
        }
      }
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) {
        F scale = S::zero();
        if constexpr (kScaled) scale = S::load_f16(scales[v] + from / ops::kScaledFeatures * 16);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          float* to = out + r * kSplit + v * kLanes;
          F sum = acc[r][v];
          if (kScaled) sum = from == 0 ? S::mul(sum, scale) : S::fma(sum, scale, S::load(to));
          S::store(to, sum);
        }
      }
    } while (kScaled && d < key_dim);
  }

  // Uses enough vectors at a time to hide the latency of an FMA chain with R rows.
  static constexpr int width_for(int rows) {
    const int wide = rows == 1 ? 8 : rows == 2 ? 4 : rows <= 4 ? (kLanes == 16 ? 4 : 2) : 2;
    return wide;
  }

  template <int R, int N, bool kStored, bool kScaled, class T>
  static void score_rows(const float* q, const T* const* blocks, const uint16_t* const* scales,
                         int key_dim, int from, int to, float* out) {
    int i = from;
    for (; i + N * kLanes <= to; i += N * kLanes) {
      const T *k[N], *next[N];
      const uint16_t* s[N];
      for (int v = 0; v < N; ++v) {
        const int token = i + v * kLanes, later = token + N * kLanes;
        k[v] = blocks[token / 16] + token % 16;
        next[v] = later < to ? blocks[later / 16] : k[v];
        s[v] = kScaled ? scales[token / 16] + token % 16 : nullptr;
      }
      score_tile<R, N, kStored, kScaled>(q, k, next, s, key_dim, out + i);
    }
    if constexpr (N * kLanes > 16) {
      score_rows<R, N / 2, kStored, kScaled>(q, blocks, scales, key_dim, i, to, out);
    }
  }

  // Scores of tokens [from, to), both multiples of 16, for 1 to kTileRows rows: out[r * kSplit +
  // token].
  template <bool kStored, bool kScaled, class T, int R = S::kTileRows>
  static void score(const float* q, const T* const* blocks, const uint16_t* const* scales,
                    int key_dim, int rows, int from, int to, float* out) {
    if constexpr (R > 1) {
      if (rows < R) {
        return score<kStored, kScaled, T, R - 1>(q, blocks, scales, key_dim, rows, from, to, out);
      }
    }
    score_rows<R, width_for(R), kStored, kScaled>(q, blocks, scales, key_dim, from, to, out);
  }

  // Converts the plain rows of a block's 16 tokens, times their scales, [stride / 32, 16].
  static void scale_rows(float* rows, int64_t stride, const uint16_t* scales) {
    for (int64_t d = 0; d < stride; d += ops::kScaledFeatures, scales += 16) {
      const int64_t end = stride - d < ops::kScaledFeatures ? stride : d + ops::kScaledFeatures;
      float scale[16];
      for (int t = 0; t < 16; t += kLanes) S::store(scale + t, S::load_f16(scales + t));
      for (int t = 0; t < 16; ++t) {
        float* row = rows + t * stride;
        for (int64_t i = d; i < end; i += kLanes) {
          S::store(row + i, S::mul(S::load(row + i), S::set(scale[t])));
        }
      }
    }
  }

  // Multiplies the weights of tokens [from, to), from a multiple of 16, by the scales of features
  // from d on.
  template <class Rows>
  static void scale_weights(const float* weights, int rows, const Rows& stored, int from, int to,
                            int d, float* out) {
    for (int t = from; t < to; t += kLanes) {
      const F scale = S::load_f16(stored.scale(t, d));
      for (int r = 0; r < rows; ++r) {
        S::store(out + r * kSplit + t, S::mul(S::load(weights + r * kSplit + t), scale));
      }
    }
  }

  // Dot products of R rows of q with 4 keys, with lanes along the features.
  template <int R>
  FRESHET_KERNEL void dot_tile(const float* q, const float* keys, int64_t stride, float* out) {
    F acc[R][4];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int t = 0; t < 4; ++t) acc[r][t] = S::zero();
    }
    for (int64_t d = 0; d < stride; d += kLanes) {
      F k[4];
#pragma GCC unroll 4
      for (int t = 0; t < 4; ++t) k[t] = S::load(keys + t * stride + d);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const F x = S::load(q + r * stride + d);
#pragma GCC unroll 4
        for (int t = 0; t < 4; ++t) acc[r][t] = S::fma(x, k[t], acc[r][t]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) S::reduce_add4(acc[r], out + r * kSplit);
  }

  // Scores of 16 tokens. q: [rows, stride], keys: [16, stride], out: [rows, kSplit].
  static void score_plain(const float* q, const float* keys, int64_t stride, int rows, float* out) {
    constexpr int kR = S::kDotRows;
    for (int t = 0; t < 16; t += 4) {
      int r = 0;
      for (; r + kR <= rows; r += kR) {
        dot_tile<kR>(q + r * stride, keys + t * stride, stride, out + r * kSplit + t);
      }
      for (; r < rows; ++r) {
        dot_tile<1>(q + r * stride, keys + t * stride, stride, out + r * kSplit + t);
      }
    }
  }

  // Vectors of a tile of C that share weights: all of them, or those of one scale.
  template <int C, class T>
  static constexpr int kWeighed =
      !kHasScales<T> || C * kLanes < ops::kScaledFeatures ? C : ops::kScaledFeatures / kLanes;

  // R rows x C vectors of features from d on: sums of weight * value over tokens [from, to). With
  // kPart the last vector has only `lanes` lanes. weights: [C / kWeighed, R, kSplit].
  template <int R, int C, bool kPart, class Rows>
  FRESHET_KERNEL void value_tile(const float* weights, const Rows& rows, int from, int to, int d,
                                 int lanes, const ValueTarget& target) {
    constexpr int kW = kWeighed<C, typename Rows::Element>;
    F acc[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) acc[r][c] = S::zero();
    }
    for (int t = from; t < to;) {
      const typename Rows::Element* row = rows.row(t) + d;
      const int end = (t | 15) + 1 < to ? (t | 15) + 1 : to;
      const uint8_t* fetch = nullptr;
      if constexpr (Rows::kStored) fetch = d == 0 ? rows.fetch_from(t) : nullptr;
      for (; t < end; ++t, row += rows.stride) {
        if constexpr (Rows::kStored) {
          const int64_t line = (t & 15) * rows.key_bytes;
          for (int64_t i = 0; fetch != nullptr && i < rows.key_bytes; i += 64) {
            __builtin_prefetch(fetch + line + i);
          }
        }
        F v[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
          v[c] = kPart ? load_n(row + c * kLanes, lanes) : load(row + c * kLanes);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
          for (int c = 0; c < C; ++c) {
            const F p = S::set(weights[(c / kW * R + r) * kSplit + t]);
            acc[r][c] = S::fma(p, v[c], acc[r][c]);
          }
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        float* at = target.to + r * target.stride + d + c * kLanes;
        F v = acc[r][c];
        if (target.keep != nullptr) {
          v = S::fma(S::load(at), S::set(target.keep[r]), S::mul(v, S::set(target.take[r])));
        }
        S::store(at, v);
      }
    }
  }

  // The weights of a tile; those multiplied by scales are in rows.scaled.
  template <int R, int C, class Rows>
  static const float* weights_of(const float* weights, const Rows& rows, int from, int to, int d) {
    constexpr int kW = kWeighed<C, typename Rows::Element>;
    if constexpr (!kHasScales<typename Rows::Element>) return weights;
    static_assert(C / kW * R <= kScaledRows);
    for (int c = 0; c < C; c += kW) {
      float* out = rows.scaled + c / kW * R * kSplit;
      scale_weights(weights, R, rows, from, to, d + c * kLanes, out);
    }
    return rows.scaled;
  }

  template <int R, int C, class Rows>
  static void value_rows(const float* weights, const Rows& rows, int from, int to, int d,
                         int value_dim, const ValueTarget& target) {
    for (; d + C * kLanes <= value_dim; d += C * kLanes) {
      const float* w = weights_of<R, C>(weights, rows, from, to, d);
      value_tile<R, C, false>(w, rows, from, to, d, kLanes, target);
    }
    if constexpr (C > 1) {
      value_rows<R, C / 2>(weights, rows, from, to, d, value_dim, target);
    } else if (d < value_dim) {
      const float* w = weights_of<R, 1>(weights, rows, from, to, d);
      value_tile<R, 1, true>(w, rows, from, to, d, value_dim - d, target);
    }
  }

  // For 1 to kTileRows rows, directly from the cache. weights: [rows, kSplit].
  template <class Rows, int R = S::kTileRows>
  static void values(const float* weights, const Rows& rows, int n, int from, int to, int value_dim,
                     const ValueTarget& target) {
    if constexpr (R > 1) {
      if (n < R) return values<Rows, R - 1>(weights, rows, n, from, to, value_dim, target);
    }
    value_rows<R, width_for(R)>(weights, rows, from, to, 0, value_dim, target);
  }

  struct ConvertedRows {
    using Element = float;
    static constexpr bool kStored = false;
    static constexpr int64_t stride = 2 * kLanes;
    const float* data;
    const float* row(int token) const { return data + token * stride; }
  };

  // For 1 to kTileRows rows and two vectors of features, from the rows made by load_columns().
  template <int R = S::kTileRows>
  static void converted_values(const float* weights, const float* values, int n, int from, int to,
                               const ValueTarget& target) {
    if constexpr (R > 1) {
      if (n < R) return converted_values<R - 1>(weights, values, n, from, to, target);
    }
    value_tile<R, 2, false>(weights, ConvertedRows{values}, from, to, 0, kLanes, target);
  }
#undef FRESHET_KERNEL
};

}  // namespace
}  // namespace freshet::cpu

// Shared by the attention kernels: the cache's layout, operands, and the order of sums.
//
// A row is one query head of one query. Its result depends only on its own context. The context is
// cut into KV splits ("pieces") at multiples of kPieceTokens keys, and splits into tiles of
// kTileTokens. Each split has its own softmax: weights are powers of two of the scores minus a
// reference. The reference is the largest unmasked score of the split's first tile that has one. If
// the weights of a later tile sum to more than kMostWeight in one of the four lanes that share a
// row, the largest score so far becomes the reference, and the sums so far are rescaled. Weighted
// values are added in order of keys; splits are merged from left to right. Masked keys have weight
// zero and change no bit, so a kernel may skip them, also by half tiles and tiles. A block may
// process the whole context (prefill), or several blocks take splits of it, which one of them
// merges (few queries). Rows are on the 16-row side of mma, or the 64-row side of wgmma: the query
// heads that share a KV head, of adjacent queries.
#pragma once

#include "backend/cuda/attention/attention_rows.h"
#include "backend/cuda/runtime/common.cuh"

namespace freshet::cuda {

inline constexpr int kBlockTokens = 16;
inline constexpr int kPieceTokens = 512;                   // keys of a KV split, with one softmax
inline constexpr int kTileTokens = 128;                    // keys weighted together
inline constexpr int kTiles = kPieceTokens / kTileTokens;  // tiles per KV split
inline constexpr int kChunk = 64;                     // keys per pipeline stage of decode kernels
inline constexpr int kChunks = kTileTokens / kChunk;  // chunks per tile
inline constexpr int kChunksOfPiece = kTiles * kChunks;
inline constexpr int kKeyTiles = kTileTokens / 8;  // mma column tiles per tile
inline constexpr float kMostWeight = 16384.0f;     // the largest F16 is 65504
inline constexpr float kLog2E = 1.4426950408889634f;

// Values beyond F16's range are clamped: an infinity would turn masked terms into NaN.
__device__ __forceinline__ __half to_half(float v) {
  return __float2half_rn(fminf(fmaxf(v, -65504.0f), 65504.0f));
}
__device__ __forceinline__ uint32_t pack_half(float low, float high) {
  const __half2 v = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(v);
}
// Packs two values as an mma operand: BF16 for a BF16 cache, otherwise F16.
template <bool kBF16>
__device__ __forceinline__ uint32_t pack_weights(float low, float high) {
  return kBF16 ? pack_bf16(low, high) : pack_half(low, high);
}
template <bool kBF16>
__device__ __forceinline__ uint32_t pack_numbers(float low, float high) {
  if (kBF16) {
    constexpr float kMost = 3.3895313892515355e38f;
    return pack_bf16(fminf(fmaxf(low, -kMost), kMost), fminf(fmaxf(high, -kMost), kMost));
  }
  const __half2 v = __halves2half2(to_half(low), to_half(high));
  return reinterpret_cast<const uint32_t&>(v);
}
__device__ __forceinline__ void mma_half(float (&d)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

template <bool kBF16>
__device__ __forceinline__ void mma_numbers(float (&d)[4], const uint4& a, uint32_t b0,
                                            uint32_t b1) {
  if constexpr (kBF16) {
    mma(d, a, b0, b1);
  } else {
    mma_half(d, a, b0, b1);
  }
}

// A block's keys or values of one KV head are core matrices of 8 slots by 16 bytes, so that
// ldmatrix and wgmma read them from shared memory in the layout of a bulk copy. Every value in a
// block is finite, even where nothing was stored yet.
__host__ __device__ constexpr bool in_bytes(CacheType type) {
  return type != CacheType::kF16 && type != CacheType::kBF16;
}
// The type of the keys, or of the values.
__host__ __device__ constexpr CacheType part_of(CacheType type, bool keys) {
  if (type != CacheType::kK8V4) return type;
  return keys ? CacheType::kInt8 : CacheType::kInt4;
}
__host__ __device__ constexpr bool has_scales(CacheType part) {
  return part == CacheType::kInt8 || part == CacheType::kInt4;
}
__host__ __device__ constexpr int scales_of(int dim) {
  return (dim + 31) / 32;
}
// Bytes of a head's keys or values in a block: without, and with scales. From here on `type` is
// that of a part (part_of()).
__host__ __device__ constexpr int numbers_bytes(CacheType type, int dim) {
  if (type == CacheType::kInt4) return kBlockTokens * scales_of(dim) * 16;
  return kBlockTokens * dim * (in_bytes(type) ? 1 : 2);
}
__host__ __device__ constexpr int head_bytes(CacheType type, int dim) {
  return numbers_bytes(type, dim) + (has_scales(type) ? kBlockTokens * scales_of(dim) * 2 : 0);
}
__device__ __forceinline__ uint8_t* keys_at(const CacheArgs& c, int64_t block, int head) {
  const bool both = in_bytes(c.type) && c.shared == 0;  // values follow the keys
  const int bytes = head_bytes(part_of(c.type, true), c.key_dim) +
                    (both ? head_bytes(part_of(c.type, false), c.value_dim) : 0);
  return c.data + block * c.block_bytes + static_cast<int64_t>(head) * bytes;
}
__device__ __forceinline__ uint8_t* values_at(const CacheArgs& c, int64_t block, int head) {
  if (c.shared != 0) return keys_at(c, block, head);
  if (in_bytes(c.type)) {
    return keys_at(c, block, head) + head_bytes(part_of(c.type, true), c.key_dim);
  }
  return keys_at(c, block, c.kv_heads) +
         static_cast<int64_t>(head) * head_bytes(c.type, c.value_dim);
}
// The byte offset of an element, for heads of `dim` features: the part that its slot adds, and the
// part that its feature adds.
__device__ __forceinline__ int slot_at(CacheType type, int slot, int dim) {
  if (type == CacheType::kInt4) return slot / 8 * 8 * scales_of(dim) * 16 + slot % 8 * 16;
  return slot / 8 * 8 * dim * (in_bytes(type) ? 1 : 2) + slot % 8 * 16;
}
__device__ __forceinline__ int feature_at(CacheType type, int f) {
  if (type == CacheType::kInt4) return f / 32 * 128 + f % 16 / 4 * 4;  // of its quad
  return in_bytes(type) ? f / 16 * 128 + f % 16 : f / 8 * 128 + f % 8 * 2;
}
// INT8 keys that also serve as values are supported by attention_sm80.cu only.
inline bool shares_codes(const CacheArgs& c) {
  return in_bytes(c.type) && c.shared != 0;
}
// Where a slot's scales are, relative to its head's data: offset of the first scale, and distance
// to the next one.
struct ScalesAt {
  int first, apart;
};
__device__ __forceinline__ ScalesAt scales_at(CacheType type, int slot, int dim, bool by_slot) {
  const int all = numbers_bytes(type, dim);
  return by_slot ? ScalesAt{all + slot * scales_of(dim) * 2, 2}
                 : ScalesAt{all + slot * 2, kBlockTokens * 2};
}
// Two E4M3 codes in F16. A cache has no NaN.
__device__ __forceinline__ uint32_t e4m3_to_half(uint32_t codes) {
#if __CUDA_ARCH__ >= 890
  uint32_t v;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(v) : "h"(static_cast<uint16_t>(codes)));
  return v;
#else
  // F16's exponent bias is 8 larger.
  const uint32_t apart = __byte_perm(codes, 0, 0x1404);
  const uint32_t low = (apart & 0x80008000) | (apart >> 1 & 0x3f803f80);
  const __half2 v = __hmul2(reinterpret_cast<const __half2&>(low), __float2half2_rn(256.0f));
  return reinterpret_cast<const uint32_t&>(v);
#endif
}
// 16 features: the first eight, and the others.
__device__ __forceinline__ void e4m3_to_half(uint4* first, uint4* second, const uint4& v) {
  *first = make_uint4(e4m3_to_half(v.x), e4m3_to_half(v.x >> 16), e4m3_to_half(v.y),
                      e4m3_to_half(v.y >> 16));
  *second = make_uint4(e4m3_to_half(v.z), e4m3_to_half(v.z >> 16), e4m3_to_half(v.w),
                       e4m3_to_half(v.w >> 16));
}
// Two INT8 codes times their scales, in F16. `which` selects the codes as bytes 0 and 2 (bytes 1
// and 3 are constants, selected by 4 and up). The addition is exact, and fma is twice as fast as a
// plain addition.
template <int kWhich>
__device__ __forceinline__ uint32_t scaled_codes(uint32_t codes, __half2 scales) {
  const uint32_t raised = __byte_perm(codes, 0x68686868, kWhich);  // 2048 + 2 (128 + code)
  const __half2 v = __hfma2(reinterpret_cast<const __half2&>(raised), __float2half2_rn(0.5f),
                            __float2half2_rn(-1152.0f));
  const __half2 scaled = __hmul2_rn(v, scales);
  return reinterpret_cast<const uint32_t&>(scaled);
}
inline constexpr int kLowCodes = 0x4140, kHighCodes = 0x4342;  // adjacent codes
inline constexpr int kEvenCodes = 0x4240, kOddCodes = 0x4341;
// 16 features of a slot: the first eight, and the others.
__device__ __forceinline__ void int8_to_half(uint4* first, uint4* second, const uint4& v,
                                             __half scale) {
  const __half2 s = __half2half2(scale);
  *first = make_uint4(scaled_codes<kLowCodes>(v.x, s), scaled_codes<kHighCodes>(v.x, s),
                      scaled_codes<kLowCodes>(v.y, s), scaled_codes<kHighCodes>(v.y, s));
  *second = make_uint4(scaled_codes<kLowCodes>(v.z, s), scaled_codes<kHighCodes>(v.z, s),
                       scaled_codes<kLowCodes>(v.w, s), scaled_codes<kHighCodes>(v.w, s));
}

// A quad is a word of eight INT4 codes in four pairs; a pair is the same four bits of both halves.
// Of 32 features, quad t holds 4 t to 4 t + 3 and 16 + 4 t to 16 + 4 t + 3, two adjacent ones in
// each pair. This returns pair kPair times its scales, in F16.
template <int kPair>
__device__ __forceinline__ uint32_t scaled_pair(uint32_t quad, __half2 scales) {
  // 2048 + 2 code, or 2048 + 32 code; both steps to the code minus 8 are exact. (Compilers would
  // make a plain addition of an fma by 1, which is half as fast.)
  const uint32_t bits =
      ((kPair < 2 ? quad : quad >> 8) & (kPair % 2 == 0 ? 0x000f000f : 0x00f000f0)) | 0x68006800;
  const auto& raised = reinterpret_cast<const __half2&>(bits);
  const __half2 plain = __hfma2(raised, __float2half2_rn(kPair % 2 == 0 ? 0.5f : 0.03125f),
                                __float2half2_rn(kPair % 2 == 0 ? -1032.0f : -72.0f));
  const __half2 scaled = __hmul2_rn(plain, scales);
  return reinterpret_cast<const uint32_t&>(scaled);
}
// Where a feature's code is in its quad (feature_at()).
__device__ __forceinline__ int bits_of_quad(int f) {
  return f % 2 * 16 + (f / 16 * 2 + f % 4 / 2) * 4;
}
// 32 codes of a slot times their scale, in order.
__device__ __forceinline__ void int4_to_half(uint4* to, const uint4& v, __half scale) {
  const __half2 s = __half2half2(scale);
  const auto first = [&](uint32_t a, uint32_t b) {
    return make_uint4(scaled_pair<0>(a, s), scaled_pair<1>(a, s), scaled_pair<0>(b, s),
                      scaled_pair<1>(b, s));
  };
  const auto second = [&](uint32_t a, uint32_t b) {
    return make_uint4(scaled_pair<2>(a, s), scaled_pair<3>(a, s), scaled_pair<2>(b, s),
                      scaled_pair<3>(b, s));
  };
  to[0] = first(v.x, v.y), to[1] = first(v.z, v.w);
  to[2] = second(v.x, v.y), to[3] = second(v.z, v.w);
}

__device__ __forceinline__ float power_of_two(float v) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(v));
  return power;
}
// A score before the softmax scale: the dot product, or its soft cap by the hyperbolic tangent.
__device__ __forceinline__ float capped(float sum, float steep) {
  const float power = power_of_two(__fmul_rn(fabsf(sum), steep));
  return copysignf(__fdividef(__fsub_rn(1.0f, power), __fadd_rn(1.0f, power)), sum);
}
__device__ __forceinline__ float cap_steepness(const AttentionArgs& a) {
  return __fmul_rn(-2.0f * kLog2E, __fdiv_rn(a.scale, a.softcap));
}
__device__ __forceinline__ float score_of(const AttentionArgs& a, float sum) {
  return a.softcap > 0.0f ? capped(sum, cap_steepness(a)) : sum;
}
// The softmax scale for powers of two.
__device__ __forceinline__ float steepness(const AttentionArgs& a) {
  return __fmul_rn(a.softcap > 0.0f ? a.softcap : a.scale, kLog2E);
}
// The offset that weigh() subtracts: the scaled largest score, or zero if no key is visible.
__device__ __forceinline__ float offset_of(float most, float steep) {
  return most == -INFINITY ? 0.0f : __fmul_rn(most, steep);
}
__device__ __forceinline__ float weight_of(float score, float steep, float offset) {
  return power_of_two(__fmaf_rn(score, steep, -offset));
}
// The factor that rescales sums with reference m to reference `to`; 1 if both are empty.
__device__ __forceinline__ float shrink(float m, float to, float steep) {
  return m == to ? 1.0f : power_of_two(__fmul_rn(__fsub_rn(m, to), steep));
}

// The reference and the sum of weights of a KV split so far (a lane's part of the sum), or of
// several splits.
template <int kRows>
struct Softmax {
  float m[kRows], l[kRows];
};

// A lane's sums of rows g and g + 8 (kRows 1: of row g only), over VT tiles of 8 features.
template <int VT, int kRows = 2>
struct Sums : Softmax<kRows> {
  float acc[VT][4];
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      this->m[r] = -INFINITY;
      this->l[r] = 0.0f;
    }
#pragma unroll
    for (int j = 0; j < VT; ++j) {
      for (int i = 0; i < 4; ++i) acc[j][i] = 0.0f;
    }
  }
  __device__ __forceinline__ void scale(const float (&factor)[kRows]) {
#pragma unroll
    for (int j = 0; j < VT; ++j) {
      for (int i = 0; i < 2 * kRows; ++i) acc[j][i] = __fmul_rn(acc[j][i], factor[i / 2]);
    }
  }
  // Merges `next`, which is to the right of this.
  __device__ __forceinline__ void merge(const Sums& next, float steep) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float most = fmaxf(this->m[r], next.m[r]);
      const float mine = shrink(this->m[r], most, steep), its = shrink(next.m[r], most, steep);
      this->m[r] = most;
      this->l[r] = __fmaf_rn(next.l[r], its, __fmul_rn(this->l[r], mine));
#pragma unroll
      for (int j = 0; j < VT; ++j) {
        for (int i = r * 2; i < r * 2 + 2; ++i) {
          acc[j][i] = __fmaf_rn(next.acc[j][i], its, __fmul_rn(acc[j][i], mine));
        }
      }
    }
  }
};

// Weights are summed by quarters of a tile. A quarter has the keys that one warp scores in decode
// kernels: groups 2 q and 2 q + 1 of eight keys, and the same groups half a tile later.
inline constexpr int kQuarters = 4, kEightsOfQuarter = kKeyTiles / kQuarters;
__device__ __forceinline__ constexpr int eight_of(int quarter, int i) {
  return i / 2 * (kKeyTiles / 2) + quarter * 2 + i % 2;
}

// Computes a lane's weights of a quarter in pairs, and their sum. score(r, i) returns the scores of
// row r for keys 2 (lane % 4) and the next of group i; put(r, i, low, high) takes the weights.
template <int kRows, class Score, class Put>
__device__ __forceinline__ void weigh_quarter(float (&sum)[kRows], const Score& score, float steep,
                                              const float (&offset)[kRows], const Put& put) {
#pragma unroll
  for (int i = 0; i < kEightsOfQuarter; ++i) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float2 v = score(r, i);
      const float low = weight_of(v.x, steep, offset[r]), high = weight_of(v.y, steep, offset[r]);
      sum[r] = i == 0 ? __fadd_rn(low, high) : __fadd_rn(__fadd_rn(sum[r], low), high);
      put(r, i, low, high);
    }
  }
}

// The same for a tile, indexed by groups of eight keys, with packed weights.
template <int kRows, bool kBF16 = false, class Score, class Put>
__device__ __forceinline__ void weigh(float (&sum)[kRows], const Score& score, float steep,
                                      const float (&offset)[kRows], const Put& put) {
#pragma unroll
  for (int q = 0; q < kQuarters; ++q) {
    float part[kRows];
    weigh_quarter(
        part, [&](int r, int i) { return score(r, eight_of(q, i)); }, steep, offset,
        [&](int r, int i, float low, float high) {
          put(r, eight_of(q, i), pack_weights<kBF16>(low, high));
        });
#pragma unroll
    for (int r = 0; r < kRows; ++r) sum[r] = q == 0 ? part[r] : __fadd_rn(sum[r], part[r]);
  }
}

// A row's largest score in a tile, or in kEights groups of eight keys of it.
template <int kEights = kKeyTiles, class Score>
__device__ __forceinline__ float largest_of(const Score& score, int r) {
  float most = -INFINITY;
#pragma unroll
  for (int j = 0; j < kEights; ++j) most = fmaxf(most, fmaxf(score(r, j).x, score(r, j).y));
#pragma unroll
  for (int step = 1; step < 4; step <<= 1) {
    most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, step));
  }
  return most;
}

// Whether a row's weights, of which this lane has `sum`, require another reference.
template <int kRows>
__device__ __forceinline__ bool some_beyond(const float (&sum)[kRows]) {
  bool beyond = false;
#pragma unroll
  for (int r = 0; r < kRows; ++r) beyond |= !(sum[r] <= kMostWeight);
  return __any_sync(0xffffffff, beyond);
}

// Where a KV split begins, or where weights require it, the largest score so far becomes the
// reference. Computes the factors that rescale the sums so far, and the new offsets. largest(r) is
// row r's largest score in this tile.
template <int kRows, class Largest>
__device__ __forceinline__ void take_reference(Softmax<kRows>& s, bool begins,
                                               const float (&sum)[kRows], float steep,
                                               float (&factor)[kRows], float (&offset)[kRows],
                                               const Largest& largest) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    bool beyond = begins || !(sum[r] <= kMostWeight);
    const float most = fmaxf(begins ? -INFINITY : s.m[r], largest(r));
#pragma unroll
    for (int step = 1; step < 4; step <<= 1) {
      beyond |= __shfl_xor_sync(0xffffffff, static_cast<int>(beyond), step) != 0;
    }
    if (beyond) {
      factor[r] = begins ? 0.0f : shrink(s.m[r], most, steep);
      s.m[r] = most;
    }
    offset[r] = offset_of(s.m[r], steep);
  }
}
// If no key was visible so far, the offset is infinite and no sum is within the bound.
template <int kRows>
__device__ __forceinline__ void offsets_of(float (&offset)[kRows], const Softmax<kRows>& s,
                                           float steep) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) offset[r] = __fmul_rn(s.m[r], steep);
}
template <int kRows>
__device__ __forceinline__ void add_sums(Softmax<kRows>& s, bool begins, const float (&sum)[kRows],
                                         const float (&factor)[kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    s.l[r] = begins ? sum[r] : __fmaf_rn(s.l[r], factor[r], sum[r]);
  }
}

// Adds a tile's scores to the KV split. weigh(sum, offset) computes the weights; largest(r) is a
// row's largest score, after look() was called. Returns whether some row's reference was raised;
// `factor` rescales its sums so far. A score of -infinity is masked.
template <int kRows, class Weigh, class Look, class Largest>
__device__ __forceinline__ bool take_tile_of(Softmax<kRows>& s, bool begins, float steep,
                                             float (&factor)[kRows], const Weigh& weigh,
                                             const Look& look, const Largest& largest) {
  float sum[kRows], offset[kRows];
  bool again = begins;
  if (!begins) {
    offsets_of(offset, s, steep);
    weigh(sum, offset);
    again = some_beyond(sum);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) factor[r] = 1.0f;
  if (again) {
    look();
    take_reference(s, begins, sum, steep, factor, offset, largest);
    weigh(sum, offset);
  }
  add_sums(s, begins, sum, factor);
  return again && !begins;
}

// The same with a single inlined copy of weigh(), for code that runs cold.
template <int kRows, class Weigh, class Look, class Largest>
__device__ __forceinline__ bool take_tile_in_turn(Softmax<kRows>& s, bool begins, float steep,
                                                  float (&factor)[kRows], const Weigh& weigh,
                                                  const Look& look, const Largest& largest) {
  float sum[kRows], offset[kRows];
  bool again = begins;
  offsets_of(offset, s, steep);
#pragma unroll
  for (int r = 0; r < kRows; ++r) sum[r] = 0.0f, factor[r] = 1.0f;
#pragma unroll 1
  for (;;) {
    if (again) {
      look();
      take_reference(s, begins, sum, steep, factor, offset, largest);
    }
    weigh(sum, offset);
    if (again || !some_beyond(sum)) break;
    again = true;
  }
  add_sums(s, begins, sum, factor);
  return again && !begins;
}

// The same for a warp that has all scores, with score() and put() as in weigh().
template <int kRows, bool kBF16 = false, class Score, class Put>
__device__ __forceinline__ bool take_scores(Softmax<kRows>& s, bool begins, const Score& score,
                                            float steep, float (&factor)[kRows], const Put& put) {
  return take_tile_of(
      s, begins, steep, factor,
      [&](float(&sum)[kRows], const float(&offset)[kRows]) {
        weigh<kRows, kBF16>(sum, score, steep, offset, put);
      },
      [] {}, [&](int r) { return largest_of(score, r); });
}

// Adds the sums of the four lanes of each row.
template <int kRows>
__device__ __forceinline__ void add_lanes(float (&l)[kRows]) {
#pragma unroll
  for (int step = 1; step < 4; step <<= 1) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) l[r] = __fadd_rn(l[r], __shfl_xor_sync(0xffffffff, l[r], step));
  }
}

// The factor from a row's sums to its result. A sink takes part in the softmax and adds no value.
__device__ __forceinline__ float ending(float m, float l, const AttentionArgs& a, int head) {
  if (a.sinks == nullptr) return __fdiv_rn(1.0f, l);
  const float sink = __fmul_rn(a.sinks[head], kLog2E);
  const float mine = __fmul_rn(m, steepness(a)), most = fmaxf(mine, sink);
  const float factor = power_of_two(__fsub_rn(mine, most));
  const float sum = __fadd_rn(__fmul_rn(l, factor), power_of_two(__fsub_rn(sink, most)));
  return __fdiv_rn(factor, sum);
}

// Writes two adjacent features of the result, and of its encoded form.
__device__ __forceinline__ void put_result(const AttentionArgs& a, int64_t row, int64_t col,
                                           float low, float high) {
  if (a.only_act == 0) {
    *reinterpret_cast<float2*>(a.out + row * a.out_stride + col) = make_float2(low, high);
  }
  if (a.act.data == nullptr) return;
  const int64_t cols = static_cast<int64_t>(a.heads) * a.cache.value_dim;
  put_pair(a.act, row, col, cols, low, high);
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
// The same in E4M3, bit-identical to encode(), for heads whose features are whole groups of 128:
// pairs of one group of a row, apart(j) features after the first. `most` is the group's largest
// magnitude.
template <class Apart, int N>
__device__ __forceinline__ void put_e4m3_pairs(const Activations& act, int64_t row, int64_t group,
                                               int first, const Apart& apart, const float2 (&v)[N],
                                               float most) {
  const E4M3Scale scale = e4m3_scale(most);
  uint8_t* tile = act.data + (group * act.core_tiles + (row >> 3)) * kE4M3TileBytes;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const int in = first + apart(j);
    *reinterpret_cast<uint16_t*>(tile + (in >> 4) * 128 + (row & 7) * 16 + (in & 15)) =
        static_cast<uint16_t>(two_e4m3(__fmul_rn(v[j].x, scale.up), __fmul_rn(v[j].y, scale.up)));
  }
  if (first == 0) {
    reinterpret_cast<float*>(tile + kTokenTile * kE4M3Cols)[row & 7] = scale.down;
  }
}
template <int N>
__device__ __forceinline__ float largest_of(const float2 (&v)[N]) {
  float most = 0.0f;
#pragma unroll
  for (int j = 0; j < N; ++j) most = fmaxf(most, fmaxf(fabsf(v[j].x), fabsf(v[j].y)));
  return most;
}
template <class Apart, int N>
__device__ __forceinline__ void put_row(const AttentionArgs& a, int64_t row, int64_t col,
                                        const Apart& apart, const float2 (&v)[N]) {
  if (a.only_act != 0) return;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    *reinterpret_cast<float2*>(a.out + row * a.out_stride + col + apart(j)) = v[j];
  }
}
// Zeros rows `first` and up, which pad the last token tile, in `groups` groups of features, by
// `threads` threads.
__device__ __forceinline__ void pad_e4m3(const Activations& act, int first, int64_t group,
                                         int groups, int thread, int threads) {
  const int rows = (kTokenTile - first % kTokenTile) % kTokenTile;
  for (int i = thread; i < rows * groups * 8; i += threads) {
    const int row = first % kTokenTile + i / 8 % rows;
    uint8_t* tile =
        act.data + ((group + i / 8 / rows) * act.core_tiles + first / kTokenTile) * kE4M3TileBytes;
    *reinterpret_cast<uint4*>(tile + i % 8 * 128 + row * 16) = make_uint4(0, 0, 0, 0);
    if (i % 8 == 0) reinterpret_cast<float*>(tile + kTokenTile * kE4M3Cols)[row] = 0.0f;
  }
}
#endif

// partial: [token, head, KV split][value_dim sums, maximum, sum of weights, two of padding].
inline constexpr int kPartialEnd = 4;
__device__ __forceinline__ float* partial_at(const AttentionArgs& a, int token, int head, int piece,
                                             int pieces) {
  return a.partial + ((static_cast<int64_t>(token) * a.heads + head) * pieces + piece) *
                         (a.cache.value_dim + kPartialEnd);
}

// Whether several blocks may take the KV splits of a context.
inline bool splits_context(const AttentionArgs& a) {
  return a.partial != nullptr && a.batch.tokens <= a.partial_tokens;
}

// The rows that a block computes.
struct Tile {
  int sequence, first_row, rows;  // rows are [query, head of the group]
  int queries, context, query_start;
};

// The tile of a block that processes whole contexts; the tiles of all sequences are numbered
// consecutively. All lanes of a warp call this.
__device__ __forceinline__ Tile find_tile(const BatchArgs& b, int group, int rows_per_block,
                                          int index) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (int base = 0; base < b.sequences; base += 32) {
    const int s = base + lane;
    const int queries = s < b.sequences ? b.query_start[s + 1] - b.query_start[s] : 0;
    const int tiles = (queries * group + rows_per_block - 1) / rows_per_block;
    int upto = tiles;
    for (int step = 1; step < 32; step <<= 1) {
      const int other = __shfl_up_sync(0xffffffff, upto, step);
      if (lane >= step) upto += other;
    }
    const unsigned here = __ballot_sync(0xffffffff, index < upto);
    if (here != 0) {
      const int owner = __ffs(static_cast<int>(here)) - 1;
      const int before = __shfl_sync(0xffffffff, upto - tiles, owner);
      const int q = __shfl_sync(0xffffffff, queries, owner);
      const int first = (index - before) * rows_per_block;
      const int found = base + owner;
      return {found,
              first,
              min(rows_per_block, q * group - first),
              q,
              b.context_len[found],
              b.query_start[found]};
    }
    index -= __shfl_sync(0xffffffff, upto, 31);
  }
  return {-1, 0, 0, 0, 0, 0};
}

// rotated_heads.cu: stores parts that are complete in four bits.
int store_rotated(const Context& ctx, const HeadsArgs& args);

// The kernel that runs these arguments: attention_rows.h.
AttentionKernel attention_kernel_of(const Context& ctx, const AttentionArgs& a);

// prefill_sm90.cu. Returns whether it also normalises and rotates the queries of a batch, or of the
// sequences after its single queries.
int attention_prompt(const Context& ctx, const AttentionArgs& a);
bool prefill_rotates(const Context& ctx, const AttentionArgs& a);

// decode_sm90.cu, or decode_cluster_sm90.cu. Returns whether it does everything in `before`.
int attention_single(const Context& ctx, const AttentionArgs& a, bool cluster);
bool takes_heads(const Context& ctx, const AttentionArgs& a);

}  // namespace freshet::cuda

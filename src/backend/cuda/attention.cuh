// What the kernels of attention share: the cache's places, operands, and the order of sums.
//
// A row is a query's head. Its result is defined as follows, whatever else is in the batch: the
// context is cut into pieces at multiples of kSplitTokens keys. A piece has a softmax of its own,
// over the scores of all its keys, and its weighted values are summed from zero, in order of keys;
// pieces are merged from left to right. Keys that a row does not see weigh nothing, and change no
// bit: a kernel may leave them out, half pieces and pieces of them too. So a block may walk the
// whole context (prompts), or blocks may take pieces of it, which one of them merges (single
// queries). Rows are the 16-row side of mma, or the 64-row side of wgmma: the heads that share a
// key head, and neighbouring queries.
#pragma once

#include "backend/cuda/common.cuh"

namespace freshet::cuda {

inline constexpr int kBlockTokens = 16;
inline constexpr int kChunk = 64;                      // keys that single queries load at a time
inline constexpr int kChunks = kSplitTokens / kChunk;  // of a piece
inline constexpr int kKeyTiles = kSplitTokens / 8;     // of a piece
inline constexpr float kLog2E = 1.4426950408889634f;

// A value beyond F16 is kept at its edge: an infinity would turn masked terms into NaN.
__device__ __forceinline__ __half to_half(float v) {
  return __float2half_rn(fminf(fmaxf(v, -65504.0f), 65504.0f));
}
__device__ __forceinline__ uint32_t pack_half(float low, float high) {
  const __half2 v = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(v);
}
__device__ __forceinline__ void mma_half(float (&d)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// A block's keys or values of a head are core matrices: [8 slots][8 features][slot][feature], so
// that ldmatrix and wgmma read them from shared memory as one bulk copy leaves them. Every number
// there is finite, also where nothing was stored yet.
__device__ __forceinline__ __half* keys_at(const CacheArgs& c, int64_t block, int head) {
  return reinterpret_cast<__half*>(c.data + block * c.block_bytes) +
         static_cast<int64_t>(head) * kBlockTokens * c.key_dim;
}
__device__ __forceinline__ __half* values_at(const CacheArgs& c, int64_t block, int head) {
  if (c.shared != 0) return keys_at(c, block, head);
  return reinterpret_cast<__half*>(c.data + block * c.block_bytes) +
         static_cast<int64_t>(c.kv_heads) * kBlockTokens * c.key_dim +
         static_cast<int64_t>(head) * kBlockTokens * c.value_dim;
}
// The place of a number in there, for heads of `dim` features.
__device__ __forceinline__ int place_in_block(int slot, int feature, int dim) {
  return slot / 8 * 8 * dim + feature / 8 * 64 + slot % 8 * 8 + feature % 8;
}

__device__ __forceinline__ float power_of_two(float v) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(v));
  return power;
}
// A score before the softmax's factor: a product, or the hyperbolic tangent that caps it.
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
// The factor that makes powers of two of scores.
__device__ __forceinline__ float steepness(const AttentionArgs& a) {
  return __fmul_rn(a.softcap > 0.0f ? a.softcap : a.scale, kLog2E);
}
// What weigh() takes from scores: that of the largest, or nothing where no key is seen.
__device__ __forceinline__ float offset_of(float most, float steep) {
  return most == -INFINITY ? 0.0f : __fmul_rn(most, steep);
}
__device__ __forceinline__ float weight_of(float score, float steep, float offset) {
  return power_of_two(__fmaf_rn(score, steep, -offset));
}
// The factor that takes sums with maximum m to maximum `to`; 1 where both are empty.
__device__ __forceinline__ float shrink(float m, float to, float steep) {
  return m == to ? 1.0f : power_of_two(__fmul_rn(__fsub_rn(m, to), steep));
}

// Sums of rows g and g + 8 of a lane (kRows 1: of row g alone), over VT tiles of 8 features.
template <int VT, int kRows = 2>
struct Sums {
  float m[kRows], l[kRows], acc[VT][4];
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      m[r] = -INFINITY;
      l[r] = 0.0f;
    }
#pragma unroll
    for (int j = 0; j < VT; ++j) {
      for (int i = 0; i < 4; ++i) acc[j][i] = 0.0f;
    }
  }
  // This, then `next`, which stands to the right of it.
  __device__ __forceinline__ void merge(const Sums& next, float steep) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float most = fmaxf(m[r], next.m[r]);
      const float mine = shrink(m[r], most, steep), its = shrink(next.m[r], most, steep);
      m[r] = most;
      l[r] = __fmaf_rn(next.l[r], its, __fmul_rn(l[r], mine));
#pragma unroll
      for (int j = 0; j < VT; ++j) {
        for (int i = r * 2; i < r * 2 + 2; ++i) {
          acc[j][i] = __fmaf_rn(next.acc[j][i], its, __fmul_rn(acc[j][i], mine));
        }
      }
    }
  }
};

// The largest score of a piece, of rows g and g + 8. A score of -infinity: not seen.
__device__ __forceinline__ void largest_score(const float (&score)[kKeyTiles][4], float (&m)[2]) {
  m[0] = m[1] = -INFINITY;
#pragma unroll
  for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) m[r] = fmaxf(m[r], fmaxf(score[j][r * 2], score[j][r * 2 + 1]));
  }
#pragma unroll
  for (int step = 1; step < 4; step <<= 1) {
#pragma unroll
    for (int r = 0; r < 2; ++r) m[r] = fmaxf(m[r], __shfl_xor_sync(0xffffffff, m[r], step));
  }
}

// Scores become weights, l the sum of a lane's.
__device__ __forceinline__ void weigh(float (&score)[kKeyTiles][4], float steep,
                                      const float (&m)[2], float (&l)[2]) {
  const float offset[2] = {offset_of(m[0], steep), offset_of(m[1], steep)};
  l[0] = l[1] = 0.0f;
#pragma unroll
  for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      score[j][i] = weight_of(score[j][i], steep, offset[i / 2]);
      l[i / 2] = __fadd_rn(l[i / 2], score[j][i]);
    }
  }
}

// The sums of lanes become the row's.
__device__ __forceinline__ void add_lanes(float (&l)[2]) {
#pragma unroll
  for (int step = 1; step < 4; step <<= 1) {
#pragma unroll
    for (int r = 0; r < 2; ++r) l[r] = __fadd_rn(l[r], __shfl_xor_sync(0xffffffff, l[r], step));
  }
}

// The factor that makes a row's result of its sums; a sink joins the softmax and adds nothing.
__device__ __forceinline__ float ending(float m, float l, const AttentionArgs& a, int head) {
  if (a.sinks == nullptr) return __fdiv_rn(1.0f, l);
  const float sink = __fmul_rn(a.sinks[head], kLog2E);
  const float mine = __fmul_rn(m, steepness(a)), most = fmaxf(mine, sink);
  const float factor = power_of_two(__fsub_rn(mine, most));
  const float sum = __fadd_rn(__fmul_rn(l, factor), power_of_two(__fsub_rn(sink, most)));
  return __fdiv_rn(factor, sum);
}

// partial: [sequence, head, piece][value_dim sums, maximum, sum of weights, two of padding].
inline constexpr int kPartialEnd = 4;
__device__ __forceinline__ float* partial_at(const AttentionArgs& a, int sequence, int head,
                                             int piece, int pieces) {
  return a.partial + ((static_cast<int64_t>(sequence) * a.heads + head) * pieces + piece) *
                         (a.cache.value_dim + kPartialEnd);
}

// What a block works on.
struct Tile {
  int sequence, first_row, rows;  // rows are [query, head of the group]
  int queries, context, query_start;
};

// The tile of a walking block: sequences' tiles stand one after the other. Warp-wide.
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

// attention_prompt.cu: many queries a sequence, for the usual sizes of heads.
bool prompt_fits(const AttentionArgs& a);
int attention_prompt(const AttentionArgs& a);
// attention_single.cu: one query a sequence, for the usual sizes of heads.
bool single_fits(const AttentionArgs& a);
int attention_single(const AttentionArgs& a);

}  // namespace freshet::cuda

// What the kernels of attention share: the cache's places, operands, and the order of sums.
//
// A row is a query's head. Its result is defined as follows, whatever else is in the batch: the
// context is cut at multiples of kSplitTokens; within a piece, chunks of 64 keys run through an
// online softmax from left to right; pieces are merged from left to right. A chunk of which a row
// sees nothing leaves the row's numbers as they are, bit for bit. So a block may walk the whole
// context (prompts), or blocks may take pieces of it, which one of them merges (single queries).
// Rows are the 16-row side of mma: the heads that share a key head, and neighbouring queries.
#pragma once

#include "backend/cuda/common.cuh"

namespace freshet::cuda {

inline constexpr int kBlockTokens = 16;
inline constexpr int kChunk = 64;
inline constexpr int kChunks = kSplitTokens / kChunk;  // of a piece
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

__device__ __forceinline__ __half* keys_at(const CacheArgs& c, int64_t block, int head, int slot) {
  return reinterpret_cast<__half*>(c.data + block * c.block_bytes) +
         (static_cast<int64_t>(head) * kBlockTokens + slot) * c.key_dim;
}
__device__ __forceinline__ __half* values_at(const CacheArgs& c, int64_t block, int head,
                                             int slot) {
  if (c.shared != 0) return keys_at(c, block, head, slot);
  return reinterpret_cast<__half*>(c.data + block * c.block_bytes) +
         static_cast<int64_t>(c.kv_heads) * kBlockTokens * c.key_dim +
         (static_cast<int64_t>(head) * kBlockTokens + slot) * c.value_dim;
}

// A score as it enters the softmax, in powers of two.
__device__ __forceinline__ float score_of(const AttentionArgs& a, float sum) {
  float v = __fmul_rn(sum, a.scale);
  if (a.softcap > 0.0f) v = __fmul_rn(a.softcap, tanhf(__fdiv_rn(v, a.softcap)));
  return __fmul_rn(v, kLog2E);
}

// The factor that takes sums with maximum m to maximum `to`; 1 where both are empty.
__device__ __forceinline__ float shrink(float m, float to) {
  return m == to ? 1.0f : exp2f(__fsub_rn(m, to));
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
  // A chunk whose weights sum to `part` has raised the maximum to `most`.
  __device__ __forceinline__ void rescale(int r, float most, float part) {
    const float factor = shrink(m[r], most);
    m[r] = most;
    l[r] = __fadd_rn(__fmul_rn(l[r], factor), part);
#pragma unroll
    for (int j = 0; j < VT; ++j) {
      for (int i = r * 2; i < r * 2 + 2; ++i) acc[j][i] = __fmul_rn(acc[j][i], factor);
    }
  }
  // This, then `next`, which stands to the right of it.
  __device__ __forceinline__ void merge(const Sums& next) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float most = fmaxf(m[r], next.m[r]);
      const float mine = shrink(m[r], most), its = shrink(next.m[r], most);
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

// Scores of a chunk become weights, and the sums so far are taken to the new maximum. `most`: of a
// lane's own scores and the sums. kMasked: scores may be -infinity, of keys that a row does not
// see.
template <int VT, bool kMasked>
__device__ __forceinline__ void weigh(float (&score)[8][4], float (&most)[2], Sums<VT>& sums) {
  float part[2] = {};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    most[r] = fmaxf(most[r], __shfl_xor_sync(0xffffffff, most[r], 1));
    most[r] = fmaxf(most[r], __shfl_xor_sync(0xffffffff, most[r], 2));
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool none = kMasked && score[j][i] == -INFINITY;
      score[j][i] = none ? 0.0f : exp2f(__fsub_rn(score[j][i], most[i / 2]));
      part[i / 2] = __fadd_rn(part[i / 2], score[j][i]);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    part[r] = __fadd_rn(part[r], __shfl_xor_sync(0xffffffff, part[r], 1));
    part[r] = __fadd_rn(part[r], __shfl_xor_sync(0xffffffff, part[r], 2));
    sums.rescale(r, most[r], part[r]);
  }
}

// The result of a row from its sums; a sink joins the softmax and adds nothing.
struct Ending {
  float factor, sum;
};
__device__ __forceinline__ Ending ending(float m, float l, const float* sinks, int head) {
  if (sinks == nullptr) return {1.0f, l};
  const float sink = __fmul_rn(sinks[head], kLog2E);
  const float most = fmaxf(m, sink);
  const float factor = shrink(m, most);
  return {factor, __fadd_rn(__fmul_rn(l, factor), exp2f(__fsub_rn(sink, most)))};
}
__device__ __forceinline__ float end_value(float acc, const Ending& e) {
  return __fdiv_rn(__fmul_rn(acc, e.factor), e.sum);
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

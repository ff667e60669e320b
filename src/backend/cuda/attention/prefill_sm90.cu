// Prefill attention for the usual head sizes (Hopper) by wgmma, with queries on its 64-row side.
//
// A block takes tiles of 128 (query, head) rows of one KV head, one after the other, from a
// counter. For each tile it loops over the steps of kTileTokens keys that some row sees. Four
// producer warps fill a pipeline in shared memory by TMA bulk copies: the queries of a tile in F32,
// then the keys and values of each step, with one copy per block of the KV cache. Each of two
// consumer warpgroups has 64 rows. While it computes the softmax weights of a step, the tensor
// cores add the values of the previous step; the warpgroups take turns at the tensor cores. Sums of
// earlier KV splits are in shared memory. If the cache is in E4M3 or INT8, two warps copy codes and
// six more convert them within the pipeline. Heads of 256 features are cut into two slices of
// values, each of which computes the scores of all features.
#include "backend/cuda/attention/prefill_sm90.cuh"
#include "backend/cuda/attention/prefill_sm90.h"
#include "backend/cuda/mma/wgmma_bf16.cuh"
#include "backend/cuda/runtime/kernels.cuh"

namespace freshet::cuda {
namespace {

using namespace prompt;

[[maybe_unused]] __device__ Counters counters;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// State of a consumer warpgroup. A lane has rows g and g + 8, as in mma.
template <int D>
struct Numbers {
  uint32_t queries, keys, values;  // descriptors of the operands in stage 0
  float acc[kSlice<D> / 8][4];     // sums of the current KV split
  float score[kKeyTiles][4];       // scores, then softmax weights
  Softmax<2> piece, total;
  bool begins;  // the next values are the split's first
  bool merged;  // there are sums of earlier splits
};
// Softmax weights of a step: the A operands for its values.
using Weights = uint32_t[kTileTokens / 16][4];

// d = a b, or d += a b if `adds`; a from registers in the layout of mma, b transposed (MN-major):
// its descriptor describes core matrices whose rows are K.
// clang-format off
#define FRESHET_SUM(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define FRESHET_SUMS(i) FRESHET_SUM(i), FRESHET_SUM(i + 1), FRESHET_SUM(i + 2), FRESHET_SUM(i + 3)
#define FRESHET_HALF \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FRESHET_VALUES(type) \
  __device__ __forceinline__ void wgmma_##type(float (&d)[16][4], const uint32_t (&a)[4], \
                                               uint64_t b, int adds) { \
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %69, 0;\n" \
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." #type "." #type " {" FRESHET_HALF \
                 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, " \
                 "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, " \
                 "%62, %63}, {%64, %65, %66, %67}, %68, adds, 1, 1, 1;\n}" \
                 : FRESHET_SUMS(0), FRESHET_SUMS(4), FRESHET_SUMS(8), FRESHET_SUMS(12) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds)); \
  } \
  __device__ __forceinline__ void wgmma_##type(float (&d)[8][4], const uint32_t (&a)[4], \
                                               uint64_t b, int adds) { \
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %37, 0;\n" \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." #type "." #type " {" FRESHET_HALF \
                 "}, {%32, %33, %34, %35}, %36, adds, 1, 1, 1;\n}" \
                 : FRESHET_SUMS(0), FRESHET_SUMS(4) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds)); \
  }
FRESHET_VALUES(f16)
FRESHET_VALUES(bf16)
#undef FRESHET_SUM
#undef FRESHET_SUMS
#undef FRESHET_HALF
#undef FRESHET_VALUES
// clang-format on

// Makes a warp-uniform value known to the compiler as such: what depends on it is computed once and
// kept, not recomputed at each use.
__device__ __forceinline__ uint32_t kept(uint32_t v) {
  asm volatile("mov.b32 %0, %0;" : "+r"(v));
  return __shfl_sync(0xffffffff, v, 0);
}
// Lower half of an operand's matrix descriptor; only this half differs from stage to stage.
__device__ __forceinline__ uint32_t kept_place(const void* shared, uint64_t next_in_k,
                                               uint64_t next_rows) {
  return kept(static_cast<uint32_t>(operand_at(shared, next_in_k, next_rows)));
}
template <int D>
inline constexpr uint32_t kNextSlot = kTileTokens * D * sizeof(__half) >> 4;

// scores = queries times keys
template <bool kBF16, int D>
__device__ __forceinline__ void multiply_keys(Numbers<D>& n, int slot) {
  const auto at = [](uint32_t low, int k) {
    return uint64_t{D * 16 >> 4} << 32 | (low + static_cast<uint32_t>(k * kNextStep));
  };
  const uint32_t keys = n.keys + static_cast<uint32_t>(slot) * kNextSlot<D>;
  wgmma_begin();
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    if constexpr (kBF16) {
      wgmma(n.score, at(n.queries, k), at(keys, k), k > 0);
    } else {
      wgmma_half(n.score, at(n.queries, k), at(keys, k), k > 0);
    }
  }
  wgmma_commit();
}

// sums += weights times values
template <bool kBF16, int D>
__device__ __forceinline__ void multiply_values(Numbers<D>& n, const Weights& weights, int slot) {
  const uint32_t values = n.values + static_cast<uint32_t>(slot) * kNextSlot<D>;
  wgmma_begin();
#pragma unroll
  for (int k = 0; k < kTileTokens / 16; ++k) {
    const uint64_t at = uint64_t{128 >> 4} << 32 | (values + k * (kSlice<D> * 32 >> 4));
    if constexpr (kBF16) {
      wgmma_bf16(n.acc, weights[k], at, k > 0 || !n.begins);
    } else {
      wgmma_f16(n.acc, weights[k], at, k > 0 || !n.begins);
    }
  }
  wgmma_commit();
}

// Merges a KV split's sums with those of the earlier splits; after the last split (kLast) the
// result is in n.acc.
template <bool kLast, int D>
__device__ __forceinline__ void merge_piece(Numbers<D>& n, Softmax<2>& piece, Shared<D>& s,
                                            float steep) {
  add_lanes(piece.l);
  if (!n.merged) {  // as if merged with zeros, which turns negative zeros into positive ones
    n.total = piece;
#pragma unroll
    for (int j = 0; j < kSlice<D> / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) n.acc[j][i] = __fadd_rn(n.acc[j][i], 0.0f);
      if constexpr (!kLast) {
        s.totals[j][threadIdx.x] = make_float4(n.acc[j][0], n.acc[j][1], n.acc[j][2], n.acc[j][3]);
      }
    }
    n.merged = true;
    return;
  }
  float mine[2], its[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float most = fmaxf(n.total.m[r], piece.m[r]);
    mine[r] = shrink(n.total.m[r], most, steep);
    its[r] = shrink(piece.m[r], most, steep);
    n.total.m[r] = most;
    n.total.l[r] = __fmaf_rn(piece.l[r], its[r], __fmul_rn(n.total.l[r], mine[r]));
  }
#pragma unroll
  for (int j = 0; j < kSlice<D> / 8; ++j) {
    const float4 v = s.totals[j][threadIdx.x];
    const float sum[4] = {__fmaf_rn(n.acc[j][0], its[0], __fmul_rn(v.x, mine[0])),
                          __fmaf_rn(n.acc[j][1], its[0], __fmul_rn(v.y, mine[0])),
                          __fmaf_rn(n.acc[j][2], its[1], __fmul_rn(v.z, mine[1])),
                          __fmaf_rn(n.acc[j][3], its[1], __fmul_rn(v.w, mine[1]))};
    if constexpr (kLast) {
#pragma unroll
      for (int i = 0; i < 4; ++i) n.acc[j][i] = sum[i];
    } else {
      s.totals[j][threadIdx.x] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    }
  }
}

// Replaces quarters of a tile's scores by softmax weights.
template <int kFrom, int kUpto, int D>
__device__ __forceinline__ void weigh_quarters(Numbers<D>& n, float (&sum)[2], float steep,
                                               const float (&offset)[2]) {
#pragma unroll
  for (int q = kFrom; q < kUpto; ++q) {
    float part[2];
    weigh_quarter(
        part,
        [&](int r, int i) {
          const float* its = n.score[eight_of(q, i)] + r * 2;
          return make_float2(its[0], its[1]);
        },
        steep, offset,
        [&](int r, int i, float low, float high) {
          n.score[eight_of(q, i)][r * 2] = low;
          n.score[eight_of(q, i)][r * 2 + 1] = high;
        });
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = q == 0 ? part[r] : __fadd_rn(sum[r], part[r]);
  }
}
template <bool kBF16, int kFrom, int kUpto, int D>
__device__ __forceinline__ void pack_quarters(Weights& weights, const Numbers<D>& n) {
#pragma unroll
  for (int i = kFrom * kEightsOfQuarter; i < kUpto * kEightsOfQuarter; ++i) {
    const int j = eight_of(i / kEightsOfQuarter, i % kEightsOfQuarter);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      weights[j / 2][j % 2 * 2 + r] = pack_weights<kBF16>(n.score[j][r * 2], n.score[j][r * 2 + 1]);
    }
  }
}
template <int D>
__device__ __forceinline__ float largest_score(const Numbers<D>& n, int row) {
  return largest_of(
      [&](int r, int j) { return make_float2(n.score[j][r * 2], n.score[j][r * 2 + 1]); }, row);
}

// Recomputes the scores of multiply_keys() with mma, by a single warp.
template <bool kBF16, int D>
__device__ __forceinline__ void score_again(Numbers<D>& n, const Shared<D>& s, int slot) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const __half* queries =
      s.queries + (warp * 2 + lane / 8 % 2) * 8 * D + lane / 16 * 64 + lane % 8 * 8;
  const __half* keys = s.slot(slot) + lane / 16 * 8 * D + lane / 8 % 2 * 64 + lane % 8 * 8;
#pragma unroll
  for (int j = 0; j < kKeyTiles; ++j) {
    for (int i = 0; i < 4; ++i) n.score[j][i] = 0.0f;
  }
#pragma unroll 1
  for (int k = 0; k < D / 16; ++k) {
    uint32_t q[4];
    ldmatrix4(q, queries + k * 128);
#pragma unroll
    for (int j = 0; j < kKeyTiles; j += 2) {
      uint32_t b[4];
      ldmatrix4(b, keys + j * 8 * D + k * 128);
      const uint4 operand = make_uint4(q[0], q[1], q[2], q[3]);
      mma_numbers<kBF16>(n.score[j], operand, b[0], b[1]);
      mma_numbers<kBF16>(n.score[j + 1], operand, b[2], b[3]);
    }
  }
}

// Applies the soft cap, and masks keys that a row doesn't see. limit: first and last visible
// position of rows g and g + 8.
template <int D>
__device__ __forceinline__ void mask_scores(Numbers<D>& n, const AttentionArgs& a, int step,
                                            const int (&limit)[2][2]) {
  if (a.softcap > 0.0f) {
    const float steep = cap_steepness(a);
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) n.score[j][i] = capped(n.score[j][i], steep);
    }
  }
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int first = step * kTileTokens + lane % 4 * 2;
  const int from[2] = {limit[0][0] - first, limit[1][0] - first};
  const int upto[2] = {limit[0][1] - first, limit[1][1] - first};
#pragma unroll
  for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int p = j * 8 + i % 2;
      if (p < from[i / 2] || p > upto[i / 2]) n.score[j][i] = -INFINITY;
    }
  }
}

// Adds the last step's values; the result of all splits is in n.acc.
template <bool kBF16, int D>
__device__ __forceinline__ void add_values(Numbers<D>& n, const Weights& weights, Ring<D>& ring,
                                           float steep) {
  ring.at.count = kept(ring.at.count);
  ring.wait_full();
  multiply_values<kBF16>(n, weights, ring.slot());
  wgmma_wait<0>();
  pin(n.acc);
  ring.leave(ring.slot());
  ring.at.next();
  merge_piece<true>(n, n.piece, ring.s, steep);
}

// Scores the first step's keys.
template <bool kBF16, int D>
__device__ __forceinline__ void take_keys(Numbers<D>& n, Weights& weights, Ring<D>& ring,
                                          const AttentionArgs& a, int step,
                                          const int (&limit)[2][2], bool masked, float steep) {
  ring.at.count = kept(ring.at.count);
  ring.wait_full();
  wait_turn();
  multiply_keys<kBF16>(n, ring.slot());
  pass_turn();
  n.begins = true;
  n.merged = false;
  wgmma_wait<0>();
  pin(n.score);
  ring.leave(ring.slot());
  ring.at.next();
  if (masked) mask_scores(n, a, step, limit);
  float sum[2] = {}, offset[2], factor[2];
  take_reference(n.piece, true, sum, steep, factor, offset,
                 [&](int r) { return largest_score(n, r); });
  weigh_quarters<0, kQuarters>(n, sum, steep, offset);
  pack_quarters<kBF16, 0, kQuarters>(weights, n);
  add_sums(n.piece, true, sum, factor);
}

// Adds the previous step's values while this step's keys are scored.
template <bool kBF16, int D>
__device__ __forceinline__ void take_both(Numbers<D>& n, Weights& weights, Ring<D>& ring,
                                          const AttentionArgs& a, int step,
                                          const int (&limit)[2][2], bool masked, float steep) {
  ring.at.count = kept(ring.at.count);
  ring.wait_full();
  const auto before = ring.at;
  const int values = before.stage();
  ring.at.next();
  ring.wait_full();
  const int keys = ring.slot();
  ring.at.next();
  wait_turn();
  multiply_keys<kBF16>(n, keys);
  multiply_values<kBF16>(n, weights, values);
  pass_turn();
  wgmma_wait<1>();
  pin(n.score);
  if (masked) mask_scores(n, a, step, limit);
  n.begins = step % kTiles == 0;
  Softmax<2> piece = n.piece;
  const auto largest = [&](int r) { return largest_score(n, r); };
  float sum[2] = {}, offset[2], factor[2] = {1.0f, 1.0f};
  if (n.begins) {
    take_reference(n.piece, true, sum, steep, factor, offset, largest);
  } else {
    offsets_of(offset, n.piece, steep);
  }
  // Weights stay in the scores' registers until the previous values have been added: operands of a
  // wgmma in flight keep their registers, and there aren't enough for both.
  weigh_quarters<0, 1>(n, sum, steep, offset);
  // The stage is full already; without this wait, ptxas would move the next one up, before a
  // branch.
  ring.pipe().wait(before);
  wgmma_wait<0>();
  pin(n.acc);
  ring.leave(values);
  pack_quarters<kBF16, 0, 1>(weights, n);
  weigh_quarters<1, kQuarters>(n, sum, steep, offset);
  pack_quarters<kBF16, 1, kQuarters>(weights, n);
  const bool raised = !n.begins && some_beyond(sum);
  if (raised) {
    score_again<kBF16>(n, ring.s, keys);
    if (masked) mask_scores(n, a, step, limit);
    take_reference(n.piece, false, sum, steep, factor, offset, largest);
    weigh_quarters<0, kQuarters>(n, sum, steep, offset);
    pack_quarters<kBF16, 0, kQuarters>(weights, n);
  }
  ring.leave(keys);
  add_sums(n.piece, n.begins, sum, factor);
  if (n.begins) merge_piece<false>(n, piece, ring.s, steep);
  if (!raised) return;
#pragma unroll
  for (int j = 0; j < kSlice<D> / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) n.acc[j][i] = __fmul_rn(n.acc[j][i], factor[i / 2]);
  }
}

// kE4M3: the encoded activations are in E4M3.
template <int D, bool kE4M3>
__device__ __forceinline__ void write_rows(const Numbers<D>& n, const AttentionArgs& a,
                                           const Walk& w) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  constexpr int kV = kSlice<D>;
  const int64_t cols = static_cast<int64_t>(a.heads) * D;
  const auto apart = [](int j) { return j * 8; };
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = warp * 16 + lane / 4 + r * 8;
    const int64_t token = w.tile.query_start + (w.tile.first_row + row) / w.group;
    const int head = w.kv_head * w.group + (w.tile.first_row + row) % w.group;
    const int64_t col = head * D + w.slice * kV + lane % 4 * 2;
    const bool real = row < w.tile.rows;
    const float end = real ? ending(n.total.m[r], n.total.l[r], a, head) : 0.0f;
    float2 v[kV / 8];
#pragma unroll
    for (int j = 0; j < kV / 8; ++j) {
      v[j] = make_float2(__fmul_rn(n.acc[j][r * 2], end), __fmul_rn(n.acc[j][r * 2 + 1], end));
    }
    float most = 0.0f;
    if constexpr (kE4M3) {
      most = largest_of(v);
      most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));
    }
    if (!real) continue;
    put_row(a, token, col, apart, v);
    if constexpr (kE4M3) {
      put_e4m3_pairs(a.act, token, head * kSlices<D> + w.slice, lane % 4 * 2, apart, v, most);
    } else if (a.act.data != nullptr) {
#pragma unroll
      for (int j = 0; j < kV / 8; j += 8) {
        auto* to = reinterpret_cast<uint32_t*>(a.act.data) +
                   activation_at(a.act, token, col + j * 8, cols) / 2;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (a.act.core_tiles > 0) {
            to[i * 32] = pack_bf16(v[j + i].x, v[j + i].y);  // feature pairs of 64 features
          } else {
            put_pair(a.act, token, col + (j + i) * 8, cols, v[j + i].x, v[j + i].y);
          }
        }
      }
    }
  }
}

// Zero rows that pad the encoded activations to a whole token tile, by the block that has the last
// row.
template <int D, bool kE4M3>
__device__ __forceinline__ void pad_rows(const AttentionArgs& a, const Walk& w) {
  const bool ends = w.tile.first_row + w.tile.rows == w.tile.queries * w.group;
  if (a.act.data == nullptr || w.slice > 0 || !ends ||
      w.tile.query_start + w.tile.queries != a.batch.tokens) {
    return;
  }
  const int64_t cols = static_cast<int64_t>(a.heads) * D;
  if constexpr (kE4M3) {
    pad_e4m3(a.act, a.batch.tokens, int64_t{w.kv_head} * w.group * D / kE4M3Cols,
             w.group * D / kE4M3Cols, static_cast<int>(threadIdx.x % 128), 128);
    return;
  }
  const int end = (a.batch.tokens + kTokenTile - 1) / kTokenTile * kTokenTile;
  for (int row = a.batch.tokens; row < end; ++row) {
    for (int c = static_cast<int>(threadIdx.x % 128) * 2; c < w.group * D; c += 256) {
      put_pair(a.act, row, w.kv_head * w.group * D + c, cols, 0.0f, 0.0f);
    }
  }
}

// All steps that a warpgroup's rows see; the pipeline has the steps that the block needs.
template <bool kBF16, bool kE4M3, int D>
__device__ __forceinline__ void take_tile(Ring<D>& ring, const AttentionArgs& a, const Walk& w) {
  const int group = static_cast<int>(threadIdx.x / 128), lane = static_cast<int>(threadIdx.x % 32);
  const int first_row = group * kGroupRows;
  const int rows = min(kGroupRows, w.tile.rows - first_row);
  const Steps all = steps_of(a, w, 0, w.tile.rows);
  const auto skip = [&](int steps) {
    for (int i = 0; i < 2 * steps; ++i, ring.at.next()) {
      ring.wait_full();
      ring.leave(ring.slot());
      if (i % 2 != 0) continue;
      wait_turn();
      pass_turn();
    }
  };
  if (rows <= 0) {
    skip(all.last - all.first + 1);
    return;
  }
  const Steps mine = steps_of(a, w, first_row, first_row + rows);
  const int first = w.position(first_row), last = w.position(first_row + rows - 1);
  // Steps that are fully visible to all rows.
  const int whole = (first_seen(a, last) + kTileTokens - 1) / kTileTokens;
  const int end = a.softcap > 0.0f ? whole : (first + 1) / kTileTokens;
  int limit[2][2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = static_cast<int>(threadIdx.x % 128 / 32) * 16 + lane / 4 + r * 8;
    limit[r][1] = w.position(first_row + min(row, rows - 1));
    limit[r][0] = first_seen(a, limit[r][1]);
  }
  const float steep = steepness(a);
  Numbers<D> n;
  n.queries = kept_place(ring.s.queries + group * kGroupRows * D, 128, D * 16);
  n.keys = kept_place(ring.s.room, 128, D * 16);
  n.values = kept_place(ring.s.room, kSlice<D> * 16, 128);
  Weights weights;
  skip(mine.first - all.first);
  const auto masked = [&](int step) { return step < whole || step >= end; };
  take_keys<kBF16>(n, weights, ring, a, mine.first, limit, masked(mine.first), steep);
  for (int step = mine.first + 1; step <= mine.last; ++step) {
    take_both<kBF16>(n, weights, ring, a, step, limit, masked(step), steep);
  }
  add_values<kBF16>(n, weights, ring, steep);
  write_rows<D, kE4M3>(n, a, w);
  if (group == 0) pad_rows<D, kE4M3>(a, w);
  skip(all.last - mine.last);
}

// Consumer warpgroup: 64 rows of every tile.
template <bool kBF16, bool kE4M3, int D>
__device__ __forceinline__ void consume(Shared<D>& s, const AttentionArgs& a,
                                        const Before& before) {
  Ring<D> ring{s};
  const int group = static_cast<int>(threadIdx.x / 128);
  Walk w;
  w.group = a.heads / a.cache.kv_heads;
  if (group == 1) pass_turn();
  for (int t = 0;; ++t) {
    for (int g = 0; g < kGroups; ++g, ring.at.next()) {
      ring.wait_full();
      w.tile = s.tiles[t % kInfos];
      if (w.tile.sequence < 0) return;
      if (g == group) {
        sync_group();  // all threads have finished reading the previous queries
        w.kv_head = s.heads[t % kInfos] / kSlices<D>;
        w.slice = s.heads[t % kInfos] % kSlices<D>;
        if constexpr (kSlices<D> > 1) {
          fetch_queries<kBF16>(s, a, w);
        } else {
          const auto* from = reinterpret_cast<const float*>(s.slot(ring.slot()));
          bool turned = false;
          if constexpr (D == kUsualDim) {
            turned = before.cos_sin != nullptr || before.weight != nullptr;
            if (turned) turn_queries<kBF16>(s, from, w, before);
          }
          if (!turned) round_queries<kBF16>(s, from, w.tile.rows - g * kGroupRows);
        }
      }
      ring.leave(ring.slot());
    }
    sync_group();
    take_tile<kBF16, kE4M3>(ring, a, w);
  }
}
#endif

// Persistent blocks: as many as are resident at once.
template <int D, CacheType kType, bool kE4M3>
__global__ void __launch_bounds__(kThreads<kType>, 1)
    prompt_kernel(const __grid_constant__ AttentionArgs a, const __grid_constant__ Before before,
                  int tiles) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr bool kCodes = in_bytes(kType);
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& s = *reinterpret_cast<Shared<D>*>(memory);
  let_next_start();
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shared<D>::kSlots; ++i) {
      Pipeline{s.full, s.empty}.init_stage(i, kConsumers / 32);
      barrier_init(&s.raw[i], 1);
    }
    barriers_ready();
  }
  __syncthreads();
  if (threadIdx.x >= kConsumers) {
    // setmaxnreg redistributes the registers that the block was launched with.
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kFewRegisters));
    wait();
    if (producer() < kProducers<kType>) {
      produce<kType>(s, a, tiles, counters);
    } else if constexpr (kCodes) {
      convert<kType>(s);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kMostRegisters<kType>));
    wait();
    consume<kType == CacheType::kBF16, kE4M3>(s, a, before);
  }
#endif
}

template <int D, CacheType kType, bool kE4M3>
int run(const Context& ctx, const AttentionArgs& a) {
  constexpr auto kKernel = prompt_kernel<D, kType, kE4M3>;
  if (const int error = raise_shared(kKernel, sizeof(Shared<D>)); error != 0) return error;
  const int64_t group = a.heads / a.cache.kv_heads;
  const int64_t tiles = a.batch.tokens * group / kRows + a.batch.sequences;
  const int64_t all = tiles * a.cache.kv_heads * kSlices<D>;
  const dim3 grid(static_cast<unsigned>(all < ctx.multiprocessors ? all : ctx.multiprocessors));
  Before before = {};
  if (a.before != nullptr) {
    const HeadsArgs::Part& q = a.before->of[0];
    if (q.rotary_dim != 0) before.cos_sin = a.before->cos_sin;
    if (q.normed != 0) before.weight = q.norm.weight;
    before.eps = q.norm.eps;
    before.weight_step = q.norm_per_head != 0 ? D : 0;
  }
  return launch(ctx, kKernel, grid, dim3(kThreads<kType>), sizeof(Shared<D>), a, before,
                static_cast<int>(tiles));
}

template <CacheType kType>
int run_type(const Context& ctx, const AttentionArgs& a) {
  if (a.cache.key_dim == 64) return run<64, kType, false>(ctx, a);
  if constexpr (!in_bytes(kType)) {
    if (a.cache.key_dim == 256) {
      return a.act.e4m3 != 0 ? run<256, kType, true>(ctx, a) : run<256, kType, false>(ctx, a);
    }
  }
  return a.act.e4m3 != 0 ? run<128, kType, true>(ctx, a) : run<128, kType, false>(ctx, a);
}

}  // namespace

static_assert(kGroupRows == kPrefillGroupRows);

// Decides for the part of the batch that isn't decode.
bool prefill_rotates(const Context& ctx, const AttentionArgs& a) {
  AttentionArgs rest = a;
  rest.single = 0;
  return attention_kernel_of(ctx, rest) == kPrefillSm90 && a.cache.key_dim == kUsualDim &&
         usual(a.before->of[0]);
}

int attention_prompt(const Context& ctx, const AttentionArgs& a) {
  switch (a.cache.type) {
    case CacheType::kE4M3:
      return run_type<CacheType::kE4M3>(ctx, a);
    case CacheType::kInt8:
      return run_type<CacheType::kInt8>(ctx, a);
    case CacheType::kBF16:
      return run_type<CacheType::kBF16>(ctx, a);
    default:
      return run_type<CacheType::kF16>(ctx, a);
  }
}

}  // namespace freshet::cuda

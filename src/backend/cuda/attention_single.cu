// Attention with one query a sequence: memory decides its speed, so keys and values stream.
//
// A block takes a run of pieces of one sequence's context, for all heads of one key head. Chunks of
// 64 keys pass through a ring in shared memory; those that no kernel of this step writes are asked
// for before the kernel in front has ended. Four warps share a chunk: by keys for the scores, which
// they leave to each other in shared memory, and by features for the values. A block that has the
// whole context writes the result; of several, the one that ends last merges all pieces from left
// to right. So neither the cut into runs nor the order of blocks touches a bit.
#include "backend/cuda/attention.cuh"
#include "backend/cuda/kernels.cuh"

namespace freshet::cuda {
namespace {

constexpr int kSingleWarps = 4, kThreads = kSingleWarps * 32;
constexpr int kStages = 3;
constexpr int kScorePad = kChunk + 8;
constexpr int kRowsOfTile = 16;
constexpr int kMostRun = 16;            // pieces of a block
constexpr int kMostCounters = 1 << 16;  // tiles of rows of a batch

// Blocks that have written their pieces, by tile; the last one leaves a zero.
__device__ unsigned arrived[kMostCounters];

struct Single {
  int tiles;   // of rows, for a key head
  int pieces;  // most pieces a row sees
  int run;     // pieces a block takes
};

template <int D, int kRows>
struct Shared {
  __half keys[kStages][kChunk * (D + 8)], values[kStages][kChunk * (D + 8)];
  float scores[8 * kRows][kScorePad];
  int ids[kMostRun * kSplitTokens / kBlockTokens];
  int last;
};

// What a block works on.
struct Range {
  int sequence, kv_head, first_row, rows;
  int low, position;                  // keys that the query sees
  int first_piece, pieces;            // that they touch
  int runs, first_chunk, last_chunk;  // last < first: nothing for this block
};

__device__ __forceinline__ Range find_range(const AttentionArgs& a, const Single& plan) {
  Range w;
  const int group = a.heads / a.cache.kv_heads;
  w.sequence = static_cast<int>(blockIdx.x) / plan.tiles;
  w.kv_head = static_cast<int>(blockIdx.y);
  w.first_row = static_cast<int>(blockIdx.x) % plan.tiles * kRowsOfTile;
  w.rows = min(kRowsOfTile, group - w.first_row);
  w.position = a.batch.context_len[w.sequence] - 1;
  w.low = a.window > 0 ? max(0, w.position - a.window + 1) : 0;
  w.first_piece = w.low / kSplitTokens;
  w.pieces = w.position / kSplitTokens + 1 - w.first_piece;
  w.runs = (w.pieces + plan.run - 1) / plan.run;
  const int first = w.first_piece + static_cast<int>(blockIdx.z) * plan.run;
  w.first_chunk = max(w.low / kChunk, first * kChunks);
  w.last_chunk = min(w.position / kChunk, (first + plan.run) * kChunks - 1);
  return w;
}

// Asks for a chunk's keys and values, zeros where the query does not look: two groups of copies.
template <int D, int kRows>
__device__ __forceinline__ void fetch(Shared<D, kRows>& s, const AttentionArgs& a, const Range& w,
                                      int chunk) {
  constexpr int kVectors = D / 8, kAtOnce = kThreads / kVectors;
  const int thread = static_cast<int>(threadIdx.x);
  const int vector = thread % kVectors, key = thread / kVectors;
  const int stage = (chunk - w.first_chunk) % kStages;
  const int* ids = s.ids + (chunk - w.first_chunk) * (kChunk / kBlockTokens);
  const int at = key * (D + 8) + vector * 8;
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    __half* to = (part == 0 ? s.keys[stage] : s.values[stage]) + at;
    if (chunk <= w.last_chunk) {
#pragma unroll
      for (int n = 0; n < kChunk / kAtOnce; ++n) {
        const int p = chunk * kChunk + n * kAtOnce + key;
        const bool valid = p >= w.low && p <= w.position;
        const int64_t id = valid ? ids[n * kAtOnce / kBlockTokens] : 0;
        const int slot = (n * kAtOnce) % kBlockTokens + key;
        const __half* from = part == 0 ? keys_at(a.cache, id, w.kv_head, slot)
                                       : values_at(a.cache, id, w.kv_head, slot);
        cp_async16(to + n * kAtOnce * (D + 8), from + vector * 8, valid);
      }
    }
    cp_async_commit();
  }
}

// The operands of a tile's queries.
template <int D, int kRows>
__device__ __forceinline__ void load_queries(uint4 (&q)[D / 16], const AttentionArgs& a,
                                             const Range& w) {
  const int lane = static_cast<int>(threadIdx.x % 32), g = lane / 4, t = lane % 4;
  const int head = w.kv_head * (a.heads / a.cache.kv_heads) + w.first_row;
  const float* from = a.q + w.sequence * a.q_stride + (head + g) * D + 2 * t;
  float2 v[kRows][D / 8];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int k = 0; k < D / 8; ++k) {
      v[r][k] = make_float2(0.0f, 0.0f);
      if (g + 8 * r < w.rows) v[r][k] = *reinterpret_cast<const float2*>(from + r * 8 * D + k * 8);
    }
  }
  const auto pair = [](const float2& f) {
    const __half2 h = __halves2half2(to_half(f.x), to_half(f.y));
    return reinterpret_cast<const uint32_t&>(h);
  };
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    q[k] = make_uint4(pair(v[0][2 * k]), 0, pair(v[0][2 * k + 1]), 0);
    if constexpr (kRows == 2) {
      q[k].y = pair(v[1][2 * k]);
      q[k].w = pair(v[1][2 * k + 1]);
    }
  }
}

// A warp's 16 keys of a chunk against all rows.
template <int D, int kRows>
__device__ __forceinline__ void score_keys(Shared<D, kRows>& s, const AttentionArgs& a,
                                           const Range& w, const uint4 (&q)[D / 16], int chunk) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const __half* keys = s.keys[(chunk - w.first_chunk) % kStages] +
                       (warp * 16 + lane / 16 * 8 + lane % 8) * (D + 8) + lane / 8 % 2 * 8;
  float sum[2][4] = {};
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    uint32_t b[4];
    ldmatrix4(b, keys + k * 16);
    mma_half(sum[0], q[k], b[0], b[1]);
    mma_half(sum[1], q[k], b[2], b[3]);
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int key = warp * 16 + j * 8 + lane % 4 * 2;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float v[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int p = chunk * kChunk + key + i;
        v[i] = p >= w.low && p <= w.position ? score_of(a, sum[j][r * 2 + i]) : -INFINITY;
      }
      *reinterpret_cast<float2*>(&s.scores[lane / 4 + r * 8][key]) = make_float2(v[0], v[1]);
    }
  }
}

// Weights a warp's features of a chunk's values by all scores.
template <int D, int kRows>
__device__ __forceinline__ void sum_values(Sums<D / 32, kRows>& sums, const Shared<D, kRows>& s,
                                           int stage) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  uint32_t weights[8][2] = {};  // of tiles of 8 keys, rows g and g + 8
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float2 v[8];
    float most = sums.m[r];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      v[j] = *reinterpret_cast<const float2*>(&s.scores[lane / 4 + r * 8][j * 8 + lane % 4 * 2]);
      most = fmaxf(most, fmaxf(v[j].x, v[j].y));
    }
    most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));
    float part = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      v[j].x = v[j].x == -INFINITY ? 0.0f : exp2f(__fsub_rn(v[j].x, most));
      v[j].y = v[j].y == -INFINITY ? 0.0f : exp2f(__fsub_rn(v[j].y, most));
      part = __fadd_rn(__fadd_rn(part, v[j].x), v[j].y);
      weights[j][r] = pack_half(v[j].x, v[j].y);
    }
    part = __fadd_rn(part, __shfl_xor_sync(0xffffffff, part, 1));
    part = __fadd_rn(part, __shfl_xor_sync(0xffffffff, part, 2));
    sums.rescale(r, most, part);
  }
  const __half* values =
      s.values[stage] + lane % 16 * (D + 8) + warp * (D / kSingleWarps) + lane / 16 * 8;
#pragma unroll
  for (int k = 0; k < kChunk / 16; ++k) {
    const uint4 operand = make_uint4(weights[2 * k][0], weights[2 * k][1], weights[2 * k + 1][0],
                                     weights[2 * k + 1][1]);
#pragma unroll
    for (int j = 0; j < D / 32; j += 2) {
      uint32_t b[4];
      ldmatrix4_trans(b, values + k * 16 * (D + 8) + j * 8);
      mma_half(sums.acc[j], operand, b[0], b[1]);
      mma_half(sums.acc[j + 1], operand, b[2], b[3]);
    }
  }
}

// Two neighbouring numbers of the result, and of its form as activations.
__device__ __forceinline__ void put_result(const AttentionArgs& a, int sequence, int64_t col,
                                           float low, float high) {
  *reinterpret_cast<float2*>(a.out + sequence * a.out_stride + col) = make_float2(low, high);
  if (a.act.data == nullptr) return;
  const int64_t cols = static_cast<int64_t>(a.heads) * a.cache.value_dim;
  put_pair(a.act, sequence, col, cols, low, high);
}

// A piece's sums as partial results, or the sums of all as the result.
template <int D, int kRows>
__device__ __forceinline__ void write_sums(const Sums<D / 32, kRows>& sums, const AttentionArgs& a,
                                           const Range& w, int piece, int pieces) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = lane / 4 + r * 8;
    if (row >= w.rows) continue;
    const int head = w.kv_head * (a.heads / a.cache.kv_heads) + w.first_row + row;
    const int first = warp * (D / kSingleWarps) + lane % 4 * 2;
    if (piece < 0) {
      const Ending end = ending(sums.m[r], sums.l[r], a.sinks, head);
#pragma unroll
      for (int j = 0; j < D / 32; ++j) {
        put_result(a, w.sequence, static_cast<int64_t>(head) * D + first + j * 8,
                   end_value(sums.acc[j][r * 2], end), end_value(sums.acc[j][r * 2 + 1], end));
      }
      continue;
    }
    float* to = partial_at(a, w.sequence, head, piece, pieces);
#pragma unroll
    for (int j = 0; j < D / 32; ++j) {
      *reinterpret_cast<float2*>(to + first + j * 8) =
          make_float2(sums.acc[j][r * 2], sums.acc[j][r * 2 + 1]);
    }
    if (warp == 0 && lane % 4 == 0) {
      *reinterpret_cast<float2*>(to + D) = make_float2(sums.m[r], sums.l[r]);
    }
  }
}

// Merges the pieces of all rows: a warp a row, a lane D / 32 neighbouring features.
template <int D>
__device__ __forceinline__ void merge_pieces(const AttentionArgs& a, const Range& w, int pieces) {
  constexpr int kPairs = D / 64;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  for (int row = warp; row < w.rows; row += kSingleWarps) {
    const int head = w.kv_head * (a.heads / a.cache.kv_heads) + w.first_row + row;
    const float* from = partial_at(a, w.sequence, head, 0, pieces);
    float m = -INFINITY, l = 0.0f;
    float2 acc[kPairs] = {};
    for (int base = 0; base < w.pieces; base += 32) {
      // Factors of 32 pieces at once, a lane a piece: a running maximum rounds nothing.
      const int count = min(32, w.pieces - base);
      float2 its_end = make_float2(-INFINITY, 0.0f);
      const float* ends = from + (base + lane) * (D + kPartialEnd) + D;
      if (lane < count) its_end = __ldcg(reinterpret_cast<const float2*>(ends));
      float most = fmaxf(m, its_end.x);
      for (int step = 1; step < 32; step <<= 1) {
        const float other = __shfl_up_sync(0xffffffff, most, step);
        if (lane >= step) most = fmaxf(most, other);
      }
      const float before = __shfl_up_sync(0xffffffff, most, 1);
      const float mine = shrink(lane == 0 ? m : before, most), its = shrink(its_end.x, most);
      m = __shfl_sync(0xffffffff, most, 31);
#pragma unroll 8
      for (int i = 0; i < count; ++i) {
        const auto* p = reinterpret_cast<const float2*>(from + (base + i) * (D + kPartialEnd));
        const float my_factor = __shfl_sync(0xffffffff, mine, i);
        const float its_factor = __shfl_sync(0xffffffff, its, i);
        l = __fmaf_rn(__shfl_sync(0xffffffff, its_end.y, i), its_factor, __fmul_rn(l, my_factor));
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
          const float2 v = __ldcg(p + j * 32 + lane);
          acc[j].x = __fmaf_rn(v.x, its_factor, __fmul_rn(acc[j].x, my_factor));
          acc[j].y = __fmaf_rn(v.y, its_factor, __fmul_rn(acc[j].y, my_factor));
        }
      }
    }
    const Ending end = ending(m, l, a.sinks, head);
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      put_result(a, w.sequence, static_cast<int64_t>(head) * D + (j * 32 + lane) * 2,
                 end_value(acc[j].x, end), end_value(acc[j].y, end));
    }
  }
}

// Zeros for the rows that fill up the activations' last tile.
template <int D>
__device__ __forceinline__ void pad_rows(const AttentionArgs& a, const Range& w) {
  if (a.act.data == nullptr || w.sequence + 1 != a.batch.sequences) return;
  const int64_t cols = static_cast<int64_t>(a.heads) * D;
  const int64_t first =
      (static_cast<int64_t>(w.kv_head) * (a.heads / a.cache.kv_heads) + w.first_row) * D;
  const int end = (a.batch.sequences + kTokenTile - 1) / kTokenTile * kTokenTile;
  for (int row = a.batch.sequences; row < end; ++row) {
    for (int c = static_cast<int>(threadIdx.x) * 2; c < w.rows * D; c += kThreads * 2) {
      put_pair(a.act, row, first + c, cols, 0.0f, 0.0f);
    }
  }
}

// Whether this block is the last of its tile's to come here.
template <int D, int kRows>
__device__ __forceinline__ bool comes_last(Shared<D, kRows>& s, const Range& w) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned& count = arrived[blockIdx.x * gridDim.y + blockIdx.y];
    s.last = atomicAdd(&count, 1u) + 1 == static_cast<unsigned>(w.runs);
    if (s.last != 0) count = 0;
  }
  __syncthreads();
  __threadfence();
  return s.last != 0;
}

// Blocks: [sequences x tiles of rows, key heads, runs of pieces].
template <int D, int kRows>
__global__ void __launch_bounds__(kThreads)
    single_kernel(const __grid_constant__ AttentionArgs a, const __grid_constant__ Single plan) {
  extern __shared__ __align__(16) uint8_t memory[];
  auto& s = *reinterpret_cast<Shared<D, kRows>*>(memory);
  let_next_start();
  // Lengths and tables came by a copy before the step's first kernel, and of the cache the step
  // writes the query's own place only.
  const Range w = find_range(a, plan);
  if (w.last_chunk < w.first_chunk) return;
  const int thread = static_cast<int>(threadIdx.x);
  const int first_block = w.first_chunk * (kChunk / kBlockTokens);
  if (first_block + thread <= w.position / kBlockTokens &&
      thread < (w.last_chunk - w.first_chunk + 1) * (kChunk / kBlockTokens)) {
    s.ids[thread] = a.batch.tables[w.sequence * a.batch.table_stride + first_block + thread];
  }
  __syncthreads();
  for (int chunk = w.first_chunk; chunk < w.first_chunk + kStages - 1; ++chunk) {
    if (chunk >= w.position / kChunk) wait();
    fetch(s, a, w, chunk);
  }
  wait();
  uint4 q[D / 16];
  load_queries<D, kRows>(q, a, w);
  Sums<D / 32, kRows> total, sums;
  total.clear();
  sums.clear();
  for (int chunk = w.first_chunk; chunk <= w.last_chunk; ++chunk) {
    cp_async_wait<2 * (kStages - 1) - 1>();
    __syncthreads();  // the chunk's keys are here, and all have left the chunk before it
    fetch(s, a, w, chunk + kStages - 1);
    score_keys(s, a, w, q, chunk);
    cp_async_wait<2 * (kStages - 1)>();
    __syncthreads();  // its scores and its values are
    sum_values<D, kRows>(sums, s, (chunk - w.first_chunk) % kStages);
    if (chunk % kChunks != kChunks - 1 && chunk != w.last_chunk) continue;
    if (w.runs == 1) {
      total.merge(sums);
    } else {
      write_sums<D, kRows>(sums, a, w, chunk / kChunks - w.first_piece, plan.pieces);
    }
    sums.clear();
  }
  if (w.runs == 1) {
    write_sums<D, kRows>(total, a, w, -1, 0);
  } else {
    if (!comes_last(s, w)) return;
    merge_pieces<D>(a, w, plan.pieces);
  }
  pad_rows<D>(a, w);
}

Single plan_single(const AttentionArgs& a, int resident) {
  Single p = {};
  p.tiles = static_cast<int>(ceil_div(a.heads / a.cache.kv_heads, kRowsOfTile));
  p.pieces = static_cast<int>(ceil_div(a.max_context, kSplitTokens));
  if (a.window > 0) {
    const auto seen = static_cast<int>(ceil_div(a.window, kSplitTokens)) + 1;
    p.pieces = p.pieces < seen ? p.pieces : seen;
  }
  // As many pieces a block as make the waves of blocks end soonest; a block's beginning and end
  // cost about a piece.
  const int64_t tiles = int64_t{a.batch.sequences} * p.tiles * a.cache.kv_heads;
  int64_t least = INT64_MAX;
  for (int run = 1; run <= kMostRun; ++run) {
    const int64_t waves = ceil_div(tiles * ceil_div(p.pieces, run), resident);
    if (waves * (run + 1) >= least) continue;
    least = waves * (run + 1);
    p.run = run;
  }
  return p;
}

template <int D, int kRows>
int run(const AttentionArgs& a) {
  constexpr size_t kBytes = sizeof(Shared<D, kRows>);
  const auto kernel = single_kernel<D, kRows>;
  static const cudaError_t kRaised = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes));
  if (kRaised != cudaSuccess) return static_cast<int>(kRaised);
  const Single plan = plan_single(a, multiprocessors * static_cast<int>(kSharedOfSm / kBytes));
  const dim3 grid(static_cast<unsigned>(a.batch.sequences * plan.tiles),
                  static_cast<unsigned>(a.cache.kv_heads),
                  static_cast<unsigned>(ceil_div(plan.pieces, plan.run)));
  return launch(kernel, grid, dim3(kThreads), kBytes, a, plan);
}

template <int D>
int run(const AttentionArgs& a) {
  return a.heads / a.cache.kv_heads <= 8 ? run<D, 1>(a) : run<D, 2>(a);
}

}  // namespace

bool single_fits(const AttentionArgs& a) {
  const int d = a.cache.key_dim;
  const int64_t tiles = int64_t{a.batch.sequences} * a.cache.kv_heads *
                        ceil_div(a.heads / a.cache.kv_heads, kRowsOfTile);
  // Hopper has the shared memory for it; the walking kernel asks for less.
  return capability >= 90 && a.single != 0 && a.partial != nullptr && a.cache.value_dim == d &&
         (d == 64 || d == 128 || d == 256) && tiles <= kMostCounters && a.out_stride % 2 == 0 &&
         a.q_stride % 2 == 0;
}

int attention_single(const AttentionArgs& a) {
  switch (a.cache.key_dim) {
    case 64:
      return run<64>(a);
    case 128:
      return run<128>(a);
    default:
      return run<256>(a);
  }
}

}  // namespace freshet::cuda

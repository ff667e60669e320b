// Shared by the decode kernels: their tasks, and how KV splits are merged. With kRows == 2 a
// sequence may have several queries; a row is then a query head of one of them, as in
// attention.cuh.
#pragma once

#include "backend/cuda/attention/decode_kv_operands.cuh"

namespace freshet::cuda::single {

inline constexpr int kWarps = 4, kSumming = kWarps * 32, kThreads = kSumming + 32;
inline constexpr int kRowsOfTile = 16;
inline constexpr int kMostRun = 32;            // KV splits per task
inline constexpr int kMostCounters = 1 << 16;  // row tiles per batch

// Division by a divisor known at launch; dividends are below 2^24, divisors below 2^16.
struct Divisor {
  int by;
  uint64_t times;
  Divisor(int d = 1)
      : by(d),
        times(((uint64_t{1} << 40) + static_cast<uint64_t>(d) - 1) / static_cast<uint64_t>(d)) {}
  __device__ __forceinline__ int quotient(int n) const {
    return static_cast<int>(static_cast<uint64_t>(static_cast<uint32_t>(n)) * times >> 40);
  }
};

struct Plan {
  Divisor tiles;      // row tiles per KV head and sequence
  Divisor all_tiles;  // of all sequences
  Divisor heads;      // KV heads
  Divisor run;        // KV splits per task
  int group;          // query heads per KV head
  int queries;        // the most queries of a sequence
  int pieces;         // the most KV splits that a tile sees
  int tasks;
  int slots;  // pipeline stages per block
};

// Heads of kDim features, 8 * kRowsOfLane rows, a cache in the format Stored_; kE4M3Result: the
// result is encoded in E4M3.
template <int kDim, int kRowsOfLane, template <int> class Stored_, bool kE4M3Result = false>
struct Kind {
  static constexpr int D = kDim, kRows = kRowsOfLane;
  static constexpr bool kE4M3 = kE4M3Result;
  using Stored = Stored_<kDim>;
  static constexpr bool kAsRows = kRows == 1;  // keys and features are rows of mma
  // Whether there is room to prefetch the next task's queries.
  static constexpr bool kAhead = kRows == 1 && D <= 128 && !Stored::kScaled;
  // Blocks per SM that the register limit must allow.
  static constexpr int kResident = kRows == 1 && D < 256 ? Stored::kResident : 1;
};

// A task: a run of KV splits of a tile.
struct Range {
  int tile, sequence, kv_head, first_head, rows;
  int first_row, query_start, queries;  // first_row: of the rows of the sequence's queries
  int low, position;                    // keys that some row sees: first and last
  int written;                          // the first position that this step stores
  int first_piece, pieces;              // the KV splits that contain them
  int runs, first_chunk, last_chunk;    // last < first: empty
};

// The queries of a sequence.
struct Queries {
  int start, count;
};
template <class T>
__device__ __forceinline__ Queries sequence_queries(const AttentionArgs& a, const Plan& plan,
                                                    int sequence) {
  if (T::kRows == 1 || plan.queries == 1) return {sequence, 1};
  const int32_t* start = a.batch.query_start + sequence;
  return {start[0], start[1] - start[0]};
}

// The task of a [sequence and row tile, KV head, run of KV splits], given the sequence's queries
// and context. It is empty if the sequence has fewer rows.
__device__ __forceinline__ Range find_range(const AttentionArgs& a, const Plan& plan, int x, int y,
                                            int z, int sequence, const Queries& queries,
                                            int context) {
  Range w;
  w.tile = x * plan.heads.by + y;
  w.sequence = sequence;
  w.kv_head = y;
  w.first_row = (x - sequence * plan.tiles.by) * kRowsOfTile;
  w.first_head = y * plan.group + w.first_row;
  w.query_start = queries.start;
  w.queries = queries.count;
  w.rows = min(kRowsOfTile, queries.count * plan.group - w.first_row);
  w.written = context - queries.count;
  int first_query = 0, last_query = 0;
  if (queries.count > 1) {
    last_query = min((w.first_row + w.rows - 1) / plan.group, queries.count - 1);
    first_query = min(w.first_row / plan.group, last_query);
  }
  w.position = w.written + last_query;
  w.low = a.window > 0 ? max(0, w.written + first_query - a.window + 1) : 0;
  w.first_piece = w.low / kPieceTokens;
  w.pieces = w.position / kPieceTokens + 1 - w.first_piece;
  w.runs = plan.run.quotient(w.pieces + plan.run.by - 1);
  const int first = w.first_piece + z * plan.run.by;
  w.first_chunk = max(w.low / kChunk, first * kChunksOfPiece);
  w.last_chunk = min(w.position / kChunk, (first + plan.run.by) * kChunksOfPiece - 1);
  if (w.rows <= 0) w.last_chunk = w.first_chunk - 1;
  return w;
}

// The token and the query head of a task's row.
struct Row {
  int token, head, query;
};
template <class T>
__device__ __forceinline__ Row row_of(const Range& w, int group, int row) {
  if (T::kRows == 1 || w.queries == 1) return {w.query_start, w.first_head + row, 0};
  const int at = w.first_row + row, query = at / group;
  return {w.query_start + query, w.kv_head * group + at - query * group, query};
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__device__ __forceinline__ void sync_summing() {
  asm volatile("bar.sync 1, %0;" ::"n"(kSumming) : "memory");
}

// A lane's adjacent pair j of row lane / 4 + 8 r, and its distance in features from the first pair.
template <class T, int kTilesOfWarp>
__device__ __forceinline__ float2 pair_of(const Sums<kTilesOfWarp, T::kRows>& sums, int r, int j) {
  const auto& acc = sums.acc;
  if constexpr (T::Stored::kFours && !T::Stored::kAdjacent) {
    return make_float2(acc[j / 2 * 2][r * 2 + j % 2], acc[j / 2 * 2 + 1][r * 2 + j % 2]);
  }
  return make_float2(acc[j][r * 2], acc[j][r * 2 + 1]);
}
template <class T>
__device__ __forceinline__ int pair_apart(int j) {
  return T::Stored::kFours ? j / 2 * 16 + j % 2 * 2 : j * 8;
}
template <class T>
__device__ __forceinline__ int first_of_lane() {
  return static_cast<int>(threadIdx.x % 4) * (T::Stored::kFours ? 4 : 2);
}

// Merges the KV splits of all rows: one warp per row, pairs of features per lane, kAtOnce splits at
// a time.
template <class T>
__device__ __forceinline__ void merge_pieces(const AttentionArgs& a, const Range& w,
                                             const Plan& plan) {
  constexpr int D = T::D, kAtOnce = 8;
  constexpr int kPairs = D / 64;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const float steep = steepness(a);
  for (int row = warp; row < w.rows; row += kWarps) {
    const auto [token, head, query] = row_of<T>(w, plan.group, row);
    const float* from = partial_at(a, token, head, 0, plan.pieces);
    float m = -INFINITY, l = 0.0f;
    float2 acc[kPairs] = {};
#pragma unroll 1
    for (int base = 0; base < w.pieces; base += kAtOnce, from += kAtOnce * (D + kPartialEnd)) {
      const int count = min(kAtOnce, w.pieces - base);
      float2 v[kAtOnce][kPairs];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
          const float* at = from + min(i, count - 1) * (D + kPartialEnd);
          v[i][j] = __ldcg(reinterpret_cast<const float2*>(at) + j * 32 + lane);
        }
      }
      // Factors of these splits, one lane per split. A running maximum does not round.
      float2 its_end = make_float2(-INFINITY, 0.0f);
      const float* ends = from + lane * (D + kPartialEnd) + D;
      if (lane < count) its_end = __ldcg(reinterpret_cast<const float2*>(ends));
      float most = fmaxf(m, its_end.x);
      for (int step = 1; step < 32; step <<= 1) {
        const float other = __shfl_up_sync(0xffffffff, most, step);
        if (lane >= step) most = fmaxf(most, other);
      }
      const float before = __shfl_up_sync(0xffffffff, most, 1);
      const float mine = shrink(lane == 0 ? m : before, most, steep);
      const float its = shrink(its_end.x, most, steep);
      m = __shfl_sync(0xffffffff, most, 31);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (i >= count) break;
        const float my_factor = __shfl_sync(0xffffffff, mine, i);
        const float its_factor = __shfl_sync(0xffffffff, its, i);
        l = __fmaf_rn(__shfl_sync(0xffffffff, its_end.y, i), its_factor, __fmul_rn(l, my_factor));
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
          acc[j].x = __fmaf_rn(v[i][j].x, its_factor, __fmul_rn(acc[j].x, my_factor));
          acc[j].y = __fmaf_rn(v[i][j].y, its_factor, __fmul_rn(acc[j].y, my_factor));
        }
      }
    }
    const float end = ending(m, l, a, head);
    if constexpr (T::kE4M3) {
#pragma unroll
      for (int j = 0; j < kPairs; j += 2) {
        const float2 v[2] = {
            make_float2(__fmul_rn(acc[j].x, end), __fmul_rn(acc[j].y, end)),
            make_float2(__fmul_rn(acc[j + 1].x, end), __fmul_rn(acc[j + 1].y, end))};
        float most = largest_of(v);
#pragma unroll
        for (int step = 1; step < 32; step <<= 1) {
          most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, step));
        }
        const int64_t group = static_cast<int64_t>(head) * (D / kE4M3Cols) + j / 2;
        const auto apart = [](int i) { return i * 64; };
        put_row(a, token, group * kE4M3Cols + lane * 2, apart, v);
        put_e4m3_pairs(a.act, token, group, lane * 2, apart, v, most);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        put_result(a, token, static_cast<int64_t>(head) * D + (j * 32 + lane) * 2,
                   __fmul_rn(acc[j].x, end), __fmul_rn(acc[j].y, end));
      }
    }
  }
}
#endif

}  // namespace freshet::cuda::single

namespace freshet::cuda {
// decode_cluster_sm90.cu: few queries over short contexts.
int attention_cluster(const Context& ctx, const AttentionArgs& a, single::Plan plan);
}  // namespace freshet::cuda

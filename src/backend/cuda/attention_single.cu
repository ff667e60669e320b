// Attention with one query a sequence: memory decides its speed, so keys and values stream.
//
// A block takes a run of pieces of one sequence's context, for all heads of one key head. One warp
// keeps a ring in shared memory filled by the bulk copy engine, half a piece's keys or values at a
// time, a copy for each block of the cache; halves that no kernel of this step writes are asked for
// before the kernel in front has ended. Four warps share a piece: by keys for the scores, which
// they leave to each other in shared memory, and by features for the values. A block that has the
// whole context writes the result; of several, the one that ends last merges all pieces from left
// to right. So neither the cut into runs nor the order of blocks touches a bit.
#include "backend/cuda/attention.cuh"
#include "backend/cuda/kernels.cuh"

namespace freshet::cuda {
namespace {

constexpr int kSingleWarps = 4, kSumming = kSingleWarps * 32, kThreads = kSumming + 32;
constexpr int kSlots = 6;
constexpr int kScorePad = kSplitTokens + 8;
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
  __half slots[kSlots][kChunk * D];
  float scores[8 * kRows][kScorePad];
  uint64_t full[kSlots], empty[kSlots];
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

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// The halves of a piece that a run has.
struct Halves {
  int first, last;
};
__device__ __forceinline__ Halves halves_of(const Range& w, int piece) {
  return {max(w.first_chunk, piece * kChunks), min(w.last_chunk, piece * kChunks + kChunks - 1)};
}

// One warp fills the ring: a piece's keys, then its values. Blocks of which nothing is seen are
// replaced by others.
template <int D, int kRows>
__device__ __forceinline__ void produce(Shared<D, kRows>& s, const AttentionArgs& a,
                                        const Range& w) {
  constexpr int kBlocks = kChunk / kBlockTokens, kBlockBytes = kBlockTokens * D * 2;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const auto ids_of = [&](int piece) {
    const int block = piece * (kSplitTokens / kBlockTokens) + lane % (kSplitTokens / kBlockTokens);
    const int real = min(max(block, w.low / kBlockTokens), w.position / kBlockTokens);
    return a.batch.tables[w.sequence * a.batch.table_stride + real];
  };
  bool waited = false;
  int at = 0;
  int next_ids = ids_of(w.first_chunk / kChunks);
  for (int piece = w.first_chunk / kChunks; piece <= w.last_chunk / kChunks; ++piece) {
    const Halves halves = halves_of(w, piece);
    const int ids = next_ids;
    next_ids = ids_of(piece + 1);
    for (int part = 0; part < 2; ++part) {
      for (int chunk = halves.first; chunk <= halves.last; ++chunk, ++at) {
        if (!waited && chunk >= w.position / kChunk) {
          wait();
          waited = true;
        }
        const int slot = at % kSlots;
        if (at >= kSlots) barrier_wait(&s.empty[slot], (at / kSlots - 1) & 1);
        const int64_t id = __shfl_sync(0xffffffff, ids, chunk % kChunks * kBlocks + lane % kBlocks);
        if (lane == 0) barrier_expect(&s.full[slot], kBlocks * kBlockBytes);
        __syncwarp();
        if (lane < kBlocks) {
          bulk_copy(s.slots[slot] + lane * kBlockTokens * D,
                    part == 0 ? keys_at(a.cache, id, w.kv_head) : values_at(a.cache, id, w.kv_head),
                    kBlockBytes, &s.full[slot]);
        }
      }
    }
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

// A warp's 16 keys of half a piece against all rows.
template <int D, int kRows>
__device__ __forceinline__ void score_keys(Shared<D, kRows>& s, const AttentionArgs& a,
                                           const Range& w, const uint4 (&q)[D / 16], int chunk,
                                           int slot) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const __half* keys =
      s.slots[slot] + (warp * 2 + lane / 16) * 8 * D + lane / 8 % 2 * 64 + lane % 8 * 8;
  float sum[2][4] = {};
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    uint32_t b[4];
    ldmatrix4(b, keys + k * 128);
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
      *reinterpret_cast<float2*>(&s.scores[lane / 4 + r * 8][chunk % kChunks * kChunk + key]) =
          make_float2(v[0], v[1]);
    }
  }
}

// Half a piece of which nothing is seen.
template <int D, int kRows>
__device__ __forceinline__ void score_nothing(Shared<D, kRows>& s, int half) {
  for (int i = static_cast<int>(threadIdx.x); i < 8 * kRows * kChunk; i += kSumming) {
    s.scores[i / kChunk][half * kChunk + i % kChunk] = -INFINITY;
  }
}

// A piece's weights as operands, of tiles of 8 keys, rows g and g + 8.
template <int D, int kRows>
__device__ __forceinline__ void weigh_piece(Sums<D / 32, kRows>& sums, const Shared<D, kRows>& s,
                                            float steep, uint32_t (&weights)[kKeyTiles][2]) {
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float2 v[kKeyTiles];
    float most = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j) {
      v[j] = *reinterpret_cast<const float2*>(&s.scores[lane / 4 + r * 8][j * 8 + lane % 4 * 2]);
      most = fmaxf(most, fmaxf(v[j].x, v[j].y));
    }
    most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));
    const float offset = offset_of(most, steep);
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j) {
      const float low = weight_of(v[j].x, steep, offset), high = weight_of(v[j].y, steep, offset);
      sum = __fadd_rn(__fadd_rn(sum, low), high);
      weights[j][r] = pack_half(low, high);
    }
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffff, sum, 1));
    sums.m[r] = most;
    sums.l[r] = __fadd_rn(sum, __shfl_xor_sync(0xffffffff, sum, 2));
  }
}

// Adds a warp's features of half a piece's values.
template <int D, int kRows>
__device__ __forceinline__ void add_values(Sums<D / 32, kRows>& sums, const __half* slot,
                                           const uint32_t (*weights)[2]) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const __half* values =
      slot + lane / 8 % 2 * 8 * D + (warp * (D / 32) + lane / 16) * 64 + lane % 8 * 8;
#pragma unroll
  for (int k = 0; k < kChunk / 16; ++k) {
    const uint4 operand = make_uint4(weights[2 * k][0], weights[2 * k][1], weights[2 * k + 1][0],
                                     weights[2 * k + 1][1]);
#pragma unroll
    for (int j = 0; j < D / 32; j += 2) {
      uint32_t b[4];
      ldmatrix4_trans(b, values + k * 16 * D + j * 64);
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
      const float end = ending(sums.m[r], sums.l[r], a, head);
#pragma unroll
      for (int j = 0; j < D / 32; ++j) {
        put_result(a, w.sequence, static_cast<int64_t>(head) * D + first + j * 8,
                   __fmul_rn(sums.acc[j][r * 2], end), __fmul_rn(sums.acc[j][r * 2 + 1], end));
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

// Merges the pieces of all rows: a warp a row, a lane D / 32 neighbouring features. A warp's share
// of the ring takes the sums of 32 pieces at once, as each is a wait for memory.
template <int D, int kRows>
__device__ __forceinline__ void merge_pieces(Shared<D, kRows>& s, const AttentionArgs& a,
                                             const Range& w, int pieces) {
  constexpr int kPairs = D / 64, kVectors = D / 4;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const float steep = steepness(a);
  static_assert(kSingleWarps * 32 * D * sizeof(float) <= sizeof(s.slots));
  float* sums = reinterpret_cast<float*>(s.slots) + warp * 32 * D;
  for (int row = warp; row < w.rows; row += kSingleWarps) {
    const int head = w.kv_head * (a.heads / a.cache.kv_heads) + w.first_row + row;
    const float* from = partial_at(a, w.sequence, head, 0, pieces);
    float m = -INFINITY, l = 0.0f;
    float2 acc[kPairs] = {};
    for (int base = 0; base < w.pieces; base += 32, from += 32 * (D + kPartialEnd)) {
      const int count = min(32, w.pieces - base);
      __syncwarp();
      for (int v = lane; v < count * kVectors; v += 32) {
        const int piece = v / kVectors;
        cp_async16(sums + v * 4, from + piece * (D + kPartialEnd) + v % kVectors * 4);
      }
      cp_async_commit();
      // Factors of these pieces, a lane a piece: a running maximum rounds nothing.
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
      cp_async_wait<0>();
      __syncwarp();
#pragma unroll 4
      for (int i = 0; i < count; ++i) {
        const float my_factor = __shfl_sync(0xffffffff, mine, i);
        const float its_factor = __shfl_sync(0xffffffff, its, i);
        l = __fmaf_rn(__shfl_sync(0xffffffff, its_end.y, i), its_factor, __fmul_rn(l, my_factor));
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
          const float2 v = reinterpret_cast<const float2*>(sums + i * D)[j * 32 + lane];
          acc[j].x = __fmaf_rn(v.x, its_factor, __fmul_rn(acc[j].x, my_factor));
          acc[j].y = __fmaf_rn(v.y, its_factor, __fmul_rn(acc[j].y, my_factor));
        }
      }
    }
    const float end = ending(m, l, a, head);
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      put_result(a, w.sequence, static_cast<int64_t>(head) * D + (j * 32 + lane) * 2,
                 __fmul_rn(acc[j].x, end), __fmul_rn(acc[j].y, end));
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
    for (int c = static_cast<int>(threadIdx.x) * 2; c < w.rows * D; c += kSumming * 2) {
      put_pair(a.act, row, first + c, cols, 0.0f, 0.0f);
    }
  }
}

__device__ __forceinline__ void sync_summing() {
  asm volatile("bar.sync 1, %0;" ::"n"(kSumming) : "memory");
}

// Whether this block is the last of its tile's to come here.
template <int D, int kRows>
__device__ __forceinline__ bool comes_last(Shared<D, kRows>& s, const Range& w) {
  __threadfence();
  sync_summing();
  if (threadIdx.x == 0) {
    unsigned& count = arrived[blockIdx.x * gridDim.y + blockIdx.y];
    s.last = atomicAdd(&count, 1u) + 1 == static_cast<unsigned>(w.runs);
    if (s.last != 0) count = 0;
  }
  sync_summing();
  __threadfence();
  return s.last != 0;
}

// Four warps: all pieces of the run.
template <int D, int kRows>
__device__ __forceinline__ void sum_pieces(Shared<D, kRows>& s, const AttentionArgs& a,
                                           const Single& plan, const Range& w) {
  uint4 q[D / 16];
  load_queries<D, kRows>(q, a, w);
  const float steep = steepness(a);
  Sums<D / 32, kRows> total;
  total.clear();
  int at = 0;
  const auto take = [&] {
    barrier_wait(&s.full[at % kSlots], at / kSlots & 1);
    return at % kSlots;
  };
  const auto leave = [&] {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(&s.empty[at % kSlots]);
    ++at;
  };
  for (int piece = w.first_chunk / kChunks; piece <= w.last_chunk / kChunks; ++piece) {
    const Halves halves = halves_of(w, piece);
    for (int chunk = piece * kChunks; chunk < (piece + 1) * kChunks; ++chunk) {
      if (chunk >= halves.first && chunk <= halves.last) {
        score_keys(s, a, w, q, chunk, take());
        leave();
      } else {
        score_nothing(s, chunk % kChunks);
      }
    }
    sync_summing();  // all scores are there
    Sums<D / 32, kRows> sums;
    sums.clear();
    uint32_t weights[kKeyTiles][2] = {};
    weigh_piece<D, kRows>(sums, s, steep, weights);
    sync_summing();  // and all have read them
#pragma unroll
    for (int half = 0; half < kChunks; ++half) {
      const int chunk = piece * kChunks + half;
      if (chunk < halves.first || chunk > halves.last) continue;
      add_values<D, kRows>(sums, s.slots[take()], weights + half * 8);
      leave();
    }
    if (w.runs == 1) {
      total.merge(sums, steep);
    } else {
      write_sums<D, kRows>(sums, a, w, piece - w.first_piece, plan.pieces);
    }
  }
  if (w.runs == 1) write_sums<D, kRows>(total, a, w, -1, 0);
}
#endif

// Blocks: [sequences x tiles of rows, key heads, runs of pieces].
template <int D, int kRows>
__global__ void __launch_bounds__(kThreads)
    single_kernel(const __grid_constant__ AttentionArgs a, const __grid_constant__ Single plan) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t memory[];
  auto& s = *reinterpret_cast<Shared<D, kRows>*>(memory);
  let_next_start();
  // Lengths and tables came by a copy before the step's first kernel, and of the cache the step
  // writes the query's own place only.
  const Range w = find_range(a, plan);
  if (w.last_chunk < w.first_chunk) return;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kSlots; ++i) {
      barrier_init(&s.full[i], 1);
      barrier_init(&s.empty[i], kSingleWarps);
    }
    barriers_ready();
  }
  __syncthreads();
  if (threadIdx.x >= kSumming) {
    produce(s, a, w);
    return;
  }
  wait();
  sum_pieces(s, a, plan, w);
  if (w.runs > 1) {
    if (!comes_last(s, w)) return;
    merge_pieces(s, a, w, plan.pieces);
  }
  pad_rows<D>(a, w);
#endif
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
  static const int kResident = [&] {
    int blocks = 1;
    (void)cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, kBytes);
    return multiprocessors * blocks;
  }();
  const Single plan = plan_single(a, kResident);
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
  // Hopper's copies; this file's code for other GPUs is empty.
  return capability == 90 && a.single != 0 && a.partial != nullptr && a.cache.value_dim == d &&
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

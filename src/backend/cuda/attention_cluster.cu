// Attention of few single queries over short contexts: a cluster of blocks for each piece.
//
// A block has the keys of one tile of the piece, and a share of the features of all its values: the
// scores go to all blocks of the cluster, and each takes all weights of the piece. So four times as
// many multiprocessors read, and a piece's sums need no memory but their own.
#include "backend/cuda/attention_single.cuh"
#include "backend/cuda/cluster.cuh"
#include "backend/cuda/kernels.cuh"

namespace freshet::cuda {
namespace {

using namespace single;

constexpr int kRanks = kTiles;  // blocks of a cluster
constexpr int kPieceBlocks = kPieceTokens / kBlockTokens;
static_assert(kPieceBlocks == 32 && kWarps == kTiles);  // a lane a block, a warp a tile

template <class T>
struct Piece {
  static constexpr int kShare = T::D / kRanks;  // features
  __half keys[kTileTokens * T::D];
  __half values[kPieceTokens / 8][kShare * 8];
  float scores[8 * T::kRows][kPieceTokens + 8];
  uint32_t weights[8 * T::kRows][kPieceTokens / 2 + 4];
  float sums[kTiles][8 * T::kRows][4], factor[kTiles][8 * T::kRows];
  float2 ends[8 * T::kRows][4];
  uint64_t full[2];
  int last, beyond;
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
constexpr int kTileBlocks = kTileTokens / kBlockTokens;

__device__ unsigned arrived[kMostCounters];

// The piece of a cluster, and what of it is seen: tiles, blocks of the cache.
struct Part {
  int rank, piece;
  int first_tile, last_tile, first_block, last_block;  // of the piece
};

__device__ __forceinline__ Part part_of(const Range& w, int z) {
  Part p;
  p.rank = z % kRanks;
  p.piece = w.first_piece + z / kRanks;
  const int low = max(w.low - p.piece * kPieceTokens, 0);
  const int high = min(w.position - p.piece * kPieceTokens, kPieceTokens - 1);
  p.first_tile = low / kTileTokens;
  p.last_tile = high / kTileTokens;
  p.first_block = low / kBlockTokens;
  p.last_block = high / kBlockTokens;
  return p;
}

// One warp: a lane a block of the cache. The one that holds the query's own place comes when all
// that was started before has ended.
template <class T>
__device__ __forceinline__ void copy_piece(Piece<T>& s, const AttentionArgs& a, const Range& w,
                                           const Part& p) {
  constexpr int kBlockBytes = T::Stored::kBlockBytes, kGroupBytes = Piece<T>::kShare * 8 * 2;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const bool seen = lane >= p.first_block && lane <= p.last_block;
  const bool mine = seen && lane / kTileBlocks == p.rank;
  const int block = p.piece * kPieceBlocks + lane;
  const int64_t id = seen ? a.batch.tables[w.sequence * a.batch.table_stride + block] : 0;
  const int keys = __popc(__ballot_sync(0xffffffff, mine));
  const int values = __popc(__ballot_sync(0xffffffff, seen));
  if (lane == 0) {
    barrier_expect(&s.full[0], keys * kBlockBytes);
    barrier_expect(&s.full[1], values * 2 * kGroupBytes);
  }
  __syncwarp();
  const auto copy = [&] {
    if (mine) {
      bulk_copy(s.keys + lane % kTileBlocks * kBlockTokens * T::D, keys_at(a.cache, id, w.kv_head),
                kBlockBytes, &s.full[0]);
    }
    const uint8_t* from = values_at(a.cache, id, w.kv_head) + p.rank * Piece<T>::kShare * 16;
    for (int i = 0; i < 2; ++i) {
      bulk_copy(s.values[lane * 2 + i], from + i * 16 * T::D, kGroupBytes, &s.full[1]);
    }
  };
  const bool newest = block == w.position / kBlockTokens;
  if (seen && !newest) copy();
  wait();
  if (seen && newest) copy();
}

// Scores of a warp's 32 keys of the block's tile, to all blocks of the cluster.
template <class T>
__device__ __forceinline__ void score_tile(Piece<T>& s, const AttentionArgs& a, const Range& w,
                                           const Part& p, const uint4 (&q)[T::D / 16]) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  float sum[4][4] = {};
#pragma unroll
  for (int k = 0; k < T::D / 16; ++k) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      uint32_t b[4];
      T::Stored::keys(b, reinterpret_cast<const uint8_t*>(s.keys), warp * 2 + j, k);
      mma_half(sum[2 * j], q[k], b[0], b[1]);
      mma_half(sum[2 * j + 1], q[k], b[2], b[3]);
    }
  }
  cluster_wait();  // all blocks have begun
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int key = p.rank * kTileTokens + warp * 32 + j * 8 + lane % 4 * 2;
#pragma unroll
    for (int r = 0; r < T::kRows; ++r) {
      float v[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = p.piece * kPieceTokens + key + i;
        v[i] = at >= w.low && at <= w.position ? score_of(a, sum[j][r * 2 + i]) : -INFINITY;
      }
      auto* to = reinterpret_cast<float2*>(&s.scores[lane / 4 + r * 8][key]);
#pragma unroll
      for (int rank = 0; rank < kRanks; ++rank) to_block(to, rank, make_float2(v[0], v[1]));
    }
  }
  cluster_arrive();
  cluster_wait();
}

// Weights of the piece: a warp a tile, with the reference of the first. Where that is too far off,
// one warp takes all tiles in their order.
template <class T>
__device__ __forceinline__ void weigh_piece(Piece<T>& s, const Part& p, float steep) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const auto score = [&](int tile) {
    return [&s, lane, tile](int r, int j) {
      return *reinterpret_cast<const float2*>(
          &s.scores[lane / 4 + r * 8][tile * kTileTokens + j * 8 + lane % 4 * 2]);
    };
  };
  const auto put = [&](int tile) {
    return [&s, lane, tile](int r, int j, uint32_t pair) {
      s.weights[lane / 4 + r * 8][tile * (kTileTokens / 2) + j * 4 + lane % 4] = pair;
    };
  };
  Softmax<T::kRows> all;
  float offset[T::kRows], sum[T::kRows];
  if (warp >= p.first_tile && warp <= p.last_tile) {
    bool beyond = false;
#pragma unroll
    for (int r = 0; r < T::kRows; ++r) {
      all.m[r] = largest_of(score(p.first_tile), r);
      offset[r] = offset_of(all.m[r], steep);
    }
    weigh<T::kRows>(sum, score(warp), steep, offset, put(warp));
#pragma unroll
    for (int r = 0; r < T::kRows; ++r) {
      beyond |= warp > p.first_tile && !(sum[r] <= kMostWeight);
      s.sums[warp][lane / 4 + r * 8][lane % 4] = sum[r];
    }
    if (beyond) s.beyond = 1;
  }
  sync_summing();
  if (s.beyond != 0 && warp == 0) {
    for (int t = p.first_tile; t <= p.last_tile; ++t) {
      float factor[T::kRows];
      take_scores<T::kRows>(all, t == p.first_tile, score(t), steep, factor, put(t));
#pragma unroll
      for (int r = 0; r < T::kRows; ++r) s.factor[t][lane / 4 + r * 8] = factor[r];
    }
  } else if (s.beyond == 0 && warp == p.first_tile) {
#pragma unroll
    for (int r = 0; r < T::kRows; ++r) {
      all.l[r] = sum[r];
      for (int t = p.first_tile + 1; t <= p.last_tile; ++t) {
        all.l[r] = __fmaf_rn(all.l[r], 1.0f, s.sums[t][lane / 4 + r * 8][lane % 4]);
      }
    }
  } else {
    return;
  }
#pragma unroll
  for (int r = 0; r < T::kRows; ++r) {
    s.ends[lane / 4 + r * 8][lane % 4] = make_float2(all.m[r], all.l[r]);
  }
}

// Sums of a warp's features, with all values of the piece.
template <class T>
__device__ __forceinline__ void add_piece(Sums<T::D / 128, T::kRows>& sums, const Piece<T>& s,
                                          const Part& p) {
  constexpr int kMine = T::D / 128;  // tiles of 8 features
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  for (int t = p.first_tile; t <= p.last_tile; ++t) {
    if (s.beyond != 0 && t > p.first_tile) {
      float factor[T::kRows];
#pragma unroll
      for (int r = 0; r < T::kRows; ++r) factor[r] = s.factor[t][lane / 4 + r * 8];
      sums.scale(factor);
    }
#pragma unroll
    for (int k = 0; k < kTileBlocks; k += 2) {
      const int block = t * kTileBlocks + k;
#pragma unroll
      for (int j = 0; j < kMine; ++j) {
        uint32_t b[4];
        ldmatrix4_trans(b, s.values[block * 2 + lane / 8] + (warp * kMine + j) * 64 + lane % 8 * 8);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (block + i < p.first_block || block + i > p.last_block) continue;
          const int at = (block + i) * 8 + lane % 4;
          const uint32_t* low = s.weights[lane / 4] + at;
          const uint32_t* high = s.weights[lane / 4 + (T::kRows - 1) * 8] + at;
          const bool two = T::kRows == 2;
          mma_half(sums.acc[j], make_uint4(low[0], two ? high[0] : 0, low[4], two ? high[4] : 0),
                   b[2 * i], b[2 * i + 1]);
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < T::kRows; ++r) {
    const float2 end = s.ends[lane / 4 + r * 8][lane % 4];
    sums.m[r] = end.x;
    sums.l[r] = end.y;
  }
  add_lanes(sums.l);
}

// The piece's sums as the result, or as a partial one.
template <class T>
__device__ __forceinline__ void write_piece(const Sums<T::D / 128, T::kRows>& sums,
                                            const AttentionArgs& a, const Range& w, const Part& p,
                                            int pieces) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int first = p.rank * Piece<T>::kShare + warp * (T::D / 16) + lane % 4 * 2;
#pragma unroll
  for (int r = 0; r < T::kRows; ++r) {
    const int row = lane / 4 + r * 8;
    if (row >= w.rows) continue;
    const int head = w.kv_head * (a.heads / a.cache.kv_heads) + w.first_row + row;
    float* to = partial_at(a, w.sequence, head, p.piece - w.first_piece, pieces);
    // As if it joined those before it: none.
    const float end = w.pieces == 1 ? ending(sums.m[r], sums.l[r], a, head) : 1.0f;
#pragma unroll
    for (int j = 0; j < T::D / 128; ++j) {
      const float low = sums.acc[j][r * 2], high = sums.acc[j][r * 2 + 1];
      if (w.pieces == 1) {
        put_result(a, w.sequence, static_cast<int64_t>(head) * T::D + first + j * 8,
                   __fmul_rn(low, end), __fmul_rn(high, end));
      } else {
        *reinterpret_cast<float2*>(to + first + j * 8) = make_float2(low, high);
      }
    }
    if (w.pieces > 1 && p.rank == 0 && warp == 0 && lane % 4 == 0) {
      *reinterpret_cast<float2*>(to + T::D) = make_float2(sums.m[r], sums.l[r]);
    }
  }
}
#endif

// Blocks: [sequences x tiles of rows, key heads, pieces x blocks of a cluster].
template <class T>
__global__ void __launch_bounds__(kThreads)
    cluster_kernel(const __grid_constant__ AttentionArgs a, const __grid_constant__ Plan plan) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t memory[];
  auto& s = *reinterpret_cast<Piece<T>*>(memory);
  let_next_start();
  const int z = static_cast<int>(blockIdx.z);
  const Range w =
      find_range(a, plan, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y), z / kRanks);
  if (w.last_chunk < w.first_chunk) return;  // of the whole cluster
  const Part p = part_of(w, z);
  if (threadIdx.x == 0) {
    barrier_init(&s.full[0], 1);
    barrier_init(&s.full[1], 1);
    s.beyond = 0;
    barriers_ready();
  }
  __syncthreads();
  cluster_arrive();
  if (threadIdx.x >= kSumming) {
    copy_piece(s, a, w, p);
    cluster_wait();
    cluster_arrive();
    cluster_wait();
    return;
  }
  wait();
  uint4 q[T::D / 16];
  load_queries<T>(q, a, w);
  barrier_wait(&s.full[0], 0);
  score_tile(s, a, w, p, q);
  weigh_piece(s, p, steepness(a));
  sync_summing();
  barrier_wait(&s.full[1], 0);
  Sums<T::D / 128, T::kRows> sums;
  sums.clear();
  add_piece(sums, s, p);
  write_piece<T>(sums, a, w, p, plan.pieces);
  if (w.pieces > 1) {
    unsigned& count = arrived[blockIdx.x * gridDim.y + blockIdx.y];
    if (!comes_last(s.last, count, w.pieces * kRanks)) return;
    static_assert(kMergeRoom<T::D> <= sizeof(s.keys) + sizeof(s.values));
    merge_pieces<T>(reinterpret_cast<float*>(s.keys), a, w, plan.pieces);
  } else if (p.rank != 0) {
    return;
  }
  pad_rows<T::D>(a, w);
#endif
}

template <class T>
int run(const AttentionArgs& a, const Plan& plan) {
  constexpr size_t kBytes = sizeof(Piece<T>);
  const auto kernel = cluster_kernel<T>;
  static const cudaError_t kRaised = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes));
  if (kRaised != cudaSuccess) return static_cast<int>(kRaised);
  const dim3 grid(static_cast<unsigned>(a.batch.sequences * plan.tiles),
                  static_cast<unsigned>(a.cache.kv_heads),
                  static_cast<unsigned>(plan.pieces * kRanks));
  return launch_cluster(kernel, grid, dim3(kThreads), kBytes, dim3(1, 1, kRanks), a, plan);
}

}  // namespace

bool cluster_fits(const AttentionArgs& a, const single::Plan& plan) {
  const int64_t blocks =
      int64_t{a.batch.sequences} * plan.tiles * a.cache.kv_heads * plan.pieces * kRanks;
  // More would wait for each other: their copies of values are small. In E4M3 a row's features
  // would have to meet.
  return a.partial != nullptr && a.act.e4m3 == 0 && a.cache.type == CacheType::kF16 &&
         a.cache.key_dim == 128 && blocks <= multiprocessors;
}

int attention_cluster(const AttentionArgs& a, single::Plan plan) {
  plan.run = 1;
  return a.heads / a.cache.kv_heads <= 8 ? run<Kind<128, 1, HalfStored>>(a, plan)
                                         : run<Kind<128, 2, HalfStored>>(a, plan);
}

}  // namespace freshet::cuda

// Decode attention of few queries over short contexts: a cluster of blocks for each KV split, or
// for two of them.
//
// Each block of a cluster scores some keys of the split and sums the values over its share of the
// features. The scores are sent to all blocks of the cluster, and each computes all softmax weights
// of the split. So four times as many SMs read memory, and the sums of a split never leave shared
// memory.
//
// decode_cluster_sm90.cuh has a block's shared memory and the code that fills it.
#include "backend/cuda/attention/decode_cluster_sm90.cuh"
#include "backend/cuda/attention/decode_cluster_sm90.h"
#include "backend/cuda/runtime/cluster.cuh"
#include "backend/cuda/runtime/kernels.cuh"

namespace freshet::cuda {
namespace {

using namespace single;

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
constexpr int kTileBlocks = kTileTokens / kBlockTokens;

__device__ unsigned arrived[kMostCounters];

// Zero rows that pad the encoded activations to a whole token tile, in the block's share of
// features; by the producer warp.
template <class T>
__device__ __forceinline__ void pad_share(const AttentionArgs& a, const Range& w, const Part& p) {
  const int sequences = a.batch.sequences;
  if (a.act.data == nullptr || w.sequence + 1 != sequences || p.piece != w.first_piece) return;
  const int first = w.first_head;
  if constexpr (T::kE4M3) {
    if (p.rank == 0) {
      pad_e4m3(a.act, sequences, first, w.rows, static_cast<int>(threadIdx.x % 32), 32);
    }
    return;
  }
  constexpr int kPairs = Piece<T>::kShare / 2;
  const int rows = (kTokenTile - sequences % kTokenTile) % kTokenTile;
  const int64_t cols = static_cast<int64_t>(a.heads) * T::D;
  for (int h = first; h < first + w.rows; ++h) {
    const int64_t col = static_cast<int64_t>(h) * T::D + p.rank * Piece<T>::kShare;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x % 32); i < rows * kPairs; i += 32) {
      put_pair(a.act, sequences + i / kPairs, col + i % kPairs * 2, cols, 0.0f, 0.0f);
    }
  }
}

// Loads the queries as MMA operands.
template <class T>
__device__ __forceinline__ void load_operands(uint4 (&q)[T::D / 16], const Piece<T>& s) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  // Two pairs among a row's 16 features.
  const auto pairs = [&](int r, int k) {
    if (r >= T::kRows) return make_uint2(0, 0);
    const __half* row = s.queries[lane / 4 + r * 8] + k * 16;
    if constexpr (T::Stored::kFours) return *reinterpret_cast<const uint2*>(row + lane % 4 * 4);
    const auto* pair = reinterpret_cast<const uint32_t*>(row) + lane % 4;
    return make_uint2(pair[0], pair[4]);
  };
#pragma unroll
  for (int k = 0; k < T::D / 16; ++k) {
    const uint2 first = pairs(0, k), second = pairs(1, k);
    q[k] = make_uint4(first.x, second.x, first.y, second.y);
  }
}

// Scores the warp's keys of the block, and sends the scores to all blocks of the split.
template <class T>
__device__ __forceinline__ void score_tile(Piece<T>& s, const AttentionArgs& a, const Range& w,
                                           const Part& p, const uint4 (&q)[T::D / 16]) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  constexpr int kPairs = kRankTokens / kWarps / 16;
  float sum[2 * kPairs][4] = {};
#pragma unroll
  for (int k = 0; k < T::D / 16; k += 2) {
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      uint32_t b[2][4];
      uint32_t loaded[T::Stored::kKeyWords];
      const uint8_t* block = s.keys[warp * kPairs + j];
      T::Stored::template load_keys<false>(loaded, block, k);
      T::Stored::template open_keys<false>(b, loaded, block, k);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        mma_half(sum[2 * j], q[k + i], b[i][0], b[i][1]);
        mma_half(sum[2 * j + 1], q[k + i], b[i][2], b[i][3]);
      }
    }
  }
  cluster_wait();  // all blocks have begun
#pragma unroll
  for (int j = 0; j < 2 * kPairs; ++j) {
    const int key = p.rank * kRankTokens + (warp * kPairs * 2 + j) * 8 + lane % 4 * 2;
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
      for (int rank = 0; rank < kRanks; ++rank) {
        send_to_block(to, p.first_rank + rank, make_float2(v[0], v[1]), &s.scored);
      }
    }
  }
  barrier_wait(&s.scored, 0);
}

// The pair of scores, or of weights, that a lane has in row lane / 4 + 8 r of a tile.
template <class T>
__device__ __forceinline__ float2 score_at(const Piece<T>& s, int tile, int r, int j) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  return *reinterpret_cast<const float2*>(
      &s.scores[lane / 4 + r * 8][tile * kTileTokens + j * 8 + lane % 4 * 2]);
}
template <class T>
__device__ __forceinline__ void put_weights(Piece<T>& s, int tile, int r, int j, uint32_t pair) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  s.weights[lane / 4 + r * 8][tile * (kTileTokens / 2) + j * 4 + lane % 4] = pair;
}

// Computes the weights of all tiles in order, by one warp. Rare, so it is kept out of the main code
// path.
template <class T>
__device__ __noinline__ void weigh_again(Piece<T>& s, const Part& p, float steep,
                                         Softmax<T::kRows>& all) {
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll 1
  for (int t = p.first_tile; t <= p.last_tile; ++t) {
    float factor[T::kRows];
    take_scores<T::kRows>(
        all, t == p.first_tile, [&](int r, int j) { return score_at(s, t, r, j); }, steep, factor,
        [&](int r, int j, uint32_t pair) { put_weights(s, t, r, j, pair); });
#pragma unroll
    for (int r = 0; r < T::kRows; ++r) s.factor[t][lane / 4 + r * 8] = factor[r];
  }
}

// Softmax weights of the split: one tile per warp, with the first tile's reference unless that is
// too far off.
template <class T>
__device__ __forceinline__ void weigh_piece(Piece<T>& s, const Part& p, float steep) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  Softmax<T::kRows> all;
  float offset[T::kRows], sum[T::kRows];
  if (warp >= p.first_tile && warp <= p.last_tile) {
    bool beyond = false;
#pragma unroll
    for (int r = 0; r < T::kRows; ++r) {
      all.m[r] = largest_of([&](int row, int j) { return score_at(s, p.first_tile, row, j); }, r);
      offset[r] = offset_of(all.m[r], steep);
    }
    weigh<T::kRows>(
        sum, [&](int r, int j) { return score_at(s, warp, r, j); }, steep, offset,
        [&](int r, int j, uint32_t pair) { put_weights(s, warp, r, j, pair); });
#pragma unroll
    for (int r = 0; r < T::kRows; ++r) {
      beyond |= warp > p.first_tile && !(sum[r] <= kMostWeight);
      s.sums[warp][lane / 4 + r * 8][lane % 4] = sum[r];
    }
    if (beyond) s.beyond = 1;
  }
  sync_summing();
  if (s.beyond != 0 && warp == 0) {
    weigh_again(s, p, steep, all);
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

// Weighted sum of all values of the split over a warp's features.
template <class T>
__device__ __forceinline__ void add_piece(Sums<Piece<T>::kMine, T::kRows>& sums, const Piece<T>& s,
                                          const Part& p) {
  constexpr int kMine = Piece<T>::kMine;
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
      // 16 bytes of features for 8 keys each.
      uint32_t loaded[4];
      ldmatrix4_trans(loaded, s.values[block * 2 + lane / 8] + warp * 128 + lane % 8 * 16);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (block + i < p.first_block || block + i > p.last_block) continue;
        uint32_t b[kMine][2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t its = loaded[2 * i + half];
          if constexpr (T::Stored::kFours) {
            T::Stored::two(b[0][half], b[1][half], its,
                           s.scales[T::Stored::kScaled ? block + i : 0], half);
          } else {
            b[0][half] = its;
          }
        }
        const int at = (block + i) * 8 + lane % 4;
        const uint32_t* low = s.weights[lane / 4] + at;
        const uint32_t* high = s.weights[lane / 4 + (T::kRows - 1) * 8] + at;
        const bool two = T::kRows == 2;
        const uint4 weights = make_uint4(low[0], two ? high[0] : 0, low[4], two ? high[4] : 0);
#pragma unroll
        for (int j = 0; j < kMine; ++j) mma_half(sums.acc[j], weights, b[j][0], b[j][1]);
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

// With two splits per cluster, the second split's blocks send their sums to the first split's
// blocks, which merge them.
template <class T>
__device__ __forceinline__ void send_sums(Piece<T>& s, const Sums<Piece<T>::kMine, T::kRows>& sums,
                                          const Part& p) {
#pragma unroll
  for (int r = 0; r < T::kRows; ++r) {
#pragma unroll
    for (int j = 0; j < Piece<T>::kMine; ++j) {
      const float v[4] = {sums.acc[j][r * 2], sums.acc[j][r * 2 + 1], sums.m[r], sums.l[r]};
      send(place_in_block(&s.second[r * Piece<T>::kMine + j][threadIdx.x], p.rank), v,
           place_in_block(&s.joined, p.rank));
    }
  }
}
template <class T>
__device__ __forceinline__ void join_sums(Piece<T>& s, Sums<Piece<T>::kMine, T::kRows>& sums,
                                          float steep) {
  const auto first = sums;
  sums.clear();
  sums.merge(first, steep);
  barrier_wait(&s.joined, 0);
  Sums<Piece<T>::kMine, T::kRows> second;
  second.clear();
#pragma unroll
  for (int r = 0; r < T::kRows; ++r) {
#pragma unroll
    for (int j = 0; j < Piece<T>::kMine; ++j) {
      const float4 v = s.second[r * Piece<T>::kMine + j][threadIdx.x];
      second.acc[j][r * 2] = v.x;
      second.acc[j][r * 2 + 1] = v.y;
      second.m[r] = v.z;
      second.l[r] = v.w;
    }
  }
  sums.merge(second, steep);
}

// The first feature of a lane's sums.
template <class T>
__device__ __forceinline__ int first_of_sums(const Part& p) {
  return p.rank * Piece<T>::kShare + static_cast<int>(threadIdx.x / 32) * Piece<T>::kMine * 8 +
         first_of_lane<T>();
}

// Writes the result in E4M3: a head is a group of 128 features, whose largest magnitude the blocks
// of the cluster exchange.
template <class T>
__device__ __forceinline__ void put_sums(Piece<T>& s, const Sums<Piece<T>::kMine, T::kRows>& sums,
                                         const AttentionArgs& a, const Range& w, const Part& p) {
  static_assert(T::D == kE4M3Cols);
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int head = w.first_head + lane / 4;
  float2 v[T::kRows][Piece<T>::kMine];
#pragma unroll
  for (int r = 0; r < T::kRows; ++r) {
    const bool real = lane / 4 + r * 8 < w.rows;
    const float end = real ? ending(sums.m[r], sums.l[r], a, head + r * 8) : 0.0f;
#pragma unroll
    for (int j = 0; j < Piece<T>::kMine; ++j) {
      const float2 pair = pair_of<T>(sums, r, j);
      v[r][j] = make_float2(__fmul_rn(pair.x, end), __fmul_rn(pair.y, end));
    }
    float most = largest_of(v[r]);
    most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));
    send_to_block(&s.most[p.rank * Piece<T>::kSummers + warp][lane / 4 + r * 8],
                  p.first_rank + lane % 4, most, &s.measured);
  }
  barrier_wait(&s.measured, 0);
#pragma unroll
  for (int r = 0; r < T::kRows; ++r) {
    const int row = lane / 4 + r * 8;
    if (row >= w.rows) continue;
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < kRanks * Piece<T>::kSummers; ++i) most = fmaxf(most, s.most[i][row]);
    const int first = first_of_sums<T>(p);
    const int64_t group = head + r * 8;
    const auto apart = [](int j) { return pair_apart<T>(j); };
    put_row(a, w.sequence, group * kE4M3Cols + first, apart, v[r]);
    put_e4m3_pairs(a.act, w.sequence, group, first, apart, v[r], most);
  }
}

// Writes the split's sums as the result if it is the only one, else as a partial result.
template <class T>
__device__ __forceinline__ void write_piece(const Sums<Piece<T>::kMine, T::kRows>& sums,
                                            const AttentionArgs& a, const Range& w, const Part& p,
                                            int pieces, bool all) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int first = first_of_sums<T>(p);
#pragma unroll
  for (int r = 0; r < T::kRows; ++r) {
    const int row = lane / 4 + r * 8;
    if (row >= w.rows) continue;
    const int head = w.first_head + row;
    float* to = partial_at(a, w.sequence, head, p.piece - w.first_piece, pieces);
    // As if merged with empty splits before it.
    const float end = all ? ending(sums.m[r], sums.l[r], a, head) : 1.0f;
#pragma unroll
    for (int j = 0; j < Piece<T>::kMine; ++j) {
      const float2 pair = pair_of<T>(sums, r, j);
      const int at = first + pair_apart<T>(j);
      if (all) {
        put_result(a, w.sequence, static_cast<int64_t>(head) * T::D + at, __fmul_rn(pair.x, end),
                   __fmul_rn(pair.y, end));
      } else {
        *reinterpret_cast<float2*>(to + at) = pair;
      }
    }
    if (!all && p.rank == 0 && warp == 0 && lane % 4 == 0) {
      *reinterpret_cast<float2*>(to + T::D) = make_float2(sums.m[r], sums.l[r]);
    }
  }
}

// Sums the values over a warp's features, then merges, sends or writes the sums.
template <class T>
__device__ __forceinline__ void sum_piece(Piece<T>& s, const AttentionArgs& a, const Range& w,
                                          const Part& p, int pieces, bool join, bool all) {
  Sums<Piece<T>::kMine, T::kRows> sums;
  sums.clear();
  add_piece(sums, s, p);
  if (join) {
    if (p.first_rank > 0) {
      send_sums(s, sums, p);
      return;
    }
    join_sums(s, sums, steepness(a));
  }
  if constexpr (T::kE4M3) {
    if (all) {
      put_sums(s, sums, a, w, p);
      return;
    }
  }
  write_piece<T>(sums, a, w, p, pieces, all);
}

// comes_last() with a fence by one thread only.
__device__ __forceinline__ bool arrives_last(int& last, unsigned& count, int blocks) {
  sync_summing();
  if (threadIdx.x == 0) {
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(&count)
                 : "memory");
    last = before + 1 == static_cast<unsigned>(blocks);
    if (last != 0) count = 0;
  }
  sync_summing();
  return last != 0;
}
#endif

// Grid: [sequences x row tiles, KV heads, splits x blocks of a cluster]. of: queries, and keys and
// values that aren't in the cache yet.
template <class T>
__global__ void __launch_bounds__(kThreads)
    cluster_kernel(const __grid_constant__ AttentionArgs a, const __grid_constant__ Plan plan,
                   const __grid_constant__ HeadsArgs of, bool are_usual) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t memory[];
  auto& s = *reinterpret_cast<Piece<T>*>(memory);
  let_next_start();
  const int z = static_cast<int>(blockIdx.z);
  const int x = static_cast<int>(blockIdx.x), sequence = plan.tiles.quotient(x);
  const Range w = find_range(a, plan, x, static_cast<int>(blockIdx.y), z / kRanks, sequence,
                             {sequence, 1}, a.batch.context_len[sequence]);
  if (w.last_chunk < w.first_chunk) return;  // true in all blocks of the split
  const Part p = part_of(w, z, plan.pieces);
  if (threadIdx.x == 0) {
    barrier_init(&s.full[kKeyCopies], 1);
    barrier_init(&s.full[kValueCopies], 1);
    barrier_init(&s.scored, 1);
    barrier_init(&s.measured, 1);
    barrier_init(&s.joined, 1);
    s.beyond = 0;
    barriers_ready();
    barrier_expect(&s.scored, 8 * T::kRows * kPieceTokens * sizeof(float));
    barrier_expect(&s.measured, sizeof(s.most));
    barrier_expect(&s.joined, sizeof(s.second));
  }
  __syncthreads();
  cluster_arrive_relaxed();
  if (threadIdx.x >= kSumming) {
    const bool stored = of.count == 1;
    const int64_t newest = copy_piece(s, a, w, p, stored);
    if (!stored) take_newest(s, a, of, w, p, newest, are_usual);
    __syncthreads();
    cluster_wait();
    pad_share<T>(a, w, p);
    return;
  }
  if (are_usual) {
    take_usual_queries(s, a, of, w);
  } else {
    wait();
    take_queries(s, a, of, w);
  }
  __syncthreads();
  uint4 q[T::D / 16];
  load_operands<T>(q, s);
  copies_of(s).wait({kKeyCopies, 0});
  score_tile(s, a, w, p, q);
  weigh_piece(s, p, steepness(a));
  sync_summing();
  copies_of(s).wait({kValueCopies, 0});
  const bool join = w.pieces == 2 && pieces_of_cluster(plan.pieces) == 2;
  const bool all = w.pieces == 1 || join;
  if (Piece<T>::kSummers == kWarps || threadIdx.x < Piece<T>::kSummers * 32) {
    sum_piece(s, a, w, p, plan.pieces, join, all);
  }
  if (!all) {
    unsigned& count = arrived[blockIdx.x * gridDim.y + blockIdx.y];
    if (!arrives_last(s.last, count, w.pieces * kRanks)) return;
    merge_pieces<T>(a, w, plan);
  }
#endif
}

template <class T>
int run(const Context& ctx, const AttentionArgs& a, const Plan& plan, const HeadsArgs& of) {
  constexpr size_t kBytes = sizeof(Piece<T>);
  const auto kernel = cluster_kernel<T>;
  if (const int error = raise_shared(kernel, kBytes); error != 0) return error;
  // Leave shared memory to a block of gemm_bf16_sm90_m1_32.cu.
  if (const int error = leave_shared(kernel); error != 0) return error;
  const dim3 grid(static_cast<unsigned>(a.batch.sequences * plan.tiles.by),
                  static_cast<unsigned>(a.cache.kv_heads),
                  static_cast<unsigned>(plan.pieces * kRanks));
  const dim3 cluster(1, 1, static_cast<unsigned>(pieces_of_cluster(plan.pieces) * kRanks));
  return launch_cluster(ctx, kernel, grid, dim3(kThreads), kBytes, cluster, a, plan, of,
                        usual(of.of[0]) && (of.count == 1 || (usual(of.of[1]) && usual(of.of[2]))));
}

template <template <int> class Stored, bool kE4M3>
int run_rows(const Context& ctx, const AttentionArgs& a, const Plan& plan, const HeadsArgs& of) {
  return a.heads / a.cache.kv_heads <= 8 ? run<Kind<128, 1, Stored, kE4M3>>(ctx, a, plan, of)
                                         : run<Kind<128, 2, Stored, kE4M3>>(ctx, a, plan, of);
}
template <template <int> class Stored>
int run_result(const Context& ctx, const AttentionArgs& a, const Plan& plan, const HeadsArgs& of) {
  return a.act.e4m3 != 0 ? run_rows<Stored, true>(ctx, a, plan, of)
                         : run_rows<Stored, false>(ctx, a, plan, of);
}

}  // namespace

static_assert(kPieceTokens == kClusterPieceTokens && kRanks == kClusterRanks &&
              kRowsOfTile == kDecodeTileRows);

int attention_cluster(const Context& ctx, const AttentionArgs& a, single::Plan plan) {
  plan.run = 1;
  HeadsArgs of{};
  if (a.before != nullptr) {
    of = *a.before;
  } else {
    of.count = 1;
    of.of[0].x = const_cast<float*>(a.q);
    of.of[0].stride = a.q_stride;
  }
  switch (a.cache.type) {
    case CacheType::kE4M3:
      return run_result<E4M3Stored>(ctx, a, plan, of);
    case CacheType::kInt8:
      return run_result<Int8Stored>(ctx, a, plan, of);
    default:
      return run_result<HalfStored>(ctx, a, plan, of);
  }
}

}  // namespace freshet::cuda

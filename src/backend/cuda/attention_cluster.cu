// Attention of few single queries over short contexts: a cluster of blocks for each piece, or for
// two of them.
//
// A block has some keys of the piece, and a share of the features of all its values: the scores go
// to all blocks of the cluster, and each takes all weights of the piece. So four times as many
// multiprocessors read, and a piece's sums need no memory but their own.
//
// Norms, rotation and storing of the new heads are done here, too, where they are told: every block
// takes the queries and what it needs of the new key and value, and puts them where copies of the
// cache left their place free.
#include "backend/cuda/attention_pieces.cuh"
#include "backend/cuda/cluster.cuh"
#include "backend/cuda/heads.cuh"
#include "backend/cuda/kernels.cuh"

namespace freshet::cuda {
namespace {

using namespace single;

constexpr int kRanks = 4;                           // blocks of a cluster
constexpr int kRankTokens = kPieceTokens / kRanks;  // whose keys a block has
constexpr int kPieceBlocks = kPieceTokens / kBlockTokens;
static_assert(kPieceBlocks == 32 && kWarps == kTiles);  // a lane a block, a warp a tile

// Tiles of 8 features of a warp that sums values.
template <int D>
inline constexpr int kMine = D / kRanks / (8 * kWarps);

template <class T>
struct Piece {
  static constexpr int kShare = T::D / kRanks;  // features
  union {
    __half keys[kRankTokens * T::D];
    uint32_t weights[8 * T::kRows][kPieceTokens / 2 + 4];  // when all scores are there
  };
  __half values[kPieceTokens / 8][kShare * 8];
  float scores[8 * T::kRows][kPieceTokens + 8];
  float sums[kTiles][8 * T::kRows][4], factor[kTiles][8 * T::kRows];
  float2 ends[8 * T::kRows][4];
  float rooms[kWarps + 1][T::D];                    // of a head that is rotated
  __half queries[8 * T::kRows][T::D + 8];           // as they are multiplied
  float most[kRanks * kWarps][8 * T::kRows];        // of each warp's features
  float4 second[T::kRows * kMine<T::D>][kSumming];  // a lane's sums of the second of two pieces
  uint64_t full[2], scored, measured, joined;
  int last, beyond;
};

// Two pieces are a cluster's, and meet in the blocks of the first; or else a piece is.
__host__ __device__ inline int pieces_of_cluster(int pieces) {
  return pieces == 2 ? 2 : 1;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
constexpr int kTileBlocks = kTileTokens / kBlockTokens;
constexpr int kRankBlocks = kRankTokens / kBlockTokens;

__device__ unsigned arrived[kMostCounters];

// The piece of a block, and what of it is seen: tiles, blocks of the cache.
struct Part {
  int rank, piece;
  int first_rank;                                      // of the piece's blocks in the cluster
  int first_tile, last_tile, first_block, last_block;  // of the piece
};

__device__ __forceinline__ Part part_of(const Range& w, int z, int pieces) {
  Part p;
  p.rank = z % kRanks;
  p.first_rank = z / kRanks % pieces_of_cluster(pieces) * kRanks;
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
// that was started before has ended, if that fills it. Returns that block, if it is of the piece.
template <class T>
__device__ __forceinline__ int64_t copy_piece(Piece<T>& s, const AttentionArgs& a, const Range& w,
                                              const Part& p, bool stored) {
  constexpr int kBlockBytes = T::Stored::kBlockBytes, kGroupBytes = Piece<T>::kShare * 8 * 2;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const bool seen = lane >= p.first_block && lane <= p.last_block;
  const bool mine = seen && lane / kRankBlocks == p.rank;
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
      bulk_copy(s.keys + lane % kRankBlocks * kBlockTokens * T::D, keys_at(a.cache, id, w.kv_head),
                kBlockBytes, &s.full[0]);
    }
    const uint8_t* from = values_at(a.cache, id, w.kv_head) + p.rank * Piece<T>::kShare * 16;
    for (int i = 0; i < 2; ++i) {
      bulk_copy(s.values[lane * 2 + i], from + i * 16 * T::D, kGroupBytes, &s.full[1]);
    }
  };
  const bool late = stored && block == w.position / kBlockTokens;
  if (seen && !late) copy();
  wait();
  if (seen && late) copy();
  return __shfl_sync(0xffffffff, id, w.position / kBlockTokens % kPieceBlocks);
}

// A warp's head of the query's token, of 128 features: a lane's four neighbours.
constexpr int kHeadDim = 128;
struct Head {
  float4 v, weight;  // weight: of a usual head's norm
  Turn turn;
};
__device__ __forceinline__ float4 norm_weight(const HeadsArgs::Part& part, int head) {
  if (part.normed == 0) return {};
  const int c = static_cast<int>(threadIdx.x % 32) * 4;
  const float* weight = part.norm.weight + (part.norm_per_head != 0 ? head * kHeadDim : 0);
  return *reinterpret_cast<const float4*>(weight + c);
}
__device__ __forceinline__ Head load_head(const HeadsArgs& of, const HeadsArgs::Part& part,
                                          int head, int token, bool is_usual) {
  const int c = static_cast<int>(threadIdx.x % 32) * 4;
  const float* x = part.x + token * part.stride + int64_t{head} * kHeadDim;
  return {load_four(x, c, kHeadDim, whole_rows(part.x, part.stride)),
          is_usual ? norm_weight(part, head) : float4{},
          turn_at(part, of.cos_sin + int64_t{token} * part.rotary_dim, c)};
}
// The same normalised and rotated, of a usual head (heads.cuh) in registers.
__device__ __forceinline__ float4 finish_usual(const Head& h, const HeadsArgs::Part& part) {
  float4 v = h.v;
  if (part.normed != 0) norm_four(v, h.weight, part.norm.eps);
  if (part.rotary_dim != 0) rotate_usual(v, h.turn);
  return v;
}
// Of any head.
__device__ __forceinline__ float4 finish_head(const Head& h, const HeadsArgs& of,
                                              const HeadsArgs::Part& part, int head, int token,
                                              float* room) {
  if (part.normed == 0 && part.rotary_dim == 0) return h.v;
  const int c = static_cast<int>(threadIdx.x % 32) * 4;
  __syncwarp();  // the head before has been read
  *reinterpret_cast<float4*>(room + c) = h.v;
  if (part.normed != 0) {
    norm_head(room, kHeadDim, part.norm, part.norm_per_head != 0 ? int64_t{head} * kHeadDim : 0);
  }
  __syncwarp();
  const float* table = of.cos_sin + int64_t{token} * part.rotary_dim;
  return rotate_four(room, c, kHeadDim, part, table, h.turn);
}

// The queries, by the warps that sum.
template <class T>
__device__ __forceinline__ void take_usual_queries(Piece<T>& s, const AttentionArgs& a,
                                                   const HeadsArgs& of, const Range& w) {
  constexpr int kEach = 8 * T::kRows / kWarps;
  const int c = static_cast<int>(threadIdx.x % 32) * 4, warp = static_cast<int>(threadIdx.x / 32);
  const HeadsArgs::Part& part = of.of[0];
  const int first = w.first_head;
  Head head[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    head[i].weight = norm_weight(part, first + min(warp + i * kWarps, w.rows - 1));
  }
  wait();
  const float* x = part.x + w.sequence * part.stride + int64_t{first} * kHeadDim + c;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int row = warp + i * kWarps;
    head[i].v = row < w.rows ? *reinterpret_cast<const float4*>(x + row * kHeadDim) : float4{};
  }
  Turn turn = {};
  if (part.rotary_dim != 0) turn = usual_turn(of.cos_sin, w.sequence, c);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    head[i].turn = turn;
    store_four(CacheType::kF16, reinterpret_cast<uint8_t*>(&s.queries[warp + i * kWarps][c]), 0,
               T::D, finish_usual(head[i], part));
  }
}
template <class T>
__device__ __forceinline__ void take_queries(Piece<T>& s, const AttentionArgs& a,
                                             const HeadsArgs& of, const Range& w) {
  const int c = static_cast<int>(threadIdx.x % 32) * 4, warp = static_cast<int>(threadIdx.x / 32);
  const HeadsArgs::Part& part = of.of[0];
  const int first = w.first_head;
#pragma unroll 1
  for (int row = warp; row < 8 * T::kRows; row += kWarps) {
    float4 v = {};
    if (row < w.rows) {
      const Head head = load_head(of, part, first + row, w.sequence, false);
      v = finish_head(head, of, part, first + row, w.sequence, s.rooms[warp]);
    }
    store_four(CacheType::kF16, reinterpret_cast<uint8_t*>(&s.queries[row][c]), 0, T::D, v);
  }
}

// The new key and value, by the warp that copies: into the copies, and into the cache.
template <class T>
__device__ __forceinline__ void take_newest(Piece<T>& s, const AttentionArgs& a,
                                            const HeadsArgs& of, const Range& w, const Part& p,
                                            int64_t id, bool are_usual) {
  constexpr CacheType kType = CacheType::kF16;
  constexpr int kShare = Piece<T>::kShare;
  const int at = w.position - p.piece * kPieceTokens;  // in the piece
  if (at >= kPieceTokens) return;
  const bool mine = at / kRankTokens == p.rank;
  const int c = static_cast<int>(threadIdx.x % 32) * 4;
  const int block = at / kBlockTokens, slot = slot_at(kType, at % kBlockTokens, T::D);
  const auto finished = [&](const Head& head, const HeadsArgs::Part& part) {
    return are_usual ? finish_usual(head, part)
                     : finish_head(head, of, part, w.kv_head, w.sequence, s.rooms[kWarps]);
  };
  const Head value = load_head(of, of.of[2], w.kv_head, w.sequence, are_usual);
  if (mine) {
    const Head head = load_head(of, of.of[1], w.kv_head, w.sequence, are_usual);
    const float4 key = finished(head, of.of[1]);
    uint8_t* keys =
        reinterpret_cast<uint8_t*>(s.keys + block % kRankBlocks * kBlockTokens * T::D) + slot;
    barrier_wait(&s.full[0], 0);
    store_four(kType, keys, c, T::D, key);
    store_four(kType, keys_at(a.cache, id, w.kv_head) + slot, c, T::D, key);
  }
  const float4 v = finished(value, of.of[2]);
  if (c / kShare == p.rank) {
    uint8_t* values = reinterpret_cast<uint8_t*>(s.values[block * 2 + at % kBlockTokens / 8]) +
                      slot_at(kType, at % 8, kShare);
    barrier_wait(&s.full[1], 0);
    store_four(kType, values, c % kShare, kShare, v);
    store_four(kType, values_at(a.cache, id, w.kv_head) + slot, c, T::D, v);
  }
}

// Zeros for the rows that fill up the activations' last tile, in the block's share of features, by
// the warp that copies.
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

// The operands of the queries.
template <class T>
__device__ __forceinline__ void load_operands(uint4 (&q)[T::D / 16], const Piece<T>& s) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const auto pair = [&](int r, int column) {
    return r >= T::kRows ? 0
                         : *reinterpret_cast<const uint32_t*>(
                               &s.queries[lane / 4 + r * 8][column + lane % 4 * 2]);
  };
#pragma unroll
  for (int k = 0; k < T::D / 16; ++k) {
    q[k] = make_uint4(pair(0, k * 16), pair(1, k * 16), pair(0, k * 16 + 8), pair(1, k * 16 + 8));
  }
}

// Scores of a warp's keys of the block, to all blocks of the piece.
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
      const auto* keys = reinterpret_cast<const uint8_t*>(s.keys);
      T::Stored::template load_keys<false>(loaded, keys, warp * kPairs + j, k);
      T::Stored::template open_keys<false>(b, loaded, keys, warp * kPairs + j, k);
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

// The pair of scores, and of weights, of a lane in row lane / 4 + 8 r of a tile.
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

// One warp takes all tiles in their order. Rare, so it is no part of the code that all go through.
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

// Weights of the piece: a warp a tile, with the reference of the first, unless that is too far off.
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

// Sums of a warp's features, with all values of the piece.
template <class T>
__device__ __forceinline__ void add_piece(Sums<kMine<T::D>, T::kRows>& sums, const Piece<T>& s,
                                          const Part& p) {
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
      for (int j = 0; j < kMine<T::D>; ++j) {
        uint32_t b[4];
        ldmatrix4_trans(
            b, s.values[block * 2 + lane / 8] + (warp * kMine<T::D> + j) * 64 + lane % 8 * 8);
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

// Of two pieces of a cluster: the second's sums go to the blocks of the first, which has both then.
template <class T>
__device__ __forceinline__ void send_sums(Piece<T>& s, const Sums<kMine<T::D>, T::kRows>& sums,
                                          const Part& p) {
#pragma unroll
  for (int r = 0; r < T::kRows; ++r) {
#pragma unroll
    for (int j = 0; j < kMine<T::D>; ++j) {
      const float v[4] = {sums.acc[j][r * 2], sums.acc[j][r * 2 + 1], sums.m[r], sums.l[r]};
      send(place_in_block(&s.second[r * kMine<T::D> + j][threadIdx.x], p.rank), v,
           place_in_block(&s.joined, p.rank));
    }
  }
}
template <class T>
__device__ __forceinline__ void join_sums(Piece<T>& s, Sums<kMine<T::D>, T::kRows>& sums,
                                          float steep) {
  const auto first = sums;
  sums.clear();
  sums.merge(first, steep);
  barrier_wait(&s.joined, 0);
  Sums<kMine<T::D>, T::kRows> second;
  second.clear();
#pragma unroll
  for (int r = 0; r < T::kRows; ++r) {
#pragma unroll
    for (int j = 0; j < kMine<T::D>; ++j) {
      const float4 v = s.second[r * kMine<T::D> + j][threadIdx.x];
      second.acc[j][r * 2] = v.x;
      second.acc[j][r * 2 + 1] = v.y;
      second.m[r] = v.z;
      second.l[r] = v.w;
    }
  }
  sums.merge(second, steep);
}

// The sums of all pieces as the result in E4M3: a head is a group of 128, whose largest number the
// blocks of the cluster tell each other.
template <class T>
__device__ __forceinline__ void put_sums(Piece<T>& s, const Sums<kMine<T::D>, T::kRows>& sums,
                                         const AttentionArgs& a, const Range& w, const Part& p) {
  static_assert(T::D == kE4M3Cols);
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int head = w.first_head + lane / 4;
  float2 v[T::kRows][kMine<T::D>];
#pragma unroll
  for (int r = 0; r < T::kRows; ++r) {
    const bool real = lane / 4 + r * 8 < w.rows;
    const float end = real ? ending(sums.m[r], sums.l[r], a, head + r * 8) : 0.0f;
#pragma unroll
    for (int j = 0; j < kMine<T::D>; ++j) {
      v[r][j] =
          make_float2(__fmul_rn(sums.acc[j][r * 2], end), __fmul_rn(sums.acc[j][r * 2 + 1], end));
    }
    float most = largest_of(v[r]);
    most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));
    send_to_block(&s.most[p.rank * kWarps + warp][lane / 4 + r * 8], p.first_rank + lane % 4, most,
                  &s.measured);
  }
  barrier_wait(&s.measured, 0);
#pragma unroll
  for (int r = 0; r < T::kRows; ++r) {
    const int row = lane / 4 + r * 8;
    if (row >= w.rows) continue;
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < kRanks * kWarps; ++i) most = fmaxf(most, s.most[i][row]);
    const int first = p.rank * Piece<T>::kShare + warp * kMine<T::D> * 8 + lane % 4 * 2;
    const int64_t group = head + r * 8;
    const auto apart = [](int j) { return j * 8; };
    put_row(a, w.sequence, group * kE4M3Cols + first, apart, v[r]);
    put_e4m3_pairs(a.act, w.sequence, group, first, apart, v[r], most);
  }
}

// The piece's sums as the result if they are all, or as a partial one.
template <class T>
__device__ __forceinline__ void write_piece(const Sums<kMine<T::D>, T::kRows>& sums,
                                            const AttentionArgs& a, const Range& w, const Part& p,
                                            int pieces, bool all) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int first = p.rank * Piece<T>::kShare + warp * kMine<T::D> * 8 + lane % 4 * 2;
#pragma unroll
  for (int r = 0; r < T::kRows; ++r) {
    const int row = lane / 4 + r * 8;
    if (row >= w.rows) continue;
    const int head = w.first_head + row;
    float* to = partial_at(a, w.sequence, head, p.piece - w.first_piece, pieces);
    // As if it joined those before it: none.
    const float end = all ? ending(sums.m[r], sums.l[r], a, head) : 1.0f;
#pragma unroll
    for (int j = 0; j < kMine<T::D>; ++j) {
      const float low = sums.acc[j][r * 2], high = sums.acc[j][r * 2 + 1];
      if (all) {
        put_result(a, w.sequence, static_cast<int64_t>(head) * T::D + first + j * 8,
                   __fmul_rn(low, end), __fmul_rn(high, end));
      } else {
        *reinterpret_cast<float2*>(to + first + j * 8) = make_float2(low, high);
      }
    }
    if (!all && p.rank == 0 && warp == 0 && lane % 4 == 0) {
      *reinterpret_cast<float2*>(to + T::D) = make_float2(sums.m[r], sums.l[r]);
    }
  }
}
// comes_last() with one thread's fence.
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

// Blocks: [sequences x tiles of rows, key heads, pieces x blocks of a cluster]. of: queries, and
// keys and values if these are not in the cache yet.
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
                             a.batch.context_len[sequence]);
  if (w.last_chunk < w.first_chunk) return;  // all blocks of the piece
  const Part p = part_of(w, z, plan.pieces);
  if (threadIdx.x == 0) {
    barrier_init(&s.full[0], 1);
    barrier_init(&s.full[1], 1);
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
  barrier_wait(&s.full[0], 0);
  score_tile(s, a, w, p, q);
  weigh_piece(s, p, steepness(a));
  sync_summing();
  barrier_wait(&s.full[1], 0);
  Sums<kMine<T::D>, T::kRows> sums;
  sums.clear();
  add_piece(sums, s, p);
  const bool join = w.pieces == 2 && pieces_of_cluster(plan.pieces) == 2;
  if (join) {
    if (p.first_rank > 0) {
      send_sums(s, sums, p);
      return;
    }
    join_sums(s, sums, steepness(a));
  }
  const bool all = w.pieces == 1 || join;
  if constexpr (T::kE4M3) {
    if (all) {
      put_sums(s, sums, a, w, p);
      return;
    }
  }
  write_piece<T>(sums, a, w, p, plan.pieces, all);
  if (!all) {
    unsigned& count = arrived[blockIdx.x * gridDim.y + blockIdx.y];
    if (!arrives_last(s.last, count, w.pieces * kRanks)) return;
    merge_pieces<T>(a, w, plan.pieces);
  }
#endif
}

template <class T>
int run(const AttentionArgs& a, const Plan& plan, const HeadsArgs& of) {
  constexpr size_t kBytes = sizeof(Piece<T>);
  const auto kernel = cluster_kernel<T>;
  static const cudaError_t kRaised = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes));
  if (kRaised != cudaSuccess) return static_cast<int>(kRaised);
  static const cudaError_t kCarved = leave_shared(kernel);  // to a block of products_few.cu
  if (kCarved != cudaSuccess) return static_cast<int>(kCarved);
  const dim3 grid(static_cast<unsigned>(a.batch.sequences * plan.tiles.by),
                  static_cast<unsigned>(a.cache.kv_heads),
                  static_cast<unsigned>(plan.pieces * kRanks));
  const dim3 cluster(1, 1, static_cast<unsigned>(pieces_of_cluster(plan.pieces) * kRanks));
  return launch_cluster(kernel, grid, dim3(kThreads), kBytes, cluster, a, plan, of,
                        usual(of.of[0]) && (of.count == 1 || (usual(of.of[1]) && usual(of.of[2]))));
}

template <bool kE4M3>
int run_rows(const AttentionArgs& a, const Plan& plan, const HeadsArgs& of) {
  return a.heads / a.cache.kv_heads <= 8 ? run<Kind<128, 1, HalfStored, kE4M3>>(a, plan, of)
                                         : run<Kind<128, 2, HalfStored, kE4M3>>(a, plan, of);
}

}  // namespace

bool cluster_fits(const AttentionArgs& a, const single::Plan& plan) {
  const int64_t blocks =
      int64_t{a.batch.sequences} * plan.tiles.by * a.cache.kv_heads * plan.pieces * kRanks;
  // More would wait for each other: their copies of values are small.
  return a.partial != nullptr && a.cache.type == CacheType::kF16 && a.cache.key_dim == 128 &&
         blocks <= multiprocessors;
}

int attention_cluster(const AttentionArgs& a, single::Plan plan) {
  plan.run = 1;
  HeadsArgs of{};
  if (a.before != nullptr) {
    of = *a.before;
  } else {
    of.count = 1;
    of.of[0].x = const_cast<float*>(a.q);
    of.of[0].stride = a.q_stride;
  }
  return a.act.e4m3 != 0 ? run_rows<true>(a, plan, of) : run_rows<false>(a, plan, of);
}

}  // namespace freshet::cuda

// Shared memory of a block of decode_cluster_sm90.cu, and the code that fills it: copies of its
// part of a KV split. If attention also normalises, rotates and stores the new heads, every block
// computes the queries and the features of the new key and value that it needs, and writes them
// into the gap that the copies left.
#pragma once

#include "backend/cuda/attention/decode_split_kv.cuh"
#include "backend/cuda/attention/qk_norm_rope_store.cuh"
#include "backend/cuda/runtime/pipeline.cuh"

namespace freshet::cuda::single {

inline constexpr int kRanks = 4;                           // blocks of a split
inline constexpr int kRankTokens = kPieceTokens / kRanks;  // keys that a block scores
inline constexpr int kPieceBlocks = kPieceTokens / kBlockTokens;
// One lane per cache block, one warp per tile.
static_assert(kPieceBlocks == 32 && kWarps == kTiles);

template <class T>
struct Piece {
  using Stored = typename T::Stored;
  static constexpr int kShare = T::D / kRanks;  // features
  // Tiles of 8 features per summing warp, and the number of such warps.
  static constexpr int kMine = Stored::kFours ? 2 : 1, kSummers = kShare / (8 * kMine);
  static_assert(kSummers <= kWarps);
  // Values of eight keys; scales of a cache block's 16 keys.
  static constexpr int kGroupBytes = kShare * 8 * (in_bytes(Stored::kType) ? 1 : 2);
  static constexpr int kScaleBytes = Stored::kScaled ? kBlockTokens * 2 : 0;
  static_assert(!Stored::kScaled || kShare == 32);
  union {
    alignas(16) uint8_t keys[kRankTokens / kBlockTokens][Stored::kKeyBytes];
    uint32_t weights[8 * T::kRows][kPieceTokens / 2 + 4];  // once all scores have arrived
  };
  alignas(16) uint8_t values[kPieceTokens / 8][kGroupBytes];
  alignas(16) uint8_t scales[Stored::kScaled ? kPieceBlocks : 1][kBlockTokens * 2];
  float scores[8 * T::kRows][kPieceTokens + 8];
  float sums[kTiles][8 * T::kRows][4], factor[kTiles][8 * T::kRows];
  float2 ends[8 * T::kRows][4];
  float rooms[kWarps + 1][T::D];                   // scratch for heads that are rotated
  __half queries[8 * T::kRows][T::D + 8];          // as MMA operands
  float most[kRanks * kSummers][8 * T::kRows];     // largest magnitude of each warp's features
  float4 second[T::kRows * kMine][kSummers * 32];  // a lane's sums of the cluster's second split
  uint64_t full[2], scored, measured, joined;      // of kKeyCopies, kValueCopies
  int last, beyond;
};

// A cluster has two splits, which are merged in the first one's blocks, or one split.
__host__ __device__ inline int pieces_of_cluster(int pieces) {
  return pieces == 2 ? 2 : 1;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
inline constexpr int kRankBlocks = kRankTokens / kBlockTokens;

// The copies of a split: a pipeline of two stages, each used once.
inline constexpr int kKeyCopies = 0, kValueCopies = 1;
template <class T>
__device__ __forceinline__ Pipeline copies_of(Piece<T>& s) {
  return {s.full};
}

// The split of a block, and its visible part: tiles and blocks of the cache.
struct Part {
  int rank, piece;
  int first_rank;                                      // the split's first block in the cluster
  int first_tile, last_tile, first_block, last_block;  // within the split
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

// Producer warp: one lane per block of the cache. The block that contains the query's own position
// is copied only after the previous kernel has ended if that kernel writes it (`stored`). Returns
// that block's id if it belongs to the split.
template <class T>
__device__ __forceinline__ int64_t copy_piece(Piece<T>& s, const AttentionArgs& a, const Range& w,
                                              const Part& p, bool stored) {
  using Stored = typename T::Stored;
  constexpr int kKeyBytes = Stored::kKeyBytes, kGroupBytes = Piece<T>::kGroupBytes;
  constexpr int kScaleBytes = Piece<T>::kScaleBytes;
  const Pipeline copies = copies_of(s);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const bool seen = lane >= p.first_block && lane <= p.last_block;
  const bool mine = seen && lane / kRankBlocks == p.rank;
  const int block = p.piece * kPieceBlocks + lane;
  const int64_t id = seen ? a.batch.tables[w.sequence * a.batch.table_stride + block] : 0;
  const int keys = __popc(__ballot_sync(0xffffffff, mine));
  const int values = __popc(__ballot_sync(0xffffffff, seen));
  if (lane == 0) {
    copies.expect(kKeyCopies, keys * kKeyBytes);
    copies.expect(kValueCopies, values * (2 * kGroupBytes + kScaleBytes));
  }
  __syncwarp();
  const auto copy = [&] {
    if (mine) {
      bulk_copy(s.keys[lane % kRankBlocks], keys_at(a.cache, id, w.kv_head), kKeyBytes,
                copies.filled(kKeyCopies));
    }
    const uint8_t* from = values_at(a.cache, id, w.kv_head);
    for (int i = 0; i < 2; ++i) {
      bulk_copy(s.values[lane * 2 + i], from + (i * kRanks + p.rank) * kGroupBytes, kGroupBytes,
                copies.filled(kValueCopies));
    }
    if constexpr (Stored::kScaled) {
      bulk_copy(s.scales[lane], from + Stored::kNumbers + p.rank * kScaleBytes, kScaleBytes,
                copies.filled(kValueCopies));
    }
  };
  const bool late = stored && block == w.position / kBlockTokens;
  if (seen && !late) copy();
  wait();
  if (seen && late) copy();
  return __shfl_sync(0xffffffff, id, w.position / kBlockTokens % kPieceBlocks);
}

// One head (128 features) of the query's token, held by a warp: four adjacent features per lane.
inline constexpr int kHeadDim = 128;
struct Head {
  float4 v, weight;  // weight: of a usual head's norm
  Turn turn;
};
__device__ __forceinline__ float4 norm_weight(const HeadsArgs::Part& part, int head) {
  if (part.normed == 0) return {};
  return weight_at(part, head, static_cast<int>(threadIdx.x % 32) * 4);
}
__device__ __forceinline__ Head load_head(const HeadsArgs& of, const HeadsArgs::Part& part,
                                          int head, int token, bool is_usual) {
  const int c = static_cast<int>(threadIdx.x % 32) * 4;
  const float* x = part.x + token * part.stride + int64_t{head} * kHeadDim;
  return {load_four(x, c, kHeadDim, whole_rows(part.x, part.stride)),
          is_usual ? norm_weight(part, head) : float4{},
          turn_at(part, of.cos_sin + int64_t{token} * part.rotary_dim, c)};
}
// Normalises and rotates a usual head (qk_norm_rope_store.cuh) in registers.
__device__ __forceinline__ float4 finish_usual(const Head& h, const HeadsArgs::Part& part) {
  float4 v = h.v;
  if (part.normed != 0) norm_four(v, h.weight, part.norm.eps);
  if (part.rotary_dim != 0) rotate_usual(v, h.turn);
  return v;
}
// The same for any head.
__device__ __forceinline__ float4 finish_head(const Head& h, const HeadsArgs& of,
                                              const HeadsArgs::Part& part, int head, int token,
                                              float* room) {
  if (part.normed == 0 && part.rotary_dim == 0) return h.v;
  const int c = static_cast<int>(threadIdx.x % 32) * 4;
  __syncwarp();  // the previous head has been read
  *reinterpret_cast<float4*>(room + c) = h.v;
  if (part.normed != 0) {
    norm_head(room, kHeadDim, part.norm, part.norm_per_head != 0 ? int64_t{head} * kHeadDim : 0);
  }
  __syncwarp();
  const float* table = of.cos_sin + int64_t{token} * part.rotary_dim;
  return rotate_four(room, c, kHeadDim, part, table, h.turn);
}

// Loads the queries; by the consumer warps.
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

// The new key and value, by the producer warp: written into the copies in shared memory, and into
// the cache.
template <class T>
__device__ __forceinline__ void take_newest(Piece<T>& s, const AttentionArgs& a,
                                            const HeadsArgs& of, const Range& w, const Part& p,
                                            int64_t id, bool are_usual) {
  constexpr CacheType kType = T::Stored::kType;
  constexpr int kShare = Piece<T>::kShare;
  const int at = w.position - p.piece * kPieceTokens;  // position within the split
  if (at >= kPieceTokens) return;
  const bool mine = at / kRankTokens == p.rank;
  const int c = static_cast<int>(threadIdx.x % 32) * 4;
  const int block = at / kBlockTokens, slot = slot_at(kType, at % kBlockTokens, T::D);
  const auto scales_from = [&](int byte, bool by_slot) {
    ScalesAt scales = scales_at(CacheType::kInt8, at % kBlockTokens, T::D, by_slot);
    scales.first -= byte;
    return scales;
  };
  const auto finished = [&](const Head& head, const HeadsArgs::Part& part) {
    return are_usual ? finish_usual(head, part)
                     : finish_head(head, of, part, w.kv_head, w.sequence, s.rooms[kWarps]);
  };
  const Head value = load_head(of, of.of[2], w.kv_head, w.sequence, are_usual);
  if (mine) {
    const Head head = load_head(of, of.of[1], w.kv_head, w.sequence, are_usual);
    const float4 key = finished(head, of.of[1]);
    const Form form = form_of_four(kType, c, T::D, key);
    const ScalesAt scales = scales_from(slot, true);
    copies_of(s).wait({kKeyCopies, 0});
    put_four(kType, s.keys[block % kRankBlocks] + slot, c, form, scales);
    put_four(kType, keys_at(a.cache, id, w.kv_head) + slot, c, form, scales);
  }
  const float4 v = finished(value, of.of[2]);
  const Form form = form_of_four(kType, c, T::D, v);
  if (c / kShare == p.rank) {
    uint8_t* values = s.values[block * 2 + at % kBlockTokens / 8] + slot_at(kType, at % 8, kShare);
    uint8_t* its_scale = s.scales[T::Stored::kScaled ? block : 0] + at % kBlockTokens * 2;
    copies_of(s).wait({kValueCopies, 0});
    put_four(kType, values, c % kShare, form, {static_cast<int>(its_scale - values), 0});
    put_four(kType, values_at(a.cache, id, w.kv_head) + slot, c, form, scales_from(slot, false));
  }
}
#endif

}  // namespace freshet::cuda::single

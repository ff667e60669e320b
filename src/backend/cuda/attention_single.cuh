// Attention with one query a sequence: memory decides its speed, so keys and values stream.
//
// A block takes a run of pieces of one sequence's context, for all heads of one key head. One warp
// keeps a ring in shared memory filled by the bulk copy engine, half a tile's keys or values at a
// time, a copy for each block of the cache; halves that no kernel of this step writes are asked for
// before the kernel in front has ended. Four warps share a tile: by keys for scores and weights,
// which they leave to each other in shared memory as operands, and by features for the values. A
// block that has the whole context writes the result; of several, the one that ends last merges all
// pieces from left to right. So neither the cut into runs nor the order of blocks touches a bit.
//
// How numbers of the cache become operands is a Stored's business (HalfStored).
#pragma once

#include "backend/cuda/attention.cuh"

namespace freshet::cuda::single {

inline constexpr int kWarps = 4, kSumming = kWarps * 32, kThreads = kSumming + 32;
inline constexpr int kRowsOfTile = 16;
inline constexpr int kMostRun = 32;            // pieces of a block
inline constexpr int kMostCounters = 1 << 16;  // tiles of rows of a batch

struct Plan {
  int tiles;   // of rows, for a key head
  int pieces;  // most pieces a row sees
  int run;     // pieces a block takes
  int slots;   // of its ring
};

// A cache in F16: what a block of it has of a head, and operands of mma from half a tile. kFours:
// of 16 features a lane of keys has four neighbours, and tiles of values take turns at features.
// kTogether: a slot has keys and values, each block's as one copy, of half a tile, or else one of
// them.
template <int D>
struct HalfStored {
  static constexpr bool kBF16 = false, kFours = false, kTogether = false;
  static constexpr int kBlockBytes = kBlockTokens * D * 2, kResident = 2;
  static constexpr int kLeastSlots = 6;
  // Of 16 keys: two columns of 8 of them, features [16 k, 16 k + 16), and the 16 after these.
  static __device__ __forceinline__ void keys(uint32_t (&b)[2][4], const uint8_t* slot, int keys,
                                              int k) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const auto* from = reinterpret_cast<const __half*>(slot) + (keys * 2 + lane / 16) * 8 * D +
                       lane / 8 % 2 * 64 + lane % 8 * 8 + k * 128;
    ldmatrix4(b[0], from);
    ldmatrix4(b[1], from + 128);
  }
  // Of keys [16 k, 16 k + 16): two columns of 8 features, the first one `column`.
  static __device__ __forceinline__ void values(uint32_t (&b)[4], const uint8_t* slot, int k,
                                                int column) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    ldmatrix4_trans(b, reinterpret_cast<const __half*>(slot) + (k * 2 + lane / 8 % 2) * 8 * D +
                           (column + lane / 16) * 64 + lane % 8 * 8);
  }
  static __device__ __forceinline__ void values(uint32_t (&b)[2][4], const uint8_t* slot, int k,
                                                int column) {
    values(b[0], slot, k, column);
    values(b[1], slot, k, column + 2);
  }
};

// The same in BF16.
template <int D>
struct BF16Stored : HalfStored<D> {
  static constexpr bool kBF16 = true;
};

// Codes of a byte: E4M3, or INT8 with scales.
template <int D, CacheType kType>
struct CodesStored {
  static constexpr bool kBF16 = false, kFours = true, kTogether = true;
  static constexpr bool kScaled = kType == CacheType::kInt8;
  static constexpr int kScales = scales_of(D), kNumbers = kBlockTokens * D;
  static constexpr int kKeyBytes = head_bytes(kType, D), kBlockBytes = 2 * kKeyBytes;
  static constexpr int kLeastSlots = 4, kResident = 3;
  static_assert(D % 64 == 0 && D <= 256);
  static __device__ __forceinline__ void keys(uint32_t (&b)[2][4], const uint8_t* slot, int keys,
                                              int k) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const uint8_t* block = slot + keys * kBlockBytes;
    uint32_t codes[4];
    ldmatrix4(codes, block + lane / 8 % 2 * 8 * D + (k + lane / 16) * 128 + lane % 8 * 16);
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      __half2 scale{};
      if constexpr (kScaled) {
        // All scales of a key at once: one load for all k.
        struct alignas(2 * kScales) Scales {
          __half of[kScales];
        };
        const auto& all = *reinterpret_cast<const Scales*>(block + kNumbers +
                                                           (tile * 8 + lane / 4) * 2 * kScales);
        scale = __half2half2(all.of[k / 2]);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t its = codes[i * 2 + tile];
        b[i][tile * 2] = kScaled ? scaled_codes<kLowCodes>(its, scale) : e4m3_to_half(its);
        b[i][tile * 2 + 1] =
            kScaled ? scaled_codes<kHighCodes>(its, scale) : e4m3_to_half(its >> 16);
      }
    }
  }
  // Two neighbouring features of keys 8 i + 2 (lane % 4) and the next, of 32 features that the
  // column is of.
  static __device__ __forceinline__ void two(uint32_t& even, uint32_t& odd, uint32_t codes,
                                             const uint8_t* block, int i, int column) {
    if constexpr (kScaled) {
      const int lane = static_cast<int>(threadIdx.x % 32);
      const auto scales = *reinterpret_cast<const __half2*>(
          block + kNumbers + (column / 4 * kBlockTokens + i * 8 + lane % 4 * 2) * 2);
      even = scaled_codes<kEvenCodes>(codes, scales);
      odd = scaled_codes<kOddCodes>(codes, scales);
    } else {
      const uint32_t turned = __byte_perm(codes, 0, 0x3120);
      even = e4m3_to_half(turned);
      odd = e4m3_to_half(turned >> 16);
    }
  }
  static __device__ __forceinline__ void values(uint32_t (&b)[4], const uint8_t* slot, int k,
                                                int column) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const uint8_t* block = slot + k * kBlockBytes + kKeyBytes;
    uint32_t codes[2];
    ldmatrix2_trans(codes, block + lane / 8 % 2 * 8 * D + column / 2 * 128 + lane % 8 * 16);
#pragma unroll
    for (int i = 0; i < 2; ++i) two(b[i], b[2 + i], codes[i], block, i, column);
  }
  // Two columns of 8 features and the next two.
  static __device__ __forceinline__ void values(uint32_t (&b)[2][4], const uint8_t* slot, int k,
                                                int column) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const uint8_t* block = slot + k * kBlockBytes + kKeyBytes;
    uint32_t codes[4];
    ldmatrix4_trans(codes,
                    block + lane / 8 % 2 * 8 * D + (column / 2 + lane / 16) * 128 + lane % 8 * 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      two(b[i / 2][i % 2], b[i / 2][2 + i % 2], codes[i], block, i % 2, column);
    }
  }
};
template <int D>
struct E4M3Stored : CodesStored<D, CacheType::kE4M3> {};
template <int D>
struct Int8Stored : CodesStored<D, CacheType::kInt8> {};

// Heads of kDim features, 8 * kRowsOfLane rows, stored as Stored_ says; kE4M3: the result goes to
// activations in E4M3.
template <int kDim, int kRowsOfLane, template <int> class Stored_, bool kE4M3Result = false>
struct Kind {
  static constexpr int D = kDim, kRows = kRowsOfLane;
  static constexpr bool kE4M3 = kE4M3Result;
  using Stored = Stored_<kDim>;
  // Blocks of a multiprocessor whose registers are to fit.
  static constexpr int kResident = kRows == 1 && D < 256 ? Stored::kResident : 1;
};

// A ring of kMostSlots, or of fewer for a block more a multiprocessor.
inline constexpr int kMostSlots = 6;
template <class T>
struct Shared {
  static constexpr int kBlocks = kChunk / kBlockTokens;
  // What warps leave to each other of a tile, and of the next one: operands of weights, sums of a
  // lane's, and the largest scores.
  struct alignas(16) Tile {
    uint32_t weights[kTileTokens / 16][32][2 * T::kRows];
    float sums[T::kRows][32][kWarps];
    float most[8 * T::kRows][kWarps];
  } tiles[2];
  uint64_t full[kMostSlots], empty[kMostSlots];
  int last;
  alignas(128) uint8_t slots[kMostSlots][kBlocks * T::Stored::kBlockBytes];
  static constexpr size_t bytes(int count) {
    return sizeof(Shared) - static_cast<size_t>(kMostSlots - count) * sizeof(slots[0]);
  }
};

// A place in the ring.
struct Place {
  int slot = 0, round = 0;
  __device__ __forceinline__ void next(int slots) {
    if (++slot == slots) slot = 0, ++round;
  }
};

// What a block works on.
struct Range {
  int sequence, kv_head, first_row, rows;
  int low, position;                  // keys that the query sees
  int first_piece, pieces;            // that they touch
  int runs, first_chunk, last_chunk;  // last < first: nothing for this block
};

// Of the block at [sequence and tile of rows, key head, run of pieces].
__device__ __forceinline__ Range find_range(const AttentionArgs& a, const Plan& plan, int x, int y,
                                            int z) {
  Range w;
  const int group = a.heads / a.cache.kv_heads;
  w.sequence = x / plan.tiles;
  w.kv_head = y;
  w.first_row = x % plan.tiles * kRowsOfTile;
  w.rows = min(kRowsOfTile, group - w.first_row);
  w.position = a.batch.context_len[w.sequence] - 1;
  w.low = a.window > 0 ? max(0, w.position - a.window + 1) : 0;
  w.first_piece = w.low / kPieceTokens;
  w.pieces = w.position / kPieceTokens + 1 - w.first_piece;
  w.runs = (w.pieces + plan.run - 1) / plan.run;
  const int first = w.first_piece + z * plan.run;
  w.first_chunk = max(w.low / kChunk, first * kChunksOfPiece);
  w.last_chunk = min(w.position / kChunk, (first + plan.run) * kChunksOfPiece - 1);
  return w;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// The halves of a tile that a run has.
struct Halves {
  int first, last;
};
__device__ __forceinline__ Halves halves_of(const Range& w, int tile) {
  return {max(w.first_chunk, tile * kChunks), min(w.last_chunk, tile * kChunks + kChunks - 1)};
}

// One warp fills the ring: a tile's keys, then its values, or both together. Blocks of which
// nothing is seen are replaced by others.
template <class T>
__device__ __forceinline__ void produce(Shared<T>& s, const AttentionArgs& a, const Range& w,
                                        int slots) {
  constexpr int kBlocks = Shared<T>::kBlocks, kBlockBytes = T::Stored::kBlockBytes;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const auto ids_of = [&](int tile) {
    const int block = tile * (kTileTokens / kBlockTokens) + lane % (kTileTokens / kBlockTokens);
    const int real = min(max(block, w.low / kBlockTokens), w.position / kBlockTokens);
    return a.batch.tables[w.sequence * a.batch.table_stride + real];
  };
  bool waited = false;
  Place at;
  int next_ids = ids_of(w.first_chunk / kChunks);
  for (int tile = w.first_chunk / kChunks; tile <= w.last_chunk / kChunks; ++tile) {
    const Halves halves = halves_of(w, tile);
    const int ids = next_ids;
    next_ids = ids_of(tile + 1);
    for (int part = 0; part < (T::Stored::kTogether ? 1 : 2); ++part) {
      for (int chunk = halves.first; chunk <= halves.last; ++chunk, at.next(slots)) {
        if (!waited && chunk >= w.position / kChunk) {
          wait();
          waited = true;
        }
        const int slot = at.slot;
        if (at.round > 0) barrier_wait(&s.empty[slot], (at.round - 1) & 1);
        const int64_t id = __shfl_sync(0xffffffff, ids, chunk % kChunks * kBlocks + lane % kBlocks);
        if (lane == 0) barrier_expect(&s.full[slot], kBlocks * kBlockBytes);
        __syncwarp();
        if (lane < kBlocks) {
          bulk_copy(s.slots[slot] + lane * kBlockBytes,
                    part == 0 ? keys_at(a.cache, id, w.kv_head) : values_at(a.cache, id, w.kv_head),
                    kBlockBytes, &s.full[slot]);
        }
      }
    }
  }
}

// The operands of a tile's queries.
template <class T>
__device__ __forceinline__ void load_queries(uint4 (&q)[T::D / 16], const AttentionArgs& a,
                                             const Range& w) {
  constexpr int D = T::D, kRows = T::kRows;
  const int lane = static_cast<int>(threadIdx.x % 32), g = lane / 4, t = lane % 4;
  const int head = w.kv_head * (a.heads / a.cache.kv_heads) + w.first_row;
  constexpr bool kFours = T::Stored::kFours;
  const float* from = a.q + w.sequence * a.q_stride + (head + g) * D + (kFours ? 4 : 2) * t;
  float2 v[kRows][D / 8];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int k = 0; k < D / 8; ++k) {
      v[r][k] = make_float2(0.0f, 0.0f);
      const int at = kFours ? k / 2 * 16 + k % 2 * 2 : k * 8;
      if (g + 8 * r < w.rows) v[r][k] = *reinterpret_cast<const float2*>(from + r * 8 * D + at);
    }
  }
  const auto pair = [](const float2& f) { return pack_numbers<T::Stored::kBF16>(f.x, f.y); };
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    q[k] = make_uint4(pair(v[0][2 * k]), 0, pair(v[0][2 * k + 1]), 0);
    if constexpr (kRows == 2) {
      q[k].y = pair(v[1][2 * k]);
      q[k].w = pair(v[1][2 * k + 1]);
    }
  }
}

// Scores of a warp's 16 keys of half a tile, rows g and g + 8, of a tile's halves.
using Scores = float[kChunks][2][4];

// A warp's 16 keys of each of kHalves halves of a tile against all rows.
template <int kHalves, class T>
__device__ __forceinline__ void score_keys(Scores& score, const Shared<T>& s,
                                           const AttentionArgs& a, const Range& w,
                                           const uint4 (&q)[T::D / 16], int first_chunk,
                                           const int (&slots)[kHalves]) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  float sum[kHalves][2][4] = {};
#pragma unroll
  for (int k = 0; k < T::D / 16; k += 2) {
#pragma unroll
    for (int n = 0; n < kHalves; ++n) {
      uint32_t b[2][4];
      T::Stored::keys(b, s.slots[slots[n]], warp, k);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        mma_numbers<T::Stored::kBF16>(sum[n][0], q[k + i], b[i][0], b[i][1]);
        mma_numbers<T::Stored::kBF16>(sum[n][1], q[k + i], b[i][2], b[i][3]);
      }
    }
  }
  // In most tiles nothing is hidden or capped.
  const int first = first_chunk * kChunk;
  if (a.softcap > 0.0f || first < w.low || first + kHalves * kChunk > w.position + 1) {
#pragma unroll
    for (int n = 0; n < kHalves; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int i = 0; i < 2 * T::kRows; ++i) {
          const int p = first + n * kChunk + warp * 16 + j * 8 + lane % 4 * 2 + i % 2;
          sum[n][j][i] = p >= w.low && p <= w.position ? score_of(a, sum[n][j][i]) : -INFINITY;
        }
      }
    }
  }
  const bool second = kHalves == 1 && first_chunk % kChunks != 0;
#pragma unroll
  for (int half = 0; half < kChunks; ++half) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Of half a tile that is not there nothing is seen.
        score[half][j][i] =
            kHalves == 1 && second != (half == 1) ? -INFINITY : sum[kHalves == 1 ? 0 : half][j][i];
      }
    }
  }
}

__device__ __forceinline__ void sync_summing() {
  asm volatile("bar.sync 1, %0;" ::"n"(kSumming) : "memory");
}

// The warp's scores become operands of weights that are there for all. `told` is for this tile, and
// was for the last but one, which all have left.
template <class T>
__device__ __forceinline__ void weigh_tile(Sums<T::D / 32, T::kRows>& sums, bool begins,
                                           typename Shared<T>::Tile& told, const Scores& score,
                                           float steep) {
  constexpr int kRows = T::kRows;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const auto mine = [&](int r, int i) {
    return make_float2(score[i / 2][i % 2][r * 2], score[i / 2][i % 2][r * 2 + 1]);
  };
  const auto four = [](const float(&v)[kWarps]) { return *reinterpret_cast<const float4*>(v); };
  float factor[kRows];
  const bool raised = take_tile_of(
      sums, begins, steep, factor,
      [&](float(&sum)[kRows], const float(&offset)[kRows]) {
        uint32_t operand[kChunks][2 * kRows];
        weigh_quarter(sum, mine, steep, offset, [&](int r, int i, float low, float high) {
          operand[i / 2][i % 2 * kRows + r] = pack_weights<T::Stored::kBF16>(low, high);
        });
#pragma unroll
        for (int half = 0; half < kChunks; ++half) {
          uint32_t* to = told.weights[half * kWarps + warp][lane];
          if constexpr (kRows == 1) {
            *reinterpret_cast<uint2*>(to) = make_uint2(operand[half][0], operand[half][1]);
          } else {
            *reinterpret_cast<uint4*>(to) =
                make_uint4(operand[half][0], operand[half][1], operand[half][2], operand[half][3]);
          }
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) told.sums[r][lane][warp] = sum[r];
        sync_summing();
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float4 v = four(told.sums[r][lane]);
          sum[r] = __fadd_rn(__fadd_rn(__fadd_rn(v.x, v.y), v.z), v.w);
        }
      },
      [&] {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float most = largest_of<kEightsOfQuarter>(mine, r);
          if (lane % 4 == 0) told.most[lane / 4 + r * 8][warp] = most;
        }
        sync_summing();
      },
      [&](int r) {
        const float4 v = four(told.most[lane / 4 + r * 8]);
        return fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w));
      });
  if (raised) sums.scale(factor);
}

// Adds a warp's features of half a tile's values.
template <class T>
__device__ __forceinline__ void add_values(Sums<T::D / 32, T::kRows>& sums, const uint8_t* slot,
                                           const uint32_t (*weights)[32][2 * T::kRows]) {
  constexpr int kMine = T::D / 32;  // tiles of 8 features
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
#pragma unroll
  for (int k = 0; k < kChunk / 16; ++k) {
    uint4 operand = {};
    if constexpr (T::kRows == 1) {
      const uint2 v = *reinterpret_cast<const uint2*>(weights[k][lane]);
      operand.x = v.x;
      operand.z = v.y;
    } else {
      operand = *reinterpret_cast<const uint4*>(weights[k][lane]);
    }
    constexpr int kPairs = kMine % 4 == 0 ? 2 : 1;
#pragma unroll
    for (int j = 0; j < kMine; j += 2 * kPairs) {
      uint32_t b[kPairs][4];
      if constexpr (kPairs == 2) {
        T::Stored::values(b, slot, k, warp * kMine + j);
      } else {
        T::Stored::values(b[0], slot, k, warp * kMine + j);
      }
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        mma_numbers<T::Stored::kBF16>(sums.acc[j + 2 * i], operand, b[i][0], b[i][1]);
        mma_numbers<T::Stored::kBF16>(sums.acc[j + 2 * i + 1], operand, b[i][2], b[i][3]);
      }
    }
  }
}

// A lane's neighbours j of its row r + 8 g, and how many features they are behind the first.
template <class T>
__device__ __forceinline__ float2 pair_of(const Sums<T::D / 32, T::kRows>& sums, int r, int j) {
  const auto& acc = sums.acc;
  if constexpr (T::Stored::kFours) {
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

// A piece's sums as partial results, or the sums of all as the result.
template <class T>
__device__ __forceinline__ void write_sums(const Sums<T::D / 32, T::kRows>& sums,
                                           const AttentionArgs& a, const Range& w, int piece,
                                           int pieces) {
  constexpr int D = T::D, kRows = T::kRows;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = lane / 4 + r * 8;
    if (row >= w.rows) continue;
    const int head = w.kv_head * (a.heads / a.cache.kv_heads) + w.first_row + row;
    const int first = warp * (D / kWarps) + first_of_lane<T>();
    if (piece < 0) {
      const float end = ending(sums.m[r], sums.l[r], a, head);
#pragma unroll
      for (int j = 0; j < D / 32; ++j) {
        const float2 v = pair_of<T>(sums, r, j);
        put_result(a, w.sequence, static_cast<int64_t>(head) * D + first + pair_apart<T>(j),
                   __fmul_rn(v.x, end), __fmul_rn(v.y, end));
      }
      continue;
    }
    float* to = partial_at(a, w.sequence, head, piece, pieces);
#pragma unroll
    for (int j = 0; j < D / 32; ++j) {
      *reinterpret_cast<float2*>(to + first + pair_apart<T>(j)) = pair_of<T>(sums, r, j);
    }
    if (warp == 0 && lane % 4 == 0) {
      *reinterpret_cast<float2*>(to + D) = make_float2(sums.m[r], sums.l[r]);
    }
  }
}

// The sums of all as the result in E4M3. The room of largest scores takes the largest numbers of
// each warp's features.
template <class T>
__device__ __forceinline__ void put_sums(Shared<T>& s, const Sums<T::D / 32, T::kRows>& sums,
                                         const AttentionArgs& a, const Range& w) {
  constexpr int D = T::D, kMine = D / 32, kWarpsOfGroup = kWarps * kE4M3Cols / D;
  static_assert(D % kE4M3Cols == 0);
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int head = w.kv_head * (a.heads / a.cache.kv_heads) + w.first_row + lane / 4;
  auto& room = s.tiles[0].most;
  sync_summing();  // all have left it
  float2 v[T::kRows][kMine];
#pragma unroll
  for (int r = 0; r < T::kRows; ++r) {
    const bool real = lane / 4 + r * 8 < w.rows;
    const float end = real ? ending(sums.m[r], sums.l[r], a, head + r * 8) : 0.0f;
#pragma unroll
    for (int j = 0; j < kMine; ++j) {
      const float2 pair = pair_of<T>(sums, r, j);
      v[r][j] = make_float2(__fmul_rn(pair.x, end), __fmul_rn(pair.y, end));
    }
    float most = largest_of(v[r]);
    most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));
    if (lane % 4 == 0) room[lane / 4 + r * 8][warp] = most;
  }
  sync_summing();
#pragma unroll
  for (int r = 0; r < T::kRows; ++r) {
    const int row = lane / 4 + r * 8, group = warp / kWarpsOfGroup;
    if (row >= w.rows) continue;
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarpsOfGroup; ++i) {
      most = fmaxf(most, room[row][group * kWarpsOfGroup + i]);
    }
    const int first = warp % kWarpsOfGroup * (D / kWarps) + first_of_lane<T>();
    const int64_t all = static_cast<int64_t>(head + r * 8) * (D / kE4M3Cols) + group;
    const auto apart = [](int j) { return pair_apart<T>(j); };
    put_row(a, w.sequence, all * kE4M3Cols + first, apart, v[r]);
    put_e4m3_pairs(a.act, w.sequence, all, first, apart, v[r], most);
  }
}

// Merges the pieces of all rows: a warp a row, a lane D / 32 neighbouring features. A warp's share
// of the room takes the sums of 16 pieces at once, as each is a wait for memory.
inline constexpr int kMergeAtOnce = 16;
template <int D>
inline constexpr size_t kMergeRoom = kWarps * kMergeAtOnce * D * sizeof(float);
template <class T>
__device__ __forceinline__ void merge_pieces(float* room, const AttentionArgs& a, const Range& w,
                                             int pieces) {
  constexpr int D = T::D;
  constexpr int kPairs = D / 64, kVectors = D / 4;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const float steep = steepness(a);
  float* sums = room + warp * kMergeAtOnce * D;
  for (int row = warp; row < w.rows; row += kWarps) {
    const int head = w.kv_head * (a.heads / a.cache.kv_heads) + w.first_row + row;
    const float* from = partial_at(a, w.sequence, head, 0, pieces);
    float m = -INFINITY, l = 0.0f;
    float2 acc[kPairs] = {};
    for (int base = 0; base < w.pieces;
         base += kMergeAtOnce, from += kMergeAtOnce * (D + kPartialEnd)) {
      const int count = min(kMergeAtOnce, w.pieces - base);
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
        put_row(a, w.sequence, group * kE4M3Cols + lane * 2, apart, v);
        put_e4m3_pairs(a.act, w.sequence, group, lane * 2, apart, v, most);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        put_result(a, w.sequence, static_cast<int64_t>(head) * D + (j * 32 + lane) * 2,
                   __fmul_rn(acc[j].x, end), __fmul_rn(acc[j].y, end));
      }
    }
  }
}

// Zeros for the rows that fill up the activations' last tile.
template <class T>
__device__ __forceinline__ void pad_rows(const AttentionArgs& a, const Range& w) {
  constexpr int D = T::D;
  if (a.act.data == nullptr || w.sequence + 1 != a.batch.sequences) return;
  const int64_t cols = static_cast<int64_t>(a.heads) * D;
  const int64_t first =
      (static_cast<int64_t>(w.kv_head) * (a.heads / a.cache.kv_heads) + w.first_row) * D;
  if constexpr (T::kE4M3) {
    pad_e4m3(a.act, a.batch.sequences, first / kE4M3Cols, w.rows * D / kE4M3Cols,
             static_cast<int>(threadIdx.x), kSumming);
    return;
  }
  const int end = (a.batch.sequences + kTokenTile - 1) / kTokenTile * kTokenTile;
  for (int row = a.batch.sequences; row < end; ++row) {
    for (int c = static_cast<int>(threadIdx.x) * 2; c < w.rows * D; c += kSumming * 2) {
      put_pair(a.act, row, first + c, cols, 0.0f, 0.0f);
    }
  }
}

// Whether this block is the last of its tile's to come here; the last one leaves a zero.
__device__ __forceinline__ bool comes_last(int& last, unsigned& count, int blocks) {
  __threadfence();
  sync_summing();
  if (threadIdx.x == 0) {
    last = atomicAdd(&count, 1u) + 1 == static_cast<unsigned>(blocks);
    if (last != 0) count = 0;
  }
  sync_summing();
  __threadfence();
  return last != 0;
}

// Four warps: all pieces of the run.
template <class T>
__device__ __forceinline__ void sum_pieces(Shared<T>& s, const AttentionArgs& a, const Plan& plan,
                                           const Range& w) {
  uint4 q[T::D / 16];
  load_queries<T>(q, a, w);
  const float steep = steepness(a);
  Sums<T::D / 32, T::kRows> total, sums;
  total.clear();
  sums.clear();
  Place at;  // what has not been left yet
  const auto take = [&] {
    barrier_wait(&s.full[at.slot], at.round & 1);
    return at.slot;
  };
  const auto leave = [&] {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(&s.empty[at.slot]);
    at.next(plan.slots);
  };
  const int first = w.first_chunk / kChunks, last = w.last_chunk / kChunks;
  for (int tile = first; tile <= last; ++tile) {
    const Halves halves = halves_of(w, tile);
    static_assert(kChunks == 2);
    Scores score;
    if (halves.first < halves.last) {
      Place second = at;
      second.next(plan.slots);
      const int slots[2] = {take(), second.slot};
      barrier_wait(&s.full[second.slot], second.round & 1);
      score_keys<2>(score, s, a, w, q, halves.first, slots);
      if constexpr (!T::Stored::kTogether) {
        leave();
        leave();
      }
    } else {
      const int slots[1] = {take()};
      score_keys<1>(score, s, a, w, q, halves.first, slots);
      if constexpr (!T::Stored::kTogether) leave();
    }
    auto& told = s.tiles[tile % 2];
    weigh_tile<T>(sums, tile % kTiles == 0 || tile == first, told, score, steep);
#pragma unroll
    for (int half = 0; half < kChunks; ++half) {
      const int chunk = tile * kChunks + half;
      if (chunk < halves.first || chunk > halves.last) continue;
      add_values<T>(sums, s.slots[take()], told.weights + half * kWarps);
      leave();
    }
    if (tile % kTiles != kTiles - 1 && tile != last) continue;
    add_lanes(sums.l);
    if (w.runs == 1) {
      total.merge(sums, steep);
    } else {
      write_sums<T>(sums, a, w, tile / kTiles - w.first_piece, plan.pieces);
    }
    sums.clear();
  }
  if (w.runs > 1) return;
  if constexpr (T::kE4M3) {
    put_sums<T>(s, total, a, w);
  } else {
    write_sums<T>(total, a, w, -1, 0);
  }
}

// A block's work; nothing where its range is empty. `count`: one for each x and y.
template <class T>
__device__ __forceinline__ void take_range(Shared<T>& s, const AttentionArgs& a, const Plan& plan,
                                           const Range& w, unsigned& count) {
  if (threadIdx.x >= kSumming) {
    produce(s, a, w, plan.slots);
    return;
  }
  wait();
  sum_pieces(s, a, plan, w);
  if (w.runs > 1) {
    if (!comes_last(s.last, count, w.runs)) return;
    static_assert(kMergeRoom<T::D> <= T::Stored::kLeastSlots * sizeof(s.slots[0]));
    merge_pieces<T>(reinterpret_cast<float*>(s.slots), a, w, plan.pieces);
  }
  pad_rows<T>(a, w);
}
#endif

}  // namespace freshet::cuda::single

namespace freshet::cuda {
// attention_cluster.cu: few queries over short contexts.
bool cluster_fits(const AttentionArgs& a, const single::Plan& plan);
int attention_cluster(const AttentionArgs& a, single::Plan plan);
}  // namespace freshet::cuda

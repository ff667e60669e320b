// Operations on stored keys and values other than attention: the softmax weights that queries give
// them (key_scores), moving them between slots, and reading keys.
//
// A query's weights depend on itself and the slots that it sees alone: scores are F32, each by FMA
// in the order of features; a thread's share of a chunk's denominator is summed in the order of
// slots, the shares of threads by a fixed tree, and chunks in their order. Weights are added as
// integers, whose order changes nothing.
#include "backend/cuda/attention/attention.cuh"
#include "backend/cuda/runtime/kernels.cuh"

namespace freshet::cuda {
namespace {

constexpr int kScoreThreads = 256;
constexpr int kScoreWarps = kScoreThreads / 32;
constexpr int kScoreRows = 8;  // rows of a thread block: queries with heads of one KV head

// Slots hold their features in pieces of 16 bytes.
template <CacheType kType>
constexpr int kPieceFeatures = kType == CacheType::kInt4 ? 32
                               : in_bytes(kType)         ? 16
                                                         : 8;
constexpr int kMostPieceFeatures = 32;
constexpr int kPieceApart = 128;  // bytes from a slot's piece to its next

__device__ __forceinline__ void halves_to_floats(float* to, const uint4& v) {
  const auto* const pairs = reinterpret_cast<const __half2*>(&v);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 two = __half22float2(pairs[i]);
    to[2 * i] = two.x, to[2 * i + 1] = two.y;
  }
}

// A piece of a slot's key in F32. key: the slot's first piece; scales: its first scale.
template <CacheType kType>
__device__ __forceinline__ void load_piece(float* to, const uint8_t* key, const uint8_t* scales,
                                           int piece) {
  const uint4 v = *reinterpret_cast<const uint4*>(key + piece * kPieceApart);
  if constexpr (kType == CacheType::kF16) {
    halves_to_floats(to, v);
  } else if constexpr (kType == CacheType::kBF16) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[2 * i] = __uint_as_float(words[i] << 16);
      to[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  } else if constexpr (kType == CacheType::kInt4) {
    uint4 halves[4];
    int4_to_half(halves, v, reinterpret_cast<const __half*>(scales)[piece]);
#pragma unroll
    for (int i = 0; i < 4; ++i) halves_to_floats(to + 8 * i, halves[i]);
  } else {
    uint4 first, second;
    if constexpr (kType == CacheType::kE4M3) {
      e4m3_to_half(&first, &second, v);
    } else {
      int8_to_half(&first, &second, v, reinterpret_cast<const __half*>(scales)[piece / 2]);
    }
    halves_to_floats(to, first);
    halves_to_floats(to + 8, second);
  }
}

template <CacheType kType>
__host__ __device__ constexpr int pieces_of(int dim) {
  return (dim + kPieceFeatures<kType> - 1) / kPieceFeatures<kType>;
}

// The largest score of a row, and the sum of exp(score - largest).
struct RowSoftmax {
  float most, sum;
};
__device__ __forceinline__ void add_score(RowSoftmax& to, float score) {
  if (score > to.most) {
    to.sum = __fmaf_rn(to.sum, expf(to.most - score), 1.0f);
    to.most = score;
  } else {
    to.sum = __fadd_rn(to.sum, expf(score - to.most));
  }
}
__device__ __forceinline__ RowSoftmax merged(const RowSoftmax& a, const RowSoftmax& b) {
  const float most = fmaxf(a.most, b.most);
  if (most == -INFINITY) return {most, 0.0f};
  return {most,
          __fadd_rn(__fmul_rn(a.sum, expf(a.most - most)), __fmul_rn(b.sum, expf(b.most - most)))};
}

// A thread block's rows and slots of one part.
struct ScoredBlock {
  const ScoredPart& part;
  int first, count;  // rows
  int group;         // rows of a query
  int rows, chunks;  // of the part
  int chunk;
  __device__ int query(int row) const { return (part.first_row + first + row) / group; }
  __device__ int head(int row) const { return (part.first_row + first + row) % group; }
  __device__ int seen(int row) const { return part.seen + query(row); }
  // Where the scores of a row of a head are, and its chunks' softmax.
  __device__ int64_t scores_at(int head, int row) const {
    return part.scores_at +
           (static_cast<int64_t>(head) * rows + first + row) * chunks * kScoreChunk;
  }
  __device__ int64_t softmax_at(int head, int row) const {
    return part.chunks_at / 2 + (static_cast<int64_t>(head) * rows + first + row) * chunks;
  }
};
// Grid: [row blocks * chunks of the largest part, KV heads, parts].
__device__ __forceinline__ ScoredBlock scored_block(const KeyScoreArgs& a, int row_blocks) {
  const ScoredPart& part = a.of[blockIdx.z];
  const int group = a.heads / a.cache.kv_heads;
  const int first = static_cast<int>(blockIdx.x) % row_blocks * kScoreRows;
  return {part,
          first,
          min(kScoreRows, part.rows - first),
          group,
          part.rows,
          (part.slots + kScoreChunk - 1) / kScoreChunk,
          static_cast<int>(blockIdx.x) / row_blocks};
}

// Scores of `slot` with all rows; of those that don't see it, any number.
template <CacheType kType>
__device__ __forceinline__ void scores_of(float (&scores)[kScoreRows], const KeyScoreArgs& a,
                                          const int32_t* table, int head, int slot,
                                          const float* queries, int padded) {
  constexpr int kEach = kPieceFeatures<kType>;
  const uint8_t* const keys = keys_at(a.cache, table[slot / kBlockTokens], head);
  const int at = slot % kBlockTokens, dim = a.cache.key_dim;
  const uint8_t* const key = keys + slot_at(kType, at, dim);
  const uint8_t* const scales = keys + scales_at(kType, at, dim, true).first;
#pragma unroll
  for (int r = 0; r < kScoreRows; ++r) scores[r] = 0.0f;
  for (int piece = 0; piece < pieces_of<kType>(dim); ++piece) {
    float k[kEach];
    load_piece<kType>(k, key, scales, piece);
#pragma unroll
    for (int r = 0; r < kScoreRows; ++r) {
      const auto* const q = reinterpret_cast<const float4*>(queries + r * padded + piece * kEach);
#pragma unroll
      for (int i = 0; i < kEach / 4; ++i) {
        const float4 four = q[i];
        scores[r] = __fmaf_rn(four.x, k[4 * i], scores[r]);
        scores[r] = __fmaf_rn(four.y, k[4 * i + 1], scores[r]);
        scores[r] = __fmaf_rn(four.z, k[4 * i + 2], scores[r]);
        scores[r] = __fmaf_rn(four.w, k[4 * i + 3], scores[r]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kScoreRows; ++r) {
    scores[r] = __fmul_rn(scores[r], a.scale);
    if (a.softcap > 0.0f) scores[r] = __fmul_rn(a.softcap, tanhf(__fdiv_rn(scores[r], a.softcap)));
  }
}

// The softmax of each row, of which every thread has a share, in totals[row].
__device__ __forceinline__ void merge_threads(RowSoftmax (&mine)[kScoreRows], RowSoftmax* totals,
                                              RowSoftmax (*warps)[kScoreRows]) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
#pragma unroll
  for (int r = 0; r < kScoreRows; ++r) {
    for (int step = 16; step > 0; step >>= 1) {
      const RowSoftmax other = {__shfl_xor_sync(0xffffffff, mine[r].most, step),
                                __shfl_xor_sync(0xffffffff, mine[r].sum, step)};
      mine[r] = merged(mine[r], other);  // which does not depend on the order of the two
    }
    if (lane == 0) warps[warp][r] = mine[r];
  }
  __syncthreads();
  if (threadIdx.x < kScoreRows) {
    RowSoftmax all = warps[0][threadIdx.x];
    for (int w = 1; w < kScoreWarps; ++w) all = merged(all, warps[w][threadIdx.x]);
    totals[threadIdx.x] = all;
  }
  __syncthreads();
}

template <CacheType kType>
__global__ void __launch_bounds__(kScoreThreads)
    key_scores_kernel(const __grid_constant__ KeyScoreArgs a, int padded, int row_blocks) {
  extern __shared__ __align__(16) float queries[];  // [kScoreRows, padded]
  __shared__ RowSoftmax totals[kScoreRows], warps[kScoreWarps][kScoreRows];
  let_next_start();
  const ScoredBlock block = scored_block(a, row_blocks);
  if (block.count <= 0 || block.chunk >= block.chunks) return;
  const int local = static_cast<int>(blockIdx.y), head = a.first_head + local;
  const int32_t* const table = a.tables + block.part.sequence * a.table_stride;
  const int dim = a.cache.key_dim;
  wait();
  for (int i = static_cast<int>(threadIdx.x); i < kScoreRows * padded; i += kScoreThreads) {
    const int r = i / padded, c = i % padded;
    queries[i] = r < block.count && c < dim
                     ? a.q[(block.part.token + block.query(r)) * a.q_stride +
                           (head * block.group + block.head(r)) * static_cast<int64_t>(dim) + c]
                     : 0.0f;
  }
  __syncthreads();
  const int first = block.chunk * kScoreChunk;
  const int end = min(first + kScoreChunk, block.seen(block.count - 1));
  RowSoftmax mine[kScoreRows];
#pragma unroll
  for (int r = 0; r < kScoreRows; ++r) mine[r] = {-INFINITY, 0.0f};
  for (int slot = first + static_cast<int>(threadIdx.x); slot < end; slot += kScoreThreads) {
    float scores[kScoreRows];
    scores_of<kType>(scores, a, table, head, slot, queries, padded);
#pragma unroll
    for (int r = 0; r < kScoreRows; ++r) {
      if (r >= block.count || slot >= block.seen(r)) continue;
      add_score(mine[r], scores[r]);
      a.scores[block.scores_at(local, r) + slot] = scores[r];
    }
  }
  merge_threads(mine, totals, warps);
  const int row = static_cast<int>(threadIdx.x);
  if (row < block.count)
    reinterpret_cast<RowSoftmax*>(a.chunks)[block.softmax_at(local, row) + block.chunk] =
        totals[row];
}

__global__ void __launch_bounds__(kScoreThreads)
    key_weights_kernel(const __grid_constant__ KeyScoreArgs a, int row_blocks) {
  __shared__ RowSoftmax totals[kScoreRows];
  let_next_start();
  const ScoredBlock block = scored_block(a, row_blocks);
  if (block.count <= 0 || block.chunk >= block.chunks) return;
  const int local = static_cast<int>(blockIdx.y), thread = static_cast<int>(threadIdx.x);
  wait();
  if (thread < block.count) {
    const RowSoftmax* const chunks =
        reinterpret_cast<const RowSoftmax*>(a.chunks) + block.softmax_at(local, thread);
    RowSoftmax all = chunks[0];
    for (int c = 1; c < block.chunks; ++c) all = merged(all, chunks[c]);
    const int head = (a.first_head + local) * block.group + block.head(thread);
    if (a.sinks != nullptr) all = merged(all, {a.sinks[head], 1.0f});
    totals[thread] = all;
  }
  __syncthreads();
  auto* const sums = reinterpret_cast<unsigned long long*>(a.sums + block.part.at) +
                     static_cast<int64_t>(local) * block.part.slots;
  const int first = block.chunk * kScoreChunk;
  const int end = min(first + kScoreChunk, block.seen(block.count - 1));
  for (int slot = first + thread; slot < end; slot += kScoreThreads) {
    long long sum = 0;
#pragma unroll
    for (int r = 0; r < kScoreRows; ++r) {
      if (r >= block.count || slot >= block.seen(r)) continue;
      const float score = a.scores[block.scores_at(local, r) + slot];
      const float weight = __fdiv_rn(expf(score - totals[r].most), totals[r].sum);
      sum += __float2ll_rn(__fmul_rn(weight, kScoreUnits));
    }
    if (sum != 0) atomicAdd(sums + slot, static_cast<unsigned long long>(sum));
  }
}

template <CacheType kType>
int run_key_scores(const Context& ctx, const KeyScoreArgs& a) {
  const int padded =
      static_cast<int>(ceil_div(a.cache.key_dim, kMostPieceFeatures)) * kMostPieceFeatures;
  const size_t shared = static_cast<size_t>(kScoreRows * padded) * sizeof(float);
  if (const int error = raise_shared(key_scores_kernel<kType>, shared); error != 0) return error;
  int rows = 0, slots = 0;
  for (int i = 0; i < a.count; ++i) {
    rows = max(rows, a.of[i].rows);
    slots = max(slots, a.of[i].slots);
  }
  const int row_blocks = static_cast<int>(ceil_div(rows, kScoreRows));
  const dim3 grid(static_cast<unsigned>(row_blocks * ceil_div(slots, kScoreChunk)),
                  static_cast<unsigned>(a.score_heads), static_cast<unsigned>(a.count));
  const int error = launch(ctx, key_scores_kernel<kType>, grid, dim3(kScoreThreads), shared, a,
                           padded, row_blocks);
  if (error != 0) return error;
  return launch(ctx, key_weights_kernel, grid, dim3(kScoreThreads), 0, a, row_blocks);
}

// ---- Moving slots

// A head's slot consists of units: pieces of keys, their scales, pieces of values, their scales.
// All are 16 bytes but for scales, which are two.
__host__ __device__ constexpr int part_pieces(CacheType part, int dim) {
  if (part == CacheType::kInt4) return (dim + 31) / 32;
  return in_bytes(part) ? (dim + 15) / 16 : (dim + 7) / 8;
}
__host__ __device__ constexpr int part_units(CacheType part, int dim) {
  return part_pieces(part, dim) + (has_scales(part) ? scales_of(dim) : 0);
}
__host__ __device__ constexpr int units_of(const CacheArgs& c) {
  return part_units(part_of(c.type, true), c.key_dim) +
         (c.shared != 0 ? 0 : part_units(part_of(c.type, false), c.value_dim));
}
__device__ __forceinline__ uint8_t* unit_at(const CacheArgs& c, int64_t block, int head, int unit,
                                            int slot, bool* scale) {
  const CacheType key = part_of(c.type, true);
  const bool keys = unit < part_units(key, c.key_dim);
  if (!keys) unit -= part_units(key, c.key_dim);
  const CacheType type = keys ? key : part_of(c.type, false);
  const int dim = keys ? c.key_dim : c.value_dim;
  uint8_t* const data = keys ? keys_at(c, block, head) : values_at(c, block, head);
  *scale = unit >= part_pieces(type, dim);
  if (!*scale) return data + slot_at(type, slot, dim) + unit * kPieceApart;
  const ScalesAt scales = scales_at(type, slot, dim, keys);
  return data + scales.first + (unit - part_pieces(type, dim)) * scales.apart;
}

// Copies units [first, first + gridDim.y) of all kept slots to the room, or from there to their
// places; unit u of the heads is unit u % units_of() of head u / units_of(). Grid: [kept slots,
// units].
constexpr int kMoveThreads = 256;
template <bool kBack>
__global__ void __launch_bounds__(kMoveThreads)
    move_slots_kernel(const __grid_constant__ MoveArgs a, int first) {
  let_next_start();
  const int i = static_cast<int>(blockIdx.x) * kMoveThreads + static_cast<int>(threadIdx.x);
  if (i >= a.count) return;
  const int units = units_of(a.cache), unit = first + static_cast<int>(blockIdx.y);
  const int head = unit / units;
  const int slot = kBack ? i : a.kept[static_cast<int64_t>(head) * a.count + i];
  const int32_t block = (kBack ? a.to : a.from)[slot / kBlockTokens];
  bool scale;
  wait();
  uint8_t* const at =
      unit_at(a.cache, block, a.first_head + head, unit % units, slot % kBlockTokens, &scale);
  uint4* const room = static_cast<uint4*>(a.room) + static_cast<int64_t>(blockIdx.y) * a.count + i;
  if (scale) {
    auto* const from = reinterpret_cast<uint16_t*>(at);
    auto* const to = reinterpret_cast<uint16_t*>(room);
    if (kBack) {
      *from = *to;
    } else {
      *to = *from;
    }
  } else if (kBack) {
    *reinterpret_cast<uint4*>(at) = *room;
  } else {
    *room = *reinterpret_cast<const uint4*>(at);
  }
}

// Grid: [slots]. A warp's lanes read different slots.
constexpr int kReadThreads = 128;
template <CacheType kType>
__global__ void __launch_bounds__(kReadThreads)
    read_keys_kernel(float* keys, const __grid_constant__ CacheArgs cache, const int32_t* blocks,
                     int head, int slots) {
  constexpr int kEach = kPieceFeatures<kType>;
  let_next_start();
  const int slot = static_cast<int>(blockIdx.x) * kReadThreads + static_cast<int>(threadIdx.x);
  if (slot >= slots) return;
  wait();
  const uint8_t* const data = keys_at(cache, blocks[slot / kBlockTokens], head);
  const int at = slot % kBlockTokens, dim = cache.key_dim;
  const uint8_t* const scales = data + scales_at(kType, at, dim, true).first;
  for (int piece = 0; piece < pieces_of<kType>(dim); ++piece) {
    float values[kEach];
    load_piece<kType>(values, data + slot_at(kType, at, dim), scales, piece);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int f = piece * kEach + i;
      if (f < dim) keys[static_cast<int64_t>(slot) * dim + f] = values[i];
    }
  }
}

template <CacheType kType>
int run_read_keys(const Context& ctx, float* keys, const CacheArgs& cache, const int32_t* blocks,
                  int head, int slots) {
  return launch(ctx, read_keys_kernel<kType>,
                dim3(static_cast<unsigned>(ceil_div(slots, kReadThreads))), dim3(kReadThreads), 0,
                keys, cache, blocks, head, slots);
}

}  // namespace

int key_scores(const Context& ctx, const KeyScoreArgs* args) {
  switch (part_of(args->cache.type, true)) {
    case CacheType::kF16:
      return run_key_scores<CacheType::kF16>(ctx, *args);
    case CacheType::kBF16:
      return run_key_scores<CacheType::kBF16>(ctx, *args);
    case CacheType::kE4M3:
      return run_key_scores<CacheType::kE4M3>(ctx, *args);
    case CacheType::kInt8:
      return run_key_scores<CacheType::kInt8>(ctx, *args);
    default:
      return run_key_scores<CacheType::kInt4>(ctx, *args);
  }
}

int move_slots(const Context& ctx, const MoveArgs* args) {
  const int units = units_of(args->cache) * args->move_heads;
  const auto blocks = static_cast<unsigned>(ceil_div(args->count, kMoveThreads));
  constexpr int kMostGrid = 65535;
  const int64_t room = args->room_bytes / (static_cast<int64_t>(args->count) * 16);
  const int at_once = static_cast<int>(room < kMostGrid ? room : kMostGrid);
  if (at_once <= 0) return kNoKernel;
  for (int first = 0; first < units; first += at_once) {
    const dim3 grid(blocks, static_cast<unsigned>(min(at_once, units - first)));
    int error = launch(ctx, move_slots_kernel<false>, grid, dim3(kMoveThreads), 0, *args, first);
    if (error == 0)
      error = launch(ctx, move_slots_kernel<true>, grid, dim3(kMoveThreads), 0, *args, first);
    if (error != 0) return error;
  }
  return 0;
}

int read_keys(const Context& ctx, float* keys, const CacheArgs* cache, const int32_t* blocks,
              int head, int slots) {
  switch (part_of(cache->type, true)) {
    case CacheType::kF16:
      return run_read_keys<CacheType::kF16>(ctx, keys, *cache, blocks, head, slots);
    case CacheType::kBF16:
      return run_read_keys<CacheType::kBF16>(ctx, keys, *cache, blocks, head, slots);
    case CacheType::kE4M3:
      return run_read_keys<CacheType::kE4M3>(ctx, keys, *cache, blocks, head, slots);
    case CacheType::kInt8:
      return run_read_keys<CacheType::kInt8>(ctx, keys, *cache, blocks, head, slots);
    default:
      return run_read_keys<CacheType::kInt4>(ctx, keys, *cache, blocks, head, slots);
  }
}

}  // namespace freshet::cuda

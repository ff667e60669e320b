// Producer warps of prefill attention: they pass tiles, queries, keys and values to the consumers,
// and convert operands from F32 or from codes.
#pragma once

#include "backend/cuda/attention/qk_norm_rope_store.cuh"
#include "backend/cuda/runtime/pipeline.cuh"

namespace freshet::cuda::prompt {

inline constexpr int kGroups = 2, kGroupRows = 64, kRows = kGroups * kGroupRows;
inline constexpr int kConsumers = kGroups * 128;

// Warps besides the consumers: those that issue copies (the lanes of one instruction are
// serialised, several warps are not), and two groups that convert codes, one for keys and one for
// values.
template <CacheType kType>
inline constexpr int kProducers = in_bytes(kType) ? 2 : 4;
inline constexpr int kConverters = 96;
template <CacheType kType>
inline constexpr int kThreads =
    kConsumers + kProducers<kType> * 32 + (in_bytes(kType) ? 2 * kConverters : 0);
// Registers per thread of consumers, and of all other warps.
template <CacheType kType>
inline constexpr int kMostRegisters = in_bytes(kType) ? 216 : 232;
inline constexpr int kFewRegisters = 40;
inline constexpr int kInfos = 4;  // tiles that the pipeline may hold parts of, plus one

// Value features that a block sums; larger heads are cut into slices. The block of each slice
// computes the scores for itself.
template <int D>
inline constexpr int kSlice = D < kUsualDim ? D : kUsualDim;
template <int D>
inline constexpr int kSlices = D / kSlice<D>;

// Tiles claimed, and blocks that won't claim any more; the last of these resets both to zero.
struct Counters {
  unsigned handed_out, done;
};

// What is fused into loading the queries: norm and rotation of heads of 128 features, as in
// HeadsArgs::Part.
struct Before {
  const float *cos_sin, *weight;  // nullptr: not rotated, not normalised
  float eps;
  int weight_step;  // from one head's weights to the next; 0: shared
};

// What a stage's copies contain.
enum class Raw : int { kQueries, kKeys, kValues, kEnd };

template <int D>
struct Shared {
  // For larger heads there is memory for a step's keys and its slice of values only.
  static constexpr int kSlots = kSlices<D> > 1 ? 2 : 4;
  static constexpr int kRoom = kTileTokens * (kSlices<D> > 1 ? D + kSlice<D> : kSlots * D);
  __half room[kRoom];  // stages; or the queries of a warpgroup, in F32
  __half queries[kRows * D];
  float4 totals[kSlice<D> / 8][kConsumers];
  uint64_t full[kSlots], empty[kSlots];
  uint64_t raw[kSlots];  // codes: `raw` means copied, `full` means converted
  Raw what[kSlots];
  Tile tiles[kInfos];
  int heads[kInfos];  // heads and slices: slices of a head are adjacent
  __host__ __device__ __forceinline__ __half* slot(int i) { return room + i * kTileTokens * D; }
  __host__ __device__ __forceinline__ const __half* slot(int i) const {
    return room + i * kTileTokens * D;
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// The work of a block: the current tile.
struct Walk {
  Tile tile;
  int kv_head, slice, group;
  __device__ __forceinline__ int position(int row) const {
    return tile.context - tile.queries + (tile.first_row + row) / group;
  }
};

__device__ __forceinline__ int first_seen(const AttentionArgs& a, int position) {
  return a.window > 0 ? max(0, position - a.window + 1) : 0;
}

// Steps of which rows [first, end) see some key.
struct Steps {
  int first, last;
};
__device__ __forceinline__ Steps steps_of(const AttentionArgs& a, const Walk& w, int first,
                                          int end) {
  return {first_seen(a, w.position(first)) / kTileTokens, w.position(end - 1) / kTileTokens};
}

template <int D>
struct Ring {
  Shared<D>& s;
  PipelineCount<Shared<D>::kSlots> at;
  __device__ __forceinline__ int slot() const { return at.stage(); }
  __device__ __forceinline__ Pipeline pipe() const { return {s.full, s.empty}; }
  // The barriers that copies signal: codes aren't full until they are converted.
  template <bool kCodes>
  __device__ __forceinline__ Pipeline copies() const {
    return {kCodes ? s.raw : s.full, s.empty};
  }
  __device__ __forceinline__ void wait_empty() const {
    if (at.count >= Shared<D>::kSlots) pipe().acquire(at);
  }
  __device__ __forceinline__ void wait_full() const { pipe().wait(at); }
  __device__ __forceinline__ void leave(int which) const {
    __syncwarp();
    pipe().release(which);
  }
};

inline constexpr int kBlocks = kTileTokens / kBlockTokens;  // per step

__device__ __forceinline__ int producer() {
  return static_cast<int>(threadIdx.x - kConsumers) / 32;
}

// Where the cache blocks of a step are copied to: codes go to the end of the stage, from where they
// are converted into the whole stage.
template <CacheType kType, int D>
__device__ __forceinline__ uint8_t* blocks_at(Shared<D>& s, int slot) {
  return reinterpret_cast<uint8_t*>(s.slot(slot) + kTileTokens * D) -
         kBlocks * head_bytes(kType, D);
}

// Copies the queries of a warpgroup's rows unchanged, one copy for the adjacent heads of each
// query. Queries of larger heads don't fit; the consumers load them from global memory.
template <bool kCodes, int D>
__device__ __forceinline__ void copy_queries(Ring<D>& ring, const AttentionArgs& a, const Walk& w,
                                             int first_row) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int rows = kSlices<D> > 1 ? 0 : max(0, min(kGroupRows, w.tile.rows - first_row));
  ring.wait_empty();
  const Pipeline copies = ring.template copies<kCodes>();
  if (lane == 0) {
    ring.s.what[ring.slot()] = w.tile.sequence < 0 ? Raw::kEnd : Raw::kQueries;
    copies.expect(ring.slot(), rows * D * 4);
  }
  __syncwarp();
  auto* to = reinterpret_cast<float*>(ring.s.slot(ring.slot()));
  const int begin = w.tile.first_row + first_row;
  for (int query = begin / w.group + lane; rows > 0 && query * w.group < begin + rows;
       query += 32) {
    const int from = max(begin, query * w.group), upto = min(begin + rows, (query + 1) * w.group);
    bulk_copy(to + (from - begin) * D,
              a.q + (w.tile.query_start + query) * a.q_stride +
                  (w.kv_head * w.group + from % w.group) * D,
              (upto - from) * D * 4, copies.filled(ring.slot()));
  }
  ring.at.next();
}

// Copies keys and values of all steps that a tile sees. Cache blocks that no row sees are replaced
// by visible ones.
template <CacheType kType, int D>
__device__ __forceinline__ void copy_steps(Ring<D>& ring, const AttentionArgs& a, const Walk& w) {
  constexpr int kBlockBytes = head_bytes(kType, D), kMine = kBlocks / kProducers<kType>;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = producer();
  const int mine = lane % kMine * kProducers<kType> + warp;
  const Steps steps = steps_of(a, w, 0, w.tile.rows);
  const int low = first_seen(a, w.position(0)) / kBlockTokens;
  const int high = w.position(w.tile.rows - 1) / kBlockTokens;
  const int* table = a.batch.tables + w.tile.sequence * a.batch.table_stride;
  int next_id = table[min(max(steps.first * kBlocks + mine, low), high)];
  for (int step = steps.first; step <= steps.last; ++step) {
    const int64_t id = next_id;
    next_id = table[min(max((step + 1) * kBlocks + mine, low), high)];
    for (int part = 0; part < 2; ++part, ring.at.next()) {
      ring.wait_empty();
      const Pipeline copies = ring.template copies<in_bytes(kType)>();
      uint64_t* full = copies.filled(ring.slot());
      // Copies of the other warps may signal the barrier before this.
      const bool slice = kSlices<D> > 1 && part == 1;
      if (warp == 0 && lane == 0) {
        ring.s.what[ring.slot()] = part == 0 ? Raw::kKeys : Raw::kValues;
        copies.expect(ring.slot(), kBlocks * kBlockBytes / (slice ? kSlices<D> : 1));
      }
      __syncwarp();
      if (slice) {
        // The slice's features of eight tokens' values.
        constexpr int kBytes = 8 * kSlice<D> * 2;
        auto* to = reinterpret_cast<uint8_t*>(ring.s.slot(ring.slot())) + mine * 2 * kBytes;
        const uint8_t* from = values_at(a.cache, id, w.kv_head) + w.slice * kBytes;
        if (lane < kMine) {
          bulk_copy(to, from, kBytes, full);
          bulk_copy(to + kBytes, from + 8 * D * 2, kBytes, full);
        }
      } else if (lane < kMine) {
        bulk_copy(blocks_at<kType>(ring.s, ring.slot()) + mine * kBlockBytes,
                  part == 0 ? keys_at(a.cache, id, w.kv_head) : values_at(a.cache, id, w.kv_head),
                  kBlockBytes, full);
      }
    }
  }
}

// Producer warps: the first one claims tiles, and all fill the pipeline. A tile without a sequence
// ends the loop.
template <CacheType kType, int D>
__device__ __forceinline__ void produce(Shared<D>& s, const AttentionArgs& a, int tiles,
                                        Counters& counters) {
  Ring<D> ring{s};
  const int lane = static_cast<int>(threadIdx.x % 32);
  Walk w;
  w.group = a.heads / a.cache.kv_heads;
  for (int n = 0;; ++n) {
    if (producer() == 0) {
      // The last tiles of a sequence see the most keys, and come first.
      int index = 0;
      do {
        if (lane == 0) index = static_cast<int>(atomicAdd(&counters.handed_out, 1u));
        index = __shfl_sync(0xffffffff, index, 0);
        const int head = index / tiles;
        w.kv_head = head / kSlices<D>;
        w.slice = head % kSlices<D>;
        w.tile = {-1, 0, 0, 0, 0, 0};
        if (w.kv_head < a.cache.kv_heads) {
          w.tile = find_tile(a.batch, w.group, kRows, tiles - 1 - index % tiles);
        }
      } while (w.tile.sequence < 0 && w.kv_head < a.cache.kv_heads);
      if (lane == 0) {
        s.tiles[n % kInfos] = w.tile;
        s.heads[n % kInfos] = w.kv_head * kSlices<D> + w.slice;
      }
      __syncwarp();
    }
    asm volatile("bar.sync 5, %0;" ::"n"(kProducers<kType> * 32) : "memory");
    w.tile = s.tiles[n % kInfos];
    w.kv_head = s.heads[n % kInfos] / kSlices<D>;
    w.slice = s.heads[n % kInfos] % kSlices<D>;
    if (producer() == 0) {
      for (int g = 0; g < kGroups; ++g) copy_queries<in_bytes(kType)>(ring, a, w, g * kGroupRows);
    } else {
      // With two stages, each stage is released once while the others fill it; a later wait would
      // take that earlier phase for the current one.
      for (int g = 0; g < kGroups; ++g, ring.at.next()) {
        if (kSlices<D> > 1) ring.wait_empty();
      }
    }
    if (w.tile.sequence < 0) break;
    copy_steps<kType>(ring, a, w);
  }
  if (threadIdx.x == kConsumers && atomicAdd(&counters.done, 1u) + 1 == gridDim.x) {
    counters = {0, 0};
  }
}

// Converts a group's share of codes to F16, every other stage of the pipeline. A core matrix of
// codes becomes two, written over codes that all threads have read (17 bytes of INT8 with scales
// become 32). A thread takes 32 features of a key slot at once, which share a scale.
template <CacheType kType, int D>
__device__ __forceinline__ void convert(Shared<D>& s) {
  constexpr unsigned kAtOnce = 2;
  constexpr unsigned kUnitsOfBlock = kBlockTokens * D / 32, kUnits = kBlocks * kUnitsOfBlock;
  const unsigned all = threadIdx.x - kConsumers - kProducers<kType> * 32;
  const unsigned thread = all % kConverters, group = all / kConverters;
  const auto sync = [&] {
    asm volatile("bar.sync %0, %1;" ::"r"(6 + group), "n"(kConverters) : "memory");
  };
  Ring<D> ring{s, {group}};
  for (Raw what = Raw::kQueries; what != Raw::kEnd; ring.at.count += 2) {
    const int slot = ring.slot();
    ring.template copies<true>().wait(ring.at);
    what = s.what[slot];
    if (what == Raw::kKeys || what == Raw::kValues) {
      const uint8_t* from = blocks_at<kType>(s, slot);
      auto* to = reinterpret_cast<uint4*>(s.slot(slot));
#pragma unroll 1
      for (unsigned first = thread; first < kUnits + thread; first += kAtOnce * kConverters) {
        uint4 v[kAtOnce][2];
        __half scale[kAtOnce];
#pragma unroll
        for (unsigned n = 0; n < kAtOnce; ++n) {
          const unsigned i = first + n * kConverters, in = i % kUnitsOfBlock;
          if (i >= kUnits) continue;
          const uint8_t* block = from + i / kUnitsOfBlock * head_bytes(kType, D);
          const auto* codes = reinterpret_cast<const uint4*>(block) + in / 8 * 16 + in % 8;
          v[n][0] = codes[0];
          v[n][1] = codes[8];
          if constexpr (kType == CacheType::kInt8) {
            const unsigned at = in / (kUnitsOfBlock / 2) * 8 + in % 8, group = in / 8 % (D / 32);
            scale[n] = reinterpret_cast<const __half*>(
                block + D * kBlockTokens)[what == Raw::kKeys ? at * (D / 32) + group
                                                             : group * kBlockTokens + at];
          }
        }
        sync();
#pragma unroll
        for (unsigned n = 0; n < kAtOnce; ++n) {
          const unsigned i = first + n * kConverters;
          if (i >= kUnits) continue;
          uint4* its = to + i / 8 * 32 + i % 8;
#pragma unroll
          for (unsigned half = 0; half < 2; ++half, its += 16) {
            if constexpr (kType == CacheType::kInt8) {
              int8_to_half(its, its + 8, v[n][half], scale[n]);
            } else {
              e4m3_to_half(its, its + 8, v[n][half]);
            }
          }
        }
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    sync();
    if (thread == 0) ring.pipe().arrive(slot);
  }
}

// Warpgroups take turns at the tensor cores, one step each, so that one computes softmax weights
// while the other multiplies.
__device__ __forceinline__ void wait_turn() {
  asm volatile("bar.sync %0, %1;" ::"r"(static_cast<int>(threadIdx.x / 128) + 3), "n"(kConsumers)
               : "memory");
}
__device__ __forceinline__ void pass_turn() {
  asm volatile("bar.arrive %0, %1;" ::"r"(4 - static_cast<int>(threadIdx.x / 128)), "n"(kConsumers)
               : "memory");
}

__device__ __forceinline__ void sync_group() {
  asm volatile("bar.sync %0, 128;" ::"r"(static_cast<int>(threadIdx.x / 128) + 1) : "memory");
}

// Converts a warpgroup's queries from F32 into core matrices; zeros for rows beyond the last.
template <bool kBF16, int D>
__device__ __forceinline__ void round_queries(Shared<D>& s, const float* from, int rows) {
  const int thread = static_cast<int>(threadIdx.x % 128);
  const int group = static_cast<int>(threadIdx.x / 128);
  __half* to = s.queries + group * kGroupRows * D;
  const int row = thread % 8;
  // Eight lanes read eight different rows and columns, which avoids bank conflicts.
  const int swap = row / 4;
#pragma unroll 4
  for (int i = thread / 8; i < kGroupRows / 8 * (D / 8); i += 16) {
    const int at = i / (D / 8) * 8 + row, column = (i + row) % (D / 8);
    float4 v[2] = {};
    if (at < rows) {
      const auto* p = reinterpret_cast<const float4*>(from + at * D + column * 8);
      const float4 one = p[swap], other = p[1 - swap];
      v[0] = swap == 0 ? one : other;
      v[1] = swap == 0 ? other : one;
    }
    const auto pair = pack_numbers<kBF16>;
    *reinterpret_cast<uint4*>(to + (i / (D / 8) * (D / 8) + column) * 64 + row * 8) = make_uint4(
        pair(v[0].x, v[0].y), pair(v[0].z, v[0].w), pair(v[1].x, v[1].y), pair(v[1].z, v[1].w));
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same, from queries in global memory.
template <bool kBF16, int D>
__device__ __forceinline__ void fetch_queries(Shared<D>& s, const AttentionArgs& a, const Walk& w) {
  const int thread = static_cast<int>(threadIdx.x % 128);
  const int group = static_cast<int>(threadIdx.x / 128);
  __half* to = s.queries + group * kGroupRows * D;
  const int row = thread % 8;
#pragma unroll 4
  for (int i = thread / 8; i < kGroupRows / 8 * (D / 8); i += 16) {
    const int at = group * kGroupRows + i / (D / 8) * 8 + row, column = (i + row) % (D / 8);
    float4 v[2] = {};
    if (at < w.tile.rows) {
      const int its = w.tile.first_row + at;
      const float* from = a.q + (w.tile.query_start + its / w.group) * a.q_stride +
                          (w.kv_head * w.group + its % w.group) * D + column * 8;
      v[0] = reinterpret_cast<const float4*>(from)[0];
      v[1] = reinterpret_cast<const float4*>(from)[1];
    }
    const auto pair = pack_numbers<kBF16>;
    *reinterpret_cast<uint4*>(to + (i / (D / 8) * (D / 8) + column) * 64 + row * 8) = make_uint4(
        pair(v[0].x, v[0].y), pair(v[0].z, v[0].w), pair(v[1].x, v[1].y), pair(v[1].z, v[1].w));
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same with norm and rotation. A warp takes eight rows at a time, twice; a lane takes two
// features of each 16 bytes of a row, and the two features 64 further, which are their rotation
// partners. Each row begins at another 16 bytes, which avoids bank conflicts. The code is short,
// since the steps between two tiles evict it from the instruction cache.
template <bool kBF16>
__device__ __forceinline__ void turn_queries(Shared<kUsualDim>& s, const float* from, const Walk& w,
                                             const Before& b) {
  constexpr int kHalf = kUsualDim / 2, kAtOnce = 4;
  // If the compiler knew it as threadIdx.x, everything derived from it would occupy registers
  // throughout.
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  const int lane = thread % 32, group = thread / 128, first = thread % 128 / 32 * 16;
  const int rows = w.tile.rows - group * kGroupRows - first;
  from += first * kUsualDim;
  float scale[2] = {1.0f, 1.0f};
  if (b.weight != nullptr) {
#pragma unroll 4
    for (int i = 0; i < 16; ++i) {
      const float its =
          norm_scale(*reinterpret_cast<const float4*>(from + i * kUsualDim + lane * 4), b.eps);
      if (i == lane / 4) scale[0] = its;
      if (i == lane / 4 + 8) scale[1] = its;
    }
  }
  const float *table[2], *weight[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row =
        w.tile.first_row + min(group * kGroupRows + first + lane / 4 + r * 8, w.tile.rows - 1);
    const int query = row / w.group, head = row - query * w.group;
    table[r] = b.cos_sin + (w.tile.query_start + query) * kUsualDim;
    weight[r] = b.weight + (w.kv_head * w.group + head) * b.weight_step;
  }
  auto* to =
      reinterpret_cast<uint8_t*>(s.queries + (group * kGroupRows + first) * kUsualDim) + lane * 4;
#pragma unroll 1
  for (int base = lane / 4; base < lane / 4 + 8; base += kAtOnce) {
    float2 cos[2][kAtOnce], sin[2][kAtOnce];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int c = (base + j) % 8 * 8 + lane % 4 * 2;
        cos[r][j] = make_float2(1.0f, 1.0f);
        sin[r][j] = make_float2(0.0f, 0.0f);
        if (b.cos_sin != nullptr) {
          cos[r][j] = *reinterpret_cast<const float2*>(table[r] + c);
          sin[r][j] = *reinterpret_cast<const float2*>(table[r] + c + kHalf);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int piece = (base + j) % 8, c = piece * 8 + lane % 4 * 2;
        float2 low = make_float2(1.0f, 1.0f), high = low;
        if (b.weight != nullptr) {
          low = *reinterpret_cast<const float2*>(weight[r] + c);
          high = *reinterpret_cast<const float2*>(weight[r] + c + kHalf);
        }
        const float* row = from + (lane / 4 + r * 8) * kUsualDim + c;
        const auto normed = [&](float v, float by) {
          return __fmul_rn(__fmul_rn(v, scale[r]), by);
        };
        const float2 one = *reinterpret_cast<const float2*>(row);
        const float2 other = *reinterpret_cast<const float2*>(row + kHalf);
        const float2 v = make_float2(normed(one.x, low.x), normed(one.y, low.y));
        const float2 u = make_float2(normed(other.x, high.x), normed(other.y, high.y));
        const uint32_t first_pair =
            pack_numbers<kBF16>(rotated(v.x, u.x, cos[r][j].x, sin[r][j].x, false),
                                rotated(v.y, u.y, cos[r][j].y, sin[r][j].y, false));
        const uint32_t second_pair =
            pack_numbers<kBF16>(rotated(u.x, v.x, cos[r][j].x, sin[r][j].x, true),
                                rotated(u.y, v.y, cos[r][j].y, sin[r][j].y, true));
        const bool real = lane / 4 + r * 8 < rows;
        auto* its = reinterpret_cast<uint32_t*>(to + r * 8 * kUsualDim * 2 + piece * 128);
        its[0] = real ? first_pair : 0;
        its[8 * 128 / 4] = real ? second_pair : 0;
      }
    }
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
#endif

}  // namespace freshet::cuda::prompt

// Attention of prompts on Hopper, for the usual sizes of heads: wgmma, rows on its 64-row side.
//
// A block takes tiles of 128 rows of a key head, one after the other, as they come: who is free
// asks for the next. Of each it walks the steps, of kTileTokens keys, that some row sees. One warp
// keeps a ring in shared memory filled by the bulk copy engine: a tile's queries as they are, then
// each step's keys and its values, a copy for each block of the cache. Two warpgroups have 64 rows
// each. While a step's weights are taken, the tensor cores add the values of the step before it.
// The warpgroups take turns at them. Sums of the pieces before stand in shared memory. Of a cache
// in E4M3 or INT8 the copies bring codes, which three more warps convert in the ring.
#include "backend/cuda/heads.cuh"
#include "backend/cuda/kernels.cuh"
#include "backend/cuda/wgmma.cuh"

namespace freshet::cuda {
namespace {

constexpr int kGroups = 2, kGroupRows = 64, kRows = kGroups * kGroupRows;
constexpr int kConsumers = kGroups * 128, kThreads = kConsumers + 128;
constexpr int kInfos = 4;  // tiles that the ring may hold parts of, and one

// Tiles handed out, and blocks that will ask for no more; the last one leaves zeros.
[[maybe_unused]] __device__ unsigned handed_out, done;

// How queries become what attention takes: heads of 128 features as HeadsArgs::Part has them.
struct Before {
  const float *cos_sin, *weight;  // nullptr: not rotated, not normalised
  float eps;
  int weight_step;  // from one head's to the next
};

// What the copies brought.
enum class Raw : int { kQueries, kKeys, kValues, kEnd };

template <int D>
struct Shared {
  static constexpr int kSlots = 4;
  __half slots[kSlots][kTileTokens * D];  // or the queries of a warpgroup, in F32
  __half queries[kRows * D];
  float4 totals[D / 8][kConsumers];
  uint64_t full[kSlots], empty[kSlots];
  uint64_t raw[kSlots];  // of codes: what came is there, full when it is converted
  Raw what[kSlots];
  Tile tiles[kInfos];
  int heads[kInfos];
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// What a block works on.
struct Walk {
  Tile tile;
  int kv_head, group;
  __device__ __forceinline__ int position(int row) const {
    return tile.context - tile.queries + (tile.first_row + row) / group;
  }
};

__device__ __forceinline__ int first_seen(const AttentionArgs& a, int position) {
  return a.window > 0 ? max(0, position - a.window + 1) : 0;
}

// Steps that rows [first, end) see something of.
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
  int at = 0;  // slots filled or taken so far
  __device__ __forceinline__ int slot() const { return at % Shared<D>::kSlots; }
  __device__ __forceinline__ int round() const { return at / Shared<D>::kSlots & 1; }
  __device__ __forceinline__ void wait_empty() const {
    if (at >= Shared<D>::kSlots) barrier_wait(&s.empty[slot()], round() ^ 1);
  }
  __device__ __forceinline__ void wait_full() const { barrier_wait(&s.full[slot()], round()); }
  __device__ __forceinline__ void leave(int which) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(&s.empty[which]);
  }
};

constexpr int kBlocks = kTileTokens / kBlockTokens;  // of a step

// Where the cache's blocks of a step go: codes to the slot's end, from where they are converted
// into the whole.
template <CacheType kType, int D>
__device__ __forceinline__ uint8_t* blocks_at(Shared<D>& s, int slot) {
  return reinterpret_cast<uint8_t*>(s.slots[slot] + kTileTokens * D) -
         kBlocks * head_bytes(kType, D);
}

// The queries of a warpgroup's rows, as they are: a copy for the neighbouring heads of each.
template <bool kCodes, int D>
__device__ __forceinline__ void copy_queries(Ring<D>& ring, const AttentionArgs& a, const Walk& w,
                                             int first_row) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int rows = max(0, min(kGroupRows, w.tile.rows - first_row));
  ring.wait_empty();
  uint64_t* full = kCodes ? &ring.s.raw[ring.slot()] : &ring.s.full[ring.slot()];
  if (lane == 0) {
    ring.s.what[ring.slot()] = w.tile.sequence < 0 ? Raw::kEnd : Raw::kQueries;
    barrier_expect(full, rows * D * 4);
  }
  __syncwarp();
  auto* to = reinterpret_cast<float*>(ring.s.slots[ring.slot()]);
  const int begin = w.tile.first_row + first_row;
  for (int query = begin / w.group + lane; rows > 0 && query * w.group < begin + rows;
       query += 32) {
    const int from = max(begin, query * w.group), upto = min(begin + rows, (query + 1) * w.group);
    bulk_copy(to + (from - begin) * D,
              a.q + (w.tile.query_start + query) * a.q_stride +
                  (w.kv_head * w.group + from % w.group) * D,
              (upto - from) * D * 4, full);
  }
  ++ring.at;
}

// Keys and values of all steps that a tile sees. Blocks of which nothing is seen are replaced by
// others.
template <CacheType kType, int D>
__device__ __forceinline__ void copy_steps(Ring<D>& ring, const AttentionArgs& a, const Walk& w) {
  constexpr int kBlockBytes = head_bytes(kType, D);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const Steps steps = steps_of(a, w, 0, w.tile.rows);
  const int low = first_seen(a, w.position(0)) / kBlockTokens;
  const int high = w.position(w.tile.rows - 1) / kBlockTokens;
  const int* table = a.batch.tables + w.tile.sequence * a.batch.table_stride;
  int next_id = table[min(max(steps.first * kBlocks + lane % kBlocks, low), high)];
  for (int step = steps.first; step <= steps.last; ++step) {
    const int64_t id = next_id;
    next_id = table[min(max((step + 1) * kBlocks + lane % kBlocks, low), high)];
    for (int part = 0; part < 2; ++part, ++ring.at) {
      ring.wait_empty();
      uint64_t* full = in_bytes(kType) ? &ring.s.raw[ring.slot()] : &ring.s.full[ring.slot()];
      if (lane == 0) {
        ring.s.what[ring.slot()] = part == 0 ? Raw::kKeys : Raw::kValues;
        barrier_expect(full, kBlocks * kBlockBytes);
      }
      __syncwarp();
      if (lane < kBlocks) {
        bulk_copy(blocks_at<kType>(ring.s, ring.slot()) + lane * kBlockBytes,
                  part == 0 ? keys_at(a.cache, id, w.kv_head) : values_at(a.cache, id, w.kv_head),
                  kBlockBytes, full);
      }
    }
  }
}

// One warp: asks for tiles, and fills the ring with what they need. A tile of no sequence ends it.
template <CacheType kType, int D>
__device__ __forceinline__ void produce(Shared<D>& s, const AttentionArgs& a, int tiles) {
  Ring<D> ring{s};
  const int lane = static_cast<int>(threadIdx.x % 32);
  Walk w;
  w.group = a.heads / a.cache.kv_heads;
  for (int n = 0;; ++n) {
    // The last tiles of a sequence see most and come first.
    int index = 0;
    do {
      if (lane == 0) index = static_cast<int>(atomicAdd(&handed_out, 1u));
      index = __shfl_sync(0xffffffff, index, 0);
      w.kv_head = index / tiles;
      w.tile = {-1, 0, 0, 0, 0, 0};
      if (w.kv_head < a.cache.kv_heads) {
        w.tile = find_tile(a.batch, w.group, kRows, tiles - 1 - index % tiles);
      }
    } while (w.tile.sequence < 0 && w.kv_head < a.cache.kv_heads);
    if (lane == 0) {
      s.tiles[n % kInfos] = w.tile;
      s.heads[n % kInfos] = w.kv_head;
    }
    __syncwarp();
    for (int g = 0; g < kGroups; ++g) copy_queries<in_bytes(kType)>(ring, a, w, g * kGroupRows);
    if (w.tile.sequence < 0) break;
    copy_steps<kType>(ring, a, w);
  }
  if (lane == 0 && atomicAdd(&done, 1u) + 1 == gridDim.x) {
    handed_out = 0;
    done = 0;
  }
}

// Three warps: codes into F16, in the order of the ring. A core matrix of codes becomes two, which
// lie where codes were that all have read: of INT8 with their scales 17 bytes become 32. A thread
// takes 32 features of a slot at once, and so one scale.
template <CacheType kType, int D>
__device__ __forceinline__ void convert(Shared<D>& s) {
  constexpr unsigned kConverters = 96, kAtOnce = 2;
  constexpr unsigned kUnitsOfBlock = kBlockTokens * D / 32, kUnits = kBlocks * kUnitsOfBlock;
  const unsigned thread = threadIdx.x - kConsumers - 32;
  const auto sync = [] { asm volatile("bar.sync 5, %0;" ::"n"(kConverters) : "memory"); };
  Ring<D> ring{s};
  for (Raw what = Raw::kQueries; what != Raw::kEnd; ++ring.at) {
    const int slot = ring.slot();
    barrier_wait(&s.raw[slot], ring.round());
    what = s.what[slot];
    if (what == Raw::kKeys || what == Raw::kValues) {
      const uint8_t* from = blocks_at<kType>(s, slot);
      auto* to = reinterpret_cast<uint4*>(s.slots[slot]);
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
    if (thread == 0) barrier_arrive(&s.full[slot]);
  }
}

// Warpgroups take turns at the tensor cores, a step each, so that one weighs while the other
// multiplies.
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

// A warpgroup's queries from F32 into core matrices; zeros for rows that are none.
template <bool kBF16, int D>
__device__ __forceinline__ void round_queries(Shared<D>& s, const float* from, int rows) {
  const int thread = static_cast<int>(threadIdx.x % 128);
  const int group = static_cast<int>(threadIdx.x / 128);
  __half* to = s.queries + group * kGroupRows * D;
  const int row = thread % 8;
  // Eight lanes have as many rows and columns: no two meet in a bank.
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

// The same of queries that are normalised and rotated first. A warp takes twice eight rows, a lane
// two features of each sixteen bytes of one, and those 64 behind, which are their pairs; rows begin
// with bytes of their own, so that no two meet in a bank. It is short: the steps between two tiles
// leave nothing of it in the instruction cache.
template <bool kBF16>
__device__ __forceinline__ void turn_queries(Shared<kUsualDim>& s, const float* from, const Walk& w,
                                             const Before& b) {
  constexpr int kHalf = kUsualDim / 2, kAtOnce = 4;
  int thread;  // where it is known as threadIdx.x, what depends on it stays in registers all along
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

// A warpgroup's numbers. Rows g and g + 8 of a lane, as mma has them.
template <int D>
struct Numbers {
  float acc[D / 8][4];  // of the piece
  float score[kKeyTiles][4];
  Softmax<2> piece, total;
  bool begins;  // the piece's first values come next
};
// A step's weights: operands of its values.
using Weights = uint32_t[kTileTokens / 16][4];

// d = a b, or d += a b if `adds`, for a from registers, as mma has it, and b with its columns side
// by side: its place's next_in_k and next_rows are those of core matrices whose rows are K.
// clang-format off
#define FRESHET_SUM(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define FRESHET_SUMS(i) FRESHET_SUM(i), FRESHET_SUM(i + 1), FRESHET_SUM(i + 2), FRESHET_SUM(i + 3)
#define FRESHET_HALF \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FRESHET_VALUES(type) \
  __device__ __forceinline__ void wgmma_##type(float (&d)[16][4], const uint32_t (&a)[4], \
                                               uint64_t b, int adds) { \
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %69, 0;\n" \
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." #type "." #type " {" FRESHET_HALF \
                 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, " \
                 "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, " \
                 "%62, %63}, {%64, %65, %66, %67}, %68, adds, 1, 1, 1;\n}" \
                 : FRESHET_SUMS(0), FRESHET_SUMS(4), FRESHET_SUMS(8), FRESHET_SUMS(12) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds)); \
  } \
  __device__ __forceinline__ void wgmma_##type(float (&d)[8][4], const uint32_t (&a)[4], \
                                               uint64_t b, int adds) { \
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %37, 0;\n" \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." #type "." #type " {" FRESHET_HALF \
                 "}, {%32, %33, %34, %35}, %36, adds, 1, 1, 1;\n}" \
                 : FRESHET_SUMS(0), FRESHET_SUMS(4) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds)); \
  }
FRESHET_VALUES(f16)
FRESHET_VALUES(bf16)
#undef FRESHET_SUM
#undef FRESHET_SUMS
#undef FRESHET_HALF
#undef FRESHET_VALUES
// clang-format on

// scores = queries keys
template <bool kBF16, int D>
__device__ __forceinline__ void multiply_keys(Numbers<D>& n, const Shared<D>& s, int slot) {
  const uint64_t a =
      operand_at(s.queries + static_cast<int>(threadIdx.x / 128) * kGroupRows * D, 128, D * 16);
  const uint64_t b = operand_at(s.slots[slot], 128, D * 16);
  wgmma_begin();
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    if constexpr (kBF16) {
      wgmma(n.score, a + k * kNextStep, b + k * kNextStep, k > 0);
    } else {
      wgmma_half(n.score, a + k * kNextStep, b + k * kNextStep, k > 0);
    }
  }
  wgmma_commit();
}

// sums += weights values
template <bool kBF16, int D>
__device__ __forceinline__ void multiply_values(Numbers<D>& n, const Weights& weights,
                                                const Shared<D>& s, int slot) {
  const uint64_t b = operand_at(s.slots[slot], D * 16, 128);
  wgmma_begin();
#pragma unroll
  for (int k = 0; k < kTileTokens / 16; ++k) {
    if constexpr (kBF16) {
      wgmma_bf16(n.acc, weights[k], b + k * (D * 32 >> 4), k > 0 || !n.begins);
    } else {
      wgmma_f16(n.acc, weights[k], b + k * (D * 32 >> 4), k > 0 || !n.begins);
    }
  }
  wgmma_commit();
}

// A piece's sums join those of the pieces before it; with the last one, in n.acc.
template <bool kLast, int D>
__device__ __forceinline__ void merge_piece(Numbers<D>& n, Softmax<2>& piece, Shared<D>& s,
                                            float steep) {
  add_lanes(piece.l);
  float mine[2], its[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float most = fmaxf(n.total.m[r], piece.m[r]);
    mine[r] = shrink(n.total.m[r], most, steep);
    its[r] = shrink(piece.m[r], most, steep);
    n.total.m[r] = most;
    n.total.l[r] = __fmaf_rn(piece.l[r], its[r], __fmul_rn(n.total.l[r], mine[r]));
  }
#pragma unroll
  for (int j = 0; j < D / 8; ++j) {
    const float4 v = s.totals[j][threadIdx.x];
    const float sum[4] = {__fmaf_rn(n.acc[j][0], its[0], __fmul_rn(v.x, mine[0])),
                          __fmaf_rn(n.acc[j][1], its[0], __fmul_rn(v.y, mine[0])),
                          __fmaf_rn(n.acc[j][2], its[1], __fmul_rn(v.z, mine[1])),
                          __fmaf_rn(n.acc[j][3], its[1], __fmul_rn(v.w, mine[1]))};
    if constexpr (kLast) {
#pragma unroll
      for (int i = 0; i < 4; ++i) n.acc[j][i] = sum[i];
    } else {
      s.totals[j][threadIdx.x] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    }
  }
}

// A step's scores become weights.
template <bool kBF16, int D>
__device__ __forceinline__ bool weigh_scores(Numbers<D>& n, bool begins, float steep,
                                             float (&factor)[2], Weights& weights) {
  return take_scores<2, kBF16>(
      n.piece, begins,
      [&](int r, int j) { return make_float2(n.score[j][r * 2], n.score[j][r * 2 + 1]); }, steep,
      factor, [&](int r, int j, uint32_t pair) { weights[j / 2][j % 2 * 2 + r] = pair; });
}

// Caps scores and hides those of keys that a row does not see. limit: first and last position that
// rows g and g + 8 do.
template <int D>
__device__ __forceinline__ void mask_scores(Numbers<D>& n, const AttentionArgs& a, int step,
                                            const int (&limit)[2][2]) {
  if (a.softcap > 0.0f) {
    const float steep = cap_steepness(a);
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) n.score[j][i] = capped(n.score[j][i], steep);
    }
  }
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int first = step * kTileTokens + lane % 4 * 2;
  const int from[2] = {limit[0][0] - first, limit[1][0] - first};
  const int upto[2] = {limit[0][1] - first, limit[1][1] - first};
#pragma unroll
  for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int p = j * 8 + i % 2;
      if (p < from[i / 2] || p > upto[i / 2]) n.score[j][i] = -INFINITY;
    }
  }
}

// The last step's values; sums of all pieces are left in n.acc.
template <bool kBF16, int D>
__device__ __forceinline__ void add_values(Numbers<D>& n, const Weights& weights, Ring<D>& ring,
                                           float steep) {
  ring.wait_full();
  multiply_values<kBF16>(n, weights, ring.s, ring.slot());
  wgmma_wait<0>();
  pin(n.acc);
  ring.leave(ring.slot());
  ++ring.at;
  merge_piece<true>(n, n.piece, ring.s, steep);
}

// The first step's keys.
template <bool kBF16, int D>
__device__ __forceinline__ void take_keys(Numbers<D>& n, Weights& weights, Ring<D>& ring,
                                          const AttentionArgs& a, int step,
                                          const int (&limit)[2][2], bool masked, float steep) {
  ring.wait_full();
  wait_turn();
  multiply_keys<kBF16>(n, ring.s, ring.slot());
  pass_turn();
#pragma unroll
  for (int j = 0; j < D / 8; ++j) ring.s.totals[j][threadIdx.x] = make_float4(0, 0, 0, 0);
  n.total = {{-INFINITY, -INFINITY}, {0.0f, 0.0f}};
  n.begins = true;
  wgmma_wait<0>();
  pin(n.score);
  ring.leave(ring.slot());
  ++ring.at;
  if (masked) mask_scores(n, a, step, limit);
  float factor[2];
  weigh_scores<kBF16>(n, true, steep, factor, weights);
}

// The values of the step before, and a step's keys.
template <bool kBF16, int D>
__device__ __forceinline__ void take_both(Numbers<D>& n, const Weights& before, Weights& weights,
                                          Ring<D>& ring, const AttentionArgs& a, int step,
                                          const int (&limit)[2][2], bool masked, float steep) {
  ring.wait_full();
  const int values = ring.slot();
  ++ring.at;
  ring.wait_full();
  const int keys = ring.slot();
  ++ring.at;
  wait_turn();
  multiply_keys<kBF16>(n, ring.s, keys);
  multiply_values<kBF16>(n, before, ring.s, values);
  pass_turn();
  wgmma_wait<1>();
  pin(n.score);
  ring.leave(keys);
  if (masked) mask_scores(n, a, step, limit);
  n.begins = step % kTiles == 0;
  Softmax<2> piece = n.piece;
  float factor[2];
  const bool raised = weigh_scores<kBF16>(n, n.begins, steep, factor, weights);
  ring.wait_full();  // of the keys' values: ptxas moves the next wait up to the last branch
  wgmma_wait<0>();
  pin(n.acc);
  ring.leave(values);
  if (n.begins) merge_piece<false>(n, piece, ring.s, steep);
  if (!raised) return;
#pragma unroll
  for (int j = 0; j < D / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) n.acc[j][i] = __fmul_rn(n.acc[j][i], factor[i / 2]);
  }
}

// Of four tiles of 8 columns, of which four lanes have a pair of each, a lane gets one whole.
__device__ __forceinline__ void exchange_pairs(float2 (&v)[4]) {
#pragma unroll
  for (int step = 1; step < 4; step <<= 1) {
    const bool upper = (threadIdx.x & step) != 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float2& low = v[i * (3 - step)];
      float2& high = v[i * (3 - step) + step];
      const float2 send = upper ? low : high;
      const float2 got = make_float2(__shfl_xor_sync(0xffffffff, send.x, step),
                                     __shfl_xor_sync(0xffffffff, send.y, step));
      low = upper ? got : low;
      high = upper ? high : got;
    }
  }
}

// In E4M3: of a row whose features four lanes have.
template <int D>
__device__ __forceinline__ E4M3Scale scale_of(const Numbers<D>& n, int r, float end) {
  float most = 0.0f;
#pragma unroll
  for (int j = 0; j < D / 8; ++j) {
    most = fmaxf(most, fmaxf(fabsf(__fmul_rn(n.acc[j][r * 2], end)),
                             fabsf(__fmul_rn(n.acc[j][r * 2 + 1], end))));
  }
  most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
  most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));
  return e4m3_scale(most);
}

// kE4M3: the activations are in E4M3.
template <int D, bool kE4M3>
__device__ __forceinline__ void write_rows(const Numbers<D>& n, const AttentionArgs& a,
                                           const Walk& w) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int64_t cols = static_cast<int64_t>(a.heads) * D;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = warp * 16 + lane / 4 + r * 8;
    const int64_t token = w.tile.query_start + (w.tile.first_row + row) / w.group;
    const int head = w.kv_head * w.group + (w.tile.first_row + row) % w.group;
    const float end = row < w.tile.rows ? ending(n.total.m[r], n.total.l[r], a, head) : 0.0f;
    E4M3Scale e4m3{};
    if constexpr (kE4M3) e4m3 = scale_of(n, r, end);
#pragma unroll
    for (int j = 0; j < D / 8; j += 4) {
      float2 v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[i] = make_float2(__fmul_rn(n.acc[j + i][r * 2], end),
                           __fmul_rn(n.acc[j + i][r * 2 + 1], end));
      }
      exchange_pairs(v);
      if (row >= w.tile.rows) continue;
      const int64_t col = head * D + (j + lane % 4) * 8;
      const float unit[kUnit] = {v[0].x, v[0].y, v[1].x, v[1].y, v[2].x, v[2].y, v[3].x, v[3].y};
      if (a.only_act == 0) store_unit(a.out + token * a.out_stride, unit, col, cols, true);
      if constexpr (kE4M3) {
        put_scaled(a.act, token, col, unit, e4m3);
      } else if (a.act.data != nullptr) {
        put_unit(a.act, token, col, cols, unit);
      }
    }
  }
}

// Zeros for the rows that fill up the activations' last tile, by who has the last row.
template <int D, bool kE4M3>
__device__ __forceinline__ void pad_rows(const AttentionArgs& a, const Walk& w) {
  const bool ends = w.tile.first_row + w.tile.rows == w.tile.queries * w.group;
  if (a.act.data == nullptr || !ends || w.tile.query_start + w.tile.queries != a.batch.tokens) {
    return;
  }
  const int64_t cols = static_cast<int64_t>(a.heads) * D;
  if constexpr (kE4M3) {
    pad_e4m3(a.act, a.batch.tokens, int64_t{w.kv_head} * w.group * D / kE4M3Cols,
             w.group * D / kE4M3Cols, static_cast<int>(threadIdx.x % 128), 128);
    return;
  }
  const int end = (a.batch.tokens + kTokenTile - 1) / kTokenTile * kTokenTile;
  for (int row = a.batch.tokens; row < end; ++row) {
    for (int c = static_cast<int>(threadIdx.x % 128) * 2; c < w.group * D; c += 256) {
      put_pair(a.act, row, w.kv_head * w.group * D + c, cols, 0.0f, 0.0f);
    }
  }
}

// All steps that a warpgroup's rows see; the ring has those of the block.
template <bool kBF16, bool kE4M3, int D>
__device__ __forceinline__ void take_tile(Ring<D>& ring, const AttentionArgs& a, const Walk& w) {
  const int group = static_cast<int>(threadIdx.x / 128), lane = static_cast<int>(threadIdx.x % 32);
  const int first_row = group * kGroupRows;
  const int rows = min(kGroupRows, w.tile.rows - first_row);
  const Steps all = steps_of(a, w, 0, w.tile.rows);
  const auto skip = [&](int steps) {
    for (int i = 0; i < 2 * steps; ++i, ++ring.at) {
      ring.wait_full();
      ring.leave(ring.slot());
      if (i % 2 != 0) continue;
      wait_turn();
      pass_turn();
    }
  };
  if (rows <= 0) {
    skip(all.last - all.first + 1);
    return;
  }
  const Steps mine = steps_of(a, w, first_row, first_row + rows);
  const int first = w.position(first_row), last = w.position(first_row + rows - 1);
  // Steps that all rows see whole.
  const int whole = (first_seen(a, last) + kTileTokens - 1) / kTileTokens;
  const int end = a.softcap > 0.0f ? whole : (first + 1) / kTileTokens;
  int limit[2][2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = static_cast<int>(threadIdx.x % 128 / 32) * 16 + lane / 4 + r * 8;
    limit[r][1] = w.position(first_row + min(row, rows - 1));
    limit[r][0] = first_seen(a, limit[r][1]);
  }
  const float steep = steepness(a);
  Numbers<D> n;
  Weights even, odd;
  skip(mine.first - all.first);
  const auto masked = [&](int step) { return step < whole || step >= end; };
  take_keys<kBF16>(n, even, ring, a, mine.first, limit, masked(mine.first), steep);
  int step = mine.first + 1;
  for (; step < mine.last; step += 2) {
    take_both<kBF16>(n, even, odd, ring, a, step, limit, masked(step), steep);
    take_both<kBF16>(n, odd, even, ring, a, step + 1, limit, masked(step + 1), steep);
  }
  if (step == mine.last) {
    take_both<kBF16>(n, even, odd, ring, a, step, limit, masked(step), steep);
    add_values<kBF16>(n, odd, ring, steep);
  } else {
    add_values<kBF16>(n, even, ring, steep);
  }
  write_rows<D, kE4M3>(n, a, w);
  if (group == 0) pad_rows<D, kE4M3>(a, w);
  skip(all.last - mine.last);
}

// A warpgroup with 64 rows of every tile.
template <bool kBF16, bool kE4M3, int D>
__device__ __forceinline__ void consume(Shared<D>& s, const AttentionArgs& a,
                                        const Before& before) {
  Ring<D> ring{s};
  const int group = static_cast<int>(threadIdx.x / 128);
  Walk w;
  w.group = a.heads / a.cache.kv_heads;
  if (group == 1) pass_turn();
  for (int t = 0;; ++t) {
    for (int g = 0; g < kGroups; ++g, ++ring.at) {
      ring.wait_full();
      w.tile = s.tiles[t % kInfos];
      if (w.tile.sequence < 0) return;
      if (g == group) {
        sync_group();  // all have left the queries before
        w.kv_head = s.heads[t % kInfos];
        const auto* from = reinterpret_cast<const float*>(s.slots[ring.slot()]);
        bool turned = false;
        if constexpr (D == kUsualDim) {
          turned = before.cos_sin != nullptr || before.weight != nullptr;
          if (turned) turn_queries<kBF16>(s, from, w, before);
        }
        if (!turned) round_queries<kBF16>(s, from, w.tile.rows - g * kGroupRows);
      }
      ring.leave(ring.slot());
    }
    sync_group();
    take_tile<kBF16, kE4M3>(ring, a, w);
  }
}
#endif

// Blocks: as many as stay.
template <int D, CacheType kType, bool kE4M3>
__global__ void __launch_bounds__(kThreads, 1)
    prompt_kernel(const __grid_constant__ AttentionArgs a, const __grid_constant__ Before before,
                  int tiles) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr bool kCodes = in_bytes(kType);
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& s = *reinterpret_cast<Shared<D>*>(memory);
  let_next_start();
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shared<D>::kSlots; ++i) {
      barrier_init(&s.full[i], 1);
      barrier_init(&s.raw[i], 1);
      barrier_init(&s.empty[i], kConsumers / 32);
    }
    barriers_ready();
  }
  __syncthreads();
  if (threadIdx.x >= kConsumers) {
    // All threads together have what they were started with.
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCodes ? 40 : 24));
    wait();
    if (threadIdx.x < kConsumers + 32) {
      produce<kType>(s, a, tiles);
    } else if constexpr (kCodes) {
      convert<kType>(s);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCodes ? 232 : 240));
    wait();
    consume<kType == CacheType::kBF16, kE4M3>(s, a, before);
  }
#endif
}

template <int D, CacheType kType, bool kE4M3>
int run(const AttentionArgs& a) {
  constexpr auto kKernel = prompt_kernel<D, kType, kE4M3>;
  static const cudaError_t kRaised =
      cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared<D>));
  if (kRaised != cudaSuccess) return static_cast<int>(kRaised);
  const int64_t group = a.heads / a.cache.kv_heads;
  const int64_t tiles = a.batch.tokens * group / kRows + a.batch.sequences;
  const int64_t all = tiles * a.cache.kv_heads;
  const dim3 grid(static_cast<unsigned>(all < multiprocessors ? all : multiprocessors));
  Before before = {};
  if (a.before != nullptr) {
    const HeadsArgs::Part& q = a.before->of[0];
    if (q.rotary_dim != 0) before.cos_sin = a.before->cos_sin;
    if (q.normed != 0) before.weight = q.norm.weight;
    before.eps = q.norm.eps;
    before.weight_step = q.norm_per_head != 0 ? D : 0;
  }
  return launch(kKernel, grid, dim3(kThreads), sizeof(Shared<D>), a, before,
                static_cast<int>(tiles));
}

template <CacheType kType>
int run_type(const AttentionArgs& a) {
  if (a.cache.key_dim == 64) return run<64, kType, false>(a);
  return a.act.e4m3 != 0 ? run<128, kType, true>(a) : run<128, kType, false>(a);
}

}  // namespace

bool prompt_fits(const AttentionArgs& a) {
  const int d = a.cache.key_dim;
  // Fewer rows leave warps without work.
  return capability == 90 && a.max_queries * (a.heads / a.cache.kv_heads) > kGroupRows &&
         a.cache.value_dim == d && (d == 64 || d == 128) && a.out_stride % 4 == 0 &&
         reinterpret_cast<uintptr_t>(a.out) % 16 == 0 && a.q_stride % 4 == 0 &&
         !shares_codes(a.cache);
}

bool prompt_turns(const AttentionArgs& a) {
  return prompt_fits(a) && a.cache.key_dim == kUsualDim && usual(a.before->of[0]);
}

int attention_prompt(const AttentionArgs& a) {
  switch (a.cache.type) {
    case CacheType::kE4M3:
      return run_type<CacheType::kE4M3>(a);
    case CacheType::kInt8:
      return run_type<CacheType::kInt8>(a);
    case CacheType::kBF16:
      return run_type<CacheType::kBF16>(a);
    default:
      return run_type<CacheType::kF16>(a);
  }
}

}  // namespace freshet::cuda

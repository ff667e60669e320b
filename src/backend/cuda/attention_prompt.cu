// Attention of prompts on Hopper, for the usual sizes of heads: wgmma, rows on its 64-row side.
//
// A block takes tiles of 128 rows of a key head, one after the other, as they come: who is free
// asks for the next. Of each it walks the pieces that some row sees. One warp keeps a ring in
// shared memory filled by the bulk copy engine: a tile's queries as they are, then each piece's
// keys and its values, a copy for each block of the cache. Two warpgroups have 64 rows each. While
// a piece's weights are taken, the tensor cores add the values of the piece before it, 64 features
// at a time, so that their sums leave room for the scores. The warpgroups take turns at them.
#include "backend/cuda/attention.cuh"
#include "backend/cuda/kernels.cuh"
#include "backend/cuda/wgmma.cuh"

namespace freshet::cuda {
namespace {

constexpr int kGroups = 2, kGroupRows = 64, kRows = kGroups * kGroupRows;
constexpr int kConsumers = kGroups * 128, kThreads = kConsumers + 128;
constexpr int kInfos = 4;  // tiles that the ring may hold parts of, and one

// Tiles handed out, and blocks that will ask for no more; the last one leaves zeros.
__device__ unsigned handed_out, done;

template <int D>
struct Shared {
  static constexpr int kSlots = 6;
  __half slots[kSlots][kSplitTokens * D];  // or the queries of a warpgroup, in F32
  __half queries[kRows * D];
  uint64_t full[kSlots], empty[kSlots];
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

// Pieces that rows [first, end) see.
struct Pieces {
  int first, last;
};
__device__ __forceinline__ Pieces pieces_of(const AttentionArgs& a, const Walk& w, int first,
                                            int end) {
  return {first_seen(a, w.position(first)) / kSplitTokens, w.position(end - 1) / kSplitTokens};
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

// The queries of a warpgroup's rows, as they are: a copy for the neighbouring heads of each.
template <int D>
__device__ __forceinline__ void copy_queries(Ring<D>& ring, const AttentionArgs& a, const Walk& w,
                                             int first_row) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int rows = max(0, min(kGroupRows, w.tile.rows - first_row));
  ring.wait_empty();
  uint64_t* full = &ring.s.full[ring.slot()];
  if (lane == 0) barrier_expect(full, rows * D * 4);
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

// Keys and values of all pieces that a tile sees. Blocks of which nothing is seen are replaced by
// others.
template <int D>
__device__ __forceinline__ void copy_pieces(Ring<D>& ring, const AttentionArgs& a, const Walk& w) {
  constexpr int kBlocks = kSplitTokens / kBlockTokens, kBlockBytes = kBlockTokens * D * 2;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const Pieces pieces = pieces_of(a, w, 0, w.tile.rows);
  const int low = first_seen(a, w.position(0)) / kBlockTokens;
  const int high = w.position(w.tile.rows - 1) / kBlockTokens;
  const int* table = a.batch.tables + w.tile.sequence * a.batch.table_stride;
  int next_id = table[min(max(pieces.first * kBlocks + lane % kBlocks, low), high)];
  for (int piece = pieces.first; piece <= pieces.last; ++piece) {
    const int64_t id = next_id;
    next_id = table[min(max((piece + 1) * kBlocks + lane % kBlocks, low), high)];
    for (int part = 0; part < 2; ++part, ++ring.at) {
      ring.wait_empty();
      uint64_t* full = &ring.s.full[ring.slot()];
      if (lane == 0) barrier_expect(full, kBlocks * kBlockBytes);
      __syncwarp();
      if (lane < kBlocks) {
        bulk_copy(ring.s.slots[ring.slot()] + lane * kBlockTokens * D,
                  part == 0 ? keys_at(a.cache, id, w.kv_head) : values_at(a.cache, id, w.kv_head),
                  kBlockBytes, full);
      }
    }
  }
}

// One warp: asks for tiles, and fills the ring with what they need. A tile of no sequence ends it.
template <int D>
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
    for (int g = 0; g < kGroups; ++g) copy_queries(ring, a, w, g * kGroupRows);
    if (w.tile.sequence < 0) break;
    copy_pieces(ring, a, w);
  }
  if (lane == 0 && atomicAdd(&done, 1u) + 1 == gridDim.x) {
    handed_out = 0;
    done = 0;
  }
}

// Warpgroups take turns at the tensor cores, a piece each, so that one weighs while the other
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

// A warpgroup's queries from F32 into core matrices in F16; zeros for rows that are none.
template <int D>
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
    const auto pair = [](float low, float high) {
      const __half2 h = __halves2half2(to_half(low), to_half(high));
      return reinterpret_cast<const uint32_t&>(h);
    };
    *reinterpret_cast<uint4*>(to + (i / (D / 8) * (D / 8) + column) * 64 + row * 8) = make_uint4(
        pair(v[0].x, v[0].y), pair(v[0].z, v[0].w), pair(v[1].x, v[1].y), pair(v[1].z, v[1].w));
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// A warpgroup's numbers. Rows g and g + 8 of a lane, as mma has them.
template <int D>
struct Numbers {
  static constexpr int kParts = D / 64;  // features of values at a time
  Sums<D / 8> total;
  float score[kKeyTiles][4], part[8][4];
  uint32_t weights[kSplitTokens / 16][4];
  // Of the piece whose values are added next: the lane's sum of weights, the total's factor, its
  // own.
  float sum[2], mine[2], its[2];
};

// scores = queries keys
template <int D>
__device__ __forceinline__ void multiply_keys(Numbers<D>& n, const Shared<D>& s, int slot) {
  const uint64_t a =
      operand_at(s.queries + static_cast<int>(threadIdx.x / 128) * kGroupRows * D, 128, D * 16);
  const uint64_t b = operand_at(s.slots[slot], 128, D * 16);
  wgmma_begin();
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    wgmma_half(n.score, a + k * kNextStep, b + k * kNextStep, k > 0);
  }
  wgmma_commit();
}

// part = weights values, of 64 features
template <int D>
__device__ __forceinline__ void multiply_values(Numbers<D>& n, const Shared<D>& s, int slot,
                                                int part) {
  const uint64_t b = operand_at(s.slots[slot] + part * 512, D * 16, 128);
  wgmma_begin();
#pragma unroll
  for (int k = 0; k < kSplitTokens / 16; ++k) {
    wgmma_half(n.part, n.weights[k], b + k * (D * 32 >> 4), k > 0);
  }
  wgmma_commit();
}

// The total as it is before a piece's values are added. A factor of one changes no bit.
template <int D>
__device__ __forceinline__ void join_sums(Numbers<D>& n) {
  add_lanes(n.sum);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    n.total.l[r] = __fmaf_rn(n.sum[r], n.its[r], __fmul_rn(n.total.l[r], n.mine[r]));
  }
  if (__any_sync(0xffffffff, n.mine[0] != 1.0f || n.mine[1] != 1.0f)) {
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) n.total.acc[j][i] = __fmul_rn(n.total.acc[j][i], n.mine[i / 2]);
    }
  }
  pin(n.total.acc);
}

template <int D>
__device__ __forceinline__ void add_part(Numbers<D>& n, int part) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& sum = n.total.acc[part * 8 + j][i];
      sum = __fmaf_rn(n.part[j][i], n.its[i / 2], sum);
    }
  }
}

// Scores become weights in their place; sum, mine and its of this piece.
template <int D>
__device__ __forceinline__ void weigh_scores(Numbers<D>& n, float steep, float (&sum)[2],
                                             float (&mine)[2], float (&its)[2]) {
  float m[2];
  largest_score(n.score, m);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float most = fmaxf(n.total.m[r], m[r]);
    mine[r] = shrink(n.total.m[r], most, steep);
    its[r] = shrink(m[r], most, steep);
    n.total.m[r] = most;
  }
  weigh(n.score, steep, m, sum);
}

template <int D>
__device__ __forceinline__ void pack_weights(Numbers<D>& n) {
#pragma unroll
  for (int k = 0; k < kSplitTokens / 16; ++k) {
    const float(&low)[4] = n.score[2 * k];
    const float(&high)[4] = n.score[2 * k + 1];
    n.weights[k][0] = pack_half(low[0], low[1]);
    n.weights[k][1] = pack_half(low[2], low[3]);
    n.weights[k][2] = pack_half(high[0], high[1]);
    n.weights[k][3] = pack_half(high[2], high[3]);
  }
}

// Caps scores and hides those of keys that a row does not see. limit: first and last position that
// rows g and g + 8 do.
template <int D>
__device__ __forceinline__ void mask_scores(Numbers<D>& n, const AttentionArgs& a, int piece,
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
  const int first = piece * kSplitTokens + lane % 4 * 2;
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

// The values of the piece whose weights are there.
template <int D>
__device__ __forceinline__ void add_values(Numbers<D>& n, Ring<D>& ring) {
  ring.wait_full();
  join_sums(n);
#pragma unroll
  for (int part = 0; part < Numbers<D>::kParts; ++part) {
    multiply_values(n, ring.s, ring.slot(), part);
    wgmma_wait<0>();
    pin(n.part);
    add_part(n, part);
  }
  ring.leave(ring.slot());
  ++ring.at;
}

// A piece's keys by themselves.
template <int D>
__device__ __forceinline__ void take_keys(Numbers<D>& n, Ring<D>& ring, const AttentionArgs& a,
                                          int piece, const int (&limit)[2][2], bool masked,
                                          float steep) {
  ring.wait_full();
  wait_turn();
  multiply_keys(n, ring.s, ring.slot());
  pass_turn();
  wgmma_wait<0>();
  pin(n.score);
  ring.leave(ring.slot());
  ++ring.at;
  if (masked) mask_scores(n, a, piece, limit);
  weigh_scores(n, steep, n.sum, n.mine, n.its);
  pack_weights(n);
}

// The values of a piece, and the keys of the next.
template <int D>
__device__ __forceinline__ void take_both(Numbers<D>& n, Ring<D>& ring, const AttentionArgs& a,
                                          int piece, const int (&limit)[2][2], bool masked,
                                          float steep) {
  constexpr int kLast = Numbers<D>::kParts - 1;
  ring.wait_full();
  const int values = ring.slot();
  wait_turn();
  if constexpr (kLast > 0) multiply_values(n, ring.s, values, 0);
  ++ring.at;
  ring.wait_full();
  const int keys = ring.slot();
  multiply_keys(n, ring.s, keys);
  ++ring.at;
  join_sums(n);
  if constexpr (kLast > 0) {
    wgmma_wait<1>();
    pin(n.part);
    add_part(n, 0);
    pin(n.part);
  }
  multiply_values(n, ring.s, values, kLast);
  pass_turn();
  wgmma_wait<1>();
  pin(n.score);
  ring.leave(keys);
  if (masked) mask_scores(n, a, piece, limit);
  float sum[2], mine[2], its[2];
  weigh_scores(n, steep, sum, mine, its);
  pin(n.score);
  ring.wait_full();  // of the keys' values: ptxas moves the next wait up to the last branch
  wgmma_wait<0>();
  pin(n.part);
  ring.leave(values);
  add_part(n, kLast);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    n.sum[r] = sum[r];
    n.mine[r] = mine[r];
    n.its[r] = its[r];
  }
  pack_weights(n);
}

template <int D>
__device__ __forceinline__ void write_rows(const Sums<D / 8>& sums, const AttentionArgs& a,
                                           const Walk& w) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = warp * 16 + lane / 4 + r * 8;
    if (row >= w.tile.rows) continue;
    const int query = (w.tile.first_row + row) / w.group;
    const int head = w.kv_head * w.group + (w.tile.first_row + row) % w.group;
    float* to = a.out + (w.tile.query_start + query) * a.out_stride + head * D + lane % 4 * 2;
    const float end = ending(sums.m[r], sums.l[r], a, head);
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
      *reinterpret_cast<float2*>(to + j * 8) =
          make_float2(__fmul_rn(sums.acc[j][r * 2], end), __fmul_rn(sums.acc[j][r * 2 + 1], end));
    }
  }
}

// All pieces that a warpgroup's rows see; the ring has those of the block.
template <int D>
__device__ __forceinline__ void take_tile(Ring<D>& ring, const AttentionArgs& a, const Walk& w) {
  const int group = static_cast<int>(threadIdx.x / 128), lane = static_cast<int>(threadIdx.x % 32);
  const int first_row = group * kGroupRows;
  const int rows = min(kGroupRows, w.tile.rows - first_row);
  const Pieces all = pieces_of(a, w, 0, w.tile.rows);
  const auto skip = [&](int pieces) {
    for (int i = 0; i < 2 * pieces; ++i, ++ring.at) {
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
  const Pieces mine = pieces_of(a, w, first_row, first_row + rows);
  const int first = w.position(first_row), last = w.position(first_row + rows - 1);
  // Pieces that all rows see whole.
  const int whole = (first_seen(a, last) + kSplitTokens - 1) / kSplitTokens;
  const int end = a.softcap > 0.0f ? whole : (first + 1) / kSplitTokens;
  int limit[2][2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = static_cast<int>(threadIdx.x % 128 / 32) * 16 + lane / 4 + r * 8;
    limit[r][1] = w.position(first_row + min(row, rows - 1));
    limit[r][0] = first_seen(a, limit[r][1]);
  }
  const float steep = steepness(a);
  Numbers<D> n;
  n.total.clear();
  skip(mine.first - all.first);
  const auto masked = [&](int piece) { return piece < whole || piece >= end; };
  take_keys(n, ring, a, mine.first, limit, masked(mine.first), steep);
  for (int piece = mine.first + 1; piece <= mine.last; ++piece) {
    take_both(n, ring, a, piece, limit, masked(piece), steep);
  }
  add_values(n, ring);
  write_rows<D>(n.total, a, w);
  skip(all.last - mine.last);
}

// A warpgroup with 64 rows of every tile.
template <int D>
__device__ __forceinline__ void consume(Shared<D>& s, const AttentionArgs& a) {
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
        round_queries(s, reinterpret_cast<const float*>(s.slots[ring.slot()]),
                      w.tile.rows - g * kGroupRows);
      }
      ring.leave(ring.slot());
    }
    w.kv_head = s.heads[t % kInfos];
    sync_group();
    take_tile(ring, a, w);
  }
}
#endif

// Blocks: as many as stay.
template <int D>
__global__ void __launch_bounds__(kThreads, 1)
    prompt_kernel(const __grid_constant__ AttentionArgs a, int tiles) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& s = *reinterpret_cast<Shared<D>*>(memory);
  let_next_start();
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shared<D>::kSlots; ++i) {
      barrier_init(&s.full[i], 1);
      barrier_init(&s.empty[i], kConsumers / 32);
    }
    barriers_ready();
  }
  __syncthreads();
  if (threadIdx.x >= kConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    wait();
    if (threadIdx.x < kConsumers + 32) produce(s, a, tiles);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    wait();
    consume(s, a);
  }
#endif
}

template <int D>
int run(const AttentionArgs& a) {
  static const cudaError_t kRaised = cudaFuncSetAttribute(
      prompt_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared<D>));
  if (kRaised != cudaSuccess) return static_cast<int>(kRaised);
  const int64_t group = a.heads / a.cache.kv_heads;
  const int64_t tiles = a.batch.tokens * group / kRows + a.batch.sequences;
  const int64_t all = tiles * a.cache.kv_heads;
  const dim3 grid(static_cast<unsigned>(all < multiprocessors ? all : multiprocessors));
  return launch(prompt_kernel<D>, grid, dim3(kThreads), sizeof(Shared<D>), a,
                static_cast<int>(tiles));
}

}  // namespace

bool prompt_fits(const AttentionArgs& a) {
  const int d = a.cache.key_dim;
  // Fewer rows leave warps without work.
  return capability == 90 && a.max_queries * (a.heads / a.cache.kv_heads) > kGroupRows &&
         a.cache.value_dim == d && (d == 64 || d == 128) && a.out_stride % 2 == 0 &&
         a.q_stride % 4 == 0;
}

int attention_prompt(const AttentionArgs& a) {
  return a.cache.key_dim == 64 ? run<64>(a) : run<128>(a);
}

}  // namespace freshet::cuda

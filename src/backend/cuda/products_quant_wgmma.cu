// Products of quantised weights with more than a tile of tokens on Hopper: wgmma, weights decoded
// into registers as its 64-row operand.
//
// A block takes 128 or 256 rows and up to 64 tokens. Two threads keep a ring each filled by the
// bulk copy engine: chunks of 256 (or 128) columns of weights, a copy for each tile of 16 rows,
// asked for before the kernel in front ends; and pieces of 64 columns of tokens. Warpgroups
// decode 64 rows each, multiply, and scale a group's sums; tensor cores work for one of them while
// another scales.
// Either blocks stay and walk through tiles of the product, all leaves of K from left to right with
// a second set of sums in shared memory; or, where that makes too few tiles, the blocks of a
// cluster take a leaf each and add up through each other's shared memory, from left to right too.
// The bits are those of products.cu.
#include "backend/cuda/cluster.cuh"
#include "backend/cuda/products.cuh"
#include "backend/cuda/wgmma_registers.cuh"

namespace freshet::cuda {
namespace {

constexpr int kTokenBytes = kTokenTile * 64 * 2;  // of a piece of a tile

// NT: tiles of 8 tokens; kTeams: warpgroups that multiply, 64 rows each; kSplit: a block takes one
// leaf.
template <class F_, int NT_, int kTeams_, bool kSplit_>
struct Shape {
  using F = F_;
  static constexpr int NT = NT_, kTeams = kTeams_;
  static constexpr bool kSplit = kSplit_;
  static constexpr int kRowTiles = 4 * kTeams, kConsumers = 128 * kTeams;
  static constexpr int kPieces = F::kUnit / 64;  // of a unit
  static constexpr int kChunkPieces = F::kTileBytes == Q8_0::kTileBytes ? 2 : 4;
  static constexpr int kChunkUnits = kChunkPieces / kPieces;
  static constexpr int kTileBytes = kChunkUnits * F::kTileBytes;  // of a chunk
  static constexpr int kChunkBytes = kRowTiles * kTileBytes;
  static constexpr int kBlocks = kTeams == 2 ? 2 : 1;  // a multiprocessor's
  static constexpr int kTotalBytes = kSplit ? 0 : NT * 4 * kConsumers * 4;
  static constexpr int kSums = 2;  // stages of sums of a unit's activations, for least values
  static constexpr int kSumBytes = F::kMins ? NT * 256 : 0;
  static constexpr int kPieceBytes = NT * kTokenBytes;
  static constexpr int kRoom =
      (kBlocks == 2 ? 111 << 10 : 223 << 10) - kTotalBytes - kSums * kSumBytes;
  static constexpr int kChunks = 3 * kChunkBytes + 6 * kPieceBytes <= kRoom ? 3 : 2;
  static constexpr int kMostTokens = (kRoom - kChunks * kChunkBytes) / kPieceBytes;
  static constexpr int kTokens = kMostTokens < 16 ? kMostTokens : 16;  // stages
  static_assert(kTokens >= 3);
  static constexpr int kRings = kChunks * kChunkBytes + kTokens * kPieceBytes + kSums * kSumBytes;
  static constexpr int kShared = kTotalBytes + kRings;
  static_assert(!kSplit || kRings >= NT * 4 * kConsumers * 4, "sums take the place of stages");
  // Registers change hands between whole warpgroups only.
  static constexpr bool kMoves = kBlocks == 1;
  static constexpr int kAdders = !F::kMins ? 0 : kMoves ? 2 : 1;  // warps that add activations up
  static constexpr int kThreads = kConsumers + (kMoves ? 128 : 64 + kAdders * 32);
  static constexpr int kBuffers = NT == 8 ? 1 : 2;  // sums of groups that may be in flight
  static_assert(kBuffers == 1 || kBuffers == 2);
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Units of a leaf. All products of a list have as many columns, and leaves are a power of two.
struct Leaf {
  int first, count;
};
struct Leaves {
  int units, parts, shift;
  __device__ __forceinline__ Leaf of(int leaf) const {
    const int first = units * leaf >> shift;
    return {first, (units * (leaf + 1) >> shift) - first};
  }
};
template <class F>
__device__ __forceinline__ Leaves leaves_of(const ProductList& list) {
  const int64_t cols = list.of[0].weight.cols;
  const int parts = leaves(cols);
  return {static_cast<int>((cols + F::kUnit - 1) / F::kUnit), parts, __ffs(parts) - 1};
}

// A ring of stages: which is next, and the parity of its round.
template <int kStages>
struct Turn {
  int stage = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <class S>
struct Rings {
  uint8_t *chunks, *tokens, *unit_sums;
  uint64_t *chunk_full, *chunk_empty, *tokens_full, *tokens_empty, *sums_full, *sums_empty;
  __device__ __forceinline__ uint8_t* chunk(int stage) const {
    return chunks + stage * S::kChunkBytes;
  }
  __device__ __forceinline__ uint8_t* piece(int stage) const {
    return tokens + stage * S::kPieceBytes;
  }
  __device__ __forceinline__ uint8_t* sums(int stage) const {
    return unit_sums + stage * S::kSumBytes;
  }
};

// Chunks in the order in which a block takes them.
template <class S>
struct Cursor {
  const ProductList& list;
  int64_t tokens;
  Leaves leaves;
  int tiles, index, leaf;
  ProductTile tile = {};
  Leaf part = {};
  int unit = 0;
  __device__ Cursor(const ProductList& l, int64_t n, int all, int block_leaf)
      : list(l),
        tokens(n),
        leaves(leaves_of<typename S::F>(l)),
        tiles(all),
        index(static_cast<int>(blockIdx.x)),
        leaf(block_leaf) {
    tile = find_product_tile<S::NT, S::kRowTiles>(list, tokens, index);
    part = leaves.of(leaf);
  }
  __device__ __forceinline__ bool more() const { return index < tiles; }
  __device__ __forceinline__ int count() const { return min(S::kChunkUnits, part.count - unit); }
  // Whether that was the last of a tile.
  __device__ __forceinline__ bool next() {
    unit += S::kChunkUnits;
    if (unit < part.count) return false;
    unit = 0;
    if (S::kSplit) {
      index = tiles;
      return true;
    }
    const bool last = ++leaf == leaves.parts;
    if (last) {
      leaf = 0;
      index += static_cast<int>(gridDim.x);
      if (more()) tile = find_product_tile<S::NT, S::kRowTiles>(list, tokens, index);
    }
    part = leaves.of(leaf);
    return last;
  }
};

// One thread. Weights are asked for before the kernel in front of this one has ended.
template <class S>
__device__ __forceinline__ void copy_rows(const Rings<S>& rings, const ProductList& list,
                                          int64_t tokens, int tiles, int leaf) {
  using F = typename S::F;
  Cursor<S> rows(list, tokens, tiles, leaf);
  Turn<S::kChunks> chunk;
  const int64_t step = static_cast<int64_t>(rows.leaves.units) * F::kTileBytes;  // to the next rows
  while (rows.more()) {
    const WeightView& w = list.of[rows.tile.product].weight;
    const uint8_t* panel = w.data + rows.tile.unit * step;
    const int below = static_cast<int>((w.rows + 15) / 16 - 1 - rows.tile.unit);
    for (bool same = true; same; chunk.next()) {  // tile
      const uint8_t* from = panel + (rows.part.first + rows.unit) * F::kTileBytes;
      const auto bytes = static_cast<uint32_t>(rows.count() * F::kTileBytes);
      uint64_t* full = &rings.chunk_full[chunk.stage];
      // The first round finds all stages empty.
      barrier_wait(&rings.chunk_empty[chunk.stage], chunk.parity ^ 1);
      barrier_expect(full, S::kRowTiles * bytes);
      uint8_t* to = rings.chunk(chunk.stage);
#pragma unroll 1
      for (int t = 0; t < S::kRowTiles; ++t) {
        bulk_copy(to, from, bytes, full);
        if (t < below) from += step;
        to += S::kTileBytes;
      }
      same = !rows.next();
    }
  }
}

// One thread.
template <class S>
__device__ __forceinline__ void copy_tokens(const Rings<S>& rings, const ProductList& list,
                                            int64_t tokens, int tiles, int leaf) {
  Cursor<S> columns(list, tokens, tiles, leaf);
  Turn<S::kTokens> piece;
  const int64_t act_tiles = (tokens + 7) / 8;
  wait();
  for (; columns.more(); columns.next()) {
    const int64_t tile = columns.tile.token_tile;
    const auto bytes = static_cast<uint32_t>(min(int64_t{S::NT}, act_tiles - tile) * kTokenBytes);
    const int first = (columns.part.first + columns.unit) * S::kPieces;
    const uint8_t* from =
        list.of[columns.tile.product].act + (first * act_tiles + tile) * kTokenBytes;
    for (int n = columns.count() * S::kPieces; n > 0; --n, from += act_tiles * kTokenBytes) {
      uint64_t* full = &rings.tokens_full[piece.stage];
      barrier_wait(&rings.tokens_empty[piece.stage], piece.parity ^ 1);
      barrier_expect(full, bytes);
      bulk_copy(rings.piece(piece.stage), from, bytes, full);
      piece.next();
    }
  }
}

// Where sums of activations lie as an operand: [tile of tokens][high, low][token][8 groups].
__device__ __forceinline__ uint64_t sums_at(const void* shared) {
  constexpr uint64_t kNextInK = 128 >> 4, kNextTokens = 256 >> 4;
  return (shared_address(shared) >> 4 & 0x3fff) | kNextInK << 16 | kNextTokens << 32;
}

// Warp `adder` of kAdders: sums of activations of so many units.
template <class S>
__device__ __forceinline__ void add_activations(const Rings<S>& rings, int units, int adder) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  Turn<S::kTokens> turn;
  Turn<S::kSums> sums;
  for (int n = 0; n < units; ++n, sums.next()) {
    const uint4* tiles[S::kPieces];
    uint64_t* empty[S::kPieces];
#pragma unroll
    for (int p = 0; p < S::kPieces; ++p, turn.next()) {
      barrier_wait(&rings.tokens_full[turn.stage], turn.parity);
      tiles[p] = reinterpret_cast<const uint4*>(rings.piece(turn.stage)) + lane;
      empty[p] = &rings.tokens_empty[turn.stage];
    }
    barrier_wait(&rings.sums_empty[sums.stage], sums.parity ^ 1);
    auto* to = reinterpret_cast<uint32_t*>(rings.sums(sums.stage)) + lane;
    for (int j = adder; j < S::NT; j += S::kAdders) {
      float ones[4] = {};
#pragma unroll
      for (int group = 0; group < S::kPieces * 2; ++group) {
        uint32_t b[4];
        ldmatrix4(b, tiles[group / 2] + j * 64 + group % 2 * 32);
        add_ones(ones, group, lane, b[0], b[1]);
        add_ones(ones, group, lane, b[2], b[3]);
      }
      const TwoSums two = split(ones[0], ones[1]);
      to[j * 64] = transposed(two.high);
      to[j * 64 + 32] = transposed(two.low);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (lane != 0) continue;
    barrier_arrive(&rings.sums_full[sums.stage]);
    for (int p = 0; p < S::kPieces; ++p) barrier_arrive(empty[p]);
  }
}

// A consumer's places in the rings.
template <class S>
struct Places {
  Turn<S::kChunks> chunk;
  Turn<S::kTokens> piece;
  Turn<S::kSums> sums;
};

__device__ __forceinline__ void leave(uint64_t* empty) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(empty);
}

// What a warp holds on its way through a leaf.
template <class S>
struct Operands {
  using F = typename S::F;
  float part[S::kBuffers][S::NT][4];
  uint4 a[2][F::kGroup];
  Piece raw;
  Least least;

  __device__ __forceinline__ void decode(int piece, int group, int lane) {
    uint4 all[4];
    F::decode(raw, piece % S::kPieces, lane, all);
#pragma unroll
    for (int k = 0; k < F::kGroup; ++k) a[group & 1][k] = all[group * F::kGroup + k];
  }
  // Piece `piece` of a chunk, of which `tile` is this warp's.
  __device__ __forceinline__ void take(const uint8_t* tile, int piece, int lane) {
    tile += piece / S::kPieces * F::kTileBytes;
    F::template load<FromShared>(tile, piece % S::kPieces, lane, raw);
    if constexpr (F::kMins) {
      if (piece == S::kPieces - 1) least = F::template least<FromShared>(tile, lane);
    }
    decode(piece, 0, lane);
  }
  __device__ __forceinline__ void add(float (&sum)[S::NT][4], int buffer, float d0, float d1) {
    float(&done)[S::NT][4] = part[buffer & (S::kBuffers - 1)];
    written(done);
    add_scaled<S::NT>(sum, done, d0, d1);
    written(sum);  // here, and not when somebody asks for it
  }
};

// sum += pieces [first, first + kCount) of a chunk, the first of which has been taken; next() takes
// what comes after them. A group's sums are scaled while the next one is multiplied.
template <class S, int kCount, class Next>
__device__ __forceinline__ void sum_pieces(const Rings<S>& rings, Places<S>& at, Operands<S>& o,
                                           float (&sum)[S::NT][4], const uint8_t* tile, int first,
                                           const Next& next) {
  using F = typename S::F;
  constexpr int kGroups = 4 / F::kGroup, kSteps = kCount * kGroups;
  const int lane = static_cast<int>(threadIdx.x % 32);
  Scales scales[2] = {};
  uint64_t b = 0, *empty[2] = {};
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int group = step % kGroups, piece = first + step / kGroups;
    if (group == 0) {
      barrier_wait(&rings.tokens_full[at.piece.stage], at.piece.parity);
      b = operand_at(rings.piece(at.piece.stage));
      empty[step / kGroups & 1] = &rings.tokens_empty[at.piece.stage];
      at.piece.next();
    }
    scales[step & 1] = F::scales(o.raw, piece % S::kPieces, group);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < F::kGroup; ++k) {
      wgmma(o.part[step & (S::kBuffers - 1)], o.a[step & 1][k],
            b + (group * F::kGroup + k) * kNextStep, k > 0);
    }
    wgmma_commit();
    const auto end = [&](int of) {
      o.add(sum, of, scales[of & 1].d0, scales[of & 1].d1);
      if (of % kGroups == kGroups - 1) leave(empty[of / kGroups & 1]);
    };
    if (S::kBuffers == 2 && step > 0) {
      wgmma_wait<1>();
      end(step - 1);
    }
    if (group + 1 < kGroups) {
      o.decode(piece, group + 1, lane);
    } else if (step + 1 < kSteps) {
      o.take(tile, piece + 1, lane);
    } else {
      next();
    }
    if (S::kBuffers == 1 || step + 1 == kSteps) {
      wgmma_wait<0>();
      end(step);
    }
  }
}

// sum -= what the least values of a unit take from it.
template <class S>
__device__ __forceinline__ void subtract_least(const Rings<S>& rings, Places<S>& at, Operands<S>& o,
                                               const Least& least, float (&sum)[S::NT][4]) {
  barrier_wait(&rings.sums_full[at.sums.stage], at.sums.parity);
  wgmma_begin();
  wgmma(o.part[0], make_uint4(least.a0, least.a1, least.a0, least.a1),
        sums_at(rings.sums(at.sums.stage)), 0);
  wgmma_commit();
  wgmma_wait<0>();
  o.add(sum, 0, -half_bits(least.d & 0xffff), -half_bits(least.d >> 16));
  leave(&rings.sums_empty[at.sums.stage]);
  at.sums.next();
}

// sum = a leaf of so many pieces, for a warpgroup's 64 rows.
template <class S>
__device__ __forceinline__ void sum_leaf(const Rings<S>& rings, Places<S>& at,
                                         float (&sum)[S::NT][4], int pieces) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  Operands<S> o;
  o.least = {};
#pragma unroll
  for (int j = 0; j < S::NT; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[j][i] = 0.0f;
  }
  const uint8_t* tile = nullptr;
  const auto enter = [&] {  // the next chunk
    barrier_wait(&rings.chunk_full[at.chunk.stage], at.chunk.parity);
    tile = rings.chunk(at.chunk.stage) + warp * S::kTileBytes;
    o.take(tile, 0, lane);
  };
  const auto leave_chunk = [&] {
    leave(&rings.chunk_empty[at.chunk.stage]);
    at.chunk.next();
  };
  enter();
  for (; pieces >= S::kChunkPieces; pieces -= S::kChunkPieces) {
    sum_pieces<S, S::kChunkPieces>(rings, at, o, sum, tile, 0, [&] {
      leave_chunk();
      if (pieces > S::kChunkPieces) enter();
    });
    if constexpr (S::F::kMins) subtract_least<S>(rings, at, o, o.least, sum);
  }
  for (int n = 0; n < pieces; ++n) {
    sum_pieces<S, 1>(rings, at, o, sum, tile, n, [&] {
      if (n + 1 < pieces) {
        o.take(tile, n + 1, lane);
      } else {
        leave_chunk();
      }
    });
  }
}

__device__ __forceinline__ Work work_of(const ProductArgs& p, int64_t tokens) {
  return {p.weight.data, p.weight.rows, p.weight.cols, p.act,  p.act_chunks, (tokens + 7) / 8,
          p.out,         p.out_stride,  tokens,        p.bias, p.scale,      p.add != 0};
}

// Warpgroups: every tile's leaves from left to right; `total` is their place for sums.
template <class S>
__device__ __forceinline__ void walk(const Rings<S>& rings, const ProductList& list, int64_t tokens,
                                     int tiles, float* total) {
  constexpr int NT = S::NT, kConsumers = S::kConsumers;
  using F = typename S::F;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  Places<S> at;
  const Leaves leaves = leaves_of<F>(list);
  total += threadIdx.x;
  for (int index = static_cast<int>(blockIdx.x); index < tiles;
       index += static_cast<int>(gridDim.x)) {
    const ProductTile tile = find_product_tile<S::NT, S::kRowTiles>(list, tokens, index);
    const ProductArgs& p = list.of[tile.product];
    float sum[NT][4];
    for (int leaf = 0; leaf < leaves.parts; ++leaf) {
      sum_leaf<S>(rings, at, sum, leaves.of(leaf).count * S::kPieces);
#pragma unroll
      for (int j = 0; j < NT; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float* place = total + (j * 4 + i) * kConsumers;
          if (leaf > 0) sum[j][i] = __fadd_rn(*place, sum[j][i]);
          if (leaf + 1 < leaves.parts) *place = sum[j][i];
        }
      }
    }
    finish<NT>(work_of(p, tokens), sum, tile.unit + warp, tile.token_tile, lane);
  }
}

// Warpgroups leave this block's sums in the place of stages, and add the leaves' from left to
// right.
template <class S>
__device__ __forceinline__ void add_leaves(const Work& w, const float (&sum)[S::NT][4],
                                           float* shared, int leaf, const ProductTile& tile) {
  constexpr int NT = S::NT, kConsumers = S::kConsumers, kMostLeaves = 8;
  const int thread = static_cast<int>(threadIdx.x), parts = leaves(w.cols);
  asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");  // nobody reads stages any more
#pragma unroll
  for (int j = 0; j < NT; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) shared[(j * 4 + i) * kConsumers + thread] = sum[j][i];
  }
  cluster_sync();
  for (int j = leaf; j < NT; j += parts) {
    float of[kMostLeaves][4], all[1][4];
#pragma unroll
    for (int l = 0; l < kMostLeaves; ++l) {  // all of them on their way before one is added
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        of[l][i] = l < parts ? from_block(shared + (j * 4 + i) * kConsumers + thread, l) : 0.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      all[0][i] = of[0][i];
#pragma unroll
      for (int l = 1; l < kMostLeaves; ++l) {
        if (l < parts) all[0][i] = __fadd_rn(all[0][i], of[l][i]);
      }
    }
    finish<1>(w, all, tile.unit + thread / 32, tile.token_tile + j, thread % 32);
  }
  cluster_sync();  // nobody leaves while others read here
}
#endif

// Blocks: [as many as stay], or [tiles, 1, leaves] if kSplit.
template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    decode_kernel(const __grid_constant__ ProductList list, int64_t tokens, int tiles) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kConsumers = S::kConsumers;
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ uint64_t chunk_full[S::kChunks], chunk_empty[S::kChunks];
  __shared__ uint64_t tokens_full[S::kTokens], tokens_empty[S::kTokens], sums_full[S::kSums],
      sums_empty[S::kSums];
  let_next_start();
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    for (int s = 0; s < S::kChunks; ++s) {
      barrier_init(&chunk_full[s], 1);
      barrier_init(&chunk_empty[s], kConsumers / 32);
    }
    for (int s = 0; s < S::kTokens; ++s) {
      barrier_init(&tokens_full[s], 1);
      barrier_init(&tokens_empty[s], kConsumers / 32 + S::kAdders);
    }
    for (int s = 0; s < S::kSums; ++s) {
      barrier_init(&sums_full[s], S::kAdders > 0 ? S::kAdders : 1);
      barrier_init(&sums_empty[s], kConsumers / 32);
    }
    barriers_ready();
  }
  __syncthreads();
  // Tokens first: their pieces are operands.
  uint8_t* chunks = shared + S::kTokens * S::kPieceBytes;
  const Rings<S> rings{chunks,       shared,      chunks + S::kChunks * S::kChunkBytes,
                       chunk_full,   chunk_empty, tokens_full,
                       tokens_empty, sums_full,   sums_empty};
  const int leaf = static_cast<int>(blockIdx.z);
  if (thread >= kConsumers) {
    if constexpr (S::kMoves) asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    if (thread == kConsumers) copy_rows<S>(rings, list, tokens, tiles, leaf);
    if (thread == kConsumers + 32) copy_tokens<S>(rings, list, tokens, tiles, leaf);
    if constexpr (S::kAdders > 0) {
      const int adder = (thread - kConsumers) / 32 - 2;
      int units = leaves_of<typename S::F>(list).of(leaf).count;
      if constexpr (!S::kSplit) {
        const int turns = (tiles - 1 - static_cast<int>(blockIdx.x)) / static_cast<int>(gridDim.x);
        units = leaves_of<typename S::F>(list).units * (turns + 1);
      }
      if (adder >= 0) add_activations<S>(rings, units, adder);
    }
    __syncwarp();
    if constexpr (S::kSplit) {  // add_leaves' two
      cluster_sync();
      cluster_sync();
    }
  } else {
    if constexpr (S::kMoves) asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
    wait();
    if constexpr (S::kSplit) {
      float sum[S::NT][4];
      Places<S> at;
      sum_leaf<S>(rings, at, sum, leaves_of<typename S::F>(list).of(leaf).count * S::kPieces);
      const ProductTile tile =
          find_product_tile<S::NT, S::kRowTiles>(list, tokens, static_cast<int>(blockIdx.x));
      add_leaves<S>(work_of(list.of[tile.product], tokens), sum, reinterpret_cast<float*>(shared),
                    leaf, tile);
    } else {
      walk<S>(rings, list, tokens, tiles, reinterpret_cast<float*>(shared + S::kRings));
    }
  }
#endif
}

template <class S>
int launch_decode(const ProductList& list, int64_t tokens, int parts) {
  const auto kernel = decode_kernel<S>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kShared);
  if (error != cudaSuccess) return static_cast<int>(error);
  const auto tiles = static_cast<int>(list.first_block[list.count] * ceil_div(tokens, S::NT * 8));
  const auto leaf_blocks = static_cast<unsigned>(S::kSplit ? parts : 1);
  const int most = S::kBlocks * multiprocessors;
  const int blocks = S::kSplit || tiles < most ? tiles : most;
  return launch_cluster(kernel, dim3(static_cast<unsigned>(blocks), 1, leaf_blocks),
                        dim3(S::kThreads), S::kShared, dim3(1, 1, leaf_blocks), list, tokens,
                        tiles);
}

template <class F, int NT, int kTeams>
int run(const ProductList& given, int64_t tokens) {
  constexpr int64_t kEnoughTiles = 64;  // more walk faster than eight times as many add up
  const ProductList list = with_blocks(given, 64 * kTeams);
  const int parts = leaves(list.of[0].weight.cols);  // all have as many columns
  const int64_t tiles = list.first_block[list.count] * ceil_div(tokens, NT * 8);
  if (parts > 1 && tiles < kEnoughTiles) {
    return launch_decode<Shape<F, NT, kTeams, true>>(list, tokens, parts);
  }
  return launch_decode<Shape<F, NT, kTeams, false>>(list, tokens, parts);
}

}  // namespace

template <class F>
int run_decode(const ProductList& list, int64_t tokens) {
  if (tokens <= 32) return run<F, 4, 2>(list, tokens);
  if (tokens <= 64) return run<F, 8, 2>(list, tokens);
  return run<F, 8, 4>(list, tokens);
}

template int run_decode<Q8_0>(const ProductList&, int64_t);
template int run_decode<Q4_0>(const ProductList&, int64_t);
template int run_decode<Q4_K>(const ProductList&, int64_t);
template int run_decode<Q6_K>(const ProductList&, int64_t);
template int run_decode<MXFP4>(const ProductList&, int64_t);

}  // namespace freshet::cuda

// Products of quantised weights with more than kQuantFew tokens on Hopper: wgmma, weights decoded
// into registers as its 64-row operand.
//
// Two threads keep a ring each filled by the bulk copy engine: of weights a copy for each tile of
// 16 rows and chunk of 256 columns, asked for before the kernel in front ends; of tokens one for
// each piece of 64 columns. Warpgroups multiply 64 rows each, and decode a piece while the tensor
// cores work on the one before it. A leaf's last chunk may be shorter.
// Either blocks of 128 rows stay and walk through tiles of the product, all leaves of K from left
// to right with a second set of sums; or, where that makes too few tiles, two blocks share 64 rows:
// a warpgroup takes two leaves, and the blocks add up through each other's shared memory, from left
// to right too. (Larger clusters don't find room on all multiprocessors.) The bits are those of
// products.cu.
#include "backend/cuda/cluster.cuh"
#include "backend/cuda/products_gated.cuh"
#include "backend/cuda/wgmma_registers.cuh"

namespace freshet::cuda {
namespace {

constexpr int kTokenBytes = kTokenTile * 64 * 2;  // of a piece of a tile
constexpr int kCopies = 8;                        // tiles of a chunk: four a warpgroup
constexpr int kConsumers = 256;
constexpr int kThreads = kConsumers + 128;  // registers change hands between whole warpgroups only
constexpr int kChunkPieces = 4;             // of 64 columns
constexpr int kPair = 2, kMostLeaves = 8;
constexpr int kOutTokens = 32, kOutStride = 64 + 4;  // of a warpgroup's sums on their way out
constexpr int kGateRound = 4;                        // tiles of tokens that gate and up exchange

// What the two warpgroups of a block have: other rows, other leaves of K, or gate and up.
enum class Split { kRows, kLeaves, kGate };

// NT: tiles of 8 tokens.
template <class F_, int NT_, Split split>
struct Shape {
  using F = F_;
  static constexpr int NT = NT_;
  static constexpr bool kSplit = split == Split::kLeaves, kGate = split == Split::kGate;
  static constexpr int kParts = kSplit ? 2 : 1;  // of K, in a block
  static constexpr int kRowTiles = split == Split::kRows ? kCopies : kCopies / 2;  // of a product
  static constexpr int kPieces = F::kUnit / 64;                                    // of a unit
  static constexpr int kTileBytes = kChunkPieces / kPieces * F::kTileBytes;        // of a chunk
  static constexpr int kChunkBytes = kCopies * kTileBytes;
  static constexpr int kOutBytes = kSplit ? 0 : 2 * kOutTokens * kOutStride * 4;
  static constexpr int kRoom = (223 << 10) - kOutBytes;
  // A stage of tokens: pieces of each part.
  static constexpr int kPieceBytes = NT * kTokenBytes;
  static constexpr int kStagePieces = kSplit ? 2 : 4;
  static constexpr int kTokensBytes = kStagePieces * kParts * kPieceBytes;
  static constexpr int kChunks = 3 * kChunkBytes + 2 * kTokensBytes <= kRoom ? 3 : 2;
  static constexpr int kMostTokens = (kRoom - kChunks * kChunkBytes) / kTokensBytes;
  static constexpr int kTokens = kMostTokens < 16 / kStagePieces ? kMostTokens : 16 / kStagePieces;
  static_assert(kTokens >= 2);
  static constexpr int kRings = kChunks * kChunkBytes + kTokens * kTokensBytes;
  static constexpr int kShared = kRings + kOutBytes;
  static constexpr int kLeaves = kMostLeaves / kPair / kParts;  // of a warpgroup, or less
  static_assert(!kGate || kOutBytes >= kExchangeBytes<kGateRound>);
  static_assert(!kSplit || kShared >= kLeaves * NT * 16 * kConsumers, "sums take their place");
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// How K is cut, in pieces. All products of a list have as many columns, and leaves are a power of
// two. A warpgroup takes leaves [first, last), those of other parts of the block lie `apart`.
template <class S>
struct Leaves {
  int units, parts, shift, first, last, apart;
  __device__ __forceinline__ explicit Leaves(const ProductList& list)
      : units(static_cast<int>((list.of[0].weight.cols + S::F::kUnit - 1) / S::F::kUnit)),
        parts(leaves(list.of[0].weight.cols)),
        shift(__ffs(parts) - 1),
        first(0),
        last(parts),
        apart(0) {
    if (!S::kSplit) return;
    last = parts / kPair / S::kParts;
    apart = edge(last);  // leaves are of one size
    first += static_cast<int>(blockIdx.z) * S::kParts * last;
    last += first;
  }
  __device__ __forceinline__ int edge(int leaf) const {
    return (units * leaf >> shift) * S::kPieces;
  }
  __device__ __forceinline__ int count(int leaf) const { return edge(leaf + 1) - edge(leaf); }
};

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

// A stage of tokens has barriers for each piece, or each part's.
template <class S>
struct Rings {
  uint8_t *chunks, *tokens;
  uint64_t *chunk_full, *chunk_empty, *tokens_full, *tokens_empty;
  __device__ __forceinline__ uint8_t* chunk(int stage) const {
    return chunks + stage * S::kChunkBytes;
  }
};

// body(tile) for each tile of a block; body(first piece, how many) for each chunk of it.
template <class S, class Body>
__device__ __forceinline__ void each_tile(const ProductList& list, int64_t tokens, int tiles,
                                          const Body& body) {
  for (int index = static_cast<int>(blockIdx.x); index < tiles;
       index += static_cast<int>(gridDim.x)) {
    body(find_product_tile<S::NT, S::kRowTiles>(list, tokens, index));
  }
}

template <class S, class Body>
__device__ __forceinline__ void each_chunk(const Leaves<S>& leaves, const Body& body) {
  for (int leaf = leaves.first; leaf < leaves.last; ++leaf) {
    const int end = leaves.edge(leaf + 1);
    for (int piece = leaves.edge(leaf); piece < end; piece += kChunkPieces) {
      body(piece, min(kChunkPieces, end - piece));
    }
  }
}

// One thread. Weights are asked for before the kernel in front of this one has ended.
template <class S>
__device__ __forceinline__ void copy_rows(const Rings<S>& rings, const ProductList& list,
                                          int64_t tokens, int tiles, const Leaves<S>& leaves) {
  using F = typename S::F;
  const int64_t step = tile_at<F>(1, list.of[0].weight.cols);  // to the next 16 rows
  Turn<S::kChunks> turn;
  each_tile<S>(list, tokens, tiles, [&](const ProductTile& tile) {
    const WeightView& w = list.of[tile.product].weight;
    const uint8_t* panel = w.data + tile.unit * step;
    const uint8_t* up = S::kGate ? list.of[1].weight.data + tile.unit * step : nullptr;
    const int below = static_cast<int>((w.rows + 15) / 16 - 1 - tile.unit);
    each_chunk(leaves, [&](int piece, int count) {
      const uint8_t* from = panel + piece / S::kPieces * F::kTileBytes;
      const auto bytes = static_cast<uint32_t>(count / S::kPieces * F::kTileBytes);
      uint64_t* full = &rings.chunk_full[turn.stage];
      // The first round finds all stages empty.
      barrier_wait(&rings.chunk_empty[turn.stage], turn.parity ^ 1);
      barrier_expect(full, kCopies * bytes);
      uint8_t* to = rings.chunk(turn.stage);
#pragma unroll 1
      for (int part = 0; part < kCopies / S::kRowTiles; ++part) {
        const uint8_t* row = from;
#pragma unroll 1
        for (int t = 0; t < S::kRowTiles; ++t) {
          bulk_copy(to, row, bytes, full);
          if (t < below) row += step;
          to += S::kTileBytes;
        }
        from = S::kGate ? up + piece / S::kPieces * F::kTileBytes
                        : from + leaves.apart / S::kPieces * F::kTileBytes;
      }
      turn.next();
    });
  });
}

// One thread.
template <class S>
__device__ __forceinline__ void copy_tokens(const Rings<S>& rings, const ProductList& list,
                                            int64_t tokens, int tiles, const Leaves<S>& leaves) {
  const int64_t act_tiles = (tokens + 7) / 8, token_step = act_tiles * kTokenBytes;
  Turn<S::kTokens> turn;
  wait();
  each_tile<S>(list, tokens, tiles, [&](const ProductTile& tile) {
    const auto bytes =
        static_cast<uint32_t>(min(int64_t{S::NT}, act_tiles - tile.token_tile) * kTokenBytes);
    const uint8_t* act = list.of[tile.product].act + tile.token_tile * kTokenBytes;
    each_chunk(leaves, [&](int piece, int count) {
      const uint8_t* from = act + piece * token_step;
#pragma unroll 1
      for (int n = 0; n < kChunkPieces; ++n) {
        const int at = turn.stage * S::kStagePieces + n % S::kStagePieces;
        uint64_t* full = &rings.tokens_full[at];
        barrier_wait(&rings.tokens_empty[at], turn.parity ^ 1);
        if (n < count) {
          barrier_expect(full, S::kParts * bytes);
          for (int part = 0; part < S::kParts; ++part) {
            bulk_copy(rings.tokens + (at * S::kParts + part) * S::kPieceBytes,
                      from + part * leaves.apart * token_step, bytes, full);
          }
        } else {
          barrier_arrive(full);
        }
        from += token_step;
        if ((n + 1) % S::kStagePieces == 0) turn.next();
      }
    });
  });
}

__device__ __forceinline__ void leave(uint64_t* empty) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(empty);
}

// A warp's way through the rings: 16 rows of weights. A piece is loaded while others are
// multiplied, and decoded into one of two operands.
template <class S>
struct Way {
  using F = typename S::F;
  const Rings<S>& rings;
  Turn<S::kChunks> chunk;
  Turn<S::kTokens> tokens;
  Piece raw;
  uint4 a[2][4];

  __device__ __forceinline__ void enter() {
    barrier_wait(&rings.chunk_full[chunk.stage], chunk.parity);
    load(0);
  }
  __device__ __forceinline__ void load(int piece) {
    const int warp = static_cast<int>(threadIdx.x / 32);
    F::template load<FromShared>(
        rings.chunk(chunk.stage) + warp * S::kTileBytes + piece / S::kPieces * F::kTileBytes,
        piece % S::kPieces, static_cast<int>(threadIdx.x % 32), raw);
  }
  // Loads what comes after a piece: the next one of the chunk, or the first of the next chunk.
  __device__ __forceinline__ void load_next(int piece, int count, bool more) {
    if (piece + 1 < count) return load(piece + 1);
    leave(&rings.chunk_empty[chunk.stage]);
    chunk.next();
    if (more) enter();
  }
  // Not before this place.
  __device__ __forceinline__ void decode(uint4 (&to)[4], int piece) {
#pragma unroll
    for (int i = 0; i < F::kVectors; ++i) {
      uint4& v = raw.q[i];
      asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)::"memory");
    }
    F::decode(raw, piece % S::kPieces, static_cast<int>(threadIdx.x % 32), to);
  }
  // Where a piece of a chunk has its tokens.
  __device__ __forceinline__ int slot(int piece) const {
    return tokens.stage * S::kStagePieces + piece % S::kStagePieces;
  }
  __device__ __forceinline__ void wait_for(int piece) {
    barrier_wait(&rings.tokens_full[slot(piece)], tokens.parity);
  }
  // sum += a piece, or sum = it.
  __device__ __forceinline__ void multiply(float (&sum)[S::NT][4], const uint4 (&of)[4], int piece,
                                           bool adds) {
    wait_for(piece);
    const int part = S::kSplit ? static_cast<int>(threadIdx.x / 128) : 0;
    const uint64_t b = operand_at(rings.tokens + (slot(piece) * S::kParts + part) * S::kPieceBytes);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma(sum, of[k], b + k * kNextStep, adds || k > 0);
    wgmma_commit();
  }
  // The piece before has been multiplied; this one becomes it.
  __device__ __forceinline__ void pass(uint64_t*& before, int piece) {
    if (before != nullptr) leave(before);
    before = &rings.tokens_empty[slot(piece)];
    if ((piece + 1) % S::kStagePieces == 0) tokens.next();
  }
};

// sum = the next `count` pieces, of which the first stands decoded in the first operand, as what
// comes after them will.
template <class S>
__device__ __forceinline__ void sum_leaf(Way<S>& way, float (&sum)[S::NT][4], int count,
                                         bool last) {
  uint64_t* before = nullptr;
  for (int n = 0; n < count; n += kChunkPieces) {
    const int left = count - n;
    if (left >= kChunkPieces) {
#pragma unroll
      for (int piece = 0; piece < kChunkPieces; ++piece) {
        way.multiply(sum, way.a[piece % 2], piece, n > 0 || piece > 0);
        way.load_next(piece, kChunkPieces, left > kChunkPieces || !last);
        wgmma_wait<1>();
        way.pass(before, piece);
        way.decode(way.a[(piece + 1) % 2], (piece + 1) % kChunkPieces);
      }
    } else {
      for (int piece = 0; piece < kChunkPieces; ++piece) {
        if (piece < left) {
          way.multiply(sum, way.a[0], piece, n > 0 || piece > 0);
          way.load_next(piece, left, !last);
        } else {
          way.wait_for(piece);
        }
        wgmma_wait<0>();
        way.pass(before, piece);
        if (piece < left) way.decode(way.a[0], piece + 1 < left ? piece + 1 : 0);
      }
    }
  }
  wgmma_wait<0>();
  leave(before);
  written(sum);
}

template <class F>
__device__ __forceinline__ Work work_of(const ProductArgs& p, int64_t tokens) {
  return {p.weight.data,    p.weight.rows, p.weight.cols, p.act,  p.act_chunks,
          (tokens + 7) / 8, p.out,         p.out_stride,  tokens, p.bias,
          p.scale,          p.add != 0,    F::kUp};
}

// What finish does, for a warpgroup's 64 rows: sums pass through shared memory, so that a token's
// rows are written 16 bytes a thread.
template <int NT>
__device__ __forceinline__ void finish_rows(const Work& w, const float (&sum)[NT][4],
                                            int64_t row_tile, int64_t token_tile, float* room) {
  const int thread = static_cast<int>(threadIdx.x % 128), lane = thread % 32;
  const int64_t row = row_tile * 16 + lane % 16 * 4;
  const bool real = row < w.rows;
  float4 bias = {};
  if (w.bias != nullptr && real) {
    bias = make_float4(w.bias[row], w.bias[row + 1], w.bias[row + 2], w.bias[row + 3]);
  }
  const auto together = [&] {
    asm volatile("bar.sync %0, 128;" ::"r"(2 + static_cast<int>(threadIdx.x / 128)) : "memory");
  };
  const auto value = [&](float v, float b) {
    v = __fmul_rn(v, w.up);
    if (w.bias != nullptr) v = __fadd_rn(v, b);
    return __fmul_rn(v, w.scale);
  };
#pragma unroll
  for (int first = 0; first < NT; first += kOutTokens / 8) {
    together();
#pragma unroll
    for (int n = 0; n < kOutTokens / 8 * 4; ++n) {
      const int token = n / 4 * 8 + lane % 4 * 2 + n % 2;
      room[token * kOutStride + thread / 32 * 16 + lane / 4 + n % 4 / 2 * 8] =
          sum[first + n / 4][n % 4];
    }
    together();
#pragma unroll
    for (int n = 0; n < kOutTokens / 8; ++n) {
      const int at = n * 8 + thread / 16;
      const int64_t token = (token_tile + first) * 8 + at;
      if (!real || token >= w.tokens) continue;
      const float4 v = *reinterpret_cast<const float4*>(room + at * kOutStride + lane % 16 * 4);
      auto* to = reinterpret_cast<float4*>(w.out + token * w.out_stride + row);
      float4 out = {value(v.x, bias.x), value(v.y, bias.y), value(v.z, bias.z), value(v.w, bias.w)};
      if (w.add) {
        const float4 before = *to;
        out = {__fadd_rn(before.x, out.x), __fadd_rn(before.y, out.y), __fadd_rn(before.z, out.z),
               __fadd_rn(before.w, out.w)};
      }
      *to = out;
    }
  }
}

// Warpgroups: every tile's leaves from left to right.
template <class S>
__device__ __forceinline__ void walk(const Rings<S>& rings, const ProductList& list, int64_t tokens,
                                     int tiles, const Activations& act, float* room) {
  constexpr int NT = S::NT;
  using F = typename S::F;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const Leaves<S> leaves(list);
  Way<S> way{rings, {}, {}, {}, {}};
  each_tile<S>(list, tokens, tiles, [&](const ProductTile& tile) {
    float total[NT][4], sum[NT][4];
    way.enter();
    way.decode(way.a[0], 0);
    for (int leaf = 0; leaf < leaves.parts; ++leaf) {
      sum_leaf<S>(way, sum, leaves.count(leaf), leaf + 1 == leaves.parts);
#pragma unroll
      for (int j = 0; j < NT; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          total[j][i] = leaf == 0 ? sum[j][i] : __fadd_rn(total[j][i], sum[j][i]);
        }
      }
    }
    if constexpr (S::kGate) {
      finish_gated<NT, kGateRound, F>(act, list.of[warp / 4], total,
                                      reinterpret_cast<float4*>(room), tile.unit,
                                      tile.unit + S::kRowTiles, tile.token_tile);
      return;
    }
    const Work w = work_of<F>(list.of[tile.product], tokens);
    if (w.rows % 4 == 0 && whole_rows(w.out, w.out_stride)) {
      finish_rows<NT>(w, total, tile.unit + warp / 4 * 4, tile.token_tile,
                      room + warp / 4 * kOutTokens * kOutStride);
    } else {
      finish<NT>(w, total, tile.unit + warp, tile.token_tile, lane);
    }
  });
}

// Warpgroups: their leaves, whose sums take the place of stages.
template <class S>
__device__ __forceinline__ void leave_sums(const Rings<S>& rings, const ProductList& list,
                                           float4* shared) {
  constexpr int NT = S::NT;
  const int thread = static_cast<int>(threadIdx.x);
  const Leaves<S> leaves(list);
  Way<S> way{rings, {}, {}, {}, {}};
  float sum[S::kLeaves][NT][4];
  way.enter();
  way.decode(way.a[0], 0);
#pragma unroll
  for (int l = 0; l < S::kLeaves; ++l) {
    const int leaf = leaves.first + l;
    if (leaf < leaves.last) sum_leaf<S>(way, sum[l], leaves.count(leaf), leaf + 1 == leaves.last);
  }
  asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");  // nobody reads stages any more
#pragma unroll
  for (int l = 0; l < S::kLeaves; ++l) {
    if (leaves.first + l >= leaves.last) break;
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      const float(&v)[4] = sum[l][j];
      shared[(l * NT + j) * kConsumers + thread] = make_float4(v[0], v[1], v[2], v[3]);
    }
  }
}

// A warp adds 16 rows of 8 tokens at a time, leaves from left to right.
template <class S>
__device__ __forceinline__ void add_leaves(const ProductList& list, int64_t tokens,
                                           const float4* shared) {
  constexpr int NT = S::NT, kWarpsOfBlock = kConsumers / 32;
  const int thread = static_cast<int>(threadIdx.x);
  const Leaves<S> leaves(list);
  const int each = leaves.last - leaves.first;  // of a warpgroup
  const ProductTile tile =
      find_product_tile<NT, S::kRowTiles>(list, tokens, static_cast<int>(blockIdx.x));
  const Work w = work_of<typename S::F>(list.of[tile.product], tokens);
  for (int n = thread / 32 * kPair + static_cast<int>(blockIdx.z); n < NT * S::kRowTiles;
       n += kWarpsOfBlock * kPair) {
    const int row_tile = n % S::kRowTiles, token_tile = n / S::kRowTiles;
    const float4* place = shared + token_tile * kConsumers + row_tile * 32 + thread % 32;
    float4 of[kMostLeaves];
#pragma unroll
    for (int l = 0; l < kMostLeaves; ++l) {  // all of them on their way before one is added
      if (l >= leaves.parts) break;
      const int group = l / each;
      of[l] = from_block(place + l % each * NT * kConsumers + group % S::kParts * 128,
                         group / S::kParts);
    }
    float all[1][4] = {{of[0].x, of[0].y, of[0].z, of[0].w}};
#pragma unroll
    for (int l = 1; l < kMostLeaves; ++l) {
      if (l >= leaves.parts) break;
      const float part[4] = {of[l].x, of[l].y, of[l].z, of[l].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) all[0][i] = __fadd_rn(all[0][i], part[i]);
    }
    finish<1>(w, all, tile.unit + row_tile, tile.token_tile + token_tile, thread % 32);
  }
}
#endif

// Blocks: [as many as stay], or [tiles, 1, 2] if kSplit.
template <class S>
__global__ void __launch_bounds__(kThreads, 1)
    decode_kernel(const __grid_constant__ ProductList list, int64_t tokens, int tiles,
                  const __grid_constant__ Activations act) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ uint64_t chunk_full[S::kChunks], chunk_empty[S::kChunks];
  __shared__ uint64_t tokens_full[S::kTokens * S::kStagePieces],
      tokens_empty[S::kTokens * S::kStagePieces];
  let_next_start();
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    for (int s = 0; s < S::kChunks; ++s) {
      barrier_init(&chunk_full[s], 1);
      barrier_init(&chunk_empty[s], kConsumers / 32);
    }
    for (int s = 0; s < S::kTokens * S::kStagePieces; ++s) {
      barrier_init(&tokens_full[s], 1);
      barrier_init(&tokens_empty[s], kConsumers / 32);
    }
    barriers_ready();
  }
  __syncthreads();
  // Tokens first: their pieces are operands.
  const Rings<S> rings{shared + S::kTokens * S::kTokensBytes,
                       shared,
                       chunk_full,
                       chunk_empty,
                       tokens_full,
                       tokens_empty};
  if (thread >= kConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    const Leaves<S> leaves(list);
    if (thread == kConsumers) copy_rows<S>(rings, list, tokens, tiles, leaves);
    if (thread == kConsumers + 32) copy_tokens<S>(rings, list, tokens, tiles, leaves);
    __syncwarp();
    if constexpr (S::kSplit) {
      cluster_sync();
      cluster_sync();
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    wait();
    if constexpr (S::kSplit) {
      auto* sums = reinterpret_cast<float4*>(shared);
      leave_sums<S>(rings, list, sums);
      cluster_sync();
      add_leaves<S>(list, tokens, sums);
      cluster_sync();  // nobody leaves while others read here
    } else {
      walk<S>(rings, list, tokens, tiles, act, reinterpret_cast<float*>(shared + S::kRings));
    }
  }
#endif
}

template <class S>
int launch_decode(const ProductList& given, int64_t tokens, const Activations& act = {}) {
  const ProductList list = with_blocks(given, 16 * S::kRowTiles);
  const auto tiles = static_cast<int>(list.first_block[list.count] * ceil_div(tokens, S::NT * 8));
  const auto kernel = decode_kernel<S>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kShared);
  if (error != cudaSuccess) return static_cast<int>(error);
  const dim3 cluster(1, 1, S::kSplit ? kPair : 1);
  const int blocks = S::kSplit || tiles < multiprocessors ? tiles : multiprocessors;
  const dim3 grid(static_cast<unsigned>(blocks), 1, cluster.z);
  return launch_cluster(kernel, grid, dim3(kThreads), S::kShared, cluster, list, tokens, tiles,
                        act);
}

// Pairs of blocks that would share 64 rows each fill a wave or two.
template <int NT>
bool pairs_fit(const ProductList& list, int64_t tokens) {
  const int64_t pairs =
      int64_t{with_blocks(list, 64).first_block[list.count]} * ceil_div(tokens, NT * 8);
  return pairs * kPair <= 2 * multiprocessors;
}

template <class F, int NT>
int run(const ProductList& list, int64_t tokens) {
  const int64_t cols = list.of[0].weight.cols;  // all have as many
  // Leaves of one size.
  const bool split =
      leaves(cols) >= 4 && cols % (leaves(cols) * F::kUnit) == 0 && pairs_fit<NT>(list, tokens);
  return split ? launch_decode<Shape<F, NT, Split::kLeaves>>(list, tokens)
               : launch_decode<Shape<F, NT, Split::kRows>>(list, tokens);
}

}  // namespace

template <class F>
int run_decode(const ProductList& list, int64_t tokens) {
  if (tokens <= 64) return run<F, 8>(list, tokens);
  return run<F, 16>(list, tokens);
}

bool decode_gated_fits(int64_t rows, int64_t tokens) {
  ProductList both = {};
  both.count = 2;
  both.of[0].weight.rows = both.of[1].weight.rows = rows;
  return rows % 64 == 0 &&
         !(tokens <= 64 ? pairs_fit<8>(both, tokens) : pairs_fit<16>(both, tokens));
}

template <class F>
int run_decode_gated(const ProductList& gate_and_up, int64_t tokens, const Activations& act) {
  ProductList list = gate_and_up;
  list.count = 1;  // up's rows stand beside gate's
  return tokens <= 64 ? launch_decode<Shape<F, 8, Split::kGate>>(list, tokens, act)
                      : launch_decode<Shape<F, 16, Split::kGate>>(list, tokens, act);
}

#define FRESHET_DECODE(F)                                  \
  template int run_decode<F>(const ProductList&, int64_t); \
  template int run_decode_gated<F>(const ProductList&, int64_t, const Activations&);
FRESHET_DECODE(Q8_0)
FRESHET_DECODE(Q4_0)
FRESHET_DECODE(Q4_K)
FRESHET_DECODE(Q6_K)
FRESHET_DECODE(MXFP4)
FRESHET_DECODE(Int4G128)
FRESHET_DECODE(Int4G32)
#undef FRESHET_DECODE

}  // namespace freshet::cuda

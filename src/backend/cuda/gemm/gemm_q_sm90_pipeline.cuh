// GEMMs with quantised weights by wgmma (Hopper); weights are decoded into registers as its 64-row
// operand. This header has the shapes, the pipelines of weights and activations, and the sum of a
// split-K slice.
//
// Producer threads fill two pipelines by TMA bulk copies: weights with one copy per tile of 16 rows
// and chunk of 256 columns, issued before the previous kernel ends; activations with one copy per
// piece of 64 columns. Each consumer warpgroup multiplies 64 rows, and decodes a piece while the
// tensor cores work on the previous one. The last chunk of a slice may be shorter.
#pragma once

#include "backend/cuda/gemm/swiglu_epilogue.cuh"
#include "backend/cuda/mma/wgmma_bf16_rs.cuh"
#include "backend/cuda/runtime/pipeline.cuh"

namespace freshet::cuda::decode {

inline constexpr int kTokenBytes = kTokenTile * 64 * 2;  // a piece of a token tile
inline constexpr int kChunkPieces = 4;                   // pieces of 64 columns
inline constexpr int kPair = 2, kMostLeaves = 8;
inline constexpr int kOutTokens = 32,
                     kOutStride = 64 + 4;  // per token of a warpgroup's sums in the epilogue
inline constexpr int kGateRound = 4;       // token tiles that gate and up exchange at a time

// How work is split: warpgroups have different rows and all of K; or half of them have gate's rows
// and half up's; or the two blocks of a cluster share K.
enum class Split { kRows, kGate, kLeaves };

// NT: token tiles. kGroups: consumer warpgroups. kParts: parts into which a block's warpgroups
// split its share of K. kDeep: 2 if a warpgroup has two times 64 rows, which share the instructions
// for a piece of activations; of gate and up, the same rows of both. kAny: slices of a block's
// parts may have two sizes.
template <class F_, int NT_, Split split, int kGroups_ = 2, int kParts_ = 1, int kDeep_ = 1,
          bool kAny_ = false>
struct Shape {
  using F = F_;
  static constexpr int NT = NT_, kGroups = kGroups_, kParts = kParts_, kDeep = kDeep_;
  static constexpr bool kAny = kAny_;
  static constexpr bool kGate = split == Split::kGate;
  static constexpr bool kSplit = split == Split::kLeaves;
  static_assert(kSplit || kParts == 1);
  static_assert(!kAny || kParts > 1);
  static_assert(kDeep == 1 || (kDeep == 2 && !kSplit && kGroups == 2));
  // A warpgroup has two of gate's tiles and two of up's.
  static constexpr bool kMixed = kGate && kGroups > 2;
  static constexpr int kConsumers = kGroups * 128;
  static constexpr int kThreads = kConsumers + 128;    // a whole producer warpgroup, for setmaxnreg
  static constexpr int kCopies = kGroups * kDeep * 4;  // 16-row tiles per chunk
  static constexpr int kRowTiles = kCopies / kParts / (kGate ? 2 : 1);       // per GEMM
  static constexpr int kPieces = F::kUnit / 64;                              // per unit
  static constexpr int kTileBytes = kChunkPieces / kPieces * F::kTileBytes;  // per chunk
  static constexpr int kChunkBytes = kCopies * kTileBytes;
  // Floats of shared memory through which the epilogue passes a warpgroup's sums.
  static constexpr int kOutFloats = kMixed ? NT * 64 * 4 : kOutTokens * kOutStride;
  static constexpr int kOutBytes = kSplit ? 0 : kGroups * kOutFloats * 4;
  static constexpr int kRoom = (223 << 10) - kOutBytes;
  // A stage of activations: pieces of each part.
  static constexpr int kPieceBytes = NT * kTokenBytes;
  static constexpr int kStagePieces = kGroups > 2 ? (kParts* NT > 16 ? 1 : 2) : kParts > 1 ? 2 : 4;
  static constexpr int kTokensBytes = kStagePieces * kParts * kPieceBytes;
  static constexpr int kChunks = 3 * kChunkBytes + 2 * kTokensBytes <= kRoom ? 3 : 2;
  static constexpr int kMostTokens = (kRoom - kChunks * kChunkBytes) / kTokensBytes;
  static constexpr int kTokens = kMostTokens < 16 / kStagePieces ? kMostTokens : 16 / kStagePieces;
  static_assert(kTokens >= 2);
  static constexpr int kRings = kChunks * kChunkBytes + kTokens * kTokensBytes;
  static constexpr int kShared = kRings + kOutBytes;
  static constexpr int kLeaves = kMostLeaves / kPair / kParts;  // per warpgroup, at most
  // With few tokens, waits for the next piece's activations before decoding it: they arrive in
  // time, and testing the barrier takes longer than their copy.
  static constexpr bool kWaitsAhead = NT <= 4;
  // Two operands alternate if there are enough registers.
  static constexpr int kOperands = kSplit && kGroups > 2 && kLeaves* NT > 8 ? 1 : 2;
  static constexpr int kRound = kGateRound < NT / 2 ? kGateRound : NT / 2;
  static_assert(!kGate || kMixed || kOutBytes >= kExchangeBytes<kRound>);
  // Sums of the slices, followed by the epilogue's, reuse the pipelines' memory.
  static constexpr int kSumsBytes = kLeaves * NT * 16 * kConsumers;
  static_assert(!kSplit || kShared >= kSumsBytes + NT * 4 * (kRowTiles * 16 + 4) * 4);
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// How K is cut, in pieces. All GEMMs of a list have the same number of columns, and the number of
// slices is a power of two. A block's first part takes slices [first, last), and each other part
// the same number of following ones, which are `apart` pieces apart if all are of one size. Parts
// process their slices side by side, in as many chunks as the longest one needs.
struct Chunk {
  int piece, count;  // count 0: none
};
template <class S>
struct Leaves {
  int units, parts, shift, first, last, apart;
  __device__ __forceinline__ explicit Leaves(const ProductList& list)
      : Leaves(list.of[0].weight.cols) {}
  __device__ __forceinline__ explicit Leaves(int64_t cols)
      : units(static_cast<int>((cols + S::F::kUnit - 1) / S::F::kUnit)),
        parts(leaves(cols)),
        shift(__ffs(parts) - 1),
        first(0),
        last(parts),
        apart(0) {
    if (!S::kSplit) return;
    last = parts / kPair / S::kParts;
    apart = edge(last);
    first += static_cast<int>(blockIdx.z) * S::kParts * last;
    last += first;
  }
  __device__ __forceinline__ int edge(int leaf) const {
    return (units * leaf >> shift) * S::kPieces;
  }
  __device__ __forceinline__ int count(int leaf) const { return edge(leaf + 1) - edge(leaf); }
  // The slice of another part that is processed together with this slice of the first part.
  __device__ __forceinline__ int beside(int leaf, int part) const {
    return leaf + part * (last - first);
  }
  // Chunks of a slice of the first part, and of the slices processed together with it.
  __device__ __forceinline__ int chunks(int leaf) const {
    int most = 0;
#pragma unroll
    for (int part = 0; part < S::kParts; ++part) most = max(most, count(beside(leaf, part)));
    return (most + kChunkPieces - 1) / kChunkPieces;
  }
  __device__ __forceinline__ Chunk chunk(int leaf, int number, int part) const {
    const int its = beside(leaf, part), piece = edge(its) + number * kChunkPieces;
    return {piece, min(kChunkPieces, max(0, edge(its + 1) - piece))};
  }
};

// A stage of activations has a barrier per piece, or per part.
template <class S>
struct Barriers {
  uint64_t chunk_full[S::kChunks], chunk_empty[S::kChunks];
  uint64_t tokens_full[S::kTokens * S::kStagePieces], tokens_empty[S::kTokens * S::kStagePieces];

  __device__ __forceinline__ Pipeline chunks() { return {chunk_full, chunk_empty}; }
  __device__ __forceinline__ Pipeline tokens() { return {tokens_full, tokens_empty}; }
};
template <class S>
struct Rings {
  uint8_t *chunks, *tokens;
  Barriers<S>* barriers;
  __device__ __forceinline__ uint8_t* chunk(int stage) const {
    return chunks + stage * S::kChunkBytes;
  }
};

// Redistributes registers: first producers release theirs, then consumers take them.
template <class S>
__device__ __forceinline__ void give_registers() {
  if constexpr (S::kGroups == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
  if constexpr (S::kGroups >= 3) asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
}
template <class S>
__device__ __forceinline__ void take_registers() {
  if constexpr (S::kGroups == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  if constexpr (S::kGroups == 3) asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
  if constexpr (S::kGroups == 4) asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
  if constexpr (S::kGroups == 5) asm volatile("setmaxnreg.inc.sync.aligned.u32 88;");
}

// The tile of a block. With a single token tile it needs no divisions, which take a third of a
// microsecond.
template <class S>
__device__ __forceinline__ ProductTile find_tile(const ProductList& list, int64_t tokens,
                                                 int index) {
  if (tokens > S::NT * 8) return find_product_tile<S::NT, S::kRowTiles>(list, tokens, index);
  int product = 0;
  while (product + 1 < list.count && index >= list.first_block[product + 1]) ++product;
  return {product, static_cast<int64_t>(index - list.first_block[product]) * S::kRowTiles, 0};
}

// Calls body(tile) for each tile of a block. Below: body(first piece, count) for each chunk.
template <class S, class Body>
__device__ __forceinline__ void each_tile(const ProductList& list, int64_t tokens, int tiles,
                                          const Body& body) {
  for (int index = static_cast<int>(blockIdx.x); index < tiles;
       index += static_cast<int>(gridDim.x)) {
    body(find_tile<S>(list, tokens, index));
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

// Producer threads for weights, and for activations: issuing a copy takes a thread 75 ns plus 10 to
// 15 ns per KiB, so that a single thread would be slower than memory.
inline constexpr int kRowThreads = 2, kTokenThreads = 2;
// The `thread`-th producer of weights: copies a tile's weights, from `panel` on and in `up`;
// `step`: stride to the next panel, of which there are `below` more.
template <class S>
__device__ __forceinline__ void copy_tile_rows(const Rings<S>& rings, PipelineState& turn,
                                               const Leaves<S>& leaves, int thread,
                                               const uint8_t* panel, const uint8_t* up,
                                               int64_t step, int below) {
  using F = typename S::F;
  constexpr int kSide = kPanelTiles<F>, kMine = S::kCopies / kRowThreads;  // tiles
  static_assert(kMine % S::kRowTiles == 0 || S::kRowTiles % kMine == 0);
  static_assert(kMine % kSide == 0 && S::kRowTiles % kSide == 0);
  each_chunk(leaves, [&](int piece, int count) {
    const uint8_t* from = panel + piece / S::kPieces * kUnitStep<F>;
    const auto bytes = static_cast<uint32_t>(count / S::kPieces * kUnitStep<F>);
    const Pipeline pipe = rings.barriers->chunks();
    uint64_t* full = pipe.filled(turn.stage);
    pipe.acquire(turn);
    pipe.expect(turn.stage, kMine / kSide * bytes);
    uint8_t* to = rings.chunk(turn.stage) + thread * kMine * S::kTileBytes;
    int part = thread * kMine / S::kRowTiles, first = thread * kMine % S::kRowTiles / kSide;
#pragma unroll 1
    for (int left = kMine / kSide; left > 0; ++part, first = 0) {
      const uint8_t* row = S::kGate && part > 0
                               ? up + piece / S::kPieces * kUnitStep<F>
                               : from + part * (leaves.apart / S::kPieces * kUnitStep<F>);
      row += min(first, below) * step;
#pragma unroll 1
      for (int t = first; t < S::kRowTiles / kSide && left > 0; ++t, --left) {
        bulk_copy(to, row, bytes, full);
        if (t < below) row += step;
        to += kSide * S::kTileBytes;
      }
    }
    turn.next(S::kChunks);
  });
}

// The same for parts whose slices may have two sizes: calls body(slice, index) for each chunk of a
// slice of the first part.
template <class S, class Body>
__device__ __forceinline__ void each_chunk_of_parts(const Leaves<S>& leaves, const Body& body) {
  for (int leaf = leaves.first; leaf < leaves.last; ++leaf) {
    const int chunks = leaves.chunks(leaf);
    for (int number = 0; number < chunks; ++number) body(leaf, number);
  }
}

template <class S>
__device__ __forceinline__ void copy_parts_rows(const Rings<S>& rings, PipelineState& turn,
                                                const Leaves<S>& leaves, int thread,
                                                const uint8_t* panel, int64_t step, int below) {
  using F = typename S::F;
  constexpr int kMyParts = S::kParts / kRowThreads, kTiles = S::kRowTiles;
  static_assert(kPanelTiles<F> == 1 && kMyParts > 0);
  each_chunk_of_parts(leaves, [&](int leaf, int number) {
    const Pipeline pipe = rings.barriers->chunks();
    uint64_t* full = pipe.filled(turn.stage);
    pipe.acquire(turn);
    uint32_t pieces = 0;
#pragma unroll
    for (int n = 0; n < kMyParts; ++n) {
      pieces += leaves.chunk(leaf, number, thread * kMyParts + n).count;
    }
    pipe.expect(turn.stage, pieces / S::kPieces * kTiles * F::kTileBytes);
    uint8_t* to = rings.chunk(turn.stage) + thread * kMyParts * kTiles * S::kTileBytes;
#pragma unroll 1
    for (int n = 0; n < kMyParts; ++n) {
      const Chunk chunk = leaves.chunk(leaf, number, thread * kMyParts + n);
      const auto bytes = static_cast<uint32_t>(chunk.count / S::kPieces * F::kTileBytes);
      const uint8_t* row = panel + chunk.piece / S::kPieces * F::kTileBytes;
#pragma unroll 1
      for (int t = 0; t < kTiles; ++t) {
        if (bytes > 0) bulk_copy(to, row, bytes, full);
        if (t < below) row += step;
        to += S::kTileBytes;
      }
    }
    turn.next(S::kChunks);
  });
}

template <class S>
__device__ __forceinline__ void copy_parts_tokens(const Rings<S>& rings, PipelineState& turn,
                                                  const Leaves<S>& leaves, int thread,
                                                  const uint8_t* act, int64_t token_step,
                                                  uint32_t bytes) {
  each_chunk_of_parts(leaves, [&](int leaf, int number) {
    uint32_t from[S::kParts], counts = 0;  // in pieces of activations; four bits each
#pragma unroll
    for (int part = 0; part < S::kParts; ++part) {
      const Chunk chunk = leaves.chunk(leaf, number, part);
      from[part] = static_cast<uint32_t>(chunk.piece);
      counts |= static_cast<uint32_t>(chunk.count) << part * 4;
    }
#pragma unroll 1
    for (uint32_t n = 0; n < kChunkPieces; ++n) {
      const int at = turn.stage * S::kStagePieces + n % S::kStagePieces;
      if (n % kTokenThreads == thread) {
        const Pipeline pipe = rings.barriers->tokens();
        uint64_t* full = pipe.filled(at);
        pipe.acquire({at, turn.phase});
        uint32_t there = 0;
#pragma unroll
        for (int part = 0; part < S::kParts; ++part) there += n < (counts >> part * 4 & 15) ? 1 : 0;
        if (there > 0) {
          pipe.expect(at, there * bytes);
#pragma unroll
          for (int part = 0; part < S::kParts; ++part) {
            if (n >= (counts >> part * 4 & 15)) continue;
            bulk_copy(rings.tokens + (at * S::kParts + part) * S::kPieceBytes,
                      act + (from[part] + n) * token_step, bytes, full);
          }
        } else {
          pipe.arrive(at);
        }
      }
      if ((n + 1) % S::kStagePieces == 0) turn.next(S::kTokens);
    }
  });
}

// Weights are requested before the previous kernel has ended.
template <class S>
__device__ __forceinline__ void copy_rows(const Rings<S>& rings, const ProductList& list,
                                          int64_t tokens, int tiles, const Leaves<S>& leaves,
                                          int thread) {
  // Stride to the next 16 rows.
  const int64_t step = tile_at<typename S::F>(1, list.of[0].weight.cols);
  PipelineState turn;
  each_tile<S>(list, tokens, tiles, [&](const ProductTile& tile) {
    const WeightView& w = list.of[tile.product].weight;
    const uint8_t* up = S::kGate ? list.of[1].weight.data + tile.unit * step : nullptr;
    const int below = static_cast<int>((w.rows + 15) / 16 - 1 - tile.unit);
    const uint8_t* panel = w.data + tile.unit * step;
    if constexpr (S::kAny) {
      copy_parts_rows<S>(rings, turn, leaves, thread, panel, step, below);
    } else {
      copy_tile_rows<S>(rings, turn, leaves, thread, panel, up, step, below);
    }
  });
}

// One of kTokenThreads producers of activations, which take pieces in turn: `bytes` of a token tile
// per piece, `token_step` apart.
template <class S>
__device__ __forceinline__ void copy_tile_tokens(const Rings<S>& rings, PipelineState& turn,
                                                 const Leaves<S>& leaves, int thread,
                                                 const uint8_t* act, int64_t token_step,
                                                 uint32_t bytes) {
  each_chunk(leaves, [&](int piece, int count) {
    const uint8_t* from = act + piece * token_step;
#pragma unroll 1
    for (int n = 0; n < kChunkPieces; ++n) {
      const int at = turn.stage * S::kStagePieces + n % S::kStagePieces;
      if (n % kTokenThreads == thread) {
        const Pipeline pipe = rings.barriers->tokens();
        uint64_t* full = pipe.filled(at);
        pipe.acquire({at, turn.phase});
        if (n < count) {
          pipe.expect(at, S::kParts * bytes);
          for (int part = 0; part < S::kParts; ++part) {
            bulk_copy(rings.tokens + (at * S::kParts + part) * S::kPieceBytes,
                      from + part * leaves.apart * token_step, bytes, full);
          }
        } else {
          pipe.arrive(at);
        }
      }
      from += token_step;
      if ((n + 1) % S::kStagePieces == 0) turn.next(S::kTokens);
    }
  });
}

template <class S>
__device__ __forceinline__ void copy_tokens(const Rings<S>& rings, const ProductList& list,
                                            int64_t tokens, int tiles, const Leaves<S>& leaves,
                                            int thread) {
  const int64_t act_tiles = (tokens + 7) / 8, token_step = act_tiles * kTokenBytes;
  PipelineState turn;
  each_tile<S>(list, tokens, tiles, [&](const ProductTile& tile) {
    const auto bytes =
        static_cast<uint32_t>(min(int64_t{S::NT}, act_tiles - tile.token_tile) * kTokenBytes);
    wait();  // after the addresses are computed
    const uint8_t* act = list.of[tile.product].act + tile.token_tile * kTokenBytes;
    if constexpr (S::kAny) {
      copy_parts_tokens<S>(rings, turn, leaves, thread, act, token_step, bytes);
    } else {
      copy_tile_tokens<S>(rings, turn, leaves, thread, act, token_step, bytes);
    }
  });
}

// Runs copy_rows(thread) and copy_tokens(thread) in the producer threads, which follow the consumer
// warpgroups.
template <class S, class Rows, class Tokens>
__device__ __forceinline__ void copy_both(const Rows& copy_rows, const Tokens& copy_tokens) {
  const int thread = static_cast<int>(threadIdx.x) - S::kConsumers, warp = thread / 32;
  if (thread % 32 != 0) return;
  if (warp < kRowThreads) {
    copy_rows(warp);
  } else {
    copy_tokens(warp - kRowThreads);
  }
}

// Called by all threads of a block. Activations come first in memory, since they are wgmma
// operands.
template <class S>
__device__ __forceinline__ Rings<S> start_rings(uint8_t* shared, Barriers<S>& barriers) {
  if (threadIdx.x < 32) {
    const int s = static_cast<int>(threadIdx.x);
    static_assert(S::kChunks <= 32 && S::kTokens * S::kStagePieces <= 32);
    if (s < S::kChunks) barriers.chunks().init_stage(s, S::kConsumers / 32, kRowThreads);
    if (s < S::kTokens * S::kStagePieces) barriers.tokens().init_stage(s, S::kConsumers / 32);
    barriers_ready();
  }
  __syncthreads();
  return {shared + S::kTokens * S::kTokensBytes, shared, &barriers};
}

// A consumer warp's path through the pipelines: 16 rows of weights. A piece is loaded while the
// previous one is multiplied, and then decoded into one of two operands.
template <class S>
struct Way {
  using F = typename S::F;
  const Rings<S>& rings;
  // Byte offsets within Barriers.
  static constexpr uint32_t kChunkEmpty = S::kChunks * 8, kTokensFull = 2 * kChunkEmpty;
  static constexpr uint32_t kTokensEmpty = kTokensFull + S::kTokens * S::kStagePieces * 8;
  PipelineState chunk, tokens;
  uint32_t ring,
      stage;          // low bits of the descriptors of the activations' pipeline and its next stage
  uint32_t barriers;  // address in shared memory
  Piece raw;
  uint4 a[S::kOperands][4];

  __device__ __forceinline__ explicit Way(const Rings<S>& r) : rings(r) {
    const int warp = static_cast<int>(threadIdx.x / 32);
    const int part = S::kParts > 1 ? warp / (S::kConsumers / 32 / S::kParts) : 0;
    ring = static_cast<uint32_t>(operand_at(rings.tokens + part * S::kPieceBytes));
    barriers = shared_address(rings.barriers);
    asm volatile("" : "+r"(barriers));  // keep it in a register instead of recomputing it
    find_stage();
  }
  __device__ __forceinline__ void enter() {
    chunks().wait(chunk);
    load(0);
  }
  __device__ __forceinline__ void load(int piece, int deep = 0) {
    const int warp = static_cast<int>(threadIdx.x / 32);
    const int tile = S::kMixed ? warp % 4 / 2 * S::kRowTiles + warp / 4 * 2 + warp % 2
                               : deep * S::kGroups * 4 + warp;
    constexpr int kSide = kPanelTiles<F>;  // tiles side by side
    F::template load<FromShared>(rings.chunk(chunk.stage) + tile / kSide * (kSide * S::kTileBytes) +
                                     piece / S::kPieces * kUnitStep<F> +
                                     tile % kSide * F::kTileBytes,
                                 piece % S::kPieces, static_cast<int>(threadIdx.x % 32), raw);
  }
  // Loads the weights after a piece: the next piece of the chunk, or the first of the next chunk.
  // `others`: chunks in between that only other parts have.
  __device__ __forceinline__ void load_next(int piece, int count, bool more, int others) {
    if (piece + 1 < count) return load(piece + 1);
    __syncwarp();
    chunks().release(chunk.stage);
    chunk.next(S::kChunks);
    if constexpr (S::kAny) {
      for (; others > 0; --others) {
        chunks().wait(chunk);
        chunks().release(chunk.stage);
        chunk.next(S::kChunks);
      }
    }
    if (more) enter();
  }
  // Keeps the compiler from decoding earlier than here.
  __device__ __forceinline__ void decode(uint4 (&to)[4], int piece) {
#pragma unroll
    for (int i = 0; i < F::kVectors; ++i) {
      uint4& v = raw.q[i];
      asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)::"memory");
    }
    F::decode(raw, piece % S::kPieces, static_cast<int>(threadIdx.x % 32), to);
  }
  // Computed as a warp-uniform value, so that it stays in a uniform register for wgmma.
  __device__ __forceinline__ void find_stage() {
    constexpr uint32_t kStep = S::kTokensBytes >> 4;
    stage = __shfl_sync(0xffffffff, ring + tokens.stage * kStep, 0);
  }
  __device__ __forceinline__ PipelineAt chunks() const {
    return {barriers, barriers + kChunkEmpty};
  }
  // The barriers of a piece's activations, as a pipeline of one stage. Only the address of `full`
  // is kept, since `empty` is at a constant offset.
  static __device__ __forceinline__ PipelineAt piece_at(uint32_t full) {
    return {full, full + (kTokensEmpty - kTokensFull)};
  }
  __device__ __forceinline__ uint32_t of_piece(int piece) const {
    return barriers + kTokensFull + (tokens.stage * S::kStagePieces + piece % S::kStagePieces) * 8;
  }
  __device__ __forceinline__ void wait_for(int piece) {
    piece_at(of_piece(piece)).wait({0, tokens.phase});
  }
  // sum += a piece whose activations have arrived, or sum = it.
  __device__ __forceinline__ void multiply(float (&sum)[S::NT][4], const uint4 (&of)[4], int piece,
                                           bool adds) {
    constexpr uint32_t kStep = S::kParts * S::kPieceBytes >> 4;
    const uint32_t at = stage + piece % S::kStagePieces * kStep;
    constexpr uint64_t kUpper = uint64_t{1024 >> 4} << 32;  // as in operand_at()
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      wgmma(sum, of[k], kUpper | (at + k * static_cast<uint32_t>(kNextStep)), adds || k > 0);
    }
    wgmma_commit();
  }
  static __device__ __forceinline__ void leave_piece(uint32_t full) { piece_at(full).release(0); }
  __device__ __forceinline__ void next_piece(int piece) {
    if ((piece + 1) % S::kStagePieces != 0) return;
    tokens.next(S::kTokens);
    find_stage();
  }
  // Skips the activations of a chunk for which this warp has no weights.
  __device__ __forceinline__ void skip_chunk() {
    for (int piece = 0; piece < kChunkPieces; ++piece) {
      wait_for(piece);
      leave_piece(of_piece(piece));
      next_piece(piece);
    }
  }
};

// A warpgroup's sums, and those of 64 rows.
template <class S>
using Sums = float[S::kDeep * S::NT][4];
template <class S>
__device__ __forceinline__ float (&sums_of(Sums<S>& sums, int deep))[S::NT][4] {
  return reinterpret_cast<float(&)[S::NT][4]>(sums[deep * S::NT]);
}

// Multiplies a chunk of kChunkPieces: sum += it, or sum = it. On entry its first piece is decoded
// in the first operand, on exit the first piece of the next chunk. `before`: the previous piece,
// which is released once this chunk's first wgmma has started.
template <class S>
__device__ __forceinline__ void sum_chunk(Way<S>& way, Sums<S>& sum, uint32_t& before, bool first,
                                          bool more, int others) {
  constexpr int kOperands = S::kOperands, kDeep = S::kDeep;
#pragma unroll
  for (int step = 0; step < kChunkPieces * kDeep; ++step) {
    const int piece = step / kDeep, deep = step % kDeep, next = (step + 1) / kDeep;
    const bool ends = deep + 1 == kDeep;
    const uint32_t its = way.of_piece(piece);
    if (ends) {
      way.load_next(piece, kChunkPieces, more, others);
    } else {
      way.load(piece, deep + 1);
    }
    if (!S::kWaitsAhead && deep == 0) way.wait_for(piece);
    way.multiply(sums_of<S>(sum, deep), way.a[step % kOperands], piece, !first || piece > 0);
    if (ends) way.next_piece(piece);
    wgmma_wait<kOperands - 1>();
    if (kOperands == 1) {
      way.leave_piece(its);
    } else if (deep == 0 && (piece > 0 || !first)) {
      way.leave_piece(before);
    }
    before = its;
    if (S::kWaitsAhead && ends && (next < kChunkPieces || more)) way.wait_for(next);
    way.decode(way.a[(step + 1) % kOperands], next % kChunkPieces);
  }
}

// sum = the next `count` pieces; other parts have `others` more chunks.
template <class S>
__device__ __forceinline__ void sum_leaf(Way<S>& way, Sums<S>& sum, int count, bool last,
                                         int others = 0) {
  uint32_t before = 0;
  int n = 0;
  if (S::kWaitsAhead) way.wait_for(0);
  for (; n + kChunkPieces <= count; n += kChunkPieces) {
    const bool more = n + kChunkPieces < count;
    sum_chunk(way, sum, before, n == 0, more || !last, more ? 0 : others);
  }
  wgmma_wait<0>();
  if (n > 0 && S::kOperands > 1) way.leave_piece(before);
  const int left = count - n;
  for (int piece = 0; left > 0 && piece < kChunkPieces; ++piece) {
    way.wait_for(piece);
    const uint32_t its = way.of_piece(piece);
    if (piece < left) {
      if constexpr (S::kDeep > 1) {
        way.load(piece, 1);
        way.multiply(sums_of<S>(sum, 0), way.a[0], piece, n > 0 || piece > 0);
        wgmma_wait<0>();
        way.decode(way.a[0], piece);
      }
      way.load_next(piece, left, !last, others);
      way.multiply(sums_of<S>(sum, S::kDeep - 1), way.a[0], piece, n > 0 || piece > 0);
    }
    wgmma_wait<0>();
    way.leave_piece(its);
    way.next_piece(piece);
    if (piece < left) way.decode(way.a[0], piece + 1 < left ? piece + 1 : 0);
  }
  if constexpr (S::kAny) {
    for (; others > 0; --others) way.skip_chunk();
  }
  written(sum);
}
#endif

}  // namespace freshet::cuda::decode

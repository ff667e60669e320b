// The pipeline of FP8 GEMMs for many tokens: the layout of a stage, its producers, and the
// consumers' view of it (gemm_fp8_sm90_m65.cuh).
//
// Four producer threads fill stages of 128 columns by TMA bulk copies: 64 G tokens, on the 64-row
// side of wgmma, and NT tiles of 8 rows. The two blocks of a cluster may share the rows: each
// copies half of them to both blocks by multicast.
#pragma once

#include "backend/cuda/gemm/gemm_fp8_sm90.cuh"
#include "backend/cuda/runtime/pipeline.cuh"

namespace freshet::cuda {

inline constexpr int kManyBytes = 222 << 10;  // shared memory
inline constexpr int kMostStages = 32;

// Producer warps, of which one thread each fills the pipeline, stage by stage in turn: a single
// thread would take longer to issue a stage's copies than memory to deliver them. (setmaxnreg works
// on whole warpgroups only.)
inline constexpr int kProducers = 4;

template <int G, int NT>
struct Fp8Shape {
  static constexpr int kConsumers = G * 128;
  static constexpr int kTokenTiles = G * 8;
  static constexpr int kThreads = kConsumers + kProducers * 32;
};

// The pipeline's layout: `count` stages, each with `width` token tiles, then the codes of all rows,
// then their scales.
struct Fp8Stages {
  int count, bytes, width;
};
template <int G, int NT>
Fp8Stages fp8_stages(int64_t tokens, int budget) {  // at least a stage per producer
  using S = Fp8Shape<G, NT>;
  const auto tiles = static_cast<int>(ceil_div(tokens, kTokenTile));
  const int width = tiles < S::kTokenTiles ? tiles : S::kTokenTiles;
  const int bytes = (width + NT) * kE4M3TileBytes;
  // Bytes that wgmma reads beyond the last stage.
  const int beyond = S::kTokenTiles * kE4M3TileBytes - bytes;
  const int count = (budget - (beyond > 0 ? beyond : 0)) / bytes;
  return {count < kMostStages ? count : kMostStages, bytes, width};
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
struct Fp8Ring {
  Fp8Stages of;
  uint8_t* stages;
  Pipeline pipe;
  int blocks;  // blocks that release a stage before it is filled again
  PipelineState at;
  __device__ __forceinline__ void next() { at.advance(of.count, kProducers); }
};

// Called by all threads of a block.
template <class Shape>
__device__ __forceinline__ Fp8Ring fp8_ring(const Fp8Stages& of, uint8_t* stages, uint64_t* full,
                                            uint64_t* empty, int blocks = 1) {
  const Pipeline pipe{full, empty};
  if (threadIdx.x == Shape::kConsumers) pipe.init(of.count, Shape::kConsumers / 32 * blocks);
  __syncthreads();
  return {of, stages, pipe, blocks};
}

// Copies to the same address in both blocks of a cluster, and signals the barrier at the same
// address in each.
__device__ __forceinline__ void copy_to_both(uint32_t to, const uint8_t* from, uint32_t bytes,
                                             uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "h"(static_cast<uint16_t>(3))
      : "memory");
}

__device__ __forceinline__ Tour tour_of(int tiles, int blocks) {
  const auto block = static_cast<int>(blockIdx.x), all = static_cast<int>(gridDim.x);
  return {block / blocks, all / blocks, tiles, blocks, block % blocks};
}
// Cluster barrier for all threads: before the first remote write, and before a block that others
// write to exits.
__device__ __forceinline__ void cluster_meet() {
  __syncwarp();
  cluster_begun();
  cluster_wait();
}

// A consumer warp's view of the pipeline. A K step is a single dependency chain from the barrier to
// the scaled sums, so its latency is its time: addresses are computed once, advanced from stage to
// stage, and `kept` from being recomputed.
struct Fp8Reader {
  const uint8_t* stages;
  int bytes, count, scales_at, blocks;
  uint32_t tokens_at, rows_at;  // operands in stage 0
  PipelineAt pipe;
  PipelineState at;
  int offset = 0;                                             // of the current stage
  __device__ __forceinline__ const uint8_t* scales() const {  // row scales of the current stage
    return stages + offset + scales_at;
  }
  __device__ __forceinline__ void wait_full() const { pipe.wait(at); }
  __device__ __forceinline__ bool is_full() const { return pipe.is_full(at); }
  __device__ __forceinline__ void next() {
    offset += bytes;
    if (at.next(count)) offset = 0;
  }
  __device__ __forceinline__ void release(int stage) const {
    pipe.release_to_blocks(stage, blocks);
  }
};
// `tiles`: 8-row tiles per stage.
__device__ __forceinline__ Fp8Reader fp8_reader(const Fp8Ring& ring, int tiles) {
  const uint8_t* tokens = ring.stages + warp_index() / 4 * (8 * kE4M3TileBytes);
  const uint8_t* rows = ring.stages + ring.of.width * kE4M3TileBytes;
  return {ring.stages,
          ring.of.bytes,
          ring.of.count,
          ring.of.width * kE4M3TileBytes + tiles * kTileCodes,
          ring.blocks,
          kept_place(tokens),
          kept_place(rows),
          {kept(shared_address(ring.pipe.full)), kept(shared_address(ring.pipe.empty))}};
}

// sum = a K step of 64 tokens and NT row tiles; complete after wgmma_wait().
template <int NT>
__device__ __forceinline__ void fp8_ask(float (&sum)[NT][4], uint32_t tokens, uint32_t rows) {
  fp8_multiply<kE4M3TileBytes, kTileCodes>(sum, tokens, rows);
}

__device__ __forceinline__ int steps_of(const WeightView& w) {
  return static_cast<int>((w.cols + kE4M3Cols - 1) / kE4M3Cols);
}
__device__ __forceinline__ int64_t panels_of(const WeightView& w) {
  return (w.rows + kPanelRows - 1) / kPanelRows;
}

// A producer's progress.
struct Fp8Filling {
  int at, before;  // its next stage, and the tile's first, both counted from the start
  bool waited;
};
// Fills a producer's share of a tile's `steps` stages. copy_rows(to, step, barrier) copies
// row_bytes of weights: the first ones before the previous kernel has ended, tokens only after
// that.
template <class CopyRows>
__device__ __forceinline__ void fp8_fill(Fp8Ring& ring, Fp8Filling& filling, int steps,
                                         uint32_t row_bytes, const CopyRows& copy_rows,
                                         const uint8_t* tokens, int64_t token_step,
                                         uint32_t token_bytes) {
  const auto ask_rows = [&](int n, int stage) {
    ring.pipe.expect(stage, row_bytes + token_bytes);
    copy_rows(ring.stages + stage * ring.of.bytes + ring.of.width * kE4M3TileBytes, n,
              ring.pipe.filled(stage));
  };
  const auto ask_tokens = [&](int n, int stage) {
    if (token_bytes == 0) return;
    bulk_copy(ring.stages + stage * ring.of.bytes, tokens + n * token_step, token_bytes,
              ring.pipe.filled(stage));
  };
  if (!filling.waited) {
    const int most = min(steps, ring.of.count);
    for (int n = filling.at; n < most; n += kProducers) ask_rows(n, n);
    wait();
    for (; filling.at < most; filling.at += kProducers, ring.next()) {
      ask_tokens(filling.at, filling.at);
    }
    filling.waited = true;
  }
  for (; filling.at < filling.before + steps; filling.at += kProducers, ring.next()) {
    if (filling.at >= ring.of.count) ring.pipe.acquire(ring.at);
    ask_rows(filling.at - filling.before, ring.at.stage);
    ask_tokens(filling.at - filling.before, ring.at.stage);
  }
  filling.before += steps;
}

// Which rows of a tile share scales.
struct Fp8Scaled {
  enum How : int32_t { kRows, kSteps, kMixed } how;
  uint32_t of_rows;  // tiles of 8 rows with one scale per row, as a bit mask
  // The mask if `how` is known at compile time.
  template <How kHow>
  __device__ __forceinline__ uint32_t rows_of() const {
    return kHow == kRows ? ~0u : kHow == kSteps ? 0 : of_rows;
  }
};
// The kind of scales of a tile's panels, loaded one tile ahead so that nothing waits for it.
template <int NT>
struct Fp8Noted {
  static constexpr int kSame = NT % 8 == 0 ? 8 : NT % 4 == 0 ? 4 : 2;  // tiles of the same panel
  int how[NT / kSame];
  // panel_of(j): address of the j-th tile's entry.
  template <class PanelOf>
  __device__ __forceinline__ void look_up(const PanelOf& panel_of) {
#pragma unroll
    for (int j = 0; j < NT; j += kSame) {
      asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(how[j / kSame]) : "l"(panel_of(j)));
    }
  }
  __device__ __forceinline__ Fp8Scaled scaled() const {
    constexpr uint32_t kBits = (1u << kSame) - 1, kAll = (1u << NT) - 1;
    uint32_t of_rows = 0, of_steps = 0;
#pragma unroll
    for (int j = 0; j < NT; j += kSame) {
      of_rows |= how[j / kSame] == FP8Panels::kOfRows ? kBits << j : 0;
      of_steps |= how[j / kSame] == FP8Panels::kOfSteps ? kBits << j : 0;
    }
    return {of_rows == kAll    ? Fp8Scaled::kRows
            : of_steps == kAll ? Fp8Scaled::kSteps
                               : Fp8Scaled::kMixed,
            of_rows};
  }
};
__device__ __forceinline__ const int32_t* scaled_panel(const WeightView& w, int64_t panel) {
  const int64_t last = panels_of(w) - 1;
  return FP8Panels::scaled_at(w.data, w.rows, w.cols) + (panel < last ? panel : last);
}

// Facts on a tile that the producers of a pair of blocks pass to the consumers, beside the stage of
// its first step, so that consumers look nothing up.
struct alignas(16) Fp8Facts {
  int32_t of[4];
};

// A producer of a pair of blocks. It refills a stage as soon as both blocks have released it.
// Anything in between would keep consumers waiting, so everything that the copies need is computed
// before.
template <int kPieces>
struct Fp8Asking {
  uint32_t stages;
  PipelineAt pipe;
  uint32_t bytes;  // per stage
  int count;       // stages
  PipelineState at;
  int step;  // this producer's next step of the tile
  bool waited;
  // What this block copies into a stage: kPieces pieces of rows, of `tiles` 8-row tiles each, to
  // both blocks; pieces are `apart` bytes apart in memory and `apart_here` panels apart in the
  // stage. Then its own tokens. A stage is full when full_bytes have arrived from both blocks.
  struct Tile {
    const uint8_t* rows;
    int64_t apart;
    uint32_t scales;  // offset from a piece's codes to its scales
    uint32_t rows_at, scales_at, apart_here, tiles;
    const uint8_t* tokens;
    uint32_t token_step, token_bytes, full_bytes;
  };
  // The producer of the first step calls facts_of().
  template <class FactsOf>
  __device__ __forceinline__ void fill(Fp8Facts* facts, int steps, const Tile& tile,
                                       const FactsOf& facts_of) {
    if (step >= steps) {
      step -= steps;
      return;
    }
    const uint8_t* rows = tile.rows + step * kPanelBytes;
    const uint8_t* tokens = tile.tokens + static_cast<int64_t>(step) * tile.token_step;
    if (step == 0) {
      const Fp8Facts its = facts_of();
      pipe.acquire(at);
      facts[at.stage] = its;
    }
#pragma unroll 1
    for (; step < steps; step += kProducers) {
      const uint32_t to = stages + at.stage * bytes, done = pipe.filled(at.stage);
      pipe.acquire(at);
      pipe.expect(at.stage, tile.full_bytes);
      if (tile.tiles != 0) {
#pragma unroll
        for (uint32_t i = 0; i < kPieces; ++i) {
          const uint8_t* piece = rows + i * tile.apart;
          copy_to_both(to + tile.rows_at + i * tile.apart_here * kPanelCodes, piece,
                       tile.tiles * kTileCodes, done);
          copy_to_both(to + tile.scales_at + i * tile.apart_here * (kPanelBytes - kPanelCodes),
                       piece + tile.scales, tile.tiles * kTileScales, done);
        }
      }
      if (!waited) {
        wait();
        waited = true;
      }
      if (tile.token_bytes != 0) {
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
            "[%3];" ::"r"(to),
            "l"(tokens), "r"(tile.token_bytes), "r"(done)
            : "memory");
      }
      rows += kProducers * kPanelBytes;
      tokens += int64_t{tile.token_step} * kProducers;
      at.advance(count, kProducers);
    }
    step -= steps;
  }
};
template <int kPieces>
__device__ __forceinline__ Fp8Asking<kPieces> fp8_asking(const Fp8Ring& ring, int producer) {
  return {shared_address(ring.stages),
          {shared_address(ring.pipe.full), shared_address(ring.pipe.empty)},
          static_cast<uint32_t>(ring.of.bytes),
          ring.of.count,
          {producer},
          producer,
          false};
}

// kUnits: row units per tile.
template <int G, int kUnits>
__device__ __forceinline__ ProductTile many_tile(const ProductList& list, int64_t tokens,
                                                 const Tour& tour, int index) {
  if (tour.blocks == 1) return find_product_tile<G * 8, kUnits>(list, tokens, index);
  ProductTile tile = find_product_tile<2 * G * 8, kUnits, 8>(list, tokens, index);
  tile.token_tile += tour.rank * G * 8;
  return tile;
}

// Producers of a pair of blocks: a tile's rows belong to at most two panels; one block copies those
// of the first panel and the other the rest (or each copies half if there is one panel).
template <int G, int NT>
__device__ __forceinline__ void fp8_produce_pair(const Fp8Ring& ring, Fp8Facts* facts,
                                                 const ProductList& list, int64_t tokens,
                                                 const Tour& tour, int producer) {
  const int64_t act_tiles = (tokens + 7) / 8;
  auto asking = fp8_asking<1>(ring, producer);
#pragma unroll 1
  for (int index = tour.first; index < tour.tiles; index += tour.step) {
    const ProductTile tile = many_tile<G, NT>(list, tokens, tour, index);
    const ProductArgs& p = list.of[tile.product];
    const auto unit = static_cast<int>(tile.unit);
    const int steps = steps_of(p.weight);
    const int all = min(NT, static_cast<int>(panels_of(p.weight) * 8) - unit);
    const int first = min(all, NT <= 8 ? NT / 2 : 8 - unit % 8);
    const int from = tour.rank == 0 ? 0 : first, rows = tour.rank == 0 ? first : all - first;
    const int left = max(min(static_cast<int>(act_tiles - tile.token_tile), ring.of.width), 0);
    const auto token_bytes = static_cast<uint32_t>(left * kE4M3TileBytes);
    const auto tokens_end = static_cast<uint32_t>(ring.of.width * kE4M3TileBytes);
    const int in_panel = (unit + from) % 8;
    asking.fill(facts, steps,
                {p.weight.data + static_cast<int64_t>((unit + from) / 8) * steps * kPanelBytes +
                     in_panel * kTileCodes,
                 0, static_cast<uint32_t>(kPanelCodes - in_panel * (kTileCodes - kTileScales)),
                 tokens_end + from * kTileCodes, tokens_end + NT * kTileCodes + from * kTileScales,
                 0, static_cast<uint32_t>(rows), p.act + tile.token_tile * kE4M3TileBytes,
                 static_cast<uint32_t>(act_tiles * kE4M3TileBytes), token_bytes,
                 static_cast<uint32_t>(all * kE4M3TileBytes) + token_bytes},
                [&]() -> Fp8Facts {
                  Fp8Noted<NT> noted;
                  noted.look_up([&](int j) { return scaled_panel(p.weight, (unit + j) / 8); });
                  const Fp8Scaled scaled = noted.scaled();
                  const LeafCut cut = leaf_cut(p.weight);
                  return {{cut.steps, cut.shift, scaled.how, static_cast<int32_t>(scaled.of_rows)}};
                });
  }
}

// Producers of a block: copy all tiles, or one of `parts` parts of their slices; one thread per
// producer warp.
template <int G, int NT>
__device__ __forceinline__ void fp8_produce(Fp8Ring ring, const ProductList& list, int64_t tokens,
                                            const Tour& tour, int producer, int part = 0,
                                            int parts = 1) {
  const int64_t act_tiles = (tokens + 7) / 8;
  const bool once = act_tiles <= Fp8Shape<G, NT>::kTokenTiles;
  Fp8Filling filling{producer, 0, false};
  ring.at.stage = producer;
  for (int index = tour.first; index < tour.tiles; index += tour.step) {
    const ProductTile tile = many_tile<G, NT>(list, tokens, tour, index);
    const ProductArgs& p = list.of[tile.product];
    const int leaves = leaves8(p.weight);
    const int from = leaf_of(p.weight, leaves * part / parts).first;
    const int steps = leaf_of(p.weight, leaves * (part + 1) / parts).first - from;
    // Two copies (codes, scales) per panel that the rows belong to.
    const int64_t of_panel = int64_t{steps_of(p.weight)} * kPanelBytes;
    const auto first = static_cast<int>(tile.unit);
    const int rows = min(NT, static_cast<int>(panels_of(p.weight) * 8) - first);  // tiles of 8 rows
    const uint8_t* panel = p.weight.data + first / 8 * of_panel + int64_t{from} * kPanelBytes;
    const auto copy_rows = [&](uint8_t* to, int n, uint64_t* barrier) {
      const uint8_t* step = panel + n * kPanelBytes;
      int in_panel = first % 8;
      for (int at = 0; at < rows; step += of_panel) {
        const int count = min(8 - in_panel, rows - at);
        copy_weights(to + at * kTileCodes, step + in_panel * kTileCodes,
                     static_cast<uint32_t>(count * kTileCodes), barrier, once);
        copy_weights(to + NT * kTileCodes + at * kTileScales,
                     step + kPanelCodes + in_panel * kTileScales,
                     static_cast<uint32_t>(count * kTileScales), barrier, once);
        at += count;
        in_panel = 0;
      }
    };
    const int left = max(min(static_cast<int>(act_tiles - tile.token_tile), ring.of.width), 0);
    fp8_fill(ring, filling, steps, static_cast<uint32_t>(rows * kE4M3TileBytes), copy_rows,
             p.act + (from * act_tiles + tile.token_tile) * kE4M3TileBytes,
             act_tiles * kE4M3TileBytes, static_cast<uint32_t>(left * kE4M3TileBytes));
  }
}

#endif

}  // namespace freshet::cuda

// GEMM with FP8 weights (E4M3) and E4M3 activations by wgmma (Hopper): for 1 to 64 tokens, and for
// up to 128 tokens if the weights have few rows. gemm_fp8_sm90_m65.cu has the kernel for more
// tokens, whose run_fp8_wide() is also better for 1 to 64 tokens if there are many rows.
//
// Every 128 columns of a row have a scale, of weights and of activations alike. The tensor cores
// sum 128 columns; that sum times both scales is added in F32 to the sum of a split-K slice, from
// left to right. The shape of the weight alone decides how K is cut into slices, which are added
// from left to right, so the number of tokens changes no bit.
//
// A panel has 64 rows. If each of its rows has one scale for all columns (FP8Panels::kOfRows), the
// sum is multiplied by it once, at the end; if all rows share the scale of each 128 columns
// (FP8Panels::kOfSteps), one scale per K step is read.
//
// A block takes a panel, with weights on the 64-row side of wgmma, and each of its two warpgroups
// takes one slice. With four slices, the two blocks of a cluster exchange partial sums through
// distributed shared memory, and each adds up half of the rows. If shared memory holds half a panel
// and there are few panels, four warpgroups take all slices; if there are many panels with a single
// slice, one warpgroup takes it. Blocks are persistent. Each pipeline has one producer thread,
// which fills it by TMA bulk copies of 8 KiB and more.
#include "backend/cuda/gemm/gemm_fp8_sm90_epilogue.cuh"
#include "backend/cuda/gemm/gemm_fp8_sm90_m1_64.cuh"
#include "backend/cuda/gemm/gemm_fp8_sm90_m1_64.h"
#include "backend/cuda/runtime/cluster.cuh"

namespace freshet::cuda {
namespace {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ __forceinline__ Work work_of(const ProductArgs& p, int64_t tokens) {
  return {p.weight.data, p.weight.rows, p.weight.cols, p.act,  p.act_chunks, (tokens + 7) / 8,
          p.out,         p.out_stride,  tokens,        p.bias, p.scale,      p.add != 0};
}

// The resident activations of a split-K slice arrive in this many parts, each with its own barrier,
// so that the first part is multiplied while the others are in flight.
template <int NT>
constexpr int kShares = NT == 1 ? 1 : 4;

#endif

// NT: tiles of 8 tokens. kGroups: consumer warpgroups; each takes one split-K slice and has its own
// pipeline. With one warpgroup, blocks claim their tiles. Up to 16 tokens, two blocks fit on an SM,
// so that the next kernel's weights are fetched while this one ends. kOwn: activations are not
// copied through the pipelines but stay resident in shared memory; one block then takes all of the
// SM's shared memory, which is faster still.
template <int NT, bool kOwn, int kGroups = 2>
struct Few {
  static constexpr int kConsumers = kGroups * 128;  // threads
  static constexpr bool kClaims = kGroups == 1;
  static constexpr bool kNear = kGroups == 4;  // weights beyond the pipelines are prefetched (Near)
  static constexpr int kBlocks = NT <= 2 && !kOwn ? 2 : 1;
  // Leaves registers for the small kernels between GEMMs: the bound is set as if a block had this
  // many threads.
  static constexpr int kBoundThreads = kGroups == 4 ? 768 : NT <= 2 ? 896 : 640;
  static constexpr int kStage = kPanelBytes + (kOwn ? 0 : NT * kE4M3TileBytes);
  static constexpr int kMeeting = NT * kGroups * 2048;  // partial sums of all slices
  // For pipelines and activations.
  static constexpr int kRoom = kFp8SharedBytes / kBlocks - kMeeting - (kNear ? kNearBytes : 0);
  static constexpr int kStages = kRoom / kStage / (kGroups <= 2 && kOwn ? 1 : kGroups);  // at most
  static constexpr int kProducers = kGroups, kFinishers = 4;                             // warps
  static constexpr int kThreads = kConsumers + 32 * (kProducers + kFinishers);
};

// Some SMs read memory faster than others, so blocks may claim every tile but their first. A block
// claims only after the previous kernel has ended. Each launch makes exactly as many claims as it
// has tiles, so the counter wraps around to zero.
__device__ unsigned claimed;
constexpr int kClaimAhead = 8;         // K steps before the end of a tile
constexpr int kTold = kFp8ClaimsTold;  // at least twice the number of tiles that fit in a pipeline

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// The tiles of a block: a fixed stride (`tour`), or its first tile and those that the producer
// claims and passes on to the other warps through `told`.
template <bool kClaims>
struct PanelTiles {
  Tour tour;
  volatile int* told;
  uint64_t* known;
  int index, turn = 0;
  __device__ __forceinline__ bool is_one() const { return index < tour.tiles; }
  __device__ __forceinline__ bool is_first() const { return turn == 0; }
  __device__ __forceinline__ bool is_last() const {
    return !kClaims && index + tour.step >= tour.tiles;
  }
  __device__ __forceinline__ void next() {
    if constexpr (kClaims) {
      barrier_wait(&known[turn % kTold], turn / kTold % 2);
      index = told[turn % kTold];
    } else {
      index += tour.step;
    }
    ++turn;
  }
  __device__ __forceinline__ void tell(int tile) {
    told[turn % kTold] = tile;
    barrier_arrive(&known[turn % kTold]);
    ++turn;
    index = tile;
  }
  __device__ __forceinline__ int claim() const {
    unsigned v;
    asm volatile("atom.global.inc.u32 %0, [%1], %2;"
                 : "=r"(v)
                 : "l"(&claimed), "r"(tour.tiles - 1)
                 : "memory");
    return static_cast<int>(v) + tour.step;
  }
};

// Producer of one pipeline (one thread) when activations go through the pipelines.
template <int NT>
__device__ __forceinline__ void produce_few(PanelRing<Few<NT, false>::kStage> ring,
                                            const ProductList& list, int64_t tokens,
                                            const Tour& tour, int leaf) {
  using S = Few<NT, false>;
  const int64_t act_tiles = (tokens + 7) / 8;
  const bool once = act_tiles <= NT;
  int issued = 0;  // K steps, over all tiles
  for (int index = tour.first; index < tour.tiles; index += tour.step) {
    const ProductTile tile = find_product_tile<NT, 1>(list, tokens, index);
    const ProductArgs& p = list.of[tile.product];
    const Fp8Slice part = leaf_of(p.weight, leaf);
    const int64_t left = act_tiles - tile.token_tile;
    const auto bytes = static_cast<uint32_t>(left < NT ? left : NT) * kE4M3TileBytes;
    const auto copy_rows = [&](int n, int stage) {
      ring.pipe.expect(stage, kPanelBytes + bytes);
      copy_weights(ring.stages + stage * S::kStage, panel_at(p.weight, tile.unit, part.first + n),
                   kPanelBytes, ring.pipe.filled(stage), once);
    };
    const auto copy_tokens = [&](int n, int stage) {
      bulk_copy(ring.stages + stage * S::kStage + kPanelBytes,
                tokens_at(p, act_tiles, part.first + n, tile.token_tile), bytes,
                ring.pipe.filled(stage));
    };
    int n = 0;
    if (issued == 0) {
      for (; n < min(part.count, ring.count); ++n) copy_rows(n, n);
      wait();
      for (; issued < n; ++issued, ring.next()) copy_tokens(issued, issued);
    }
    for (; n < part.count; ++n, ++issued, ring.next()) {
      if (issued >= ring.count) ring.pipe.acquire(ring.at);
      copy_rows(n, ring.at.stage);
      copy_tokens(n, ring.at.stage);
    }
  }
}

// Which rows of a tile share scales (FP8Panels::kOfRows ...).
template <int NT>
__device__ __forceinline__ int scaled_tile(const ProductList& list, int64_t tokens, int index) {
  const ProductTile tile = find_product_tile<NT, 1>(list, tokens, index);
  return scaled(list.of[tile.product].weight, tile.unit);
}

// Producer when all GEMMs read the same single token tile: the slice's activations are copied once
// and stay resident. Until the previous kernel has `ended`, only a few stages are in flight
// (prefetch_weights.cuh). A block that claims tiles doesn't know the next tile in time to look up
// which rows share scales, so it copies all scales.
template <class S, int NT, bool kClaims>
__device__ __forceinline__ void produce_rows(PanelRing<S::kStage> ring, const ProductList& list,
                                             int64_t tokens, PanelTiles<kClaims> tiles, int leaf,
                                             uint8_t* own, uint64_t* here, Near near,
                                             const volatile int& ended) {
  constexpr int kInFlight = (kFp8AheadBytes / S::kProducers + S::kStage - 1) / S::kStage;
  const Fp8Slice part = leaf_of(list.of[0].weight, leaf);
  const int of_step = static_cast<int>((tokens + 7) / 8) * kE4M3TileBytes;
  const auto start_tokens = [&] {
    wait();
#pragma unroll
    for (int s = 0; s < kShares<NT>; ++s) {
      const int first = part.count * s / kShares<NT>, end = part.count * (s + 1) / kShares<NT>;
      const auto bytes = static_cast<uint32_t>((end - first) * of_step);
      barrier_expect(&here[s], bytes);
      if (bytes == 0) continue;
      bulk_copy(own + first * of_step,
                list.of[0].act + static_cast<int64_t>(part.first + first) * of_step, bytes,
                &here[s]);
    }
  };
  const auto look_up = [&](int index) {
    return index < tiles.tour.tiles ? scaled_tile<NT>(list, tokens, index) : 0;
  };
  int issued = 0;  // K steps, over all tiles
  bool started = false;
  int how = 0, next = 0;
  while (tiles.is_one()) {
    const ProductTile tile = find_product_tile<NT, 1>(list, tokens, tiles.index);
    const uint8_t* from = panel_at(list.of[tile.product].weight, tile.unit, part.first);
    int n = 0;
    if (!kClaims && tiles.is_first()) {
      // The lookup is in flight while the first codes are requested; later tiles are looked up one
      // tile ahead.
      how = scaled(list.of[tile.product].weight, tile.unit);
      const int first = min(kInFlight, min(part.count, ring.count));
      for (int i = 0; i < first; ++i) {
        copy_codes(ring.stages + i * S::kStage, from + i * kPanelBytes, ring.pipe.filled(i));
      }
      for (; n < first; ++n, ring.next(), from += kPanelBytes) {
        copy_scales(ring.data(), from, scale_bytes(how), ring.filled());
      }
      issued = n;
    }
    if (!kClaims) next = look_up(tiles.index + tiles.tour.step);
    const uint32_t scales = scale_bytes(how);
    int claim = 0;
    for (; n < part.count; ++n, ++issued, ring.next(), from += kPanelBytes) {
      if (issued >= kInFlight && issued < ring.count) {
        landed(ring.pipe.filled(issued - kInFlight), ended);
      }
      if (!started && (issued == ring.count || ended != 0)) {
        if constexpr (S::kNear) near.bring(from, part.count - n, ended);
        start_tokens();
        started = true;
        if constexpr (S::kNear) near.end();
      }
      if (kClaims && started && claim == 0 && n >= part.count - kClaimAhead) claim = tiles.claim();
      if (issued >= ring.count) ring.pipe.acquire(ring.at);
      if constexpr (kClaims) {
        ring.pipe.expect(ring.at.stage, kPanelBytes);
        copy_weights(ring.data(), from, kPanelBytes, ring.filled());
      } else {
        copy_scales(ring.data(), from, scales, ring.filled());
        copy_codes(ring.data(), from, ring.filled());
      }
    }
    if constexpr (kClaims) {
      if (!started) start_tokens();
      started = true;
      tiles.tell(claim != 0 ? claim : tiles.claim());
    } else {
      tiles.next();
    }
    how = next;
  }
  if (!started) start_tokens();
}

// The partial sums of a tile's slices: each block of the cluster adds up its share of the rows.
struct LeafMeeting {
  uint8_t* sums;  // [slice][tile of 16 rows][tile of tokens][lane][4]
  Pipeline pipe;  // of one stage: all sums of a tile
  int blocks, rank, leaves;
};

// Consumer warpgroup: computes one split-K slice of every tile and sends the partial sums to the
// block that adds them up. `next`: scaled_tile() of the first tile.
template <class S, int NT, bool kOwn, bool kClaims>
__device__ __forceinline__ void take_leaves(PanelRing<S::kStage> ring, const ProductList& list,
                                            int64_t tokens, PanelTiles<kClaims> tiles, int leaf,
                                            const LeafMeeting& meeting, const uint8_t* own,
                                            uint64_t* here, int next) {
  const int lane = static_cast<int>(threadIdx.x % 32),
            warp = static_cast<int>(threadIdx.x / 32 % 4);
  const int mine = 4 / meeting.blocks, owner = warp / mine;
  const uint32_t to =
      place_in_block(meeting.sums + ((leaf * mine + warp % mine) * NT * 32 + lane) * 16, owner);
  const uint32_t arrived = place_in_block(meeting.pipe.filled(0), owner);
  constexpr uint32_t kStagePlaces = S::kStage >> 4;
  // Stride of a K step in the resident activations.
  const int of_step = static_cast<int>((tokens + 7) / 8) * kE4M3TileBytes;
  const uint32_t ring_at = kept_place(ring.stages), own_at = kept_place(own);
  int phase = 0;
  for (; tiles.is_one(); tiles.next(), phase ^= 1) {
    const int index = tiles.index;
    const WeightView& weight =
        list.of[find_product_tile<NT, 1>(list, tokens, index).product].weight;
    if (kClaims && !tiles.is_first()) next = scaled_tile<NT>(list, tokens, index);
    const int how = next;
    if (!kClaims && !tiles.is_last()) {
      next = scaled_tile<NT>(list, tokens, index + tiles.tour.step);
    }
    float leaf_sum[NT][4];
    clear(leaf_sum);
    const int count = leaf_of(weight, leaf).count;
    int share = tiles.is_first() ? 0 : kShares<NT>;  // next part of the activations to wait for
    const auto ask = [&](float(&sum)[NT][4], int n) {
      if constexpr (kOwn) {
        for (; share < kShares<NT> && count * share / kShares<NT> <= n; ++share) {
          barrier_wait(&here[share], 0);
        }
      }
      ring.pipe.wait(ring.at);
      const uint32_t at = ring_at + ring.at.stage * kStagePlaces;
      fp8_ask<NT>(sum, at, kOwn ? own_at + (n * of_step >> 4) : at + (kPanelBytes >> 4));
    };
    // A stage is released as soon as its sum is scaled and added.
    const auto add = [&](const float(&sum)[NT][4], int n, int stage, const float2& w) {
      const uint8_t* panel = ring.stages + stage * S::kStage;
      add_step<NT>(leaf_sum, sum, w, kOwn ? own + n * of_step : panel + kPanelBytes);
      __syncwarp();
      ring.pipe.release(stage);
    };
    const auto scales_of = [&](int stage) {
      return step_scales(ring.stages + stage * S::kStage, how);
    };
    if constexpr (NT == 1) {
      // The next step is multiplied while the previous one is scaled and added.
      int n = 0;
      for (; n + 1 < count; n += 2) {
        float even[NT][4], odd[NT][4];
        const int stage = ring.at.stage;
        ask(even, n);
        const float2 even_scales = scales_of(stage);
        ring.next();
        ask(odd, n + 1);
        const float2 odd_scales = scales_of(ring.at.stage);
        wgmma_wait<1>();
        add(even, n, stage, even_scales);
        wgmma_wait<0>();
        add(odd, n + 1, ring.at.stage, odd_scales);
        ring.next();
      }
      if (n < count) {
        float sum[NT][4];
        ask(sum, n);
        const float2 w = scales_of(ring.at.stage);
        wgmma_wait<0>();
        add(sum, n, ring.at.stage, w);
        ring.next();
      }
    } else {
      for (int n = 0; n < count; ++n, ring.next()) {
        float sum[NT][4];
        ask(sum, n);
        const float2 w = scales_of(ring.at.stage);
        wgmma_wait<0>();
        add(sum, n, ring.at.stage, w);
      }
    }
    if (!tiles.is_first()) meeting.pipe.acquire({0, phase});
    if (meeting.blocks > 1) {
#pragma unroll
      for (int j = 0; j < NT; ++j) send(to + j * 512, leaf_sum[j], arrived);
    } else {
      auto* own = reinterpret_cast<float4*>(meeting.sums) + (leaf * 4 + warp) * NT * 32 + lane;
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        const float(&v)[4] = leaf_sum[j];
        own[j * 32] = make_float4(v[0], v[1], v[2], v[3]);
      }
      __syncwarp();
      if (lane == 0) meeting.pipe.arrive(0);
    }
  }
}

// Epilogue for more than 8 tokens, by separate warps while the next tile is multiplied: adds up the
// slices of this block's kMine tiles of 16 rows. The values to add to are loaded before the partial
// sums arrive; weight scales and page lookups of the first tile are requested before the previous
// kernel has ended.
template <int NT, int kMine>
__device__ __forceinline__ void finish_lines(const ProductList& list, int64_t tokens,
                                             PanelTiles<false> tiles, const LeafMeeting& meeting,
                                             int warp) {
  constexpr int kThreads = Few<NT, false>::kFinishers * 32, kQuads = kMine * 4;
  constexpr int kAtOnce = kThreads / kQuads, kRounds = NT * kTokenTile / kAtOnce;
  constexpr int kItems = kMine * NT / Few<NT, false>::kFinishers;
  // Floats per token, padded so that the lanes of a half warp hit different banks.
  constexpr int kWidth = kMine * 16 + 4;
  static_assert(kItems > 0 && NT * kTokenTile * kWidth * 4 <= Few<NT, false>::kMeeting);
  const int lane = static_cast<int>(threadIdx.x % 32), thread = warp * 32 + lane;
  const int in = thread / kQuads, of_rows_at = thread % kQuads * 4;
  const auto sync = [] { asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory"); };
  int phase = 0;
  for (; tiles.is_one(); tiles.next(), phase ^= 1) {
    const ProductTile tile = find_product_tile<NT, 1>(list, tokens, tiles.index);
    const ProductArgs& p = list.of[tile.product];
    const int64_t row = tile.unit * kPanelRows + meeting.rank * kMine * 16 + of_rows_at;
    const int64_t token = tile.token_tile * kTokenTile + in;
    const Four of = four_of(p, row);
    float4 scales = make_float4(1.0f, 1.0f, 1.0f, 1.0f), before[kRounds] = {};
    if (scaled(p.weight, tile.unit) == FP8Panels::kOfRows) {  // one scale per row
      scales = __ldg(reinterpret_cast<const float4*>(row_scale(p.weight, row)));
    }
    if (tiles.is_first()) {
      if (warp == 0) look_up_pages(p, tokens, tile.unit * kPanelRows, lane);
      wait();
    }
    const auto each = [&](auto&& body) {
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        const int64_t t = token + i * kAtOnce;
        if (t < tokens && of.count > 0) body(i, p.out + t * p.out_stride + row);
      }
    };
    if (p.add != 0) each([&](int i, const float* from) { before[i] = load_some(from, of); });
    if (meeting.blocks > 1 && thread == 0) {
      meeting.pipe.expect(0, static_cast<uint32_t>(meeting.leaves * kMine * NT * 512));
    }
    meeting.pipe.wait({0, phase});
    float4 v[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const auto* sums = reinterpret_cast<const float4*>(meeting.sums) +
                         (warp + i * Few<NT, false>::kFinishers) * 32 + lane;
      v[i] = sums[0];
      for (int l = 1; l < meeting.leaves; ++l) {
        const float4 next = sums[l * kMine * NT * 32];
        v[i] = make_float4(__fadd_rn(v[i].x, next.x), __fadd_rn(v[i].y, next.y),
                           __fadd_rn(v[i].z, next.z), __fadd_rn(v[i].w, next.w));
      }
    }
    // Transpose in place, so that neighbouring rows of a token are contiguous.
    sync();
    auto* lines = reinterpret_cast<float*>(meeting.sums);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int item = warp + i * Few<NT, false>::kFinishers;
      float* to =
          lines + (item % NT * kTokenTile + lane % 4 * 2) * kWidth + item / NT * 16 + lane / 4;
      to[0] = v[i].x;
      to[kWidth] = v[i].y;
      to[8] = v[i].z;
      to[kWidth + 8] = v[i].w;
    }
    sync();
    each([&](int i, float* to) {
      float4 sum =
          *reinterpret_cast<const float4*>(lines + (in + i * kAtOnce) * kWidth + of_rows_at);
      sum = make_float4(__fmul_rn(sum.x, scales.x), __fmul_rn(sum.y, scales.y),
                        __fmul_rn(sum.z, scales.z), __fmul_rn(sum.w, scales.w));
      write_some(to, p, of, sum, before[i]);
    });
    __syncwarp();
    if (lane < meeting.blocks && !tiles.is_last()) {
      arrive_at(place_in_block(meeting.pipe.emptied(0), lane));
    }
  }
}

// Epilogue for up to 8 tokens: each warp has at most one tile of 16 rows.
template <bool kClaims>
__device__ __forceinline__ void finish_tiles(const ProductList& list, int64_t tokens,
                                             PanelTiles<kClaims> tiles, const LeafMeeting& meeting,
                                             int warp) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int mine = 4 / meeting.blocks;  // tiles of 16 rows
  int phase = 0;
  for (; tiles.is_one(); tiles.next(), phase ^= 1) {
    const ProductTile tile = find_product_tile<1, 1>(list, tokens, tiles.index);
    const ProductArgs& p = list.of[tile.product];
    const Work work = work_of(p, tokens);
    const int64_t row_tile = tile.unit * 4 + meeting.rank * mine + warp;
    Before before;
    float2 scales = make_float2(1.0f, 1.0f);
    if (warp < mine) {
      if (scaled(p.weight, tile.unit) == FP8Panels::kOfRows) {  // one scale per row
        const float* scale = row_scale(p.weight, row_tile * 16 + lane / 4);
        scales = make_float2(__ldg(scale), __ldg(scale + 8));
      }
    }
    if (tiles.is_first()) {
      if (warp == 0) look_up_pages(p, tokens, tile.unit * kPanelRows, lane);
      wait();
    }
    if (warp < mine) {
      if (work.add) before.load(work, row_tile, tile.token_tile, lane);
    }
    if (meeting.blocks > 1 && warp == 0 && lane == 0) {
      meeting.pipe.expect(0, static_cast<uint32_t>(meeting.leaves * mine * 512));
    }
    meeting.pipe.wait({0, phase});
    if (warp < mine) {
      const auto* sums = reinterpret_cast<const float4*>(meeting.sums) + warp * 32 + lane;
      float4 v = sums[0];
      for (int l = 1; l < meeting.leaves; ++l) {
        const float4 next = sums[l * mine * 32];
        v = make_float4(__fadd_rn(v.x, next.x), __fadd_rn(v.y, next.y), __fadd_rn(v.z, next.z),
                        __fadd_rn(v.w, next.w));
      }
      const float all[1][4] = {{__fmul_rn(v.x, scales.x), __fmul_rn(v.y, scales.x),
                                __fmul_rn(v.z, scales.y), __fmul_rn(v.w, scales.y)}};
      if (work.add) {
        finish<1>(work, all, row_tile, tile.token_tile, lane, before.v);
      } else {
        finish<1>(work, all, row_tile, tile.token_tile, lane);
      }
    }
    __syncwarp();
    if (lane < meeting.blocks && !tiles.is_last()) {
      arrive_at(place_in_block(meeting.pipe.emptied(0), lane));
    }
  }
}
#endif

template <int NT, bool kOwn, int kGroups>
__global__ void __launch_bounds__(Few<NT, kOwn, kGroups>::kBoundThreads, 1)
    few_kernel(const __grid_constant__ ProductList list, int64_t tokens, int tiles, int blocks,
               int own_stages) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Few<NT, kOwn, kGroups>;
  const int ring_stages = kOwn ? own_stages : S::kStages;
  extern __shared__ __align__(1024) uint8_t stages[];
  __shared__ uint64_t full[kGroups][S::kStages], empty[kGroups][S::kStages];
  __shared__ uint64_t arrived, room, here[kGroups][kShares<NT>], near[kGroups];
  __shared__ volatile int ended;  // set once the previous kernel has ended
  __shared__ volatile int told[kTold];
  __shared__ uint64_t known[kTold];
  let_next_start();
  const int64_t cols = list.of[0].weight.cols;
  const int leaves = leaves8(list.of[0].weight), rank = static_cast<int>(blockIdx.x) % blocks;
  const int rings = leaves < kGroups ? leaves : kGroups;
  if (threadIdx.x == S::kConsumers) {
    ended = 0;
    for (int i = 0; i < kGroups; ++i) {
      for (int s = 0; s < ring_stages; ++s) Pipeline{full[i], empty[i]}.init_stage(s, 4);
      for (int s = 0; s < kShares<NT>; ++s) barrier_init(&here[i][s], 1);
      if (S::kNear) barrier_init(&near[i], 1);
    }
    Pipeline{&arrived, &room}.init_stage(0, S::kFinishers * blocks, blocks > 1 ? 1 : leaves * 4);
    for (int s = 0; S::kClaims && s < kTold; ++s) barrier_init(&known[s], 1);
    barriers_ready();
  }
  __syncthreads();
  const Tour tour{static_cast<int>(blockIdx.x) / blocks, static_cast<int>(gridDim.x) / blocks,
                  tiles};
  const PanelTiles<S::kClaims> its{tour, told, known, tour.first};
  constexpr int kFirst = S::kConsumers / 32;  // first warp that isn't a consumer
  const int warp = warp_index();
  const bool produces = warp >= kFirst && warp < kFirst + S::kProducers;
  const int group = produces ? warp - kFirst : warp / 4 % kGroups;
  const int leaf = rank * kGroups + group;
  const PanelRing<S::kStage> ring{
      stages + group * ring_stages * S::kStage, {full[group], empty[group]}, ring_stages};
  uint8_t* meet = stages + rings * ring_stages * S::kStage;
  const LeafMeeting meeting{meet, {&arrived, &room}, blocks, rank, leaves};
  uint8_t* near_at = meet + S::kMeeting;
  uint8_t* own = near_at + (S::kNear ? kNearBytes : 0) +
                 group * most_steps(cols, leaves) * NT * kE4M3TileBytes;
  // No block may send before all blocks have initialised their barriers.
  if (blocks > 1) cluster_begun();
  if (produces && threadIdx.x % 32 == 0 && leaf < leaves) {
    if constexpr (kOwn) {
      produce_rows<S, NT>(ring, list, tokens, its, leaf, own, here[group], {near_at, &near[group]},
                          ended);
    } else {
      produce_few<NT>(ring, list, tokens, tour, leaf);
    }
  }
  if (blocks > 1) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
  if (produces) return;
  if (warp >= kFirst) {
    const int finisher = warp - kFirst - S::kProducers;
    if constexpr (NT == 1) {
      finish_tiles(list, tokens, its, meeting, finisher);
    } else if (blocks > 1) {
      finish_lines<NT, 2>(list, tokens, its, meeting, finisher);
    } else {
      finish_lines<NT, 4>(list, tokens, its, meeting, finisher);
    }
  } else {
    const int first = scaled_tile<NT>(list, tokens, tour.first);
    wait();
    if (threadIdx.x == 0) ended = 1;
    if (leaf < leaves) {
      take_leaves<S, NT, kOwn>(ring, list, tokens, its, leaf, meeting, own, here[group], first);
    }
  }
#endif
}

template <int NT, bool kOwn, int kGroups>
int launch_few(const Context& ctx, const ProductList& list, int64_t tokens) {
  using S = Few<NT, kOwn, kGroups>;
  static_assert(S::kStages >= 2);
  const auto kernel = few_kernel<NT, kOwn, kGroups>;
  const WeightView& weight = list.of[0].weight;
  const int leaves = leaves8(weight);  // the same for all GEMMs of the list
  const int rings = leaves < kGroups ? leaves : kGroups;
  const int own = kOwn ? rings * most_steps(weight.cols, leaves) * NT * kE4M3TileBytes : 0;
  const int fit = (S::kRoom - own) / S::kStage / rings,
            stages = fit < S::kStages ? fit : S::kStages;
  const int bytes = rings * stages * S::kStage + S::kMeeting + (S::kNear ? kNearBytes : 0) + own;
  if (const int error = raise_shared(kernel, bytes); error != 0) return error;
  const int blocks = (leaves + kGroups - 1) / kGroups;
  const auto tiles = static_cast<int>(list.first_block[list.count] * ceil_div(tokens, NT * 8));
  const int most = ctx.multiprocessors * S::kBlocks / blocks;
  const int clusters = tiles < most ? tiles : most;
  return launch_cluster(ctx, kernel, dim3(static_cast<unsigned>(clusters * blocks)),
                        dim3(S::kThreads), static_cast<size_t>(bytes),
                        dim3(static_cast<unsigned>(blocks)), list, tokens, tiles, blocks, stages);
}

bool same_tokens(const ProductList& list) {
  bool same = true;
  for (int i = 1; i < list.count; ++i) same = same && list.of[i].act == list.of[0].act;
  return same;
}

template <int NT>
int launch_few(const Context& ctx, const ProductList& given, int64_t tokens) {
  const ProductList list = with_blocks(given, kPanelRows);
  const bool same = same_tokens(list);
  const WeightView& weight = list.of[0].weight;
  const int leaves = leaves8(weight), of_leaf = most_steps(weight.cols, leaves);
  const int tokens_of_leaf = of_leaf * NT * kE4M3TileBytes;
  if constexpr (NT == 1) {
    if (fp8_claims(ctx, problem_of(list, tokens))) {
      return launch_few<1, true, 1>(ctx, list, tokens);
    }
    if (same && leaves == 4 && list.first_block[list.count] <= ctx.multiprocessors &&
        Few<1, true, 4>::kRoom - 4 * tokens_of_leaf >= leaves * of_leaf * kPanelBytes / 2) {
      return launch_few<1, true, 4>(ctx, list, tokens);
    }
  }
  // Two blocks on an SM get half of its bandwidth each, so that long slices end late.
  if (NT == 2 && of_leaf >= 16) return launch_few<4, false, 2>(ctx, list, tokens);
  if constexpr (NT == 1 || NT == 4) {
    // At least half of the shared memory is left for the pipelines.
    if (same && (leaves > 1 ? 2 : 1) * tokens_of_leaf <= Few<NT, true>::kRoom / 2) {
      return launch_few<NT, true, 2>(ctx, list, tokens);
    }
  }
  return launch_few<NT, false, 2>(ctx, list, tokens);
}

}  // namespace

int run_fp8_few(const Context& ctx, const ProductList& list, int64_t tokens) {
  using Claims = Few<1, true, 1>;
  static_assert(Claims::kRoom == kFp8ClaimRoom && Claims::kStages == kFp8ClaimStages);
  if (tokens <= 8) return launch_few<1>(ctx, list, tokens);
  if (tokens <= 16) return launch_few<2>(ctx, list, tokens);
  if (tokens <= 32) return launch_few<4>(ctx, list, tokens);
  return launch_few<8>(ctx, list, tokens);
}

}  // namespace freshet::cuda

// GEMM with FP8 weights (E4M3) for more than 64 tokens (Hopper), with persistent blocks;
// run_fp8_wide() runs the same kernel for 1 to 64 tokens if there are many rows. The order of sums
// is that of gemm_fp8_sm90_m1_64.cu, so results are bit-identical.
#include <algorithm>

#include "backend/cuda/gemm/gemm_fp8_sm90_epilogue.cuh"
#include "backend/cuda/gemm/gemm_fp8_sm90_m65.cuh"

namespace freshet::cuda {
namespace {

// With two consumer warpgroups, separate writer warps run the epilogue from a staging buffer
// (`Desk`) while the consumers go on to the next tile.
template <int G, int NT>
struct Many : Fp8Shape<G, NT> {
  static constexpr int kWriters = G == 2 ? 4 : 0;
  static constexpr int kThreads = Fp8Shape<G, NT>::kThreads + kWriters * 32;
  // Floats per token; padded so that the lanes of a half warp hit different banks.
  static constexpr int kStride = NT * 8 + 8;
  static constexpr int kDeskBytes = kWriters > 0 ? G * 64 * kStride * 4 : 0;
  static constexpr int kRingBytes = kManyBytes - kDeskBytes;
  // Tokens of a block's last tile per writer warp and per consumer warp: consumers help to write
  // it.
  static constexpr int kOfWriter = 4, kOfOther = 14;
  static_assert(kWriters == 0 || kWriters * kOfWriter + G * 4 * kOfOther == G * 64);
  static_assert(kRingBytes / ((G * 8 + NT) * kE4M3TileBytes) >= kProducers);
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Staging buffer for the sums of a tile, from consumers to writers: a pipeline of one stage.
struct Desk {
  float* sums;  // [token][kStride]
  Pipeline pipe;
};

template <int NT>
__device__ __forceinline__ void hand_over(const Desk& desk, const float (&sum)[NT][4]) {
  constexpr int kStride = Many<2, NT>::kStride;
  const int lane = static_cast<int>(threadIdx.x % 32);
  float* to = desk.sums + (warp_index() * 16 + lane / 4) * kStride + lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    *reinterpret_cast<float2*>(to + j * 8) = make_float2(sum[j][0], sum[j][1]);
    *reinterpret_cast<float2*>(to + 8 * kStride + j * 8) = make_float2(sum[j][2], sum[j][3]);
  }
  __syncwarp();
  if (lane == 0) desk.pipe.arrive(0);
}

// What a lane writes: four adjacent rows of the tile's tokens.
struct Fp8Lines {
  Four of;
  float* out;
  int at;      // offset of the lane's rows within a token's sums
  int count;   // tokens
  bool whole;  // all rows of the tile exist, and there is no bias
};
template <int G, int NT>
__device__ __forceinline__ Fp8Lines lines_of(const ProductArgs& p, int64_t tokens,
                                             const ProductTile& tile) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t row = tile.unit * 8 + lane * 4;
  const bool whole = p.bias == nullptr && (tile.unit + NT) * 8 <= p.weight.rows &&
                     p.out_stride % 4 == 0 && reinterpret_cast<uintptr_t>(p.out) % 16 == 0;
  return {four_of(p, row, lane * 4 < NT * 8), p.out + tile.token_tile * 8 * p.out_stride + row,
          lane * 4 < NT * 8 ? lane * 4 : 0,
          static_cast<int>(min(static_cast<int64_t>(G * 64), tokens - tile.token_tile * 8)), whole};
}

// Writes N tokens of a whole tile from `first` on. The values to add to are loaded before ready()
// waits for the sums.
template <int N, int kStride, class Ready>
__device__ __forceinline__ void write_whole(const ProductArgs& p, const Fp8Lines& lines,
                                            const float* sums, int first, const Ready& ready) {
  float* const out = lines.out + first * p.out_stride;
  const int64_t stride = p.out_stride;
  const int count = lines.of.count > 0 ? lines.count - first : 0;
  const bool adds = p.add != 0;
  const float scale = p.scale;
  float4 before[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    before[i] = make_float4(-0.0f, -0.0f, -0.0f, -0.0f);  // adding -0 changes nothing
    if (adds && i < count) before[i] = *reinterpret_cast<const float4*>(out + i * stride);
  }
  ready();
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float4 sum = *reinterpret_cast<const float4*>(sums + (first + i) * kStride + lines.at);
    const float4 v = make_float4(__fadd_rn(before[i].x, __fmul_rn(sum.x, scale)),
                                 __fadd_rn(before[i].y, __fmul_rn(sum.y, scale)),
                                 __fadd_rn(before[i].z, __fmul_rn(sum.z, scale)),
                                 __fadd_rn(before[i].w, __fmul_rn(sum.w, scale)));
    if (i < count) *reinterpret_cast<float4*>(out + i * stride) = v;
  }
}

// The last tile of a block: consumer warps hand their sums over and write their share of the
// tokens.
template <int G, int NT>
__device__ __forceinline__ void end_last(const ProductList& list, int64_t tokens,
                                         const ProductTile& tile, const Desk& desk, int phase,
                                         const float (&sum)[NT][4]) {
  using S = Many<G, NT>;
  const ProductArgs& p = list.of[tile.product];
  const Fp8Lines lines = lines_of<G, NT>(p, tokens, tile);
  if (!lines.whole) {
    hand_over<NT>(desk, sum);
    return;
  }
  const int first = S::kWriters * S::kOfWriter + warp_index() * S::kOfOther;
  write_whole<S::kOfOther, S::kStride>(p, lines, desk.sums, first, [&] {
    hand_over<NT>(desk, sum);
    desk.pipe.wait({0, phase});
  });
}

// Epilogue of a writer warp: of each tile of the block it writes every kWriters-th token.
template <int G, int NT>
__device__ __forceinline__ void fp8_write(const ProductList& list, int64_t tokens, const Tour& tour,
                                          const Desk& desk, int writer) {
  using S = Many<G, NT>;
  constexpr int kAtOnce = 4, kStep = S::kWriters;
  const int lane = static_cast<int>(threadIdx.x % 32);
  int phase = 0;
  wait();
  for (int index = tour.first; index < tour.tiles; index += tour.step, phase ^= 1) {
    const ProductTile tile = many_tile<G, NT>(list, tokens, tour, index);
    const ProductArgs& p = list.of[tile.product];
    const Fp8Lines lines = lines_of<G, NT>(p, tokens, tile);
    if (lines.whole && index + tour.step >= tour.tiles) {
      write_whole<S::kOfWriter, S::kStride>(p, lines, desk.sums, writer * S::kOfWriter,
                                            [&] { desk.pipe.wait({0, phase}); });
      return;
    }
    float* const out = lines.out;
    const Four& of = lines.of;
    desk.pipe.wait({0, phase});
    for (int t = writer; t < lines.count && of.count > 0; t += kAtOnce * kStep) {
      float4 before[kAtOnce] = {};
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = t + i * kStep;
        if (p.add != 0 && at < lines.count) before[i] = load_some(out + at * p.out_stride, of);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = t + i * kStep;
        if (at >= lines.count) break;
        const float4 sum = *reinterpret_cast<const float4*>(desk.sums + at * S::kStride + lane * 4);
        write_some(out + at * p.out_stride, p, of, sum, before[i]);
      }
    }
    __syncwarp();
    desk.pipe.release(0);
  }
}

// Consumer warpgroups (G of them): compute all tiles of the block.
template <int G, int NT>
__device__ __forceinline__ void fp8_walk(const Fp8Ring& of, const ProductList& list, int64_t tokens,
                                         const Tour& tour, const Desk& desk) {
  Fp8Reader ring = fp8_reader(of, NT);
  int product = 0;
  Fp8Noted<NT> noted;
  const auto look_up = [&](int index) {
    const ProductTile tile =
        many_tile<G, NT>(list, tokens, tour, index < tour.tiles ? index : tour.first);
    const WeightView& w = list.of[tile.product].weight;
    noted.look_up([&](int j) { return scaled_panel(w, (tile.unit + j) / 8); });
    product = tile.product;
  };
  look_up(tour.first);
  wait();
  int phase = 0;
  for (int index = tour.first; index < tour.tiles; index += tour.step, phase ^= 1) {
    const WeightView& weight = list.of[product].weight;
    const Fp8Scaled scaled = noted.scaled();
    float sum[NT][4];
    fp8_as(scaled, [&](auto how) {
      constexpr Fp8Scaled::How kHow = decltype(how)::value;
      const uint32_t of_rows = scaled.rows_of<kHow>();
      if constexpr (G == 2) {
        fp8_sum_ahead<NT, kHow>(ring, sum, leaf_cut(weight), of_rows);
      } else {
        float last[NT][4];
        fp8_leaves<NT, kHow>(
            ring, sum, last, weight, {0, leaves8(weight)}, true, of_rows, [] {},
            [&](const uint8_t* rows) {
              if (kHow != Fp8Scaled::kSteps) fp8_scale<NT>(sum, rows, of_rows);
            });
      }
    });
    look_up(index + tour.step);
    if constexpr (Many<G, NT>::kWriters > 0) {
      if (index != tour.first) desk.pipe.acquire({0, phase});
      if (index + tour.step < tour.tiles) {
        hand_over<NT>(desk, sum);
      } else {
        end_last<G, NT>(list, tokens, many_tile<G, NT>(list, tokens, tour, index), desk, phase,
                        sum);
      }
    } else {
      const ProductTile tile = many_tile<G, NT>(list, tokens, tour, index);
      fp8_finish<NT>(list.of[tile.product], tokens, sum, tile);
    }
  }
}

// Consumer warpgroups of a cluster of two blocks that multiply the same rows: the producer passes
// the facts on a tile (`told`) together with its first stage.
template <int G, int NT>
__device__ __forceinline__ void fp8_walk_pair(const Fp8Ring& of, const Fp8Facts* told,
                                              const ProductList& list, int64_t tokens,
                                              const Tour& tour, const Desk& desk) {
  Fp8Reader ring = fp8_reader(of, NT);
  wait();
  int phase = 0;
  for (int index = tour.first; index < tour.tiles; index += tour.step, phase ^= 1) {
    ring.wait_full();
    const Fp8Facts facts = facts_at(told, ring);
    const LeafCut cut{facts.of[0], facts.of[1]};
    const Fp8Scaled scaled{static_cast<Fp8Scaled::How>(facts.of[2]),
                           static_cast<uint32_t>(facts.of[3])};
    float sum[NT][4];
    fp8_as(scaled, [&](auto how) {
      constexpr Fp8Scaled::How kHow = decltype(how)::value;
      fp8_sum_ahead<NT, kHow>(ring, sum, cut, scaled.rows_of<kHow>());
    });
    if (index != tour.first) desk.pipe.acquire({0, phase});
    if (index + tour.step < tour.tiles) {
      hand_over<NT>(desk, sum);
    } else {
      end_last<G, NT>(list, tokens, many_tile<G, NT>(list, tokens, tour, index), desk, phase, sum);
    }
  }
}
#endif

// kPair: a cluster of two blocks shares the rows by multicast.
template <int G, int NT, bool kPair>
__global__ void __launch_bounds__(Many<G, NT>::kThreads, 1)
    fp8_kernel(const __grid_constant__ ProductList list, int64_t tokens, int tiles,
               Fp8Stages stages) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Many<G, NT>;
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ uint64_t full[kMostStages], empty[kMostStages], there, free;
  constexpr int blocks = kPair ? 2 : 1;
  let_next_start();
  const Desk desk{reinterpret_cast<float*>(shared + S::kRingBytes), {&there, &free}};
  if (S::kWriters > 0 && threadIdx.x == S::kConsumers) {
    desk.pipe.init_stage(0, S::kWriters, S::kConsumers / 32);
  }
  __shared__ Fp8Facts facts[kPair ? kMostStages : 1];
  const Fp8Ring ring = fp8_ring<S>(stages, shared, full, empty, blocks);
  const Tour tour = tour_of(tiles, blocks);
  if (blocks > 1) cluster_meet();
  const int other = warp_index() - S::kConsumers / 32;
  if (other >= kProducers) {
    if constexpr (S::kWriters > 0) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 48;");
      fp8_write<G, NT>(list, tokens, tour, desk, other - kProducers);
    }
  } else if (other >= 0) {
    if constexpr (G == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    if (threadIdx.x % 32 == 0) {
      if constexpr (kPair) {
        fp8_produce_pair<G, NT>(ring, facts, list, tokens, tour, other);
      } else {
        fp8_produce<G, NT>(ring, list, tokens, tour, other);
      }
    }
  } else {
    if constexpr (G == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
    if constexpr (kPair) {
      fp8_walk_pair<G, NT>(ring, facts, list, tokens, tour, desk);
    } else {
      fp8_walk<G, NT>(ring, list, tokens, tour, desk);
    }
  }
  if (blocks > 1) cluster_meet();
#endif
}

template <int G, int NT, bool kPair>
int launch_fp8(const Context& ctx, const ProductList& given, int64_t tokens) {
  using S = Many<G, NT>;
  const ProductList list = with_blocks(given, NT * 8);
  const auto kernel = fp8_kernel<G, NT, kPair>;
  if (const int error = raise_shared(kernel, kManyBytes); error != 0) return error;
  constexpr int blocks = kPair ? 2 : 1;
  const auto tiles =
      static_cast<int>(list.first_block[list.count] * ceil_div(tokens, blocks * G * 64));
  const int most = ctx.multiprocessors / blocks, clusters = tiles < most ? tiles : most;
  return launch_cluster(ctx, kernel, dim3(static_cast<unsigned>(clusters * blocks)),
                        dim3(S::kThreads), kManyBytes, dim3(static_cast<unsigned>(blocks)), list,
                        tokens, tiles, fp8_stages<G, NT>(tokens, S::kRingBytes));
}
// A tiling of a GEMM: warpgroups of 64 tokens and tiles of 8 rows per block, and the number of
// blocks that share the rows.
struct Fp8Way {
  int groups, tiles, blocks;
  int (*launch)(const Context& ctx, const ProductList& list, int64_t tokens);
};
constexpr Fp8Way kWays[] = {
    {1, 6, 1, launch_fp8<1, 6, false>},   {1, 8, 1, launch_fp8<1, 8, false>},
    {2, 14, 1, launch_fp8<2, 14, false>}, {2, 16, 1, launch_fp8<2, 16, false>},
    {2, 8, 2, launch_fp8<2, 8, true>},    {2, 12, 2, launch_fp8<2, 12, true>},
    {2, 16, 2, launch_fp8<2, 16, true>},
};

// Estimated cycles for all K steps of 128 columns: a step is bound by the tensor cores, by reading
// memory (weights) or L2 (both operands), or by latency.
int64_t cost(const Context& ctx, const Fp8Way& way, const ProductList& list, int64_t tokens) {
  constexpr int64_t kMemory = 20, kCache = 45, kLeast = 260;  // bytes per cycle, cycles
  int64_t tiles = 0;
  for (int i = 0; i < list.count; ++i) tiles += ceil_div(list.of[i].weight.rows, way.tiles * 8);
  const int64_t blocks = way.blocks;
  tiles *= ceil_div(tokens, way.groups * 64 * blocks);
  const int64_t act_tiles = ceil_div(tokens, kTokenTile), most = way.groups * 8;
  const int64_t of_rows = way.tiles * kE4M3TileBytes / blocks;
  const int64_t of_tokens = (act_tiles < most ? act_tiles : most) * kE4M3TileBytes;
  int64_t cycles = std::max<int64_t>(kLeast, way.groups * way.tiles * 17);
  cycles = std::max(cycles, (of_rows + of_tokens) / kCache);
  if (act_tiles <= most) cycles = std::max(cycles, of_rows / kMemory);
  return ceil_div(tiles, ctx.multiprocessors / blocks) * cycles;
}

}  // namespace

int run_fp8_wide(const Context& ctx, const ProductList& list, int64_t tokens) {
  return launch_fp8<1, 16, false>(ctx, list, tokens);
}

int run_fp8_many(const Context& ctx, const ProductList& list, int64_t tokens) {
  const Fp8Way* best = nullptr;
  for (const Fp8Way& way : kWays) {
    // The second block would have no tokens.
    if (tokens <= way.groups * 64 * (way.blocks - 1)) continue;
    if (best == nullptr || cost(ctx, way, list, tokens) < cost(ctx, *best, list, tokens))
      best = &way;
  }
  return best->launch(ctx, list, tokens);
}

}  // namespace freshet::cuda

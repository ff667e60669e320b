// Gate and up GEMMs with FP8 weights and a SwiGLU epilogue in E4M3 for more than 64 tokens
// (Hopper).
//
// A tile has 128 rows of gate and the same rows of up, so that a lane has both sums of its
// features, and four lanes have all features that share a scale. A warpgroup multiplies its 64
// tokens by gate's rows, then by up's: accumulators take 128 registers per thread, and sums of 128
// columns another 64. This leaves registers only for weights whose K is a single slice.
// Bit-identical to gemm_fp8_sm90_m1_64.cu, then glu() and put_e4m3().
#include <algorithm>

#include "backend/cuda/gemm/gemm_fp8_sm90_m65.cuh"
#include "backend/cuda/gemm/swiglu_epilogue.cuh"
#include "backend/cuda/gemm/swiglu_fp8_sm90.h"

namespace freshet::cuda {
namespace {

constexpr int kTiles = 16;  // 8-row tiles of gate, and of up
constexpr int kGateRows = kTiles * kTokenTile;
constexpr int G = 2;  // warpgroups of 64 tokens each
using Fp8GateShape = Fp8Shape<G, 2 * kTiles>;
using Fp8GateSums = float[2][kTiles][4];  // gate's, up's

// A cluster first takes tiles (for a pair of blocks) in turn, and then at most one half tile, in
// which a block takes 64 tokens and each of its warpgroups half of the features.
struct HalvedTiles {
  int first, count;  // the first tile that is halved, and the number of halves
};
// Up to this many turns, saving half a turn is worth a slightly slower kernel.
constexpr int kMostTurns = 12;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr int kPanels = kGateRows / kPanelRows;
constexpr int kScaleBytes = kPanelBytes - kPanelCodes;  // per K step of a panel

// One thread of each producer warp.
__device__ __forceinline__ void produce(Fp8Ring ring, const ProductList& list, int64_t tokens,
                                        const Tour& tour, int producer) {
  const WeightView &gate = list.of[0].weight, &up = list.of[1].weight;
  const int64_t act_tiles = (tokens + 7) / 8;
  const bool once = act_tiles <= Fp8GateShape::kTokenTiles;
  const int steps = steps_of(gate);
  const int64_t of_panel = int64_t{steps} * kPanelBytes;
  Fp8Filling filling{producer, 0, false};
  ring.at.stage = producer;
  for (int index = tour.first; index < tour.tiles; index += tour.step) {
    const ProductTile tile = many_tile<G, 1>(list, tokens, tour, index);
    const int left = max(min(static_cast<int>(act_tiles - tile.token_tile), ring.of.width), 0);
    const int64_t at = tile.unit * kPanels * of_panel;
    const auto copy_rows = [&](uint8_t* to, int n, uint64_t* barrier) {
      for (int i = 0; i < 2 * kPanels; ++i) {
        const uint8_t* from =
            (i < kPanels ? gate : up).data + at + i % kPanels * of_panel + n * kPanelBytes;
        copy_weights(to + i * kPanelCodes, from, kPanelCodes, barrier, once);
        copy_weights(to + 2 * kPanels * kPanelCodes + i * kScaleBytes, from + kPanelCodes,
                     kScaleBytes, barrier, once);
      }
    };
    fp8_fill(ring, filling, steps, 2 * kPanels * kPanelBytes, copy_rows,
             list.of[0].act + tile.token_tile * kE4M3TileBytes, act_tiles * kE4M3TileBytes,
             static_cast<uint32_t>(left * kE4M3TileBytes));
  }
}

__device__ __forceinline__ ProductTile half_tile(const ProductList& list, int64_t tokens,
                                                 const Tour& tour, const HalvedTiles& halves) {
  ProductTile tile = many_tile<G, 1>(list, tokens, tour, halves.first + tour.first / 2);
  tile.token_tile += tour.first % 2 * (G * 8) - tour.rank * (G * 4);
  return tile;
}

// The same for a pair of blocks: one copies gate's rows and the other up's.
template <bool kHalves>
__device__ __forceinline__ void produce_pair(const Fp8Ring& ring, Fp8Facts* facts,
                                             const ProductList& list, int64_t tokens,
                                             const Tour& tour, const HalvedTiles& halves,
                                             int producer) {
  const WeightView &gate = list.of[0].weight, &up = list.of[1].weight;
  const int64_t act_tiles = (tokens + 7) / 8;
  const int steps = steps_of(gate);
  const int64_t of_panel = int64_t{steps} * kPanelBytes;
  auto asking = fp8_asking<kPanels>(ring, producer);
  // Gate's panels, then up's; for a half tile, half of gate's panels and the same half of up's.
  const auto ask = [&](const ProductTile& tile, int most, int at, int apart) {
    const int left = max(min(static_cast<int>(act_tiles - tile.token_tile), most), 0);
    const auto token_bytes = static_cast<uint32_t>(left * kE4M3TileBytes);
    const auto tokens_end = static_cast<uint32_t>(ring.of.width * kE4M3TileBytes);
    asking.fill(facts, steps,
                {(tour.rank == 0 ? gate : up).data + tile.unit * kPanels * of_panel, of_panel,
                 kPanelCodes, tokens_end + tour.rank * at * kPanelCodes,
                 tokens_end + 2 * kPanels * kPanelCodes + tour.rank * at * kScaleBytes,
                 static_cast<uint32_t>(apart), kPanelRows / kTokenTile,
                 list.of[0].act + tile.token_tile * kE4M3TileBytes,
                 static_cast<uint32_t>(act_tiles * kE4M3TileBytes), token_bytes,
                 2 * kPanels * kPanelBytes + token_bytes},
                [&]() -> Fp8Facts {
                  Fp8Noted<kTiles> noted[2];
                  for (int h = 0; h < 2; ++h) {
                    noted[h].look_up([&](int j) {
                      return scaled_panel(list.of[h].weight, tile.unit * kPanels + j / 8);
                    });
                  }
                  const Fp8Scaled scaled[2] = {noted[0].scaled(), noted[1].scaled()};
                  return {{static_cast<int32_t>(tile.unit), static_cast<int32_t>(tile.token_tile),
                           scaled[0].how == scaled[1].how ? scaled[0].how : Fp8Scaled::kMixed,
                           static_cast<int32_t>(scaled[0].of_rows | scaled[1].of_rows << kTiles)}};
                });
  };
#pragma unroll 1
  for (int index = tour.first; index < tour.tiles; index += tour.step) {
    ask(many_tile<G, 1>(list, tokens, tour, index), ring.of.width, kPanels, 1);
  }
  if (kHalves && tour.first < halves.count) {
    ask(half_tile(list, tokens, tour, halves), G * 4, 1, 2);
  }
}

// sum = the sums of a tile, over all of K.
template <Fp8Scaled::How kHow>
__device__ __forceinline__ void sum_up(Fp8Reader& ring, Fp8GateSums& sum, int steps,
                                       uint32_t of_rows) {
  constexpr uint32_t kAll = (1u << kTiles) - 1;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) sum[h][j][0] = sum[h][j][1] = sum[h][j][2] = sum[h][j][3] = 0;
  }
  const auto of_half = [&](int h) {
    return kHow == Fp8Scaled::kRows ? kAll : of_rows >> h * kTiles & kAll;
  };
  const auto scales_of_half = [&](int h) { return ring.scales() + h * kTiles * kTileScales; };
#pragma unroll 1
  for (int n = 1;; ++n) {
    const auto places = static_cast<uint32_t>(ring.offset) >> 4;
    ring.wait_full();
    float2 scales;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float part[kTiles][4];
      fp8_ask(part, ring.tokens_at + places,
              ring.rows_at + places + (h * kTiles * kTileCodes >> 4));
      if (h == 0) scales = token_scales(ring);
      wgmma_wait<0>();
      fp8_add<kTiles, kHow>(sum[h], part, scales, scales_of_half(h), of_half(h));
      pin(sum[h]);
    }
    if (n == steps) break;
    ring.release(ring.at.stage);
    ring.next();
  }
  // Outside the loop: even code that is jumped over would slow it down.
  if constexpr (kHow != Fp8Scaled::kSteps) {
#pragma unroll
    for (int h = 0; h < 2; ++h) fp8_scale<kTiles>(sum[h], scales_of_half(h), of_half(h));
  }
  ring.release(ring.at.stage);
  ring.next();
}

// The epilogue of a tile is a loop over tiles. Unrolled code that runs once would take longer to
// fetch from L2 or memory than to run, so each turn takes the first few tiles, and the others move
// up.
constexpr int kAtOnce = 8;
template <int N>
__device__ __forceinline__ void move_up(float (&v)[N][4]) {
#pragma unroll
  for (int j = 0; j + kAtOnce < N; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) v[j][i] = v[j + kAtOnce][i];
  }
}

// Replaces gate's sums by SwiGLU outputs; returns the largest magnitude for each of a lane's two
// tokens.
template <bool kBias, int N>
__device__ __forceinline__ float2 gate_sums(float (&gate)[N][4], float (&up)[N][4],
                                            const ProductList& list, int64_t first) {
  const float scales[2] = {list.of[0].scale, list.of[1].scale};
  float most[2] = {};
#pragma unroll 1
  for (int turn = 0; turn < N / kAtOnce; ++turn) {
    float v[kAtOnce][4];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      float bias[2][2] = {};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (!kBias || list.of[h].bias == nullptr) continue;
        const float* from =
            list.of[h].bias + first + (turn * kAtOnce + j) * 8 + threadIdx.x % 4 * 2;
        bias[h][0] = from[0], bias[h][1] = from[1];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto ended = [&](int h) {
          float e = h == 0 ? gate[j][i] : up[j][i];
          if (kBias && list.of[h].bias != nullptr) e = __fadd_rn(e, bias[h][i % 2]);
          return __fmul_rn(e, scales[h]);
        };
        v[j][i] = __fmul_rn(activate(ended(0), kSilu), ended(1));
        most[i / 2] = fmaxf(most[i / 2], fabsf(v[j][i]));
      }
    }
    move_up(gate);
    move_up(up);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) gate[N - kAtOnce + j][i] = v[j][i];
    }
  }
  return make_float2(most[0], most[1]);
}
// (The version without bias has no branch.)
template <int N>
__device__ __forceinline__ float2 gate_sums(float (&gate)[N][4], float (&up)[N][4],
                                            const ProductList& list, int64_t first) {
  if (list.of[0].bias == nullptr && list.of[1].bias == nullptr) {
    return gate_sums<false>(gate, up, list, 0);
  }
  return gate_sums<true>(gate, up, list, first);
}

// Encodes 8 N of the 128 features of a lane's two tokens, from tile `first` of 8 on, bit-identical
// to put_e4m3(); `at` is the warp's first token tile. share() turns the largest magnitude of these
// features into that of all 128.
template <int N, class Share>
__device__ __forceinline__ void put_tile(const Activations& act, float (&v)[N][4], float2 most,
                                         int64_t unit, int first, int64_t at, int64_t tokens,
                                         const Share& share) {
  const int lane = static_cast<int>(threadIdx.x % 32), odd = lane % 2;
  uint8_t* const to = act.data + (unit * act.core_tiles + at) * kE4M3TileBytes;
  uint8_t* codes = to + first * 64 + lane / 4 * 16 + odd * 8 + lane % 4 / 2 * 4;
  float up[2];
  uint32_t real[2];  // all bits set, or none
  bool there[2];
  share(most);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool is = (at + r) * 8 + lane / 4 < tokens;
    float its = r == 0 ? most.x : most.y;
    its = fmaxf(its, __shfl_xor_sync(0xffffffff, its, 1));
    its = fmaxf(its, __shfl_xor_sync(0xffffffff, its, 2));
    const E4M3Scale scale = e4m3_scale(is ? its : 0.0f);
    up[r] = scale.up, real[r] = is ? ~0u : 0, there[r] = at + r < act.core_tiles;
    if (first == 0 && lane % 4 == 0 && there[r]) {
      reinterpret_cast<float*>(to + r * kE4M3TileBytes + kTokenTile * kE4M3Cols)[lane / 4] =
          scale.down;
    }
  }
  // Among 16 features, the first of two lanes writes four of the first eight.
  const uint32_t halves = odd != 0 ? 0x1054 : 0x5410;
#pragma unroll 1
  for (int turn = 0; turn < N / kAtOnce; ++turn, codes += kAtOnce / 2 * 128) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int j = 0; j < kAtOnce; j += 2) {
        const auto two = [&](int n) {
          return two_e4m3(__fmul_rn(v[n][r * 2], up[r]), __fmul_rn(v[n][r * 2 + 1], up[r]));
        };
        const uint32_t low = two(j), high = two(j + 1);
        const uint32_t other = __shfl_xor_sync(0xffffffff, odd != 0 ? low : high, 1);
        const uint32_t four = __byte_perm(odd != 0 ? high : low, other, halves) & real[r];
        if (there[r]) {
          *reinterpret_cast<uint32_t*>(codes + r * kE4M3TileBytes + j / 2 * 128) = four;
        }
      }
    }
    move_up(v);
  }
}

// Epilogue of a tile.
__device__ __forceinline__ void end_tile(Fp8GateSums& sum, const ProductList& list,
                                         const ProductTile& tile, int64_t tokens,
                                         const Activations& act) {
  const float2 most = gate_sums(sum[0], sum[1], list, tile.unit * kGateRows);
  put_tile(act, sum[0], most, tile.unit, 0, tile.token_tile + warp_index() * 2, tokens,
           [](float2&) {});
}

// The last tile of a block is half a tile: both warpgroups take the same tokens, and half of the
// features each. `most`: two floats per token.
__device__ __forceinline__ void take_half(const Fp8Reader& of, const Fp8Facts* told,
                                          const ProductList& list, int64_t tokens,
                                          const Activations& act, float* most) {
  constexpr int kTokens = G * 4, kHalf = kTiles / 2;  // tiles
  const int half = warp_index() / 4, warp = warp_index() % 4;
  Fp8Reader ring = of;
  ring.wait_full();
  const Fp8Facts facts = facts_at(told, ring);
  if (half != 0) {  // the first warpgroup's tokens, and the rows after its own
    ring.stages -= kTokens * kE4M3TileBytes;
    ring.tokens_at -= kTokens * kE4M3TileBytes >> 4;
    ring.rows_at += kTiles * kTileCodes >> 4;
    ring.scales_at += kTokens * kE4M3TileBytes + kTiles * kTileScales;
  }
  const Fp8Scaled both{static_cast<Fp8Scaled::How>(facts.of[2]), 0};
  const auto bits = static_cast<uint32_t>(facts.of[3]) >> half * kHalf;
  const uint32_t of_rows = (bits & 0xff) | (bits >> kTiles & 0xff) << kHalf;
  float sum[kTiles][4];
  fp8_as(both, [&](auto how) {
    constexpr Fp8Scaled::How kHow = decltype(how)::value;
    fp8_sum_ahead<kTiles, kHow>(ring, sum, {steps_of(list.of[0].weight), 0},
                                kHow == Fp8Scaled::kRows ? ~0u : of_rows);
  });
  float gate[kHalf][4], up[kHalf][4];
#pragma unroll
  for (int j = 0; j < kHalf; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) gate[j][i] = sum[j][i], up[j][i] = sum[kHalf + j][i];
  }
  const float2 largest = gate_sums(gate, up, list, facts.of[0] * kGateRows + half * kHalf * 8);
  put_tile(act, gate, largest, facts.of[0], half * kHalf, facts.of[1] + warp * 2, tokens,
           [&](float2& of_lane) {
             const int lane = static_cast<int>(threadIdx.x % 32);
             float* own = most + warp * 16 + lane / 4;
             const auto of_four = [](float v) {
               v = fmaxf(v, __shfl_xor_sync(0xffffffff, v, 1));
               return fmaxf(v, __shfl_xor_sync(0xffffffff, v, 2));
             };
             const float2 mine = make_float2(of_four(of_lane.x), of_four(of_lane.y));
             if (lane % 4 == 0) own[half * 64] = mine.x, own[half * 64 + 8] = mine.y;
             asm volatile("bar.sync 1, %0;" ::"n"(Fp8GateShape::kConsumers) : "memory");
             of_lane = make_float2(fmaxf(own[0], own[64]), fmaxf(own[8], own[64 + 8]));
           });
}

// Consumer warpgroups.
__device__ __forceinline__ void walk(const Fp8Ring& of, const ProductList& list, int64_t tokens,
                                     const Tour& tour, const Activations& act) {
  Fp8Reader ring = fp8_reader(of, 2 * kTiles);
  const int steps = steps_of(list.of[0].weight);
  ProductTile next;
  Fp8Noted<kTiles> noted[2];
  const auto look_up = [&](int index) {
    next = many_tile<G, 1>(list, tokens, tour, index);
    for (int h = 0; h < 2; ++h) {
      noted[h].look_up(
          [&](int j) { return scaled_panel(list.of[h].weight, next.unit * kPanels + j / 8); });
    }
  };
  look_up(tour.first);
  wait();
  for (int index = tour.first; index < tour.tiles; index += tour.step) {
    const ProductTile tile = next;
    const Fp8Scaled scaled[2] = {noted[0].scaled(), noted[1].scaled()};
    const Fp8Scaled both{scaled[0].how == scaled[1].how ? scaled[0].how : Fp8Scaled::kMixed, 0};
    const uint32_t of_rows = scaled[0].of_rows | scaled[1].of_rows << kTiles;
    Fp8GateSums sum;
    fp8_as(both, [&](auto how) { sum_up<decltype(how)::value>(ring, sum, steps, of_rows); });
    if (index + tour.step < tour.tiles) look_up(index + tour.step);
    end_tile(sum, list, tile, tokens, act);
  }
}

// Consumer warpgroups of a pair of blocks.
template <bool kHalves>
__device__ __forceinline__ void walk_pair(const Fp8Ring& of, const Fp8Facts* told,
                                          const ProductList& list, int64_t tokens, const Tour& tour,
                                          const HalvedTiles& halves, const Activations& act,
                                          float* most) {
  Fp8Reader ring = fp8_reader(of, 2 * kTiles);
  const int steps = steps_of(list.of[0].weight);
  wait();
  for (int index = tour.first; index < tour.tiles; index += tour.step) {
    ring.wait_full();
    const Fp8Facts facts = facts_at(told, ring);
    const Fp8Scaled both{static_cast<Fp8Scaled::How>(facts.of[2]), 0};
    const auto of_rows = static_cast<uint32_t>(facts.of[3]);
    Fp8GateSums sum;
    fp8_as(both, [&](auto how) { sum_up<decltype(how)::value>(ring, sum, steps, of_rows); });
    end_tile(sum, list, {0, facts.of[0], facts.of[1]}, tokens, act);
  }
  if (kHalves && tour.first < halves.count) take_half(ring, told, list, tokens, act, most);
}
#endif

// kPair: a cluster of two blocks shares the rows; kHalves: its last tile may be half a tile.
template <bool kPair, bool kHalves>
__global__ void __launch_bounds__(Fp8GateShape::kThreads, 1)
    gated_kernel(const __grid_constant__ ProductList list, int64_t tokens, int tiles,
                 HalvedTiles halves, Fp8Stages stages, Activations act) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ uint64_t full[kMostStages], empty[kMostStages];
  __shared__ Fp8Facts facts[kPair ? kMostStages : 1];
  __shared__ float most[kPair ? G * 64 : 1];
  constexpr int blocks = kPair ? 2 : 1;
  let_next_start();
  const Fp8Ring ring = fp8_ring<Fp8GateShape>(stages, shared, full, empty, blocks);
  const Tour tour = tour_of(tiles, blocks);
  if (blocks > 1) cluster_meet();
  const int producer = warp_index() - Fp8GateShape::kConsumers / 32;
  if (producer >= 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x % 32 == 0) {
      if constexpr (kPair) {
        produce_pair<kHalves>(ring, facts, list, tokens, tour, halves, producer);
      } else {
        produce(ring, list, tokens, tour, producer);
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    if constexpr (kPair) {
      walk_pair<kHalves>(ring, facts, list, tokens, tour, halves, act, most);
    } else {
      walk(ring, list, tokens, tour, act);
    }
  }
  if (blocks > 1) cluster_meet();
#endif
}

int64_t tiles_of(int64_t rows, int64_t tokens) {
  return ceil_div(rows, kGateRows) * (tokens <= 64 ? 1 : ceil_div(tokens, 128));
}

template <bool kPair, bool kHalves>
int launch_gated(const Context& ctx, const ProductList& list, int64_t tokens,
                 const Activations& act, const HalvedTiles& halves) {
  static_assert(kManyBytes / ((Fp8GateShape::kTokenTiles + 2 * kTiles) * kE4M3TileBytes) >=
                kProducers);
  const auto kernel = gated_kernel<kPair, kHalves>;
  if (const int error = raise_shared(kernel, kManyBytes); error != 0) return error;
  constexpr int blocks = kPair ? 2 : 1;
  const int clusters = std::min(std::max(halves.first, halves.count), ctx.multiprocessors / blocks);
  return launch_cluster(ctx, kernel, dim3(static_cast<unsigned>(clusters * blocks)),
                        dim3(Fp8GateShape::kThreads), kManyBytes,
                        dim3(static_cast<unsigned>(blocks)), list, tokens, halves.first, halves,
                        fp8_stages<G, 2 * kTiles>(tokens, kManyBytes), act);
}

}  // namespace

int run_fp8_gated(const Context& ctx, const ProductList& gate_and_up, int64_t tokens,
                  const Activations& act) {
  static_assert(kGateRows == kFp8GateRows);
  ProductList list = with_blocks(gate_and_up, kGateRows);
  list.count = 1;  // up has the same rows, and isn't counted
  const int64_t rows = list.of[0].weight.rows;
  const auto tiles = static_cast<int>(tiles_of(rows, tokens));
  if (tokens <= 128) return launch_gated<false, false>(ctx, list, tokens, act, {tiles, 0});
  const auto pairs = static_cast<int>(tiles_of(rows, ceil_div(tokens, 2)));
  // Tiles of a last turn in which at least half of the clusters would be idle are cut in two.
  const int clusters = ctx.multiprocessors / 2, left = pairs % clusters;
  if (left == 0 || left * 2 > clusters || pairs > kMostTurns * clusters) {
    return launch_gated<true, false>(ctx, list, tokens, act, {pairs, 0});
  }
  return launch_gated<true, true>(ctx, list, tokens, act, {pairs - left, left * 2});
}

}  // namespace freshet::cuda

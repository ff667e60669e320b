// Products of FP8 weights (E4M3) with more than 64 tokens on Hopper; the order of a sum is that of
// products_fp8.cu, and its bits.
//
// A block takes 64 G tokens, on the 64-row side of wgmma (a lane has two of their scales to look up
// then, rather than 32), and NT tiles of 8 rows, of which it walks all leaves; it goes from tile to
// tile of the product. Four threads keep a ring of stages of 128 columns filled by the bulk copy
// engine; G warpgroups multiply. Rows of tokens that are not there are multiplied as whatever lies
// in shared memory, and left out.
#include <algorithm>

#include "backend/cuda/products_fp8.cuh"

namespace freshet::cuda {
namespace {

constexpr int kSharedBytes = 222 << 10;
constexpr int kMostStages = 32;

// Warps of which one thread each fills the ring, a stage in turn: one alone would take longer for a
// stage than its bytes. (Registers change hands between whole warpgroups only.)
constexpr int kProducers = 4;

template <int G, int NT>
struct Fp8Shape {
  static constexpr int kConsumers = G * 128;
  static constexpr int kTokenTiles = G * 8;
  static constexpr int kThreads = kConsumers + kProducers * 32;
};

// What is in a ring: so many stages, each of `width` tiles of tokens and then the rows.
struct Fp8Stages {
  int count, bytes, width;
};
template <int G, int NT>
Fp8Stages fp8_stages(int64_t tokens, int budget) {
  using S = Fp8Shape<G, NT>;
  const auto tiles = static_cast<int>(ceil_div(tokens, kTokenTile));
  const int width = tiles < S::kTokenTiles ? tiles : S::kTokenTiles;
  const int bytes = (width + NT) * kE4M3TileBytes;
  const int beyond = S::kTokenTiles * kE4M3TileBytes - bytes;  // is read of the last
  const int count = (budget - (beyond > 0 ? beyond : 0)) / bytes;
  return {count < kMostStages ? count : kMostStages, bytes, width};
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
template <int NT>
constexpr int kAheadOf = NT <= 8 ? 2 : 1;  // sums being computed

struct Fp8Ring {
  Fp8Stages of;
  uint8_t* stages;
  uint64_t *full, *empty;
  int stage = 0, round = 0;
  __device__ __forceinline__ uint8_t* data() const { return stages + stage * of.bytes; }
  __device__ __forceinline__ void next(int stages = 1) {
    stage += stages;
    if (stage >= of.count) stage -= of.count, round ^= 1;
  }
};

// All threads of a block.
template <class Shape>
__device__ __forceinline__ Fp8Ring fp8_ring(const Fp8Stages& of, uint8_t* stages, uint64_t* full,
                                            uint64_t* empty) {
  if (threadIdx.x == Shape::kConsumers) {
    for (int s = 0; s < of.count; ++s) {
      barrier_init(&full[s], 1);
      barrier_init(&empty[s], Shape::kConsumers / 32);
    }
    barriers_ready();
  }
  __syncthreads();
  return {of, stages, full, empty};
}

__device__ __forceinline__ int steps_of(const WeightView& w) {
  return static_cast<int>((w.cols + kE4M3Cols - 1) / kE4M3Cols);
}
__device__ __forceinline__ int64_t panels_of(const WeightView& w) {
  return (w.rows + kPanelRows - 1) / kPanelRows;
}

// What a producer has asked for.
struct Fp8Filling {
  int at, before;  // the stage that it fills next and the first of the tile, counted from the start
  bool waited;
};
// The stages of a tile of so many steps, a producer's share. copy_rows(to, step, barrier) asks for
// row_bytes of weights: at first before the kernel in front of this one has ended, tokens after.
template <class CopyRows>
__device__ __forceinline__ void fp8_fill(Fp8Ring& ring, Fp8Filling& filling, int steps,
                                         uint32_t row_bytes, const CopyRows& copy_rows,
                                         const uint8_t* tokens, int64_t token_step,
                                         uint32_t token_bytes) {
  const auto ask_rows = [&](int n, int stage) {
    barrier_expect(&ring.full[stage], row_bytes + token_bytes);
    copy_rows(ring.stages + stage * ring.of.bytes + ring.of.width * kE4M3TileBytes, n,
              &ring.full[stage]);
  };
  const auto ask_tokens = [&](int n, int stage) {
    bulk_copy(ring.stages + stage * ring.of.bytes, tokens + n * token_step, token_bytes,
              &ring.full[stage]);
  };
  if (!filling.waited) {
    const int most = min(steps, ring.of.count);
    for (int n = filling.at; n < most; n += kProducers) ask_rows(n, n);
    wait();
    for (; filling.at < most; filling.at += kProducers, ring.next(kProducers)) {
      ask_tokens(filling.at, filling.at);
    }
    filling.waited = true;
  }
  for (; filling.at < filling.before + steps; filling.at += kProducers, ring.next(kProducers)) {
    if (filling.at >= ring.of.count) barrier_wait(&ring.empty[ring.stage], ring.round ^ 1);
    ask_rows(filling.at - filling.before, ring.stage);
    ask_tokens(filling.at - filling.before, ring.stage);
  }
  filling.before += steps;
}

// Fills the ring with all tiles of a block: a thread of each producer.
template <int G, int NT>
__device__ __forceinline__ void fp8_produce(Fp8Ring ring, const ProductList& list, int64_t tokens,
                                            const Tour& tour, int producer) {
  const int64_t act_tiles = (tokens + 7) / 8;
  Fp8Filling filling{producer, 0, false};
  ring.stage = producer;
  for (int index = tour.first; index < tour.tiles; index += tour.step) {
    const ProductTile tile =
        find_product_tile<Fp8Shape<G, NT>::kTokenTiles, NT>(list, tokens, index);
    const ProductArgs& p = list.of[tile.product];
    const int steps = steps_of(p.weight);
    // A copy for each panel that the rows are of.
    const int64_t of_panel = int64_t{steps} * kPanelBytes;
    const auto first = static_cast<int>(tile.unit), in_panel = first % 8;
    const int rows = min(NT, static_cast<int>(panels_of(p.weight) * 8) - first) * kE4M3TileBytes;
    const int of_first = min(rows, (8 - in_panel) * kE4M3TileBytes);
    const uint8_t* panel = p.weight.data + first / 8 * of_panel;
    const auto copy_rows = [&](uint8_t* to, int n, uint64_t* barrier) {
      const uint8_t* from = panel + n * kPanelBytes;
      bulk_copy(to, from + in_panel * kE4M3TileBytes, static_cast<uint32_t>(of_first), barrier);
      for (int at = of_first; at < rows; at += kPanelBytes) {
        from += of_panel;
        bulk_copy(to + at, from, static_cast<uint32_t>(min(kPanelBytes, rows - at)), barrier);
      }
    };
    const int left = min(static_cast<int>(act_tiles - tile.token_tile), ring.of.width);
    fp8_fill(ring, filling, steps, static_cast<uint32_t>(rows), copy_rows,
             p.act + tile.token_tile * kE4M3TileBytes, act_tiles * kE4M3TileBytes,
             static_cast<uint32_t>(left * kE4M3TileBytes));
  }
}

// What the scales of a tile's rows have in common.
struct Fp8Scaled {
  enum How : int32_t { kRows, kSteps, kMixed } how;
  uint32_t of_rows;  // a bit a tile of 8 rows
};
// panel_of(j): where the j-th tile's is noted. What is looked up a tile ahead stays where it is
// written.
template <int NT, class PanelOf>
__device__ __forceinline__ Fp8Scaled fp8_scaled(const PanelOf& panel_of) {
  uint32_t of_rows = 0, of_steps = 0;
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    int how;
    asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(how) : "l"(panel_of(j)));
    of_rows |= how == FP8::kOfRows ? 1u << j : 0;
    of_steps |= how == FP8::kOfSteps ? 1u << j : 0;
  }
  constexpr uint32_t kAll = (1u << NT) - 1;
  return {of_rows == kAll    ? Fp8Scaled::kRows
          : of_steps == kAll ? Fp8Scaled::kSteps
                             : Fp8Scaled::kMixed,
          of_rows};
}
__device__ __forceinline__ const int32_t* scaled_panel(const WeightView& w, int64_t panel) {
  const int64_t last = panels_of(w) - 1;
  return FP8::scaled_at(w.data, w.rows, w.cols) + (panel < last ? panel : last);
}

// sum += part, times the scales of a lane's two tokens and of the tiles at `rows`.
template <int NT, Fp8Scaled::How kHow>
__device__ __forceinline__ void fp8_add(float (&sum)[NT][4], const float (&part)[NT][4],
                                        float2 tokens, const uint8_t* rows, uint32_t of_rows) {
  float2 s0 = make_float2(tokens.x, tokens.x), s1 = make_float2(tokens.y, tokens.y);
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    const uint8_t* scales = rows + j * kE4M3TileBytes + kTokenTile * kE4M3Cols;
    float2 w = make_float2(1.0f, 1.0f);
    if constexpr (kHow == Fp8Scaled::kSteps) {
      w.x = w.y = *reinterpret_cast<const float*>(scales);
    } else if constexpr (kHow == Fp8Scaled::kMixed) {
      const float2 own = *reinterpret_cast<const float2*>(scales + threadIdx.x % 4 * 8);
      const bool whole = (of_rows >> j & 1) != 0;
      w = make_float2(whole ? 1.0f : own.x, whole ? 1.0f : own.y);
    }
    // Whole panels share a step's scale.
    if constexpr (kHow == Fp8Scaled::kMixed) {
      s0 = make_float2(__fmul_rn(w.x, tokens.x), __fmul_rn(w.y, tokens.x));
      s1 = make_float2(__fmul_rn(w.x, tokens.y), __fmul_rn(w.y, tokens.y));
    } else if (kHow == Fp8Scaled::kSteps && (NT % 8 != 0 || j % 8 == 0)) {
      s0.x = s0.y = __fmul_rn(w.x, tokens.x);
      s1.x = s1.y = __fmul_rn(w.x, tokens.y);
    }
    sum[j][0] = __fmaf_rn(part[j][0], s0.x, sum[j][0]);
    sum[j][1] = __fmaf_rn(part[j][1], s0.y, sum[j][1]);
    sum[j][2] = __fmaf_rn(part[j][2], s1.x, sum[j][2]);
    sum[j][3] = __fmaf_rn(part[j][3], s1.y, sum[j][3]);
  }
}

// sum *= the scales of the rows of tiles that have one each.
template <int NT>
__device__ __forceinline__ void fp8_scale(float (&sum)[NT][4], const uint8_t* rows,
                                          uint32_t of_rows) {
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    if ((of_rows >> j & 1) == 0) continue;
    const float2 w = *reinterpret_cast<const float2*>(
        rows + j * kE4M3TileBytes + kTokenTile * kE4M3Cols + threadIdx.x % 4 * 8);
    sum[j][0] = __fmul_rn(sum[j][0], w.x);
    sum[j][1] = __fmul_rn(sum[j][1], w.y);
    sum[j][2] = __fmul_rn(sum[j][2], w.x);
    sum[j][3] = __fmul_rn(sum[j][3], w.y);
  }
}

// sum += the next U steps, for a warpgroup's 64 tokens; some parts are on their way at once.
// After the last one, end(its rows).
template <int G, int NT, Fp8Scaled::How kHow, int U, class End>
__device__ __forceinline__ void fp8_steps(Fp8Ring& ring, float (&sum)[NT][4], uint32_t of_rows,
                                          bool last, const End& end) {
  constexpr int kAhead = kAheadOf<NT> < U ? kAheadOf<NT> : U;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = warp_index() % 4;
  const int group = warp_index() / 4;
  float part[kAhead][NT][4];
  float2 scales[kAhead];
  const uint8_t* rows[kAhead];
  uint64_t* empty[kAhead];
  const auto ask = [&](int i) {
    barrier_wait(&ring.full[ring.stage], ring.round);
    const uint8_t* tokens = ring.data() + group * (8 * kE4M3TileBytes);
    rows[i] = ring.data() + ring.of.width * kE4M3TileBytes;
    empty[i] = &ring.empty[ring.stage];
    const uint64_t a = e4m3_at(tokens), b = e4m3_at(rows[i]);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma8(part[i], a + k * kNextStep, b + k * kNextStep, k > 0);
    wgmma_commit();
    const uint8_t* own = tokens + warp * (2 * kE4M3TileBytes) + kTokenTile * kE4M3Cols;
    scales[i] = make_float2(
        *reinterpret_cast<const float*>(own + lane / 4 * 4),
        *reinterpret_cast<const float*>(own + kE4M3TileBytes + lane / 4 * 4));
    ring.next();
  };
#pragma unroll
  for (int u = 0; u < kAhead - 1; ++u) ask(u);
#pragma unroll
  for (int u = 0; u < U; ++u) {
    if (u + kAhead - 1 < U) ask((u + kAhead - 1) % kAhead);
    if (u + kAhead - 1 < U) {
      wgmma_wait<kAhead - 1>();
    } else if (u + 2 < U) {
      wgmma_wait<2>();
    } else if (u + 1 < U) {
      wgmma_wait<1>();
    } else {
      wgmma_wait<0>();
    }
    fp8_add<NT, kHow>(sum, part[u % kAhead], scales[u % kAhead], rows[u % kAhead], of_rows);
    if (u + 1 == U && last) end(rows[u % kAhead]);
    pin(sum);
    __syncwarp();
    if (lane == 0) barrier_arrive(empty[u % kAhead]);
  }
}

// Writes a tile's sums: a lane has two neighbouring rows of two tokens.
template <int NT>
__device__ __forceinline__ void fp8_finish(const ProductArgs& p, int64_t tokens,
                                           const float (&sum)[NT][4], const ProductTile& tile) {
  constexpr int kAtOnce = 8;  // loads of what is added fly together
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int64_t token = tile.token_tile * 8 + warp * 16 + lane / 4;
  const int64_t first = tile.unit * 8 + lane % 4 * 2, end = p.weight.rows;
  const bool pairs = p.out_stride % 2 == 0 && reinterpret_cast<uintptr_t>(p.out) % 8 == 0;
#pragma unroll
  for (int from = 0; from < NT; from += kAtOnce) {
    // Body(number of the pair, its row, its place) for all pairs.
    const auto each = [&](auto&& body) {
#pragma unroll
      for (int n = 0; n < kAtOnce * 2; ++n) {
        if (from + n / 2 >= NT) break;
        const int64_t row = first + (from + n / 2) * 8, t = token + n % 2 * 8;
        if (row < end && t < tokens) body(n, row, p.out + t * p.out_stride + row);
      }
    };
    float2 before[kAtOnce * 2] = {};
    if (p.add != 0) {
      each([&](int n, int64_t row, const float* at) {
        if (pairs && row + 1 < end) {
          before[n] = *reinterpret_cast<const float2*>(at);
        } else {
          before[n] = make_float2(at[0], row + 1 < end ? at[1] : 0.0f);
        }
      });
    }
    each([&](int n, int64_t row, float* to) {
      const int j = from + n / 2;
      float2 v = make_float2(sum[j][n % 2 * 2], sum[j][n % 2 * 2 + 1]);
      if (p.bias != nullptr) {
        v.x = __fadd_rn(v.x, p.bias[row]);
        if (row + 1 < end) v.y = __fadd_rn(v.y, p.bias[row + 1]);
      }
      v = make_float2(__fmul_rn(v.x, p.scale), __fmul_rn(v.y, p.scale));
      if (p.add != 0) v = make_float2(__fadd_rn(before[n].x, v.x), __fadd_rn(before[n].y, v.y));
      if (pairs && row + 1 < end) {
        *reinterpret_cast<float2*>(to) = v;
      } else {
        to[0] = v.x;
        if (row + 1 < end) to[1] = v.y;
      }
    });
  }
}

// total = the sums of all leaves, from left to right.
template <int G, int NT, Fp8Scaled::How kHow>
__device__ __forceinline__ void fp8_sum(Fp8Ring& ring, float (&total)[NT][4], int64_t cols,
                                        uint32_t of_rows) {
  constexpr int kAtOnce = kAheadOf<NT> == 1 || kHow == Fp8Scaled::kMixed ? 1 : 8;
  const int parts = leaves8(cols);
  float sum[NT][4];
  for (int leaf = 0; leaf < parts; ++leaf) {
#pragma unroll
    for (int j = 0; j < NT; ++j) sum[j][0] = sum[j][1] = sum[j][2] = sum[j][3] = 0.0f;
    const auto end = [&](const uint8_t* rows) {
#pragma unroll
      for (int j = 0; j < NT; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          total[j][i] = leaf == 0 ? sum[j][i] : __fadd_rn(total[j][i], sum[j][i]);
        }
      }
      if (kHow != Fp8Scaled::kSteps && leaf + 1 == parts) fp8_scale<NT>(total, rows, of_rows);
      pin(total);
    };
    int left = leaf_of(cols, leaf).count;
    for (; left >= kAtOnce; left -= kAtOnce) {
      fp8_steps<G, NT, kHow, kAtOnce>(ring, sum, of_rows, left == kAtOnce, end);
    }
    if constexpr (kAtOnce > 1) {
      for (; left > 0; --left) fp8_steps<G, NT, kHow, 1>(ring, sum, of_rows, left == 1, end);
    }
  }
}
template <int G, int NT>
__device__ __forceinline__ void fp8_sum(Fp8Ring& ring, float (&total)[NT][4], int64_t cols,
                                        const Fp8Scaled& scaled) {
  if (scaled.how == Fp8Scaled::kRows) {
    fp8_sum<G, NT, Fp8Scaled::kRows>(ring, total, cols, scaled.of_rows);
  } else if (scaled.how == Fp8Scaled::kSteps) {
    fp8_sum<G, NT, Fp8Scaled::kSteps>(ring, total, cols, scaled.of_rows);
  } else {
    fp8_sum<G, NT, Fp8Scaled::kMixed>(ring, total, cols, scaled.of_rows);
  }
}

// G warpgroups.
template <int G, int NT>
__device__ __forceinline__ void fp8_walk(Fp8Ring ring, const ProductList& list, int64_t tokens,
                                         const Tour& tour) {
  constexpr int kTokenTiles = Fp8Shape<G, NT>::kTokenTiles;
  const auto look_up = [&](int index) {
    const ProductTile tile = find_product_tile<kTokenTiles, NT>(
        list, tokens, index < tour.tiles ? index : tour.first);
    const WeightView& w = list.of[tile.product].weight;
    return fp8_scaled<NT>([&](int j) { return scaled_panel(w, (tile.unit + j) / 8); });
  };
  Fp8Scaled next = look_up(tour.first);
  wait();
  for (int index = tour.first; index < tour.tiles; index += tour.step) {
    const ProductTile tile = find_product_tile<kTokenTiles, NT>(list, tokens, index);
    const ProductArgs& p = list.of[tile.product];
    const Fp8Scaled scaled = next;
    next = look_up(index + tour.step);
    float sum[NT][4];
    fp8_sum<G, NT>(ring, sum, p.weight.cols, scaled);
    fp8_finish<NT>(p, tokens, sum, tile);
  }
}
#endif

template <int G, int NT>
__global__ void __launch_bounds__(Fp8Shape<G, NT>::kThreads, 1)
    fp8_kernel(const __grid_constant__ ProductList list, int64_t tokens, int tiles,
               Fp8Stages stages) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Fp8Shape<G, NT>;
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ uint64_t full[kMostStages], empty[kMostStages];
  let_next_start();
  const Fp8Ring ring = fp8_ring<S>(stages, shared, full, empty);
  const Tour tour{static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), tiles};
  const int producer = warp_index() - S::kConsumers / 32;
  if (producer >= 0) {
    if constexpr (G == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x % 32 == 0) fp8_produce<G, NT>(ring, list, tokens, tour, producer);
  } else {
    if constexpr (G == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    fp8_walk<G, NT>(ring, list, tokens, tour);
  }
#endif
}

template <int G, int NT>
int launch_fp8(const ProductList& given, int64_t tokens) {
  using S = Fp8Shape<G, NT>;
  const ProductList list = with_blocks(given, NT * 8);
  const auto kernel = fp8_kernel<G, NT>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return static_cast<int>(error);
  const auto tiles = static_cast<int>(list.first_block[list.count] * ceil_div(tokens, G * 64));
  const int blocks = tiles < multiprocessors ? tiles : multiprocessors;
  return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(S::kThreads), kSharedBytes, list,
                tokens, tiles, fp8_stages<G, NT>(tokens, kSharedBytes));
}

// A way to cut a product: so many warpgroups of tokens and tiles of 8 rows a block.
struct Way {
  int groups, tiles;
  int (*launch)(const ProductList& list, int64_t tokens);
};
constexpr Way kWays[] = {
    {1, 6, launch_fp8<1, 6>},
    {1, 8, launch_fp8<1, 8>},
    {2, 14, launch_fp8<2, 14>},
    {2, 16, launch_fp8<2, 16>},
};

// About how many cycles all steps of 128 columns take: each is multiplied, comes from memory (its
// weights) or the L2 cache (all of it), or is waited for.
int64_t cost(const Way& way, const ProductList& list, int64_t tokens) {
  constexpr int64_t kMemory = 20, kCache = 45, kLeast = 260;  // bytes a cycle, cycles
  int64_t tiles = 0;
  for (int i = 0; i < list.count; ++i) tiles += ceil_div(list.of[i].weight.rows, way.tiles * 8);
  tiles *= ceil_div(tokens, way.groups * 64);
  const int64_t act_tiles = ceil_div(tokens, kTokenTile), most = way.groups * 8;
  const int64_t of_rows = way.tiles * kE4M3TileBytes;
  const int64_t of_tokens = (act_tiles < most ? act_tiles : most) * kE4M3TileBytes;
  int64_t cycles = std::max<int64_t>(kLeast, way.groups * way.tiles * 17);
  cycles = std::max(cycles, (of_rows + of_tokens) / kCache);
  if (act_tiles <= most) cycles = std::max(cycles, of_rows / kMemory);
  return ceil_div(tiles, multiprocessors) * cycles;
}

}  // namespace

int run_fp8_many(const ProductList& list, int64_t tokens) {
  const Way* best = nullptr;
  for (const Way& way : kWays) {
    if (best == nullptr || cost(way, list, tokens) < cost(*best, list, tokens)) best = &way;
  }
  return best->launch(list, tokens);
}

}  // namespace freshet::cuda

// Products of FP8 weights (E4M3) on Hopper, from one token to many: activations in E4M3 too, wgmma.
//
// Every 128 columns of a row have a scale, of weights and of activations alike. The tensor cores
// sum 128 columns; the sum times both scales is added in F32 to that of a leaf, from left to right.
// K is cut into leaves by the weight's number of columns alone, and leaves are added from left to
// right: how many tokens there are touches no bit.
//
// Rows of 64 are a panel. Where every row of it has one scale from end to end (FP8::kOfRows), the
// sum is multiplied by it once, at its end; where all its rows share theirs (FP8::kOfSteps), it is
// one number to look up.
//
// Few tokens: a block takes a panel, and its two warpgroups a leaf of it each, weights on the
// 64-row side of wgmma; the leaves of a cluster of two blocks meet in the shared memory of the one
// that adds them up. Many tokens: a block takes two panels and 128 tokens, and walks all leaves
// with a second set of sums. Tokens are on the 64-row side then, so that a lane has two scales of
// tokens to look up rather than 32. In both, blocks stay and go from tile to tile, and one thread
// keeps a ring of stages filled by the bulk copy engine, with copies of 8 KiB and more.
#include "backend/cuda/cluster.cuh"
#include "backend/cuda/products.cuh"
#include "backend/cuda/wgmma8.cuh"

namespace freshet::cuda {
namespace {

constexpr int kPanelRows = 64;
constexpr int kConsumers = 256;  // threads of two warpgroups
constexpr int kPanelBytes = static_cast<int>(kUnitStep<FP8>);
constexpr int kSharedBytes = 225 << 10;
constexpr int kLeavesOfBlock = 2;

__host__ __device__ inline int leaves8(int64_t cols) {
  return cols >= 2048 ? 4 : cols >= 1024 ? 2 : 1;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr int kStepCols = kE4M3Cols;
constexpr int kScales = kTokenTile * kStepCols;  // where those of a tile of 8 rows lie

// A tile of the product: so many panels, NT tiles of tokens.
struct Leaf {
  int first, count;  // steps of 128 columns
};
__device__ __forceinline__ Leaf leaf_of(int64_t cols, int leaf) {
  const int steps = static_cast<int>((cols + kStepCols - 1) / kStepCols), parts = leaves8(cols);
  const int first = steps * leaf / parts;
  return {first, steps * (leaf + 1) / parts - first};
}

template <int kStages, int kStageBytes>
struct Ring {
  uint8_t* stages;
  uint64_t *full, *empty;
  int stage = 0, round = 0;
  __device__ __forceinline__ uint8_t* data() const { return stages + stage * kStageBytes; }
  __device__ __forceinline__ void next() {
    if (++stage == kStages) {
      stage = 0;
      round ^= 1;
    }
  }
};

// The tiles of a block.
struct Tour {
  int first, step, tiles;
};

__device__ __forceinline__ const uint8_t* panel_at(const WeightView& w, int64_t panel, int step) {
  const int64_t steps = (w.cols + kStepCols - 1) / kStepCols;
  return w.data + (panel * steps + step) * kPanelBytes;
}
__device__ __forceinline__ const uint8_t* tokens_at(const ProductArgs& p, int64_t act_tiles,
                                                    int step, int64_t token_tile) {
  return p.act + (step * act_tiles + token_tile) * kE4M3TileBytes;
}

// Asks the tensor cores for the product of 128 columns of 64 rows `a` and NT tiles of eight rows
// `b`.
template <int NT>
__device__ __forceinline__ void issue(float (&sum)[NT][4], const uint8_t* a, const uint8_t* b) {
  const uint64_t at_a = e4m3_at(a), at_b = e4m3_at(b);
  wgmma_begin();
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma8(sum, at_a + k * kNextStep, at_b + k * kNextStep, k > 0);
  wgmma_commit();
}

// Scales of a lane's rows g and g + 8 of its warp's 16 in a panel (of weights or tokens).
__device__ __forceinline__ float2 row_scales(const uint8_t* panel) {
  const int g = static_cast<int>(threadIdx.x % 32 / 4),
            warp = static_cast<int>(threadIdx.x / 32 % 4);
  const uint8_t* p = panel + warp * FP8::kTileBytes + kScales + g * 4;
  return make_float2(*reinterpret_cast<const float*>(p),
                     *reinterpret_cast<const float*>(p + kE4M3TileBytes));
}
// Scales of a lane's rows 2 t and 2 t + 1 of a tile of 8.
__device__ __forceinline__ float2 pair_scales(const uint8_t* tile) {
  return *reinterpret_cast<const float2*>(tile + kScales + threadIdx.x % 4 * 8);
}

// What is looked up a tile ahead stays where it is written.
__device__ __forceinline__ int scaled(const WeightView& w, int64_t panel) {
  const int64_t last = (w.rows - 1) / kPanelRows;
  int how;
  asm volatile("ld.global.nc.s32 %0, [%1];"
               : "=r"(how)
               : "l"(FP8::scaled_at(w.data, w.rows, w.cols) + (panel < last ? panel : last)));
  return how;
}

__device__ __forceinline__ Work work_of(const ProductArgs& p, int64_t tokens) {
  return {p.weight.data, p.weight.rows, p.weight.cols, p.act,  p.act_chunks, (tokens + 7) / 8,
          p.out,         p.out_stride,  tokens,        p.bias, p.scale,      p.add != 0};
}

template <int NT>
__device__ __forceinline__ void clear(float (&sum)[NT][4]) {
#pragma unroll
  for (int j = 0; j < NT; ++j) sum[j][0] = sum[j][1] = sum[j][2] = sum[j][3] = 0.0f;
}
#endif

// ---- Many tokens

constexpr int kManyTiles = 16;  // of tokens
constexpr int kManyStage = 2 * kPanelBytes + kManyTiles * kE4M3TileBytes;
constexpr int kManyStages = kSharedBytes / kManyStage;
constexpr int kManyThreads = kConsumers + 128;  // registers change hands between warpgroups only

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
using ManyRing = Ring<kManyStages, kManyStage>;

// One thread. Weights are asked for before the kernel in front of this one has ended, tokens after.
__device__ __forceinline__ void produce_many(ManyRing ring, const ProductList& list, int64_t tokens,
                                             const Tour& tour) {
  const int64_t act_tiles = (tokens + 7) / 8;
  int issued = 0;  // in all
  for (int index = tour.first; index < tour.tiles; index += tour.step) {
    const ProductTile tile = find_product_tile<kManyTiles, 2>(list, tokens, index);
    const ProductArgs& p = list.of[tile.product];
    const int steps = static_cast<int>((p.weight.cols + kStepCols - 1) / kStepCols);
    const int64_t left = act_tiles - tile.token_tile;
    const auto bytes =
        static_cast<uint32_t>(left < kManyTiles ? left : kManyTiles) * kE4M3TileBytes;
    const int panels = (tile.unit + 1) * kPanelRows < p.weight.rows ? 2 : 1;
    const auto copy_rows = [&](int n, int stage) {
      uint8_t* to = ring.stages + stage * kManyStage;
      barrier_expect(&ring.full[stage], static_cast<uint32_t>(panels * kPanelBytes) + bytes);
      for (int i = 0; i < panels; ++i) {
        bulk_copy(to + i * kPanelBytes, panel_at(p.weight, tile.unit + i, n), kPanelBytes,
                  &ring.full[stage]);
      }
    };
    const auto copy_tokens = [&](int n, int stage) {
      bulk_copy(ring.stages + stage * kManyStage + 2 * kPanelBytes,
                tokens_at(p, act_tiles, n, tile.token_tile), bytes, &ring.full[stage]);
    };
    int n = 0;
    if (issued == 0) {
      for (; n < min(steps, kManyStages); ++n) copy_rows(n, n);
      wait();
      for (; issued < n; ++issued, ring.next()) copy_tokens(issued, issued);
    }
    for (; n < steps; ++n, ++issued, ring.next()) {
      if (issued >= kManyStages) barrier_wait(&ring.empty[ring.stage], ring.round ^ 1);
      copy_rows(n, ring.stage);
      copy_tokens(n, ring.stage);
    }
  }
}

// leaf += sum times the scales of a lane's two tokens and of the weights: `all`, or those of the
// panel's rows.
template <bool kOne>
__device__ __forceinline__ void add_panel(float (&leaf)[kManyTiles][4], int first,
                                          const float (&sum)[8][4], float2 tokens, float all,
                                          const uint8_t* panel, bool of_rows) {
  const float s0 = __fmul_rn(all, tokens.x), s1 = __fmul_rn(all, tokens.y);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float(&to)[4] = leaf[first + j];
    if constexpr (kOne) {
      to[0] = __fmaf_rn(sum[j][0], s0, to[0]);
      to[1] = __fmaf_rn(sum[j][1], s0, to[1]);
      to[2] = __fmaf_rn(sum[j][2], s1, to[2]);
      to[3] = __fmaf_rn(sum[j][3], s1, to[3]);
    } else {
      float2 w = pair_scales(panel + j * kE4M3TileBytes);
      if (of_rows) w = make_float2(1.0f, 1.0f);
      to[0] = __fmaf_rn(sum[j][0], __fmul_rn(w.x, tokens.x), to[0]);
      to[1] = __fmaf_rn(sum[j][1], __fmul_rn(w.y, tokens.x), to[1]);
      to[2] = __fmaf_rn(sum[j][2], __fmul_rn(w.x, tokens.y), to[2]);
      to[3] = __fmaf_rn(sum[j][3], __fmul_rn(w.y, tokens.y), to[3]);
    }
  }
}

// leaf += the next U steps, for a warpgroup's 64 tokens. The two panels take turns: one is
// multiplied while the other is scaled. kOne: each has one scale a step (1, if of rows).
template <int U, bool kOne>
__device__ __forceinline__ void add_steps(ManyRing& ring, float (&leaf)[kManyTiles][4],
                                          const bool (&of_rows)[2]) {
  const int group = static_cast<int>(threadIdx.x / 128);
  float low[8][4], high[8][4];
  const uint8_t *rows = nullptr, *tokens = nullptr;
  const auto next = [&] {
    barrier_wait(&ring.full[ring.stage], ring.round);
    rows = ring.data();
    tokens = rows + 2 * kPanelBytes + group * kPanelBytes;
    issue<8>(low, tokens, rows);
  };
  const auto one = [&](const uint8_t* panel, int i) {
    return of_rows[i] ? 1.0f : *reinterpret_cast<const float*>(panel + kScales);
  };
  next();
  issue<8>(high, tokens, rows + kPanelBytes);
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const float2 scales = row_scales(tokens);
    const uint8_t *first = rows, *second = rows + kPanelBytes;
    const float all[2] = {one(first, 0), one(second, 1)};
    uint64_t* const empty = &ring.empty[ring.stage];
    ring.next();
    wgmma_wait<1>();
    add_panel<kOne>(leaf, 0, low, scales, all[0], first, of_rows[0]);
    if (u + 1 < U) {
      next();
      wgmma_wait<1>();
    } else {
      wgmma_wait<0>();
    }
    add_panel<kOne>(leaf, 8, high, scales, all[1], second, of_rows[1]);
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(empty);
    if (u + 1 < U) issue<8>(high, tokens, rows + kPanelBytes);
  }
}

// The sums of 128 rows and a warp's 16 tokens.
__device__ __forceinline__ void finish_tokens(const Work& w, const float (&sum)[kManyTiles][4],
                                              const ProductTile& tile, const bool (&of_rows)[2]) {
  constexpr int kAtOnce = 4;  // loads of what is added fly together
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int64_t token = tile.token_tile * 8 + warp * 16 + lane / 4;
  const int64_t first = tile.unit * kPanelRows + lane % 4 * 2;
  const bool pairs = w.out_stride % 2 == 0 && reinterpret_cast<uintptr_t>(w.out) % 8 == 0;
#pragma unroll
  for (int from = 0; from < kManyTiles; from += kAtOnce) {
    // Body(number of the pair, its row, its token) for all pairs.
    const auto each = [&](auto&& body) {
#pragma unroll
      for (int n = 0; n < kAtOnce * 2; ++n) {
        const int64_t row = first + (from + n / 2) * 8, t = token + n % 2 * 8;
        if (row < w.rows && t < w.tokens) body(n, row, w.out + t * w.out_stride + row);
      }
    };
    float2 before[kAtOnce * 2] = {};
    if (w.add) {
      each([&](int n, int64_t row, const float* at) {
        if (pairs && row + 1 < w.rows) {
          before[n] = *reinterpret_cast<const float2*>(at);
        } else {
          before[n] = make_float2(at[0], row + 1 < w.rows ? at[1] : 0.0f);
        }
      });
    }
    each([&](int n, int64_t row, float* to) {
      const int j = from + n / 2;
      float2 v = make_float2(sum[j][n % 2 * 2], sum[j][n % 2 * 2 + 1]);
      if (of_rows[j / 8]) {
        const int64_t tile_of = tile_at<FP8>(row / 16, w.cols);
        const float2 scale = __ldg(reinterpret_cast<const float2*>(
            w.weights + tile_of + FP8::scale_place(static_cast<int>(row % 16))));
        v = make_float2(__fmul_rn(v.x, scale.x), __fmul_rn(v.y, scale.y));
      }
      if (w.bias != nullptr) {
        v.x = __fadd_rn(v.x, w.bias[row]);
        if (row + 1 < w.rows) v.y = __fadd_rn(v.y, w.bias[row + 1]);
      }
      v = make_float2(__fmul_rn(v.x, w.scale), __fmul_rn(v.y, w.scale));
      if (w.add) v = make_float2(__fadd_rn(before[n].x, v.x), __fadd_rn(before[n].y, v.y));
      if (pairs && row + 1 < w.rows) {
        *reinterpret_cast<float2*>(to) = v;
      } else {
        to[0] = v.x;
        if (row + 1 < w.rows) to[1] = v.y;
      }
    });
  }
}

template <bool kOne>
__device__ __forceinline__ void walk_tile(ManyRing& ring, const ProductArgs& p, int64_t tokens,
                                          const ProductTile& tile, const bool (&of_rows)[2]) {
  const int parts = leaves8(p.weight.cols);
  float total[kManyTiles][4], sum[kManyTiles][4];
  for (int leaf = 0; leaf < parts; ++leaf) {
    clear(sum);
    const int count = leaf_of(p.weight.cols, leaf).count;
    for (int n = 0; n < count / 4; ++n) add_steps<4, kOne>(ring, sum, of_rows);
    for (int n = 0; n < count % 4; ++n) add_steps<1, kOne>(ring, sum, of_rows);
#pragma unroll
    for (int j = 0; j < kManyTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        total[j][i] = leaf == 0 ? sum[j][i] : __fadd_rn(total[j][i], sum[j][i]);
      }
    }
  }
  finish_tokens(work_of(p, tokens), total, tile, of_rows);
}

// Two warpgroups: every tile's leaves from left to right.
__device__ __forceinline__ void walk(ManyRing ring, const ProductList& list, int64_t tokens,
                                     const Tour& tour) {
  int next[2] = {};
  const auto look_up = [&](int index) {
    if (index >= tour.tiles) return;
    const ProductTile tile = find_product_tile<kManyTiles, 2>(list, tokens, index);
    for (int i = 0; i < 2; ++i) next[i] = scaled(list.of[tile.product].weight, tile.unit + i);
  };
  look_up(tour.first);
  for (int index = tour.first; index < tour.tiles; index += tour.step) {
    const ProductTile tile = find_product_tile<kManyTiles, 2>(list, tokens, index);
    const ProductArgs& p = list.of[tile.product];
    const bool of_rows[2] = {next[0] == FP8::kOfRows, next[1] == FP8::kOfRows};
    const bool one = next[0] != FP8::kOfBlocks && next[1] != FP8::kOfBlocks;
    look_up(index + tour.step);
    if (one) {
      walk_tile<true>(ring, p, tokens, tile, of_rows);
    } else {
      walk_tile<false>(ring, p, tokens, tile, of_rows);
    }
  }
}
#endif

__global__ void __launch_bounds__(kManyThreads, 1)
    many_kernel(const __grid_constant__ ProductList list, int64_t tokens, int tiles) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t stages[];
  __shared__ uint64_t full[kManyStages], empty[kManyStages];
  let_next_start();
  if (threadIdx.x == kConsumers) {
    for (int s = 0; s < kManyStages; ++s) {
      barrier_init(&full[s], 1);
      barrier_init(&empty[s], kConsumers / 32);
    }
    barriers_ready();
  }
  __syncthreads();
  const ManyRing ring{stages, full, empty};
  const Tour tour{static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), tiles};
  if (threadIdx.x >= kConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == kConsumers) produce_many(ring, list, tokens, tour);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    wait();
    walk(ring, list, tokens, tour);
  }
#endif
}

// ---- Few tokens

// NT: tiles of 8 tokens. Each warpgroup has a ring of its own. With few enough, two blocks have
// room on a multiprocessor: the next kernel's weights come while this one ends.
template <int NT>
struct Few {
  static constexpr int kBlocks = NT <= 2 ? 2 : 1;
  static constexpr int kStage = kPanelBytes + NT * kE4M3TileBytes;
  static constexpr int kMeeting = NT * 4096;  // where leaves meet
  static constexpr int kStages = (kSharedBytes / kBlocks - kMeeting) / kStage / kLeavesOfBlock;
  static constexpr int kBytes = kLeavesOfBlock * kStages * kStage + kMeeting;
  static constexpr int kProducers = kLeavesOfBlock, kFinishers = 4;  // warps
  static constexpr int kThreads = kConsumers + 32 * (kProducers + kFinishers);
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// One thread a ring.
template <int NT>
__device__ __forceinline__ void produce_few(Ring<Few<NT>::kStages, Few<NT>::kStage> ring,
                                            const ProductList& list, int64_t tokens,
                                            const Tour& tour, int leaf) {
  using S = Few<NT>;
  const int64_t act_tiles = (tokens + 7) / 8;
  int issued = 0;  // in all
  for (int index = tour.first; index < tour.tiles; index += tour.step) {
    const ProductTile tile = find_product_tile<NT, 1>(list, tokens, index);
    const ProductArgs& p = list.of[tile.product];
    const Leaf part = leaf_of(p.weight.cols, leaf);
    const int64_t left = act_tiles - tile.token_tile;
    const auto bytes = static_cast<uint32_t>(left < NT ? left : NT) * kE4M3TileBytes;
    const auto copy_rows = [&](int n, int stage) {
      barrier_expect(&ring.full[stage], kPanelBytes + bytes);
      bulk_copy(ring.stages + stage * S::kStage, panel_at(p.weight, tile.unit, part.first + n),
                kPanelBytes, &ring.full[stage]);
    };
    const auto copy_tokens = [&](int n, int stage) {
      bulk_copy(ring.stages + stage * S::kStage + kPanelBytes,
                tokens_at(p, act_tiles, part.first + n, tile.token_tile), bytes, &ring.full[stage]);
    };
    int n = 0;
    if (issued == 0) {
      for (; n < min(part.count, S::kStages); ++n) copy_rows(n, n);
      wait();
      for (; issued < n; ++issued, ring.next()) copy_tokens(issued, issued);
    }
    for (; n < part.count; ++n, ++issued, ring.next()) {
      if (issued >= S::kStages) barrier_wait(&ring.empty[ring.stage], ring.round ^ 1);
      copy_rows(n, ring.stage);
      copy_tokens(n, ring.stage);
    }
  }
}

__device__ __forceinline__ uint32_t address_in(const void* shared, int rank) {
  uint32_t at;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(at)
               : "r"(shared_address(shared)), "r"(rank));
  return at;
}
__device__ __forceinline__ void send(uint32_t to, const float (&v)[4]) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(to), "f"(v[0]), "f"(v[1]),
               "f"(v[2]), "f"(v[3])
               : "memory");
}
__device__ __forceinline__ void arrive_at(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier)
               : "memory");
}
__device__ __forceinline__ void cluster_barrier_wait(uint64_t* barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra AGAIN;\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Where the leaves of a tile meet: each block of the cluster adds up its share of the rows.
struct Meeting {
  uint8_t* sums;  // [leaf][tile of 16 rows][tile of tokens][lane][4]
  uint64_t *arrived, *room;
  int blocks, rank, leaves;
};

// leaf += the product of 128 columns of a panel and NT tiles of tokens.
template <int NT>
__device__ __forceinline__ void add_step(float (&leaf)[NT][4], const uint8_t* panel,
                                         const uint8_t* tokens, bool of_rows) {
  float sum[NT][4];
  issue<NT>(sum, panel, tokens);
  const float2 w = of_rows ? make_float2(1.0f, 1.0f) : row_scales(panel);
  wgmma_wait<0>();
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    const float2 t = pair_scales(tokens + j * kE4M3TileBytes);
    leaf[j][0] = __fmaf_rn(sum[j][0], __fmul_rn(w.x, t.x), leaf[j][0]);
    leaf[j][1] = __fmaf_rn(sum[j][1], __fmul_rn(w.x, t.y), leaf[j][1]);
    leaf[j][2] = __fmaf_rn(sum[j][2], __fmul_rn(w.y, t.x), leaf[j][2]);
    leaf[j][3] = __fmaf_rn(sum[j][3], __fmul_rn(w.y, t.y), leaf[j][3]);
  }
}

// Two warpgroups: a leaf each of every tile, sent to where it is added up.
template <int NT>
__device__ __forceinline__ void take_leaves(Ring<Few<NT>::kStages, Few<NT>::kStage> ring,
                                            const ProductList& list, int64_t tokens,
                                            const Tour& tour, int leaf, const Meeting& meeting) {
  const int lane = static_cast<int>(threadIdx.x % 32),
            warp = static_cast<int>(threadIdx.x / 32 % 4);
  const int mine = 4 / meeting.blocks, owner = warp / mine;
  const uint32_t to =
      address_in(meeting.sums + ((leaf * mine + warp % mine) * NT * 32 + lane) * 16, owner);
  const uint32_t arrived = address_in(meeting.arrived, owner);
  const auto look_up = [&](int index) {
    const ProductTile tile =
        find_product_tile<NT, 1>(list, tokens, index < tour.tiles ? index : tour.first);
    return scaled(list.of[tile.product].weight, tile.unit);
  };
  int parity = 1, next = look_up(tour.first);
  for (int index = tour.first; index < tour.tiles; index += tour.step, parity ^= 1) {
    const WeightView& weight =
        list.of[find_product_tile<NT, 1>(list, tokens, index).product].weight;
    const bool of_rows = next == FP8::kOfRows;
    next = look_up(index + tour.step);
    float leaf_sum[NT][4];
    clear(leaf_sum);
    const int count = leaf_of(weight.cols, leaf).count;
    for (int n = 0; n < count; ++n, ring.next()) {
      barrier_wait(&ring.full[ring.stage], ring.round);
      add_step<NT>(leaf_sum, ring.data(), ring.data() + kPanelBytes, of_rows);
      __syncwarp();
      if (lane == 0) barrier_arrive(&ring.empty[ring.stage]);
    }
    if (index != tour.first) cluster_barrier_wait(meeting.room, parity);
#pragma unroll
    for (int j = 0; j < NT; ++j) send(to + j * 512, leaf_sum[j]);
    __syncwarp();
    if (lane == 0) arrive_at(arrived);
  }
}

// Other warps add up the block's share of the leaves meanwhile.
template <int NT>
__device__ __forceinline__ void finish_tiles(const ProductList& list, int64_t tokens,
                                             const Tour& tour, const Meeting& meeting) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warp = static_cast<int>(threadIdx.x - kConsumers) / 32 - Few<NT>::kProducers;
  const int mine = 4 / meeting.blocks;  // tiles of 16 rows
  int parity = 0;
  for (int index = tour.first; index < tour.tiles; index += tour.step, parity ^= 1) {
    const ProductTile tile = find_product_tile<NT, 1>(list, tokens, index);
    const ProductArgs& p = list.of[tile.product];
    const Work work = work_of(p, tokens);
    const bool of_rows = scaled(p.weight, tile.unit) == FP8::kOfRows;
    cluster_barrier_wait(meeting.arrived, parity);
    const auto* sums = reinterpret_cast<const float4*>(meeting.sums) + lane;
    for (int at = warp; at < mine * NT; at += Few<NT>::kFinishers) {
      float4 v = sums[at * 32];
      for (int l = 1; l < meeting.leaves; ++l) {
        const float4 next = sums[(l * mine * NT + at) * 32];
        v = make_float4(__fadd_rn(v.x, next.x), __fadd_rn(v.y, next.y), __fadd_rn(v.z, next.z),
                        __fadd_rn(v.w, next.w));
      }
      const int64_t row_tile = tile.unit * 4 + meeting.rank * mine + at / NT;
      if (of_rows) {
        const uint8_t* scale = p.weight.data + tile_at<FP8>(row_tile, p.weight.cols);
        const auto times = [&](int row) {
          return __ldg(reinterpret_cast<const float*>(scale + FP8::scale_place(row)));
        };
        const float low = times(lane / 4), high = times(lane / 4 + 8);
        v = make_float4(__fmul_rn(v.x, low), __fmul_rn(v.y, low), __fmul_rn(v.z, high),
                        __fmul_rn(v.w, high));
      }
      const float all[1][4] = {{v.x, v.y, v.z, v.w}};
      finish<1>(work, all, row_tile, tile.token_tile + at % NT, lane);
    }
    __syncwarp();
    if (lane < meeting.blocks && index + tour.step < tour.tiles) {
      arrive_at(address_in(meeting.room, lane));
    }
  }
}
#endif

template <int NT>
__global__ void __launch_bounds__(Few<NT>::kThreads, Few<NT>::kBlocks)
    few_kernel(const __grid_constant__ ProductList list, int64_t tokens, int tiles, int blocks) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Few<NT>;
  extern __shared__ __align__(1024) uint8_t stages[];
  __shared__ uint64_t full[kLeavesOfBlock][S::kStages], empty[kLeavesOfBlock][S::kStages];
  __shared__ uint64_t arrived, room;
  let_next_start();
  const int leaves = leaves8(list.of[0].weight.cols), rank = static_cast<int>(blockIdx.x) % blocks;
  if (threadIdx.x == kConsumers) {
    for (int i = 0; i < kLeavesOfBlock; ++i) {
      for (int s = 0; s < S::kStages; ++s) {
        barrier_init(&full[i][s], 1);
        barrier_init(&empty[i][s], 4);
      }
    }
    barrier_init(&arrived, leaves * 4 / blocks);
    barrier_init(&room, S::kFinishers * blocks);
    barriers_ready();
  }
  __syncthreads();
  const Tour tour{static_cast<int>(blockIdx.x) / blocks, static_cast<int>(gridDim.x) / blocks,
                  tiles};
  const int warp = static_cast<int>(threadIdx.x / 32);
  const bool produces = warp >= kWarps && warp < kWarps + S::kProducers;
  const int group = produces ? warp - kWarps : warp / 4 % kLeavesOfBlock;
  const int leaf = rank * kLeavesOfBlock + group;
  const Ring<S::kStages, S::kStage> ring{stages + group * S::kStages * S::kStage, full[group],
                                         empty[group]};
  const Meeting meeting{
      stages + kLeavesOfBlock * S::kStages * S::kStage, &arrived, &room, blocks, rank, leaves};
  // Nobody sends before all blocks have their barriers.
  if (blocks > 1) asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  if (produces && threadIdx.x % 32 == 0 && leaf < leaves) {
    produce_few<NT>(ring, list, tokens, tour, leaf);
  }
  if (blocks > 1) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
  if (produces) return;
  wait();
  if (warp >= kWarps) {
    finish_tiles<NT>(list, tokens, tour, meeting);
  } else if (leaf < leaves) {
    take_leaves<NT>(ring, list, tokens, tour, leaf, meeting);
  }
#endif
}

template <int NT>
int launch_few(const ProductList& given, int64_t tokens) {
  using S = Few<NT>;
  const ProductList list = with_blocks(given, kPanelRows);
  const auto kernel = few_kernel<NT>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kBytes);
  if (error != cudaSuccess) return static_cast<int>(error);
  const int leaves = leaves8(list.of[0].weight.cols);  // all have as many columns
  const int blocks = (leaves + kLeavesOfBlock - 1) / kLeavesOfBlock;
  const auto tiles = static_cast<int>(list.first_block[list.count] * ceil_div(tokens, NT * 8));
  const int most = multiprocessors / blocks;
  const int clusters = tiles < most ? tiles : most;
  return launch_cluster(kernel, dim3(static_cast<unsigned>(clusters * blocks)), dim3(S::kThreads),
                        S::kBytes, dim3(static_cast<unsigned>(blocks)), list, tokens, tiles,
                        blocks);
}

int launch_many(const ProductList& given, int64_t tokens) {
  const ProductList list = with_blocks(given, 2 * kPanelRows);
  constexpr int kBytes = kManyStages * kManyStage;
  const cudaError_t error =
      cudaFuncSetAttribute(many_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return static_cast<int>(error);
  const auto tiles =
      static_cast<int>(list.first_block[list.count] * ceil_div(tokens, kManyTiles * 8));
  const int blocks = tiles < multiprocessors ? tiles : multiprocessors;
  return launch(many_kernel, dim3(static_cast<unsigned>(blocks)), dim3(kManyThreads), kBytes, list,
                tokens, tiles);
}

}  // namespace

int run_fp8(const ProductList& list, int64_t tokens) {
  if (tokens <= 8) return launch_few<1>(list, tokens);
  if (tokens <= 16) return launch_few<2>(list, tokens);
  if (tokens <= 32) return launch_few<4>(list, tokens);
  if (tokens <= 64) return launch_few<8>(list, tokens);
  // Twice as many would leave most multiprocessors idle.
  int64_t tiles = 0;
  for (int i = 0; i < list.count; ++i) tiles += ceil_div(list.of[i].weight.rows, 2 * kPanelRows);
  if (tokens <= 128 && tiles * 2 < multiprocessors) return launch_few<8>(list, tokens);
  return launch_many(list, tokens);
}

}  // namespace freshet::cuda

// GEMM with INT8 weights for more than 32 tokens (Hopper), by wgmma.
//
// A block takes 64 G tokens, on the 64-row side of wgmma, and NT tiles of 8 rows. Four producer
// threads fill a pipeline of stages of 128 columns by TMA bulk copies; G consumer warpgroups keep
// their accumulators for all of K. Blocks are persistent. If there are fewer tiles than SMs, the
// blocks of a cluster split K and add their sums through distributed shared memory. Tokens beyond
// the last are computed from whatever lies in shared memory, and not written.
//
// Gate and up may have a SwiGLU epilogue: a block's tiles are then the same rows of both, so that a
// lane has both sums of a feature. A separate kernel encodes the result once its rows are complete.
#include <algorithm>

#include "backend/cuda/gemm/gemm_int8.cuh"
#include "backend/cuda/gemm/swiglu_epilogue.cuh"
#include "backend/cuda/mma/wgmma_int8.cuh"
#include "backend/cuda/runtime/cluster.cuh"
#include "backend/cuda/runtime/kernels.cuh"
#include "backend/cuda/runtime/pipeline.cuh"

namespace freshet::cuda {
namespace {

constexpr int kRingBytes = 222 << 10, kMostStages = 16;
// Producer warps, of which one thread each fills the pipeline, stage by stage in turn: a single
// thread would take longer to issue a stage's copies than memory to deliver them. (setmaxnreg works
// on whole warpgroups only.)
constexpr int kProducers = 4;

// kGate: half of the row tiles are gate's, half up's.
template <int G_, int NT_, bool kGate_ = false>
struct Int8Shape {
  static constexpr bool kGate = kGate_;
  static constexpr int kRowTiles = kGate ? NT_ / 2 : NT_;  // per matrix
  static constexpr int G = G_, NT = NT_, kConsumers = G * 128, kTokenTiles = G * 8;
  static constexpr int kThreads = kConsumers + kProducers * 32;
  // At least one stage per producer.
  static_assert((kTokenTiles + NT) * kInt8TileBytes * kProducers <= kRingBytes);
};

// How a GEMM is cut: stages in the pipeline, token tiles per stage, output tiles, and blocks that
// share an output tile (split-K).
struct Int8Plan {
  int stages, width, tiles, parts;
  __host__ __device__ int stage_bytes(int row_tiles) const {
    return (width + row_tiles) * kInt8TileBytes;
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// A block's part of K, in steps.
struct Part {
  int first, count;
};
__device__ __forceinline__ Part part_of(int64_t cols, const Int8Plan& plan) {
  const int steps = int8_steps(cols), rank = static_cast<int>(blockIdx.x) % plan.parts;
  const int first = steps * rank / plan.parts;
  return {first, steps * (rank + 1) / plan.parts - first};
}
template <class S>
__device__ __forceinline__ ProductTile find_tile(const ProductList& list, int64_t tokens,
                                                 int index) {
  constexpr int kRowsAtOnce = S::NT >= 28 ? 8 : 16;  // row blocks whose weights stay in L2
  return find_product_tile<S::kTokenTiles, S::kRowTiles, kRowsAtOnce>(list, tokens, index);
}

// One thread of each producer warp.
template <class S>
__device__ __forceinline__ void produce(const ProductList& list, int64_t tokens,
                                        const Int8Plan& plan, int producer, uint8_t* stages,
                                        const Pipeline& pipe) {
  const int bytes = plan.stage_bytes(S::NT);
  const int64_t act_tiles = (tokens + 7) / 8, token_step = act_tiles * kInt8TileBytes;
  const bool once = act_tiles <= S::kTokenTiles;
  PipelineState at{producer};
  int n = producer;  // the producer's next step of the tile
  bool waited = false;
  for (int index = static_cast<int>(blockIdx.x) / plan.parts; index < plan.tiles;
       index += static_cast<int>(gridDim.x) / plan.parts) {
    const ProductTile tile = find_tile<S>(list, tokens, index);
    const ProductArgs& p = list.of[tile.product];
    const Part part = part_of(p.weight.cols, plan);
    constexpr int kPanel = kInt8PanelBytes / kInt8TileBytes;  // tiles of 8 rows
    const int64_t panels = (p.weight.rows + kInt8Panel - 1) / kInt8Panel;
    const int64_t of_panel = int64_t{int8_steps(p.weight.cols)} * kInt8PanelBytes;
    const auto in_panel = static_cast<int>(tile.unit % kPanel);
    const int rows = min(S::kRowTiles, static_cast<int>(panels * kPanel - tile.unit));
    const int64_t panel = tile.unit / kPanel * of_panel;
    const auto left = static_cast<int>(act_tiles - tile.token_tile);
    const auto token_bytes = static_cast<uint32_t>(min(left, plan.width) * kInt8TileBytes);
    const uint8_t* token = p.act + tile.token_tile * kInt8TileBytes;
    const auto ask_rows = [&](int n, int stage) {
      constexpr int kMatrices = S::kGate ? 2 : 1;
      pipe.expect(stage, static_cast<uint32_t>(kMatrices * rows * kInt8TileBytes) + token_bytes);
      uint8_t* to = stages + stage * bytes + plan.width * kInt8TileBytes;
#pragma unroll
      for (int m = 0; m < kMatrices; ++m, to += S::kRowTiles * kInt8TileBytes) {
        const uint8_t* from = (m == 0 ? p : list.of[1]).weight.data + panel +
                              (part.first + n) * int64_t{kInt8PanelBytes};
        for (int r = 0, skip = in_panel; r < rows; skip = 0, from += of_panel) {
          const int count = min(rows - r, kPanel - skip);
          copy_weights(to + r * kInt8TileBytes, from + skip * kInt8TileBytes,
                       static_cast<uint32_t>(count * kInt8TileBytes), pipe.filled(stage), once);
          r += count;
        }
      }
    };
    const auto ask_tokens = [&](int n, int stage) {
      bulk_copy(stages + stage * bytes, token + (part.first + n) * token_step, token_bytes,
                pipe.filled(stage));
    };
    if (!waited) {
      const int most = min(part.count, plan.stages);
      for (int k = n; k < most; k += kProducers) ask_rows(k, k);
      wait();
      for (; n < most; n += kProducers) {
        ask_tokens(n, n);
        at.advance(plan.stages, kProducers);
      }
      waited = true;
    }
    for (; n < part.count; n += kProducers) {
      pipe.acquire(at);
      ask_rows(n, at.stage);
      ask_tokens(n, at.stage);
      at.advance(plan.stages, kProducers);
    }
    n -= part.count;
  }
}

struct Int8Stages {
  uint8_t* data;
  Pipeline pipe;
  int count, bytes, width;
  PipelineState at;
};
// sum = a block's part of K for a warpgroup's 64 tokens.
template <int NT>
__device__ __forceinline__ void sum_steps(Int8Stages& ring, int (&sum)[NT][4], int steps) {
  const int group = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x / 128), 0);
  int before = -1;
#pragma unroll 1
  for (int n = 0; n < steps; ++n) {
    ring.pipe.wait(ring.at);
    const uint8_t* data = ring.data + ring.at.stage * ring.bytes;
    const uint64_t a = operand_at(data + group * 8 * kInt8TileBytes),
                   b = operand_at(data + ring.width * kInt8TileBytes);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma_int8(sum, a + k * kNextStep, b + k * kNextStep, n + k > 0);
    wgmma_commit();
    wgmma_wait<1>();
    if (before >= 0) ring.pipe.release(before);
    before = ring.at.stage;
    ring.at.next(ring.count);
  }
  wgmma_wait<0>();
  if (before >= 0) ring.pipe.release(before);
}

// What a lane writes: pairs of rows for two tokens.
struct Int8End {
  const ProductArgs& p;
  int64_t tokens, token, row;  // the lane's first token and row
  const float* of_rows;
  float of_tokens[2];
  bool pairs;

  // What tile j's pair of rows needs besides its sums. It is loaded before anything is written,
  // since the compiler must assume that the output may alias it.
  struct Rows {
    float2 scale, bias;
  };

  __device__ __forceinline__ Int8End(const ProductArgs& product, int64_t n, const ProductTile& tile)
      : p(product), tokens(n) {
    const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
    token = tile.token_tile * 8 + warp * 16 + lane / 4;
    row = tile.unit * 8 + lane % 4 * 2;
    of_rows = row_scales_of(p.weight);
    const float* scales = token_scales(p, tokens);
    for (int i = 0; i < 2; ++i) of_tokens[i] = token + i * 8 < tokens ? scales[token + i * 8] : 0;
    pairs = p.out_stride % 2 == 0 && reinterpret_cast<uintptr_t>(p.out) % 8 == 0;
  }
  __device__ __forceinline__ bool real(int j, int i) const {
    return row + j * 8 < p.weight.rows && token + i * 8 < tokens;
  }
  __device__ __forceinline__ bool both(int j) const { return row + j * 8 + 1 < p.weight.rows; }
  __device__ __forceinline__ float* at(int j, int i) const {
    return p.out + (token + i * 8) * p.out_stride + row + j * 8;
  }
  __device__ __forceinline__ Rows rows(int j) const {
    Rows r = {};
    const int64_t first = row + j * 8;
    if (first >= p.weight.rows) return r;
    // Padded to whole panels, so always readable.
    r.scale = __ldg(reinterpret_cast<const float2*>(of_rows + first));
    if (p.bias != nullptr) {
      r.bias = make_float2(__ldg(p.bias + first), both(j) ? __ldg(p.bias + first + 1) : 0.0f);
    }
    return r;
  }
  // The value to add to, for tile j's token i.
  __device__ __forceinline__ float2 before(int j, int i) const {
    if (p.add == 0 || !real(j, i)) return {};
    const float* from = at(j, i);
    if (pairs && both(j)) return *reinterpret_cast<const float2*>(from);
    return make_float2(from[0], both(j) ? from[1] : 0.0f);
  }
  // Value of the output for token i, before addition.
  __device__ __forceinline__ float2 value(const Rows& r, int i, int first, int second) const {
    float2 v = make_float2(int8_value(first, r.scale.x, of_tokens[i]),
                           int8_value(second, r.scale.y, of_tokens[i]));
    if (p.bias != nullptr) v = make_float2(__fadd_rn(v.x, r.bias.x), __fadd_rn(v.y, r.bias.y));
    return make_float2(__fmul_rn(v.x, p.scale), __fmul_rn(v.y, p.scale));
  }
  __device__ __forceinline__ void put(int j, int i, float2 v) const {
    if (!real(j, i)) return;
    float* to = at(j, i);
    if (pairs && both(j)) {
      *reinterpret_cast<float2*>(to) = v;
    } else {
      to[0] = v.x;
      if (both(j)) to[1] = v.y;
    }
  }
  // Writes both tokens' sums of tile j, in wgmma's accumulator layout.
  __device__ __forceinline__ void put(int j, const Rows& r, const int (&sum)[4],
                                      const float2 (&before)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float2 v = value(r, i, sum[2 * i], sum[2 * i + 1]);
      if (p.add != 0) {
        v = make_float2(__fadd_rn(before[i].x, v.x), __fadd_rn(before[i].y, v.y));
      }
      put(j, i, v);
    }
  }
};

template <class S>
__device__ __forceinline__ void finish_tile(const Int8End& end, const int (&sum)[S::NT][4]) {
  constexpr int kAtOnce = 4;  // row tiles
#pragma unroll
  for (int from = 0; from < S::NT; from += kAtOnce) {
    Int8End::Rows rows[kAtOnce];
    float2 before[kAtOnce][2];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      rows[n] = end.rows(from + n);
      for (int i = 0; i < 2; ++i) before[n][i] = end.before(from + n, i);
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) end.put(from + n, rows[n], sum[from + n], before[n]);
  }
}

// SwiGLU, written where gate's output would be.
template <class S>
__device__ __forceinline__ void finish_gate(const Int8End& gate, const Int8End& up,
                                            const int (&sum)[S::NT][4]) {
  constexpr int kAtOnce = 2;
#pragma unroll
  for (int from = 0; from < S::kRowTiles; from += kAtOnce) {
    Int8End::Rows of_gate[kAtOnce], of_up[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      of_gate[n] = gate.rows(from + n);
      of_up[n] = up.rows(from + n);
    }
#pragma unroll
    for (int n = 0; n < kAtOnce * 2; ++n) {
      const int j = from + n / 2, i = n % 2;
      const int(&its)[4] = sum[j], (&ups)[4] = sum[j + S::kRowTiles];
      const float2 g = gate.value(of_gate[n / 2], i, its[2 * i], its[2 * i + 1]);
      const float2 u = up.value(of_up[n / 2], i, ups[2 * i], ups[2 * i + 1]);
      gate.put(
          j, i,
          make_float2(__fmul_rn(activate(g.x, kSilu), u.x), __fmul_rn(activate(g.y, kSilu), u.y)));
    }
  }
}

__device__ __forceinline__ int4 ints_from_block(const int4* p, int rank) {
  int4 v;
  asm volatile("ld.shared::cluster.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(place_in_block(p, rank))
               : "memory");
  return v;
}
// Epilogue of split-K: a block's share of the cluster's sums, which are [row tile][thread] in each
// block.
template <class S>
__device__ __forceinline__ void finish_part(const Int8End& end, const int4* room, int parts) {
  const int rank = static_cast<int>(blockIdx.x) % parts, mine = S::NT / parts;
#pragma unroll 4
  for (int j = rank * mine; j < (rank + 1) * mine; ++j) {
    const Int8End::Rows rows = end.rows(j);
    const float2 before[2] = {end.before(j, 0), end.before(j, 1)};
    int all[4] = {};
    for (int b = 0; b < parts; ++b) {
      const int4 v = ints_from_block(room + j * S::kConsumers + threadIdx.x, b);
      all[0] += v.x, all[1] += v.y, all[2] += v.z, all[3] += v.w;
    }
    end.put(j, rows, all, before);
  }
}

template <class S>
__device__ __forceinline__ void consume(Int8Stages ring, const ProductList& list, int64_t tokens,
                                        const Int8Plan& plan) {
  for (int index = static_cast<int>(blockIdx.x) / plan.parts; index < plan.tiles;
       index += static_cast<int>(gridDim.x) / plan.parts) {
    const ProductTile tile = find_tile<S>(list, tokens, index);
    const ProductArgs& p = list.of[tile.product];
    int sum[S::NT][4] = {};
    sum_steps<S::NT>(ring, sum, part_of(p.weight.cols, plan).count);
    const Int8End end(p, tokens, tile);
    if constexpr (S::kGate) {
      finish_gate<S>(end, Int8End(list.of[1], tokens, tile), sum);
      continue;
    }
    if (plan.parts == 1) {
      finish_tile<S>(end, sum);
      continue;
    }
    // The stages are reused for sums. A cluster has only one tile.
    asm volatile("bar.sync 1, %0;" ::"n"(S::kConsumers) : "memory");
    auto* room = reinterpret_cast<int4*>(ring.data);
#pragma unroll
    for (int j = 0; j < S::NT; ++j) {
      room[j * S::kConsumers + threadIdx.x] = make_int4(sum[j][0], sum[j][1], sum[j][2], sum[j][3]);
    }
    cluster_sync();
    finish_part<S>(end, room, plan.parts);
  }
}
#endif

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1)
    many_kernel(const __grid_constant__ ProductList list, int64_t tokens, Int8Plan plan) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t stages[];
  __shared__ uint64_t full[kMostStages], empty[kMostStages];
  let_next_start();
  const Pipeline pipe{full, empty};
  if (threadIdx.x == 0) pipe.init(plan.stages, S::kConsumers / 32);
  __syncthreads();
  const int producer = static_cast<int>(threadIdx.x - S::kConsumers) / 32;
  if (threadIdx.x >= S::kConsumers) {
    if constexpr (S::G == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x % 32 == 0) produce<S>(list, tokens, plan, producer, stages, pipe);
    __syncwarp();
    if (plan.parts > 1) cluster_sync();
  } else {
    if constexpr (S::G == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    wait();
    consume<S>({stages, pipe, plan.stages, plan.stage_bytes(S::NT), plan.width}, list, tokens,
               plan);
  }
  if (plan.parts > 1) cluster_sync();  // no block may exit while others read its shared memory
#endif
}

template <class S>
int launch_many(const Context& ctx, const ProductList& given, int64_t tokens, int parts) {
  ProductList list = with_blocks(given, S::kRowTiles * 8);
  if (S::kGate) list.count = 1;  // up has the same rows, and isn't counted
  const int64_t act_tiles = ceil_div(tokens, kTokenTile);
  Int8Plan plan{};
  plan.width = static_cast<int>(std::min<int64_t>(act_tiles, S::kTokenTiles));
  plan.tiles = static_cast<int>(list.first_block[list.count] * ceil_div(tokens, S::G * 64));
  plan.parts = parts;
  // wgmma reads beyond the last stage's tokens.
  const int beyond = std::max(S::kTokenTiles - plan.width - S::NT, 0) * kInt8TileBytes;
  plan.stages = std::min(kMostStages, (kRingBytes - beyond) / plan.stage_bytes(S::NT));
  const auto kernel = many_kernel<S>;
  if (const int error = raise_shared(kernel, kRingBytes); error != 0) return error;
  const int blocks = parts > 1 ? plan.tiles * parts : std::min(plan.tiles, ctx.multiprocessors);
  return launch_cluster(ctx, kernel, dim3(static_cast<unsigned>(blocks)), dim3(S::kThreads),
                        size_t{kRingBytes}, dim3(static_cast<unsigned>(parts)), list, tokens, plan);
}

// A tiling of a GEMM.
struct Int8Way {
  int groups, tiles;
  int (*launch)(const Context& ctx, const ProductList& list, int64_t tokens, int parts);
};
constexpr Int8Way kWays[] = {
    {1, 8, launch_many<Int8Shape<1, 8>>},   {2, 8, launch_many<Int8Shape<2, 8>>},
    {1, 12, launch_many<Int8Shape<1, 12>>}, {1, 16, launch_many<Int8Shape<1, 16>>},
    {1, 28, launch_many<Int8Shape<1, 28>>}, {2, 12, launch_many<Int8Shape<2, 12>>},
    {2, 16, launch_many<Int8Shape<2, 16>>}, {2, 28, launch_many<Int8Shape<2, 28>>},
    {2, 32, launch_many<Int8Shape<2, 32>>},
};

constexpr Int8Way kGateWays[] = {
    {1, 16, launch_many<Int8Shape<1, 16, true>>},
    {1, 28, launch_many<Int8Shape<1, 28, true>>},
    {2, 28, launch_many<Int8Shape<2, 28, true>>},
    {2, 32, launch_many<Int8Shape<2, 32, true>>},
};

// How many clusters of `parts` blocks are resident at once: not every SM can be part of a cluster
// of four.
int clusters_at_once(const Context& ctx, int parts) {
  if (parts != 4) return ctx.multiprocessors / parts;
  const auto kernel = many_kernel<Int8Shape<1, 16>>;
  return known_of(ctx, reinterpret_cast<const void*>(kernel), kRingBytes, [&] {
    (void)raise_shared(kernel, kRingBytes);
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(4);
    config.blockDim = dim3(Int8Shape<1, 16>::kThreads);
    config.dynamicSmemBytes = kRingBytes;
    cudaLaunchAttribute size = {};
    size.id = cudaLaunchAttributeClusterDimension;
    size.val.clusterDim.x = 4;
    size.val.clusterDim.y = size.val.clusterDim.z = 1;
    config.attrs = &size;
    config.numAttrs = 1;
    int count = 0;
    const bool known = cudaOccupancyMaxActiveClusters(&count, kernel, &config) == cudaSuccess;
    return known && count > 0 ? count : 1;
  });
}

// Estimated cycles of a GEMM: a K step is bound by the tensor cores, by memory (weights) or by L2
// (both operands); prologues and epilogues of tiles are added.
int64_t cost(const Context& ctx, const Int8Way& way, int parts, const ProductList& list,
             int64_t tokens) {
  constexpr int64_t kMemory = 20, kCache = 45, kEnds = 2500,
                    kMeeting = 1500;  // bytes per cycle, cycles
  int64_t tiles = 0;
  for (int i = 0; i < list.count; ++i) tiles += ceil_div(list.of[i].weight.rows, way.tiles * 8);
  tiles *= ceil_div(tokens, way.groups * 64);
  const int64_t act_tiles = ceil_div(tokens, kTokenTile), most = way.groups * 8;
  const int64_t of_rows = way.tiles * kInt8TileBytes;
  const int64_t of_tokens = std::min(act_tiles, most) * kInt8TileBytes;
  int64_t cycles = std::max<int64_t>(way.groups * way.tiles * 16, (of_rows + of_tokens) / kCache);
  if (act_tiles <= most) cycles = std::max(cycles, of_rows / kMemory);
  const int64_t at_once = clusters_at_once(ctx, parts);
  const int64_t steps = ceil_div(int8_steps(list.of[0].weight.cols), parts);
  const int64_t turn = steps * cycles + kEnds + (parts > 1 ? kMeeting : 0);
  return ceil_div(tiles, at_once) * turn;
}

// Launches the cheapest tiling.
template <size_t N>
int launch_best(const Context& ctx, const Int8Way (&ways)[N], int most_parts,
                const ProductList& list, int64_t tokens) {
  const Int8Way* best = nullptr;
  int parts = 1;
  int64_t least = 0;
  for (const Int8Way& way : ways) {
    for (int n = 1; n <= most_parts; n *= 2) {
      const int64_t its = cost(ctx, way, n, list, tokens);
      if (best == nullptr || its < least) best = &way, parts = n, least = its;
    }
  }
  return best->launch(ctx, list, tokens, parts);
}

}  // namespace

int run_int8_many(const Context& ctx, const ProductList& list, int64_t tokens) {
  return launch_best(ctx, kWays, 4, list, tokens);
}

int run_int8_gated(const Context& ctx, const ProductList& gate_and_up, int64_t tokens,
                   const Activations& act) {
  const ProductArgs& gate = gate_and_up.of[0];
  if (const int error = launch_best(ctx, kGateWays, 1, gate_and_up, tokens); error != 0)
    return error;
  return encode_int8(ctx, act, {gate.out, tokens, gate.weight.rows, gate.out_stride});
}

}  // namespace freshet::cuda

// Gate and up GEMMs with BF16 weights and a SwiGLU epilogue for 17 to 32 tokens (Hopper).
//
// All SMs get the same number of rows of gate and up. A block takes up to kMost tiles of 16 rows of
// each at a time, so that it reads the activations once. Each of its two consumer warpgroups takes
// half of the tiles, the same rows of gate and up, so that a lane has both sums of a feature. wgmma
// computes 64 rows; rows beyond those of a warpgroup are computed and not written. Bit-identical to
// gemm_sm80_small_m.cu.
//
// Weights and activations have separate pipelines. Weights are copied before the previous kernel
// ends, and take most of shared memory. Activations arrive in the layout of mma fragments, which
// the neighbouring GEMMs read and write, and two warps convert them to core matrices.
#include "backend/cuda/gemm/gemm_bf16_sm90_wgmma.cuh"
#include "backend/cuda/gemm/prefetch_weights.cuh"
#include "backend/cuda/gemm/swiglu_epilogue.cuh"

namespace freshet::cuda {
namespace {

constexpr int kMost = 7;  // 16-row tiles of each matrix per pass
constexpr int kTokenTiles = 4, kGroupTiles = 4;
constexpr int kUp = kMost * BF16::kTileBytes;  // offset from gate's rows to up's
constexpr int kGroupRows = kGroupTiles * BF16::kTileBytes;
constexpr int kRowBytes = 2 * kUp, kPieceBytes = kTokenTiles * kTokenBytes;
constexpr int kRowStages = 6, kTokenStages = 8;
constexpr int kTokenRoom = kTokenStages * kPieceBytes;
// wgmma reads beyond the last tiles of the last stage.
constexpr int kBeyond = (2 * kGroupTiles - kMost) * BF16::kTileBytes;
constexpr int kBytes = kTokenRoom + kRowStages * kRowBytes + kBeyond;
static_assert(kBytes <= kSharedOfSm - 1024);

// Producer warps; one thread in each of the former.
constexpr int kRowFillers = 2, kTokenFillers = 2;
constexpr int kAhead = 1;  // pieces of activations in registers of the latter
constexpr int kThreads = kConsumers + (kRowFillers + kTokenFillers) * 32;
// Leaves registers for a norm's block on the same SM: the bound is set as if this block had this
// many threads.
constexpr int kBoundThreads = 576;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
struct Rings {
  uint64_t full_tokens[kTokenStages], empty_tokens[kTokenStages];
  uint64_t full_rows[kRowStages], empty_rows[kRowStages];

  __device__ __forceinline__ Pipeline tokens() { return {full_tokens, empty_tokens}; }
  __device__ __forceinline__ Pipeline rows() { return {full_rows, empty_rows}; }
  __device__ __forceinline__ void start() {
    const auto thread = static_cast<int>(threadIdx.x);
    if (thread < kTokenStages) tokens().init_stage(thread, kConsumers / 32);
    if (thread < kRowStages) rows().init_stage(thread, kConsumers / 32);
    barriers_ready();
    __syncthreads();
  }
};

// A pass's 16-row tiles of gate and of up, which may extend into a second panel.
struct FewTiles {
  const uint8_t *gate, *up;
  uint32_t here, beyond;  // bytes in either panel, per matrix
  int64_t jump;

  __device__ __forceinline__ FewTiles(const ProductList& list, int64_t tile, int count) {
    constexpr int kPanel = kPanelTiles<BF16>;
    const int64_t cols = list.of[0].weight.cols, at = tile_at<BF16>(tile, cols);
    const int in_panel = min(count, kPanel - static_cast<int>(tile % kPanel));
    gate = list.of[0].weight.data + at;
    up = list.of[1].weight.data + at;
    here = static_cast<uint32_t>(in_panel * BF16::kTileBytes);
    beyond = static_cast<uint32_t>((count - in_panel) * BF16::kTileBytes);
    jump = tile_at<BF16>(tile + in_panel, cols) - at;
  }
  __device__ __forceinline__ uint32_t bytes() const { return 2 * (here + beyond); }
  __device__ __forceinline__ void copy(uint32_t to, int64_t at, uint32_t barrier,
                                       uint64_t policy) const {
    copy_weights(to, gate + at, here, barrier, policy);
    copy_weights(to + kUp, up + at, here, barrier, policy);
    if (beyond == 0) return;
    copy_weights(to + here, gate + jump + at, beyond, barrier, policy);
    copy_weights(to + kUp + here, up + jump + at, beyond, barrier, policy);
  }
};

// A block's tiles, pass by pass; passes are as even as possible.
struct FewPasses {
  int64_t first;
  int count, units;  // tiles; pieces of 64 columns

  __device__ __forceinline__ int passes() const { return (count + kMost - 1) / kMost; }
  __device__ __forceinline__ int64_t begin(int pass) const {
    return first + count * pass / passes();
  }
  __device__ __forceinline__ int tiles(int pass) const {
    return static_cast<int>(begin(pass + 1) - begin(pass));
  }
};

// A producer thread's share of the weights. Until the previous kernel has `ended`, only a few
// stages are in flight (prefetch_weights.cuh).
__device__ __forceinline__ void fill_rows(Rings& rings, uint8_t* rows, const ProductList& list,
                                          const FewPasses& passes, int index,
                                          const volatile int& ended) {
  constexpr int kInFlight = kAheadBytes / kRowBytes;
  const uint64_t policy = read_once();
  const Pipeline pipe = rings.rows();
  PipelineState at{index};
  int next = index;  // the next piece that it copies, over all passes
  for (int pass = 0; pass < passes.passes(); ++pass) {
    const FewTiles tiles(list, passes.begin(pass), passes.tiles(pass));
    const int before = pass * passes.units;
#pragma unroll 1
    for (; next < before + passes.units; next += kRowFillers, at.advance(kRowStages, kRowFillers)) {
      if (next >= kRowStages) {
        pipe.acquire(at);
      } else if (next >= kInFlight) {
        landed(pipe.filled(next - kInFlight), ended);
      }
      pipe.expect(at.stage, tiles.bytes());
      tiles.copy(shared_address(rows + at.stage * kRowBytes), (next - before) * kUnitStep<BF16>,
                 shared_address(pipe.filled(at.stage)), policy);
    }
  }
}

// A producer warp's share of the activations: it loads its next pieces before a stage is free,
// since loads are slow while weights are being copied.
__device__ __forceinline__ void fill_tokens(Rings& rings, uint8_t* stages, const ProductArgs& p,
                                            int tokens, const FewPasses& passes, int index) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int last = (tokens + 7) / 8 - 1, end = passes.passes() * passes.units;
  const auto next_tile = static_cast<int>(p.act_chunks * 32);
  const auto* act = reinterpret_cast<const uint4*>(p.act) + lane;
  uint4 v[kAhead][kTokenTiles][2];
  int unit = index;  // next to load; pieces beyond the last pass are not stored
  const auto load = [&](uint4(&of)[kTokenTiles][2]) {
#pragma unroll
    for (int j = 0; j < kTokenTiles; ++j) {
      const uint4* from = act + unit * 64 + min(j, last) * next_tile;
      of[j][0] = from[0], of[j][1] = from[32];
    }
    unit += kTokenFillers;
    if (unit >= passes.units) unit -= passes.units;
  };
#pragma unroll
  for (int d = 0; d < kAhead; ++d) load(v[d]);
  const Pipeline pipe = rings.tokens();
  PipelineState at{index};
  int next = index;  // as in fill_rows()
#pragma unroll 1
  while (next < end) {
#pragma unroll
    for (int d = 0; d < kAhead; ++d) {
      if (next >= end) break;
      pipe.acquire(at);
      auto* to = reinterpret_cast<uint32_t*>(stages + at.stage * kPieceBytes) + lane;
#pragma unroll
      for (int n = 0; n < kTokenTiles * 2; ++n) {
        const uint4& of = v[d][n / 2][n % 2];
        to[n * 128] = of.x, to[n * 128 + 32] = of.y;
        to[n * 128 + 64] = of.z, to[n * 128 + 96] = of.w;
      }
      load(v[d]);
      shared_for_copies();
      __syncwarp();
      if (lane == 0) pipe.arrive(at.stage);
      at.advance(kTokenStages, kTokenFillers);
      next += kTokenFillers;
    }
  }
}

// A consumer warpgroup's position in the pipelines. Addresses are computed once, and kept in
// uniform registers if they are uniform.
struct FewReader {
  uint32_t tokens, rows;  // operands in the first stages
  Rings& rings;
  PipelineState token, row;

  __device__ __forceinline__ FewReader(Rings& all, const uint8_t* its_tokens,
                                       const uint8_t* its_rows)
      : tokens(kept(its_tokens)), rows(kept(its_rows)), rings(all) {}
  __device__ __forceinline__ static uint32_t kept(const uint8_t* at) {
    auto v = static_cast<uint32_t>(operand_at(at));
    asm volatile("mov.b32 %0, %0;" : "+r"(v));
    return __shfl_sync(0xffffffff, v, 0);
  }
  __device__ __forceinline__ static uint64_t step(uint32_t low, int k) {
    return operand_at(nullptr) >> 32 << 32 | (low + static_cast<uint32_t>(k * kNextStep));
  }
  __device__ __forceinline__ void leave(int token_stage, int row_stage) const {
    rings.tokens().release(token_stage);
    rings.rows().release(row_stage);
  }
  // Sums of the `count` pieces of a slice.
  __device__ __forceinline__ void take(float (&gate)[kTokenTiles][4], float (&up)[kTokenTiles][4],
                                       int count) {
    int token_before = -1, row_before = -1;
#pragma unroll 1
    for (int n = 0; n < count; ++n, token.next(kTokenStages), row.next(kRowStages)) {
      rings.tokens().wait(token);
      rings.rows().wait(row);
      const uint32_t a = rows + row.stage * (kRowBytes >> 4);
      const uint32_t b = tokens + token.stage * (kPieceBytes >> 4);
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        wgmma(gate, step(a, k), step(b, k), n > 0 || k > 0);
        wgmma(up, step(a + (kUp >> 4), k), step(b, k), n > 0 || k > 0);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (n > 0) leave(token_before, row_before);
      token_before = token.stage, row_before = row.stage;
    }
    wgmma_wait<0>();
    if (count > 0) leave(token_before, row_before);
  }
};
#endif

// share: 16-row tiles per block. The list has gate followed by up.
__global__ void __launch_bounds__(kBoundThreads, 1)
    gate_few_kernel(const __grid_constant__ ProductList list, int tokens, int share,
                    const __grid_constant__ Activations act) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t stages[];
  __shared__ Rings rings;
  __shared__ volatile int ended;  // set once the previous kernel has ended
  let_next_start();
  if (threadIdx.x == 0) ended = 0;
  rings.start();
  uint8_t* rows = stages + kTokenRoom;
  const ProductArgs& p = list.of[0];
  const int64_t cols = p.weight.cols, all = (p.weight.rows + 15) / 16;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * share;
  const FewPasses passes{first, static_cast<int>(min(static_cast<int64_t>(share), all - first)),
                         static_cast<int>((cols + 63) / 64)};
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  if (threadIdx.x >= kConsumers) {
    const int index = producer_index();
    if (index < kRowFillers) {
      if (lane == 0) fill_rows(rings, rows, list, passes, index, ended);
    } else {
      const int64_t tiles = (tokens + 7) / 8;
      if (lane < 2) look_up_page(p.act + lane * (tiles * p.act_chunks * 512 - 1));
      wait();
      if (index == kRowFillers && lane == 0) ended = 1;
      fill_tokens(rings, stages, p, tokens, passes, index - kRowFillers);
    }
    return;
  }
  FewReader reader(rings, stages, rows + threadIdx.x / 128 * kGroupRows);
  wait();
  for (int pass = 0; pass < passes.passes(); ++pass) {
    float gate[kTokenTiles][4], up[kTokenTiles][4];
#pragma unroll
    for (int n = 0; n < kTokenTiles * 4; ++n) {
      gate[n / 4][n % 4] = up[n / 4][n % 4] = -0.0f;  // -0 is the identity of addition
    }
    float gate_leaf[kTokenTiles][4], up_leaf[kTokenTiles][4];
#pragma unroll 1
    for (int leaf = 0; leaf < leaves(cols); ++leaf) {
      reader.take(gate_leaf, up_leaf, leaf_of(cols, leaf).count);
      add_sums(gate, gate_leaf);
      add_sums(up, up_leaf);
    }
    if (warp >= passes.tiles(pass)) continue;
    const int64_t tile = passes.begin(pass) + warp;
    end_sums<kTokenTiles>(p, gate, tile * 16 + lane / 4);
    end_sums<kTokenTiles>(list.of[1], up, tile * 16 + lane / 4);
#pragma unroll
    for (int j = 0; j < kTokenTiles; ++j) {
      if (j * 8 < tokens) put_gated_lanes(act, p.weight.rows, gate[j], up[j], tile, j);
    }
  }
#endif
}

}  // namespace

int run_gate_few(const Context& ctx, const ProductList& gate_and_up, int64_t tokens,
                 const Activations& act) {
  ProductList list = gate_and_up;
  list.count = 1;  // up has the same rows, and isn't counted
  const int share = even_share(ctx, list);
  if (const int error = raise_shared(gate_few_kernel, kBytes); error != 0) return error;
  return launch(ctx, gate_few_kernel, dim3(static_cast<unsigned>(list.first_block[1])),
                dim3(kThreads), kBytes, list, static_cast<int>(tokens), share, act);
}

}  // namespace freshet::cuda

// Gate and up GEMMs with BF16 weights and a SwiGLU epilogue for 65 to 128 tokens (Hopper).
//
// All SMs get the same number of rows of gate and up, and take all of them at a time, so that they
// read the activations once. Tokens are on the 64-row side of wgmma: two warpgroups have 64 each,
// and a lane has gate's and up's sums of the same row. The running totals of the slices need as
// many registers as the current sums. They don't all fit, so those of the last tiles are in shared
// memory. Bit-identical to gemm_sm80_small_m.cu.
#include "backend/cuda/gemm/gemm_bf16_sm90_wgmma.cuh"
#include "backend/cuda/gemm/swiglu_bf16_sm90_m65_128.h"
#include "backend/cuda/gemm/swiglu_epilogue.cuh"

namespace freshet::cuda {
namespace {

constexpr int kMost = 7;           // 16-row tiles of each matrix per pass
constexpr int kTiles = 4 * kMost;  // 8-row tiles: gate's, then up's
constexpr int kKept = 18;          // tiles whose totals are in registers
constexpr int kGateBytes = 2 * kMost * kTokenBytes;
constexpr int kTokenTiles = 16;
struct GateStages {
  static constexpr int kProducers = 4;
  static constexpr bool kTokensLead = true;
  static constexpr int kGroupRows = 0, kGroupTokens = 8 * kTokenBytes;
  static constexpr int kRowBytes = 2 * kGateBytes;
  static constexpr int kStageBytes = kRowBytes + kTokenTiles * kTokenBytes;
  static constexpr int kStages = 4;
  static constexpr int kRoom = kStages * kStageBytes;
  static constexpr int kBytes = kRoom + (kTiles - kKept) * kConsumers * 16;
  static_assert(kBytes <= kSharedOfSm - 1024);
  // In the epilogue, sums of gate's tiles pass through a stage, half of them at a time, together
  // with up's sums that are in registers.
  static constexpr int kHalf = kTiles / 4, kUpKept = kKept - kTiles / 2;
  static_assert(kUpKept <= kHalf && (kHalf + kUpKept) * kConsumers * 16 <= kStageBytes);
};
constexpr int kThreads = kConsumers + kProducerWarps * 32;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// 16-row tiles of gate and of up, which may extend into a second panel.
struct GateTiles {
  const uint8_t *gate, *up;
  int here, beyond;
  int64_t jump;

  __device__ __forceinline__ GateTiles(const ProductList& list, int64_t tile, int count) {
    constexpr int kPanel = kPanelTiles<BF16>;
    const int64_t cols = list.of[0].weight.cols, at = tile_at<BF16>(tile, cols);
    gate = list.of[0].weight.data + at;
    up = list.of[1].weight.data + at;
    here = min(count, kPanel - static_cast<int>(tile % kPanel));
    beyond = count - here;
    jump = tile_at<BF16>(tile + here, cols) - at;
  }
  __device__ __forceinline__ uint32_t bytes() const {
    return static_cast<uint32_t>(2 * (here + beyond) * BF16::kTileBytes);
  }
  __device__ __forceinline__ void copy(uint8_t* to, int64_t at, uint64_t* barrier) const {
    const uint32_t first = here * BF16::kTileBytes, second = beyond * BF16::kTileBytes;
    copy_weights(to, gate + at, first, barrier);
    copy_weights(to + kGateBytes, up + at, first, barrier);
    if (second == 0) return;
    copy_weights(to + first, gate + jump + at, second, barrier);
    copy_weights(to + kGateBytes + first, up + jump + at, second, barrier);
  }
};

// A block's tiles, pass by pass; passes are as even as possible.
struct GatePasses {
  int64_t first;
  int count;

  __device__ __forceinline__ int passes() const { return (count + kMost - 1) / kMost; }
  __device__ __forceinline__ int64_t begin(int pass) const {
    return first + count * pass / passes();
  }
};

// Running totals of the slices, added from left to right.
struct Total {
  float kept[kKept][4];
  float4* room;  // this thread's part

  __device__ __forceinline__ void add(const float (&sum)[kTiles][4], bool first) {
#pragma unroll
    for (int j = 0; j < kKept; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) kept[j][i] = __fadd_rn(kept[j][i], sum[j][i]);
    }
#pragma unroll
    for (int j = kKept; j < kTiles; ++j) {
      const float(&v)[4] = sum[j];
      float4* at = room + (j - kKept) * kConsumers;
      float4 all = make_float4(v[0], v[1], v[2], v[3]);
      if (!first) {
        const float4 so_far = *at;
        all = make_float4(__fadd_rn(so_far.x, v[0]), __fadd_rn(so_far.y, v[1]),
                          __fadd_rn(so_far.z, v[2]), __fadd_rn(so_far.w, v[3]));
      }
      *at = all;
    }
  }
};

// Epilogue of a lane's sums: pairs of rows of a tile, two tokens.
__device__ __forceinline__ void end_pairs(const ProductArgs& p, float (&v)[4], int64_t row) {
  if (p.bias != nullptr) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float bias = row + i < p.weight.rows ? p.bias[row + i] : 0.0f;
      v[i] = __fadd_rn(v[i], bias);
      v[i + 2] = __fadd_rn(v[i + 2], bias);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = __fmul_rn(v[i], p.scale);
}

// Epilogue of a pass. It runs once, and unrolled code would take long to fetch: sums pass through
// shared memory (`stage` and Total's), so that it is a loop.
__device__ __forceinline__ void end_pass(const ProductList& list, const Activations& act,
                                         const Total& total, uint8_t* stage, int64_t tile,
                                         int count) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t token_tile = threadIdx.x / 32 * 2;
  float4* own = reinterpret_cast<float4*>(stage) + threadIdx.x;
  const auto leave = [&](int to, int from) {
    const float(&v)[4] = total.kept[from];
    own[to * kConsumers] = make_float4(v[0], v[1], v[2], v[3]);
  };
#pragma unroll
  for (int i = 0; i < GateStages::kUpKept; ++i) leave(GateStages::kHalf + i, kTiles / 2 + i);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int first = half * GateStages::kHalf, end = min(first + GateStages::kHalf, count * 2);
#pragma unroll
    for (int j = 0; j < GateStages::kHalf; ++j) leave(j, first + j);
#pragma unroll 1
    for (int j = first; j < end; ++j) {
      const float4 g = own[(j - first) * kConsumers];
      const float4 u = j < GateStages::kUpKept ? own[(GateStages::kHalf + j) * kConsumers]
                                               : total.room[(j - GateStages::kUpKept) * kConsumers];
      float gate[4] = {g.x, g.y, g.z, g.w}, up[4] = {u.x, u.y, u.z, u.w};
      const int64_t row = tile * 16 + j * 8 + lane % 4 * 2;
      end_pairs(list.of[0], gate, row);
      end_pairs(list.of[1], up, row);
#pragma unroll
      for (int i = 0; i < 4; ++i) up[i] = __fmul_rn(activate(gate[i], kSilu), up[i]);
      uint8_t* to = act.data + ((row >> 6) * act.core_tiles + token_tile) * kTokenTileBytes +
                    (row & 63) / 8 * 128 + lane * 4;
      if (token_tile < act.core_tiles) *reinterpret_cast<uint32_t*>(to) = pack_bf16(up[0], up[1]);
      if (token_tile + 1 < act.core_tiles) {
        *reinterpret_cast<uint32_t*>(to + kTokenTileBytes) = pack_bf16(up[2], up[3]);
      }
    }
  }
}
#endif

// share: 16-row tiles per block. The list has gate followed by up.
__global__ void __launch_bounds__(kThreads, 1)
    gate_kernel(const __grid_constant__ ProductList list, int tokens, int share,
                const __grid_constant__ Activations act) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t stages[];
  __shared__ uint64_t full[GateStages::kStages], empty[GateStages::kStages];
  let_next_start();
  GemmStages<GateStages> ring = start_ring<GateStages>(stages, full, empty, kConsumers / 32);
  const int64_t cols = list.of[0].weight.cols;
  // Columns of the activations are padded.
  const int64_t all = (list.of[0].weight.rows + 63) / 64 * 4;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * share;
  const GatePasses passes{first, static_cast<int>(min(static_cast<int64_t>(share), all - first))};
  if (warp_index() >= kConsumers / 32) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x % 32 == 0) {
      const int token_tiles = (tokens + 7) / 8;
      bool waited = false;
      for (int pass = 0; pass < passes.passes(); ++pass) {
        const int64_t tile = passes.begin(pass);
        fill(ring, GateTiles(list, tile, static_cast<int>(passes.begin(pass + 1) - tile)),
             list.of[0].act, static_cast<int64_t>(token_tiles) * kTokenBytes,
             static_cast<uint32_t>(token_tiles * kTokenBytes), static_cast<int>((cols + 63) / 64),
             waited);
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    Reader<GateStages> reader(ring);
    wait();
    for (int pass = 0; pass < passes.passes(); ++pass) {
      Total total;
      total.room = reinterpret_cast<float4*>(stages + GateStages::kRoom) + threadIdx.x;
#pragma unroll
      for (int j = 0; j < kKept; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) total.kept[j][i] = -0.0f;  // -0 is the identity of addition
      }
      float sum[kTiles][4];
#pragma unroll 1
      for (int leaf = 0; leaf < leaves(cols); ++leaf) {
        sum_pieces<GateStages, kTiles>(reader, sum, leaf_of(cols, leaf).count,
                                       leaf + 1 == leaves(cols));
        total.add(sum, leaf == 0);
      }
      const int64_t tile = passes.begin(pass);
      const int last = reader.before;
      sync_consumers();  // the last stage is reused for sums
      end_pass(list, act, total, stages + last * GateStages::kStageBytes, tile,
               static_cast<int>(passes.begin(pass + 1) - tile));
      shared_for_copies();
      __syncwarp();
      ring.pipe.release(last);
    }
  }
#endif
}

// 16-row tiles of gate per block; also sets the list's first_block for gate.
int share_of(const Context& ctx, ProductList& list) {
  list.count = 1;
  const int64_t rows = list.of[0].weight.rows;
  list.of[0].weight.rows = ceil_div(rows, 64) * 64;
  const int share = even_share(ctx, list);
  list.of[0].weight.rows = rows;
  return share;
}

}  // namespace

static_assert(kMost == kPassTiles);

int run_gate(const Context& ctx, const ProductList& gate_and_up, int64_t tokens,
             const Activations& act) {
  ProductList list = gate_and_up;
  const int share = share_of(ctx, list);
  if (const int error = raise_shared(gate_kernel, GateStages::kBytes); error != 0) return error;
  return launch(ctx, gate_kernel, dim3(static_cast<unsigned>(list.first_block[1])), dim3(kThreads),
                GateStages::kBytes, list, static_cast<int>(tokens), share, act);
}

}  // namespace freshet::cuda

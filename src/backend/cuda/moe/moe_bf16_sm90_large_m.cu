// Experts in BF16 with many tokens each (Hopper): two kernels with persistent blocks, gate and up
// with a SwiGLU epilogue, and down. Each loops over (slot, row block) items.
//
// Tokens are on the 64-row side of wgmma and weights on the other. So a thread has gate and up of
// the same features, and writes the SwiGLU outputs from its registers, in runs of 128 bytes per
// warp. Nothing is exchanged: the three consumer warpgroups of a block never synchronise, and one
// runs its epilogue while the others multiply. A warpgroup without tokens only releases the stages.
// K is cut and summed as in gemm_sm80_small_m.cu.
#include "backend/cuda/gemm/gemm_bf16_sm90_wgmma.cuh"
#include "backend/cuda/gemm/glu_activation.cuh"
#include "backend/cuda/moe/moe.h"
#include "backend/cuda/runtime/register_transpose.cuh"

namespace freshet::cuda {
namespace {

constexpr int kGroups = kManySlot / 64;             // consumer warpgroups
constexpr int kReaders = kGroups * 128;             // consumer threads
constexpr int kThreads = kReaders + 128;            // a whole producer warpgroup, for setmaxnreg
constexpr int kTiles = 16;                          // tiles of 8 weight rows
constexpr int kGroupBytes = 8 * kTokenBytes;        // tokens per warpgroup
constexpr int kGateRows = 64, kDownRows = 128;      // rows per block
constexpr int kWeightBytes = kTiles * kTokenBytes;  // half gate's and half up's, or all down's

// Tokens come first in a stage: they are the operand that differs between warpgroups.
struct ManyStage {
  static constexpr int kRowBytes = kGroups * kGroupBytes;
  static constexpr int kStageBytes = kRowBytes + kWeightBytes;
  static constexpr int kStages = kRingBytes / kStageBytes;
  static constexpr int kBytes = kStages * kStageBytes;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Descriptor of a warpgroup's tokens for gate and up: rows of 128 bytes in wgmma's 128-byte
// swizzle, so that a token's 64 columns are contiguous in memory.
__device__ __forceinline__ uint64_t swapped_rows_at(const void* shared) {
  return operand_at(shared, 16, 1024) | uint64_t{1} << 62;
}
inline constexpr uint64_t kNextSwapped = 32 >> 4;  // 16 columns

// total = the sum of all slices, added from left to right.
template <bool kGate>
__device__ __forceinline__ void sum_leaves(GemmStages<ManyStage>& ring, float (&total)[kTiles][4],
                                           int64_t cols) {
  constexpr uint64_t kNext = kGate ? kNextSwapped : kNextStep;
  const int group = static_cast<int>(threadIdx.x / 128), parts = leaves(cols);
  float sum[kTiles][4] = {};
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) total[j][i] = -0.0f;  // -0 is the identity of addition
  }
#pragma unroll 1
  for (int leaf = 0; leaf < parts; ++leaf) {
    const int count = leaf_of(cols, leaf).count;
    int before = -1;
#pragma unroll 1
    for (int n = 0; n < count; ++n, ring.at.next(ManyStage::kStages)) {
      ring.pipe.wait(ring.at);
      const uint8_t* tokens = ring.data() + group * kGroupBytes;
      const uint64_t a = kGate ? swapped_rows_at(tokens) : operand_at(tokens);
      const uint64_t b = operand_at(ring.data() + ManyStage::kRowBytes);
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < 4; ++k) wgmma(sum, a + k * kNext, b + k * kNextStep, n + k > 0);
      wgmma_commit();
      wgmma_wait<1>();
      if (before >= 0) ring.pipe.release(before);
      before = ring.at.stage;
    }
    wgmma_wait<0>();
    if (before >= 0) ring.pipe.release(before);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) total[j][i] = __fadd_rn(total[j][i], sum[j][i]);
    }
  }
}

// The items of a kernel: a slot's tokens and a row block of the weights.
template <bool kGate>
struct ManyWalk {
  const ExpertsArgs& e;
  int blocks, items;

  __device__ explicit ManyWalk(const ExpertsArgs& args)
      : e(args),
        blocks(static_cast<int>(kGate ? e.ff / kGateRows : (e.hidden + kDownRows - 1) / kDownRows)),
        items(__ldcg(e.groups.used) * blocks) {}
  __device__ __forceinline__ int64_t cols() const { return kGate ? e.hidden : e.ff; }
  __device__ __forceinline__ int slot(int item) const { return item / blocks; }
  __device__ __forceinline__ int block(int item) const { return item % blocks; }
  __device__ __forceinline__ int expert(int item) const {
    return item < items ? __ldcg(e.groups.slot_expert + slot(item)) : 0;
  }
  // Whether a warpgroup's part of the slot has tokens: an expert fills its slots in order.
  __device__ __forceinline__ bool real(int item, int group) const {
    return item < items &&
           __ldcg(e.groups.token + int64_t{slot(item)} * kManySlot + group * 64) >= 0;
  }
};

// Producer thread. The down kernel requests weights before the gate kernel has ended: the slots'
// experts were final before the gate kernel began.
template <bool kGate>
__device__ __forceinline__ void produce(GemmStages<ManyStage> ring, const ExpertsArgs& e,
                                        const uint8_t* const* weights) {
  const ManyWalk<kGate> walk(e);
  const Activations& act = kGate ? e.in : e.act;
  const int64_t cols = walk.cols(), step = act.core_tiles * kTokenBytes;
  const auto pieces = static_cast<int>((cols + 63) / 64), turn = static_cast<int>(gridDim.x);
  bool waited = kGate;
  auto item = static_cast<int>(blockIdx.x);
  int expert = walk.expert(item);
  bool second = walk.real(item, 1), third = walk.real(item, 2);
  for (; item < walk.items; item += turn) {
    const int block = walk.block(item);
    const uint8_t* rows = weights[expert] + tile_at<BF16>(block * (kGate ? 4 : 8), cols);
    const uint8_t* ups = weights[expert] + tile_at<BF16>(e.ff / 16 + block * 4, cols);
    const uint8_t* tokens =
        act.data + int64_t{walk.slot(item)} * (kManySlot / kTokenTile) * kTokenBytes;
    const uint32_t bytes = (third ? 3 : second ? 2 : 1) * kGroupBytes;
    expert = walk.expert(item + turn);
    second = walk.real(item + turn, 1);
    third = walk.real(item + turn, 2);
    const auto copy_rows = [&](int n, int stage) {
      uint64_t* barrier = ring.pipe.filled(stage);
      uint8_t* to = ring.stages + stage * ManyStage::kStageBytes + ManyStage::kRowBytes;
      barrier_expect(barrier, kWeightBytes + bytes);
      bulk_copy(to, rows + n * kUnitStep<BF16>, kGate ? kWeightBytes / 2 : kWeightBytes, barrier);
      if constexpr (kGate) {
        bulk_copy(to + kWeightBytes / 2, ups + n * kUnitStep<BF16>, kWeightBytes / 2, barrier);
      }
    };
    const auto copy_tokens = [&](int n, int stage) {
      bulk_copy(ring.stages + stage * ManyStage::kStageBytes, tokens + n * step, bytes,
                ring.pipe.filled(stage));
    };
    int n = 0;
    if (!waited) {
      for (; n < min(pieces, ManyStage::kStages); ++n) copy_rows(n, n);
      wait();
      for (int k = 0; k < n; ++k) copy_tokens(k, k);
      waited = true;
      ring.at.advance(ManyStage::kStages, n);
    }
    for (; n < pieces; ++n, ring.at.next(ManyStage::kStages)) {
      ring.pipe.acquire(ring.at);
      copy_rows(n, ring.at.stage);
      copy_tokens(n, ring.at.stage);
    }
  }
}

// Writes a thread's SwiGLU outputs: two token rows, the first of which is in token tile `tile`, and
// 64 features.
template <class Gated>
__device__ __forceinline__ void put_gated(const ExpertsArgs& e, const float (&total)[kTiles][4],
                                          int expert, int64_t tile, int block,
                                          const Gated& gated_of) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  uint8_t* to = e.act.data + (block * e.act.core_tiles + tile) * kTokenBytes + lane * 4;
  const float* bias = e.gate_up_bias;
  if (bias != nullptr) bias += expert * 2 * e.ff + block * kGateRows + lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < kTiles / 2; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float v[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float gate = total[j][half * 2 + i], up = total[j + kTiles / 2][half * 2 + i];
        if (bias != nullptr) {
          gate = __fadd_rn(gate, bias[j * 8 + i]);
          up = __fadd_rn(up, bias[e.ff + j * 8 + i]);
        }
        v[i] = gated_of(gate, up);
      }
      *reinterpret_cast<uint32_t*>(to + half * kTokenBytes + j * 128) = pack_bf16(v[0], v[1]);
    }
  }
}

// The same for 128 features of down, in BF16: four lanes exchange four adjacent tiles, so that each
// lane writes the 8 features of one tile at once.
__device__ __forceinline__ void put_down(const ExpertsArgs& e, const float (&total)[kTiles][4],
                                         int expert, int64_t tile, int block) {
  const int lane = static_cast<int>(threadIdx.x % 32), mine = lane % 4;
  const int64_t place = tile * kTokenTile + lane / 4;
  const int64_t first = static_cast<int64_t>(block) * kDownRows;
  const auto left = static_cast<int>(min(int64_t{kDownRows}, e.hidden - first));
  const float* bias = e.down_bias;
  if (bias != nullptr) bias += expert * e.hidden + first + mine * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool real = __ldcg(e.groups.token + place + half * 8) >= 0;
    auto* to = reinterpret_cast<uint16_t*>(e.y) + (place + half * 8) * e.hidden + first;
#pragma unroll
    for (int four = 0; four < kTiles; four += 4) {
      uint32_t row[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float v[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = (four + j) * 8 + i;
          v[i] = total[four + j][half * 2 + i];
          if (bias != nullptr && at + mine * 2 < left) v[i] = __fadd_rn(v[i], bias[at]);
        }
        row[j] = pack_bf16(v[0], v[1]);
      }
      const uint4 eight = transposed(row);
      const int at = (four + mine) * 8;
      if (!real || at >= left) continue;
      if (e.hidden % 8 == 0) {
        *reinterpret_cast<uint4*>(to + at) = eight;
        continue;
      }
      const uint32_t two[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (at + i < left) to[at + i] = static_cast<uint16_t>(two[i / 2] >> i % 2 * 16);
      }
    }
  }
}

template <bool kGate>
__device__ __forceinline__ void consume(GemmStages<ManyStage> ring, const ExpertsArgs& e) {
  const ManyWalk<kGate> walk(e);
  const int64_t cols = walk.cols();
  const int turn = static_cast<int>(gridDim.x), group = static_cast<int>(threadIdx.x / 128);
  const bool silu = e.glu.activation == 1 && e.glu.limit <= 0.0f;
  auto item = static_cast<int>(blockIdx.x);
  bool real = walk.real(item, group);
  for (; item < walk.items; item += turn) {
    const bool works = real;
    real = walk.real(item + turn, group);
    if (!works) {
      for (auto n = static_cast<int>((cols + 63) / 64); n > 0; --n) {
        ring.pipe.wait(ring.at);
        ring.pipe.release(ring.at.stage);
        ring.at.next(ManyStage::kStages);
      }
      continue;
    }
    float total[kTiles][4];
    sum_leaves<kGate>(ring, total, cols);
    const int slot = walk.slot(item), block = walk.block(item);
    const int expert = walk.expert(item);
    const int64_t tile = int64_t{slot} * (kManySlot / kTokenTile) + threadIdx.x / 32 * 2;
    if constexpr (!kGate) {
      put_down(e, total, expert, tile, block);
    } else if (silu) {  // a choice per element would cost as much as the GLU itself
      put_gated(e, total, expert, tile, block,
                [](float gate, float up) { return activate(gate, 1) * up; });
    } else {
      put_gated(e, total, expert, tile, block,
                [&](float gate, float up) { return gated(gate, up, e.glu); });
    }
  }
}
#endif

template <bool kGate>
__global__ void __launch_bounds__(kThreads, 1) many_kernel(const __grid_constant__ ExpertsArgs e) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t stages[];
  __shared__ uint64_t full[ManyStage::kStages], empty[ManyStage::kStages];
  __shared__ const uint8_t* weights[kMaxExperts];
  for (int i = static_cast<int>(threadIdx.x); i < e.groups.experts; i += kThreads) {
    weights[i] = (kGate ? e.gate_up : e.down)[i];
  }
  const GemmStages<ManyStage> ring = start_ring<ManyStage>(stages, full, empty, kReaders / 32);
  // A kernel that starts after the gate kernel may rely on everything written before it.
  if (kGate) wait();
  let_next_start();
  if (threadIdx.x >= kReaders) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    if (threadIdx.x == kReaders) produce<kGate>(ring, e, weights);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
    if (!kGate) wait();
    consume<kGate>(ring, e);
  }
#endif
}

template <bool kGate>
int launch_many(const Context& ctx, const ExpertsArgs& e) {
  const auto kernel = many_kernel<kGate>;
  if (const int error = raise_shared(kernel, ManyStage::kBytes); error != 0) return error;
  const int64_t rows = kGate ? e.ff / kGateRows : ceil_div(e.hidden, kDownRows);
  const int64_t items = e.groups.slots * rows;
  const auto blocks =
      static_cast<unsigned>(items < ctx.multiprocessors ? items : ctx.multiprocessors);
  return launch(ctx, kernel, dim3(blocks), dim3(kThreads), ManyStage::kBytes, e);
}

}  // namespace

int run_many_experts(const Context& ctx, const ExpertsArgs& e) {
  const int error = launch_many<true>(ctx, e);
  return error != 0 ? error : launch_many<false>(ctx, e);
}

}  // namespace freshet::cuda

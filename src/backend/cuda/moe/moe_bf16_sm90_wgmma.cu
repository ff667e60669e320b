// Experts in BF16 (Hopper): two kernels with persistent blocks that loop over (slot, row block),
// where a slot is a tile of one expert's tokens. wgmma has weights on its 64-row side, tokens on
// the other.
//
// The first kernel computes gate and up: one warpgroup sums 64 rows of gate, another the same rows
// of up; they exchange halves, and each applies SwiGLU to 8 of every 16 rows and writes the
// activations of the second kernel, down. One producer thread fills a pipeline of stages of 64
// columns by TMA bulk copies. The second kernel's first weights are requested while the first
// kernel still runs. K is cut and summed as in gemm_sm80_small_m.cu.
#include "backend/cuda/gemm/gemm.cuh"
#include "backend/cuda/gemm/glu_activation.cuh"
#include "backend/cuda/mma/wgmma_bf16.cuh"
#include "backend/cuda/moe/moe.h"
#include "backend/cuda/runtime/kernels.cuh"
#include "backend/cuda/runtime/pipeline.cuh"
#include "backend/cuda/runtime/register_transpose.cuh"

namespace freshet::cuda {
namespace {

constexpr int kConsumers = 256;
constexpr int kGroupRows = 64;                   // per warpgroup
constexpr int kHalfBytes = kGroupRows * 64 * 2;  // weights of a warpgroup
constexpr int kTokenBytes = kTokenTile * 64 * 2;

// NT: token tiles per slot.
template <int NT>
struct ExpertShape {
  static constexpr bool kWide = NT > 4;  // a block has an SM to itself
  static constexpr int kStageBytes = 2 * kHalfBytes + NT * kTokenBytes;
  // Staging buffer of the epilogue: gate's and up's sums of 64 rows, or down's 128 rows per token.
  static constexpr int kRowFloats = 128 + 4;  // padded against bank conflicts
  static constexpr int kExchange = NT * 8 * kRowFloats * 4;
  static constexpr int kStages = ((kWide ? 216 << 10 : 108 << 10) - kExchange) / kStageBytes;
  static constexpr int kBytes = kStages * kStageBytes + kExchange;
  // A whole producer warpgroup if setmaxnreg is used.
  static constexpr int kThreads = kConsumers + (kWide ? 128 : 32);
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// The pipeline of weights and tokens, and a thread's position in it.
template <int NT>
struct ExpertStages {
  uint8_t* stages;
  Pipeline pipe;
  PipelineState at;
  __device__ __forceinline__ uint8_t* data() const {
    return stages + at.stage * ExpertShape<NT>::kStageBytes;
  }
};

// One of the two kernels.
template <bool kGate>
struct Half {
  const ExpertsArgs& e;
  __device__ __forceinline__ int64_t cols() const { return kGate ? e.hidden : e.ff; }
  __device__ __forceinline__ int blocks() const {  // row blocks per slot
    return static_cast<int>(kGate ? e.ff / kGroupRows : (e.hidden + 127) / 128);
  }
  __device__ __forceinline__ int items() const { return __ldcg(e.groups.used) * blocks(); }
  __device__ __forceinline__ int pieces() const { return static_cast<int>((cols() + 63) / 64); }
  // A warpgroup's rows.
  __device__ __forceinline__ const uint8_t* rows(const uint8_t* weights, int block,
                                                 int group) const {
    const int64_t row = kGate ? group * e.ff + static_cast<int64_t>(block) * kGroupRows
                              : static_cast<int64_t>(block) * 128 + group * kGroupRows;
    return weights + tile_at<BF16>(row / 16, cols());
  }
};

// Whether the groups were final before the previous kernel, since the gather kernel runs in
// between.
__device__ __forceinline__ bool grouped_before(const ExpertsArgs& e) {
  return e.groups.whole == 0;
}

// Producer thread. If the slots' experts are final already, it requests the first weights before
// the previous kernel has ended. The first kernel's producer then lets the second kernel start.
template <int NT, bool kGate>
__device__ __forceinline__ void produce(ExpertStages<NT> ring, const ExpertsArgs& e,
                                        const uint8_t* const* weights) {
  using S = ExpertShape<NT>;
  const Half<kGate> half{e};
  const Activations& act = kGate ? e.in : e.act;
  bool waited = kGate && !grouped_before(e);
  const int blocks = half.blocks(), pieces = half.pieces(), items = half.items();
  for (int item = static_cast<int>(blockIdx.x); item < items; item += static_cast<int>(gridDim.x)) {
    const int slot = item / blocks, block = item % blocks;
    const uint8_t* expert = weights[__ldcg(e.groups.slot_expert + slot)];
    const uint8_t* first = half.rows(expert, block, 0);
    const uint8_t* second = half.rows(expert, block, 1);
    const int64_t tile = kGate && e.groups.whole != 0 ? 0 : static_cast<int64_t>(slot) * NT;
    const auto bytes = static_cast<uint32_t>(
        act.core_tiles - tile < NT ? (act.core_tiles - tile) * kTokenBytes : NT * kTokenBytes);
    const uint8_t* tokens = act.data + tile * kTokenBytes;
    const auto copy_rows = [&](int n, int stage) {
      uint64_t* barrier = ring.pipe.filled(stage);
      uint8_t* to = ring.stages + stage * S::kStageBytes;
      barrier_expect(barrier, 2 * kHalfBytes + bytes);
      bulk_copy(to, first + n * kUnitStep<BF16>, kGate ? kHalfBytes : 2 * kHalfBytes, barrier);
      if (kGate) bulk_copy(to + kHalfBytes, second + n * kUnitStep<BF16>, kHalfBytes, barrier);
    };
    const auto copy_tokens = [&](int n, int stage) {
      bulk_copy(ring.stages + stage * S::kStageBytes + 2 * kHalfBytes,
                tokens + n * act.core_tiles * kTokenBytes, bytes, ring.pipe.filled(stage));
    };
    int n = 0;
    if (!waited) {
      for (; n < min(pieces, S::kStages); ++n) copy_rows(n, n);
      wait();
      if (kGate) let_next_start();
      for (int k = 0; k < n; ++k) copy_tokens(k, k);
      waited = true;
      ring.at.advance(S::kStages, n);
    }
    for (; n < pieces; ++n, ring.at.next(S::kStages)) {
      ring.pipe.acquire(ring.at);
      copy_rows(n, ring.at.stage);
      copy_tokens(n, ring.at.stage);
    }
  }
}

// sum = the next `count` pieces for a warpgroup's 64 rows.
template <int NT>
__device__ __forceinline__ void sum_pieces(ExpertStages<NT>& ring, float (&sum)[NT][4], int count) {
  const int group = static_cast<int>(threadIdx.x / 128);
  int before = -1;
#pragma unroll 1
  for (int n = 0; n < count; ++n, ring.at.next(ExpertShape<NT>::kStages)) {
    ring.pipe.wait(ring.at);
    const uint64_t a = operand_at(ring.data() + group * kHalfBytes);
    const uint64_t b = operand_at(ring.data() + 2 * kHalfBytes);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma(sum, a + k * kNextStep, b + k * kNextStep, n + k > 0);
    wgmma_commit();
    wgmma_wait<1>();
    if (before >= 0) ring.pipe.release(before);
    before = ring.at.stage;
  }
  wgmma_wait<0>();
  if (before >= 0) ring.pipe.release(before);
}

// total = the slices, added from left to right.
template <int NT>
__device__ __forceinline__ void sum_leaves(ExpertStages<NT>& ring, float (&total)[NT][4],
                                           int64_t cols) {
  const int parts = leaves(cols), units = static_cast<int>((cols + 63) / 64);
  float sum[NT][4] = {};
#pragma unroll
  for (int j = 0; j < NT; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) total[j][i] = -0.0f;  // -0 is the identity of addition
  }
#pragma unroll 1
  for (int leaf = 0; leaf < parts; ++leaf) {
    sum_pieces<NT>(ring, sum, units * (leaf + 1) / parts - units * leaf / parts);
#pragma unroll
    for (int j = 0; j < NT; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) total[j][i] = __fadd_rn(total[j][i], sum[j][i]);
    }
  }
}

__device__ __forceinline__ void consumers_sync() {
  asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");
}

// SwiGLU epilogue. Of a warp's 16 rows, gate's warpgroup finishes the first 8 and up's the others.
// All sums go through shared memory, so that the code is a loop and not unrolled for every
// register.
template <int NT>
__device__ __forceinline__ void finish_gate(const ExpertsArgs& e, const float (&total)[NT][4],
                                            float* exchange, int slot, int block) {
  const int group = static_cast<int>(threadIdx.x / 128);
  const int thread = static_cast<int>(threadIdx.x % 128), warp = thread / 32, lane = thread % 32;
#pragma unroll
  for (int j = 0; j < NT; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) exchange[((group * NT + j) * 4 + i) * 128 + thread] = total[j][i];
  }
  const int64_t first = static_cast<int64_t>(block) * kGroupRows + warp * 16 + group * 8;
  float gate_bias = 0.0f, up_bias = 0.0f;
  const bool biased = e.gate_up_bias != nullptr;
  if (biased) {
    const float* bias = e.gate_up_bias + e.groups.slot_expert[slot] * 2 * e.ff + first + lane / 4;
    gate_bias = bias[0];
    up_bias = bias[e.ff];
  }
  consumers_sync();
  const int64_t place = static_cast<int64_t>(slot) * NT * 8 + lane / 4;
  const int64_t col = first + lane % 4 * 2;
  const float* gates = exchange + group * 256 + thread;
#pragma unroll(NT < 2 ? NT : 2)
  for (int j = 0; j < NT; ++j) {
    float v[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float gate = gates[(j * 4 + i) * 128], up = gates[((NT + j) * 4 + i) * 128];
      if (biased) gate = __fadd_rn(gate, gate_bias);
      if (biased) up = __fadd_rn(up, up_bias);
      v[i] = gated(gate, up, e.glu);
    }
    const uint32_t two = transposed(pack_bf16(v[0], v[1]));
    const int64_t to = activation_at(e.act, place + j * 8, col, e.ff);
    reinterpret_cast<uint32_t*>(e.act.data)[to / 2] = two;
  }
  consumers_sync();  // all threads have finished reading
}

// Writes down's sums by place.
template <int NT>
__device__ __forceinline__ void finish_down(const ExpertsArgs& e, const float (&total)[NT][4],
                                            int slot, int block) {
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const int64_t row = static_cast<int64_t>(block) * 128 + warp * 16 + lane / 4;
  const int64_t place = static_cast<int64_t>(slot) * NT * 8 + lane % 4 * 2;
  float bias[2] = {};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (e.down_bias != nullptr && row + r * 8 < e.hidden) {
      bias[r] = e.down_bias[e.groups.slot_expert[slot] * e.hidden + row + r * 8];
    }
  }
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    const int2 token = *reinterpret_cast<const int2*>(e.groups.token + place + j * 8);
    float* to = static_cast<float*>(e.y) + (place + j * 8) * e.hidden + row;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i % 2 == 0 ? token.x : token.y) < 0 || row + i / 2 * 8 >= e.hidden) continue;
      float v = total[j][i];
      if (e.down_bias != nullptr) v = __fadd_rn(v, bias[i / 2]);
      to[i % 2 * e.hidden + i / 2 * 8] = v;
    }
  }
}

// The same for many tokens: a token's 128 rows are one bulk copy, which overlaps with the next
// sums.
template <int NT>
__device__ __forceinline__ void finish_down_copied(const ExpertsArgs& e,
                                                   const float (&total)[NT][4], float* exchange,
                                                   int slot, int block) {
  constexpr int kRowFloats = ExpertShape<NT>::kRowFloats;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int64_t first = static_cast<int64_t>(block) * 128;
  const int row = warp * 16 + lane / 4;
  float bias[2] = {};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (e.down_bias != nullptr && first + row + r * 8 < e.hidden) {
      bias[r] = e.down_bias[e.groups.slot_expert[slot] * e.hidden + first + row + r * 8];
    }
  }
  bulk_stores_read();
  consumers_sync();
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    float* to = exchange + (j * 8 + lane % 4 * 2) * kRowFloats + row;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float v = total[j][i];
      if (e.down_bias != nullptr) v = __fadd_rn(v, bias[i / 2]);
      to[i % 2 * kRowFloats + i / 2 * 8] = v;
    }
  }
  shared_for_copies();
  consumers_sync();
  const int64_t place = static_cast<int64_t>(slot) * NT * 8 + thread;
  if (thread >= NT * 8 || e.groups.token[place] < 0) return;
  const auto rows = static_cast<uint32_t>(e.hidden - first < 128 ? e.hidden - first : 128);
  bulk_store(static_cast<float*>(e.y) + place * e.hidden + first, exchange + thread * kRowFloats,
             rows * 4);
}

template <int NT, bool kGate>
__device__ __forceinline__ void consume(ExpertStages<NT> ring, const ExpertsArgs& e,
                                        float* exchange) {
  const Half<kGate> half{e};
  wait();
  const int items = half.items(), blocks = half.blocks();
  for (int item = static_cast<int>(blockIdx.x); item < items; item += static_cast<int>(gridDim.x)) {
    float total[NT][4];
    sum_leaves<NT>(ring, total, half.cols());
    if constexpr (kGate) {
      finish_gate<NT>(e, total, exchange, item / blocks, item % blocks);
    } else if (ExpertShape<NT>::kWide && e.hidden % 4 == 0) {
      finish_down_copied<NT>(e, total, exchange, item / blocks, item % blocks);
    } else {
      finish_down<NT>(e, total, item / blocks, item % blocks);
    }
  }
  if constexpr (!kGate && ExpertShape<NT>::kWide) bulk_stores_done();
}
#endif

template <int NT, bool kGate>
__global__ void __launch_bounds__(ExpertShape<NT>::kThreads, ExpertShape<NT>::kWide ? 1 : 2)
    experts_kernel(const __grid_constant__ ExpertsArgs e) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = ExpertShape<NT>;
  extern __shared__ __align__(1024) uint8_t stages[];
  __shared__ uint64_t full[S::kStages], empty[S::kStages];
  __shared__ const uint8_t* weights[kMaxExperts];
  const Pipeline pipe{full, empty};
  if (threadIdx.x == 0) pipe.init(S::kStages, kConsumers / 32);
  for (int i = static_cast<int>(threadIdx.x); i < e.groups.experts; i += S::kThreads) {
    weights[i] = (kGate ? e.gate_up : e.down)[i];
  }
  __syncthreads();
  // A kernel that starts after the first one may rely on everything written before it.
  const bool asks = kGate && grouped_before(e) && threadIdx.x == kConsumers;
  if (kGate && !asks) wait();
  if (!asks) let_next_start();
  const ExpertStages<NT> ring{stages, pipe};
  auto* exchange = reinterpret_cast<float*>(stages + S::kStages * S::kStageBytes);
  if (threadIdx.x >= kConsumers) {
    if constexpr (S::kWide) asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
    if (threadIdx.x == kConsumers) produce<NT, kGate>(ring, e, weights);
  } else {
    if constexpr (S::kWide) asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
    consume<NT, kGate>(ring, e, exchange);
  }
#endif
}

template <int NT>
int launch_experts(const Context& ctx, const ExpertsArgs& e) {
  using S = ExpertShape<NT>;
  const auto run = [&](auto kernel, int64_t row_blocks) {
    if (const int error = raise_shared(kernel, S::kBytes); error != 0) return error;
    const int64_t items = e.groups.slots * row_blocks;
    const int64_t most = int64_t{ctx.multiprocessors} * (S::kWide ? 1 : 2);
    const auto blocks = static_cast<unsigned>(items < most ? items : most);
    return launch(ctx, kernel, dim3(blocks), dim3(S::kThreads), S::kBytes, e);
  };
  const int error = run(experts_kernel<NT, true>, e.ff / kGroupRows);
  return error != 0 ? error : run(experts_kernel<NT, false>, ceil_div(e.hidden, 128));
}

}  // namespace

int run_experts_wgmma(const Context& ctx, const ExpertsArgs& e) {
  switch (e.groups.slot_tokens) {
    case 8:
      return launch_experts<1>(ctx, e);
    case 16:
      return launch_experts<2>(ctx, e);
    case 32:
      return launch_experts<4>(ctx, e);
    case 64:
      return launch_experts<8>(ctx, e);
    case 128:
      return launch_experts<16>(ctx, e);
    case kManySlot:
      return run_many_experts(ctx, e);
    default:
      return static_cast<int>(cudaErrorInvalidValue);
  }
}

}  // namespace freshet::cuda

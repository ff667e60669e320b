// Experts in block formats (Hopper): the pipelines and warpgroups of gemm_q_sm90_wgmma.cuh, with
// tiles of an expert's rows by the tokens of one of its slots. Gate and up have a SwiGLU epilogue.
//
// Gate and up are one kernel, down is another. The second one's first weights are requested while
// the first still runs, since the slots' experts were final before the first one began. K is cut
// and summed as in gemm_sm80_small_m.cu.
#pragma once

#include "backend/cuda/gemm/gemm_q_sm90_wgmma.cuh"
#include "backend/cuda/moe/moe.h"

namespace freshet::cuda::decode {

// The tiles of gate and up, or of down, depending on S.
template <class S>
struct ExpertTiles {
  const ExpertsArgs& e;
  __host__ __device__ __forceinline__ int64_t rows() const { return S::kGate ? e.ff : e.hidden; }
  __host__ __device__ __forceinline__ int64_t cols() const { return S::kGate ? e.hidden : e.ff; }
  __host__ __device__ __forceinline__ int blocks() const {  // row blocks per slot
    return static_cast<int>((rows() + S::kRowTiles * 16 - 1) / (S::kRowTiles * 16));
  }
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __device__ __forceinline__ int expert(int slot) const {
    return __ldcg(e.groups.slot_expert + slot);
  }
  // Calls body(slot, its first 16-row tile) for each tile of a block.
  template <class Body>
  __device__ __forceinline__ void each(const Body& body) const {
    const int of_slot = blocks(), items = __ldcg(e.groups.used) * of_slot;
    for (int item = static_cast<int>(blockIdx.x); item < items;
         item += static_cast<int>(gridDim.x)) {
      body(item / of_slot, item % of_slot * S::kRowTiles);
    }
  }
#endif
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Counterpart of copy_rows() and copy_tokens().
template <class S>
__device__ __forceinline__ void copy_expert_rows(const Rings<S>& rings, const ExpertTiles<S>& tiles,
                                                 int thread) {
  const ExpertsArgs& e = tiles.e;
  using F = typename S::F;
  constexpr int kSide = kPanelTiles<F>;  // row tiles per panel
  const int64_t step = tile_at<F>(kSide, tiles.cols());
  const Leaves<S> leaves(tiles.cols());
  PipelineState turn;
  tiles.each([&](int slot, int unit) {
    const uint8_t* expert = (S::kGate ? e.gate_up : e.down)[tiles.expert(slot)];
    const uint8_t* panel = expert + unit / kSide * step;
    const int below = (static_cast<int>(tiles.rows()) - 1) / (16 * kSide) - unit / kSide;
    copy_tile_rows<S>(rings, turn, leaves, thread, panel, panel + e.ff / (16 * kSide) * step, step,
                      below);
  });
}

template <class S>
__device__ __forceinline__ void copy_expert_tokens(const Rings<S>& rings,
                                                   const ExpertTiles<S>& tiles, int thread) {
  const ExpertsArgs& e = tiles.e;
  const Activations& act = S::kGate ? e.in : e.act;
  const Leaves<S> leaves(tiles.cols());
  PipelineState turn;
  wait();
  tiles.each([&](int slot, int) {
    const int64_t first = S::kGate && e.groups.whole != 0 ? 0 : int64_t{slot} * S::NT;
    const auto bytes =
        static_cast<uint32_t>(min(int64_t{S::NT}, act.core_tiles - first) * kTokenBytes);
    copy_tile_tokens<S>(rings, turn, leaves, thread, act.data + first * kTokenBytes,
                        act.core_tiles * kTokenBytes, bytes);
  });
}

// Writes the SwiGLU outputs of a slot's tokens, 64 rows or more.
template <class S, class Unit>
__device__ __forceinline__ void finish_gate(const ExpertsArgs& e, float (&total)[S::NT][4],
                                            float* room, int expert, int slot, int unit,
                                            const Unit& glu) {
  constexpr int NT = S::NT;
  using F = typename S::F;
  const int warp = static_cast<int>(threadIdx.x / 32), up = S::kMixed ? warp % 4 / 2 : warp / 4;
  ProductArgs p = {};
  p.weight.rows = e.ff;
  p.scale = 1.0f;
  if (e.gate_up_bias != nullptr) p.bias = e.gate_up_bias + (int64_t{expert} * 2 + up) * e.ff;
  const int64_t token_tile = int64_t{slot} * NT;
  if constexpr (S::kMixed) {
    finish_mixed<NT, F>(e.act, p, total, room + warp / 4 * S::kOutFloats, unit + warp / 4 * 2,
                        token_tile, glu);
  } else {
    finish_gated<NT, S::kRound, F>(e.act, p, total, reinterpret_cast<float4*>(room), unit,
                                   unit + S::kRowTiles, token_tile, glu);
  }
}

// Writes a warpgroup's 64 rows of an expert's outputs in BF16, as finish_rows() writes F32.
template <class S>
__device__ __forceinline__ void finish_bf16(const ExpertsArgs& e, const float (&total)[S::NT][4],
                                            float* room, const float* bias, int64_t row_tile,
                                            int64_t place) {
  const int thread = static_cast<int>(threadIdx.x % 128), lane = thread % 32;
  const int64_t row = row_tile * 16 + lane % 16 * 4;
  const bool real = row < e.hidden;
  float of[4] = {};
  for (int i = 0; i < 4 && bias != nullptr && real; ++i) of[i] = bias[row + i];
  const auto together = [&] {
    asm volatile("bar.sync %0, 128;" ::"r"(2 + static_cast<int>(threadIdx.x / 128)) : "memory");
  };
  const auto value = [&](float v, float b) {
    v = __fmul_rn(v, S::F::kUp);
    return bias != nullptr ? __fadd_rn(v, b) : v;
  };
#pragma unroll
  for (int first = 0; first < S::NT; first += kOutTokens / 8) {
    together();
#pragma unroll
    for (int n = 0; n < kOutTokens / 8 * 4; ++n) {
      const int token = n / 4 * 8 + lane % 4 * 2 + n % 2;
      room[token * kOutStride + thread / 32 * 16 + lane / 4 + n % 4 / 2 * 8] =
          total[first + n / 4][n % 4];
    }
    together();
#pragma unroll
    for (int n = 0; n < kOutTokens / 8; ++n) {
      const int at = n * 8 + thread / 16;
      const int64_t to = place + first * 8 + at;
      if (!real || __ldcg(e.groups.token + to) < 0) continue;
      const float4 v = *reinterpret_cast<const float4*>(room + at * kOutStride + lane % 16 * 4);
      *reinterpret_cast<uint2*>(static_cast<uint16_t*>(e.y) + to * e.hidden + row) =
          make_uint2(pack_bf16(value(v.x, of[0]), value(v.y, of[1])),
                     pack_bf16(value(v.z, of[2]), value(v.w, of[3])));
    }
  }
}

// Writes the outputs of an expert by place.
template <class S>
__device__ __forceinline__ void finish_down(const ExpertsArgs& e, const float (&total)[S::NT][4],
                                            float* room, int expert, int slot, int unit) {
  const int group = static_cast<int>(threadIdx.x / 128);
  const float* bias = e.down_bias != nullptr ? e.down_bias + expert * e.hidden : nullptr;
  room += group * kOutTokens * kOutStride;
  if constexpr (S::NT * kTokenTile == kWideSlot) {
    finish_bf16<S>(e, total, room, bias, unit + group * 4, int64_t{slot} * kWideSlot);
  } else {
    Work w = {};
    w.rows = w.out_stride = e.hidden;
    w.out = static_cast<float*>(e.y);
    w.tokens = int64_t{e.groups.slots} * e.groups.slot_tokens;
    w.scale = 1.0f;
    w.up = S::F::kUp;
    w.bias = bias;
    finish_rows<S::NT>(w, total, unit + group * 4, int64_t{slot} * S::NT, room,
                       [&](int64_t place) { return __ldcg(e.groups.token + place) >= 0; });
  }
}

// Consumer warpgroups: tile after tile.
template <class S>
__device__ __forceinline__ void walk_experts(const Rings<S>& rings, const ExpertTiles<S>& tiles,
                                             float* room) {
  const ExpertsArgs& e = tiles.e;
  const Leaves<S> leaves(tiles.cols());
  Way<S> way(rings);
  tiles.each([&](int slot, int unit) {
    float total[S::NT][4];
    sum_tile<S>(way, leaves, total);
    const int expert = tiles.expert(slot);
    if constexpr (!S::kGate) {
      finish_down<S>(e, total, room, expert, slot, unit);
    } else if (e.glu.limit > 0.0f) {
      finish_gate<S>(e, total, room, expert, slot, unit, LimitedUnit{e.glu});
    } else {
      finish_gate<S>(e, total, room, expert, slot, unit, SiluUnit{});
    }
  });
}
#endif

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1)
    experts_kernel(const __grid_constant__ ExpertsArgs e) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ Barriers<S> barriers;
  const Rings<S> rings = start_rings<S>(shared, barriers);
  // A kernel that starts after gate and up may rely on everything written before it.
  if (S::kGate) wait();
  let_next_start();
  const ExpertTiles<S> tiles{e};
  if (threadIdx.x >= S::kConsumers) {
    give_registers<S>();
    copy_both<S>([&](int thread) { copy_expert_rows<S>(rings, tiles, thread); },
                 [&](int thread) { copy_expert_tokens<S>(rings, tiles, thread); });
  } else {
    take_registers<S>();
    wait();
    walk_experts<S>(rings, tiles, reinterpret_cast<float*>(shared + S::kRings));
  }
#endif
}

template <class S>
int launch_experts(const Context& ctx, const ExpertsArgs& e) {
  const auto kernel = experts_kernel<S>;
  if (const int error = raise_shared(kernel, S::kShared); error != 0) return error;
  const int64_t tiles = int64_t{e.groups.slots} * ExpertTiles<S>{e}.blocks();
  const auto blocks =
      static_cast<unsigned>(tiles < ctx.multiprocessors ? tiles : ctx.multiprocessors);
  return launch(ctx, kernel, dim3(blocks), dim3(S::kThreads), S::kShared, e);
}

// Calls body(format) for a code that these kernels support.
template <class Body>
int with_quantised(Code code, const Body& body) {
  int error = static_cast<int>(cudaErrorInvalidValue);
  if (code == Code::kFP8) return body(FP8Values{});
  with_format(code, [&](auto f) {
    if constexpr (kQuantised<decltype(f)>) error = body(f);
  });
  return error;
}

}  // namespace freshet::cuda::decode

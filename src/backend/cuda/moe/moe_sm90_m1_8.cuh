// Shared by the two kernels of experts for at most 8 tokens (moe_gate_up_sm90_m1_8.cu): the routing
// of tokens, and the sum of a piece of weights.
#pragma once

#include "backend/cuda/gemm/gemm.cuh"
#include "backend/cuda/moe/moe.h"
#include "backend/cuda/moe/route_topk.cuh"
#include "backend/cuda/runtime/kernels.cuh"
#include "backend/cuda/runtime/pipeline.cuh"

namespace freshet::cuda::few {

inline constexpr int kTokens = 8, kMostChosen = 64;  // pairs of token and expert
inline constexpr int kThreads = kWarps * 32 + 32;    // the last warp only adds
inline constexpr int kSets = 2;                      // sets of sums in flight

// Experts in use, in ascending order. In shared memory.
struct Chosen {
  const uint8_t* weights[kMostChosen];
  float weight[kMostChosen][kTokens];
  uint32_t tokens[kMostChosen];  // bit mask
  int32_t expert[kMostChosen];
  int32_t slot[kFewExperts];  // by expert; -1: not in use
  int32_t ids[kMostChosen];
  float of_pair[kMostChosen];
  int32_t of_warp[kFewExperts / 32], count;
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// Called by all threads; `mine`: the weights of the expert whose index is this thread's. `room`:
// see routing_room().
template <bool kWithWeights>
__device__ __forceinline__ void choose(const FewExpertsArgs& e, Chosen& c, float* room,
                                       const uint8_t* mine) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int top_k = e.routing.top_k, pairs = e.tokens * top_k;
  if (e.logits == nullptr) {
    if (thread < pairs) {
      c.ids[thread] = __ldcg(e.ids + thread);
      c.of_pair[thread] = __ldcg(e.weights + thread);
    }
  } else if (warp < e.tokens) {
    route_token<kFewExperts / 32>(e.logits + warp * e.logits_stride, e.routing,
                                  room + warp * routing_room(e.routing), c.ids + warp * top_k,
                                  c.of_pair + warp * top_k);
  }
  if (thread < kFewExperts) c.slot[thread] = -1;
  __syncthreads();
  if (thread < pairs) c.slot[c.ids[thread]] = 0;
  __syncthreads();
  const bool used = thread < kFewExperts && c.slot[thread] >= 0;
  const uint32_t in_warp = __ballot_sync(0xffffffff, used);
  if (lane == 0 && thread < kFewExperts) c.of_warp[warp] = __popc(in_warp);
  __syncthreads();
  int before = 0, all = 0;
#pragma unroll
  for (int w = 0; w < kFewExperts / 32; ++w) {
    if (w < warp) before += c.of_warp[w];
    all += c.of_warp[w];
  }
  if (thread == 0) c.count = all;
  if (used) {
    const int slot = before + __popc(in_warp & ((1u << lane) - 1));
    c.slot[thread] = slot;
    c.expert[slot] = thread;
    c.weights[slot] = mine;
    c.tokens[slot] = 0;
  }
  __syncthreads();
  if constexpr (kWithWeights) {
    if (thread < pairs) {
      const int slot = c.slot[c.ids[thread]], token = thread / top_k;
      c.weight[slot][token] = c.of_pair[thread];
      atomicOr(&c.tokens[slot], 1u << token);
    }
    __syncthreads();
  }
}

// Hands sums over from the consumer warps to the adding warp: consumers are limited by their
// copies, and none of them waits for another.
template <int kSize>
struct Handover {
  float4* sums;  // kSets of kSize
  Pipeline pipe;
  PipelineState at;

  __device__ __forceinline__ void start(int readers) const { pipe.init(kSets, readers, kWarps); }
  __device__ __forceinline__ float4* to_write() const {
    pipe.acquire(at);
    return sums + at.stage * kSize;
  }
  __device__ __forceinline__ const float4* to_read() const {
    pipe.wait(at);
    return sums + at.stage * kSize;
  }
  __device__ __forceinline__ void written() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) pipe.arrive(at.stage);
    at.next(kSets);
  }
  __device__ __forceinline__ void read() {
    __syncwarp();
    pipe.release(at.stage);
    at.next(kSets);
  }
};

// sums[i] += 16 rows by 64 columns for 8 tokens, for pieces of the units at `tile`, `step` bytes
// apart. The accumulators alternate, since an MMA waits for the previous one with the same
// accumulator.
template <class F, int N>
__device__ __forceinline__ void add_pieces(float (&sums)[N][4], const uint8_t* tile, int step,
                                           int index, const uint4 (&b)[2]) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  uint4 a[N][4];
#pragma unroll
  for (int t = 0; t < N; ++t) {
    Piece piece;
    F::template load<FromShared>(tile + t * step, index, lane, piece);
    F::decode(piece, index, lane, a[t]);
  }
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const uint4& v = b[n / 2];
#pragma unroll
    for (int t = 0; t < N; ++t) {
      mma(sums[t], a[t][n], n % 2 == 0 ? v.x : v.z, n % 2 == 0 ? v.y : v.w);
    }
  }
}
__device__ __forceinline__ void add_leaf(float (&sum)[4], const float4& leaf) {
  sum[0] = __fadd_rn(sum[0], leaf.x);
  sum[1] = __fadd_rn(sum[1], leaf.y);
  sum[2] = __fadd_rn(sum[2], leaf.z);
  sum[3] = __fadd_rn(sum[3], leaf.w);
}

#endif

template <class Kernel>
int launch_few(const Context& ctx, Kernel kernel, int64_t blocks, int bytes,
               const FewExpertsArgs& e) {
  if (const int error = raise_shared(kernel, bytes); error != 0) return error;
  if (const int error = leave_shared(kernel); error != 0) return error;
  return launch(ctx, kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads),
                static_cast<size_t>(bytes), e);
}

// Formats that these kernels support: those whose experts have kernels for many tokens, too. FP8
// counts as FP8Values.
template <class F>
inline constexpr bool kTaken = kQuantised<F> || F::kCode == Code::kBF16 || F::kCode == Code::kFP8;
template <class Body>
int with_taken(Code code, const Body& body) {
  int error = static_cast<int>(cudaErrorInvalidValue);
  with_format(code, [&](auto f) {
    using F = std::conditional_t<decltype(f)::kCode == Code::kFP8, FP8Values, decltype(f)>;
    if constexpr (kTaken<F>) error = body(F{});
  });
  return error;
}

}  // namespace freshet::cuda::few

// Routes tokens to experts, groups tokens by expert, and adds the experts' outputs.
#include "backend/cuda/formats/formats.cuh"
#include "backend/cuda/gemm/gemm_f32_bf16x3.cuh"
#include "backend/cuda/moe/moe.h"
#include "backend/cuda/moe/moe_rows.h"
#include "backend/cuda/moe/route_topk.cuh"
#include "backend/cuda/runtime/kernels.cuh"

namespace freshet::cuda {
namespace {

// One warp per token.
template <int kMine>
__global__ void __launch_bounds__(256)
    route_kernel(Rows logits, RoutingArgs r, int32_t* ids, float* weights) {
  extern __shared__ float room[];
  let_next_start();
  wait();
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int64_t t = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
  if (t >= logits.rows) return;
  route_token<kMine>(logits.data + t * logits.stride, r, room + warp * routing_room(r),
                     ids + t * r.top_k, weights + t * r.top_k);
}

struct Grouping {  // of one block, in shared memory
  int32_t count[kMaxExperts], first[kMaxExperts], of_warp[32];
};

// Computes the experts' slot numbers and the number of slots from the counts. By all threads.
template <int Threads>
__device__ __forceinline__ int number_slots(const GroupArgs& a, Grouping& g) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  int before = 0;
  for (int base = 0; base < a.experts; base += Threads) {
    const int e = base + thread;
    const int count = e < a.experts ? g.count[e] : 0;
    const int slots = a.whole != 0 ? count > 0 : (count + a.slot_tokens - 1) / a.slot_tokens;
    int sum = slots;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffff, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == 31) g.of_warp[thread / 32] = sum;
    __syncthreads();
    int all = 0;
    for (int w = 0; w < Threads / 32; ++w) {
      if (w < thread / 32) sum += g.of_warp[w];
      all += g.of_warp[w];
    }
    if (e < a.experts) g.first[e] = before + sum - slots;
    for (int s = 0; s < slots; ++s) a.slot_expert[before + sum - slots + s] = e;
    before += all;
    __syncthreads();
  }
  return before;
}

// By one block. The place of a token among its expert's tokens isn't deterministic, and affects no
// sum.
template <int Threads>
__device__ __forceinline__ void group_tokens(const GroupArgs& a, Grouping& g) {
  constexpr int kHeld = 4;  // a thread's pairs in registers; few tokens have no more
  const int thread = static_cast<int>(threadIdx.x);
  const int pairs = a.tokens * a.top_k;
  int id[kHeld], in[kHeld] = {};
  float weight[kHeld];
#pragma unroll
  for (int n = 0; n < kHeld; ++n) {
    const int i = thread + n * Threads;
    id[n] = i < pairs ? __ldcg(a.ids + i) : -1;
    weight[n] = i < pairs ? __ldcg(a.weights + i) : 0.0f;
  }
  for (int e = thread; e < a.experts; e += Threads) g.count[e] = 0;
  for (int p = thread; p < a.slots * a.slot_tokens; p += Threads) a.token[p] = -1;
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kHeld; ++n) {
    if (id[n] >= 0) in[n] = atomicAdd(&g.count[id[n]], 1);
  }
  for (int i = thread + kHeld * Threads; i < pairs; i += Threads) {
    a.place[i] = atomicAdd(&g.count[__ldcg(a.ids + i)], 1);
  }
  __syncthreads();
  const int used = number_slots<Threads>(a, g);
  if (thread == 0) *a.used = used;
  for (int s = used + thread; s < a.slots; s += Threads) a.slot_expert[s] = -1;
  const auto put = [&](int i, int its, float its_weight, int among) {
    const int token = i / a.top_k;
    const int place = g.first[its] * a.slot_tokens + (a.whole != 0 ? token : among);
    a.token[place] = token;
    a.place_weight[place] = its_weight;
    a.place[i] = place;
  };
#pragma unroll
  for (int n = 0; n < kHeld; ++n) {
    if (id[n] >= 0) put(thread + n * Threads, id[n], weight[n], in[n]);
  }
  for (int i = thread + kHeld * Threads; i < pairs; i += Threads) {
    put(i, __ldcg(a.ids + i), __ldcg(a.weights + i), a.place[i]);
  }
}

constexpr int kGroupThreads = 1024;
__global__ void __launch_bounds__(kGroupThreads) group_kernel(GroupArgs a) {
  __shared__ Grouping g;
  let_next_start();
  wait();
  group_tokens<kGroupThreads>(a, g);
}

constexpr int kRoutedByBlock = 16;  // tokens, upper bound
// The number of blocks that have arrived; zero between launches.
__device__ int32_t arrived[kMaxRouterTokens / kWarps + 1];

// Whether this block is the last of `blocks` to arrive. The last one sees everything that the
// others wrote before.
__device__ __forceinline__ bool last_of(int32_t* counter, int blocks) {
  __shared__ int last;
  __syncthreads();
  if (threadIdx.x == 0) {
    int before;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(counter)
                 : "memory");
    last = before == blocks - 1;
    if (last != 0) *counter = 0;
  }
  __syncthreads();
  return last != 0;
}

// Many pairs: each block counts some, and the last block numbers the slots. Then each block
// reserves places of each expert for its tokens.
constexpr int kManyThreads = 512, kPairsOfThread = 8, kPairsOfBlock = kManyThreads * kPairsOfThread;
__device__ int32_t total[kMaxExperts];  // zero between launches
__device__ int32_t next_place[kMaxExperts];

__global__ void __launch_bounds__(kManyThreads) count_kernel(GroupArgs a) {
  __shared__ Grouping g;
  let_next_start();
  wait();
  const int thread = static_cast<int>(threadIdx.x), pairs = a.tokens * a.top_k;
  const int first = static_cast<int>(blockIdx.x) * kPairsOfBlock + thread;
  for (int e = thread; e < a.experts; e += kManyThreads) g.count[e] = 0;
  const int places = a.slots * a.slot_tokens, all = static_cast<int>(gridDim.x) * kManyThreads;
  for (int p = static_cast<int>(blockIdx.x) * kManyThreads + thread; p < places; p += all) {
    a.token[p] = -1;
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kPairsOfThread; ++n) {
    const int i = first + n * kManyThreads;
    if (i < pairs) atomicAdd(&g.count[a.ids[i]], 1);
  }
  __syncthreads();
  for (int e = thread; e < a.experts; e += kManyThreads) {
    if (g.count[e] > 0) atomicAdd(&total[e], g.count[e]);
  }
  if (!last_of(arrived, static_cast<int>(gridDim.x))) return;
  for (int e = thread; e < a.experts; e += kManyThreads) {
    g.count[e] = __ldcg(&total[e]);
    total[e] = 0;
  }
  __syncthreads();
  const int used = number_slots<kManyThreads>(a, g);
  if (thread == 0) *a.used = used;
  for (int s = used + thread; s < a.slots; s += kManyThreads) a.slot_expert[s] = -1;
  for (int e = thread; e < a.experts; e += kManyThreads) next_place[e] = g.first[e] * a.slot_tokens;
}

__global__ void __launch_bounds__(kManyThreads) place_kernel(GroupArgs a) {
  __shared__ int32_t count[kMaxExperts], base[kMaxExperts];
  let_next_start();
  wait();
  const int thread = static_cast<int>(threadIdx.x), pairs = a.tokens * a.top_k;
  const int first = static_cast<int>(blockIdx.x) * kPairsOfBlock + thread;
  for (int e = thread; e < a.experts; e += kManyThreads) count[e] = 0;
  __syncthreads();
  int id[kPairsOfThread], in[kPairsOfThread];
#pragma unroll
  for (int n = 0; n < kPairsOfThread; ++n) {
    const int i = first + n * kManyThreads;
    id[n] = i < pairs ? a.ids[i] : -1;
  }
#pragma unroll
  for (int n = 0; n < kPairsOfThread; ++n) in[n] = id[n] >= 0 ? atomicAdd(&count[id[n]], 1) : 0;
  __syncthreads();
  for (int e = thread; e < a.experts; e += kManyThreads) {
    if (count[e] > 0) base[e] = atomicAdd(&next_place[e], count[e]);
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kPairsOfThread; ++n) {
    if (id[n] < 0) continue;
    const int i = first + n * kManyThreads, place = base[id[n]] + in[n];
    a.token[place] = i / a.top_k;
    a.place_weight[place] = a.weights[i];
    a.place[i] = place;
  }
}

// The router's GEMM, then routes, then groups. The last block to finish some tokens routes them,
// and the last one of those blocks groups all tokens. Blocks: [experts, tokens]; 16 by 8 for
// weights that are exact in BF16; otherwise one expert and token per warp, or squares of them.
enum class RouterCut { kRows, kSquares, kExact };
template <RouterCut kCut>
inline constexpr int kTokensOfCut = kCut == RouterCut::kRows      ? 1
                                    : kCut == RouterCut::kSquares ? kF32Side
                                                                  : 8;

template <RouterCut kCut, int kMine>
__global__ void __launch_bounds__(256)
    router_kernel(const __grid_constant__ ProductArgs p, int tokens, int routed,
                  const __grid_constant__ RoutingArgs r, int32_t* ids, float* weights,
                  const __grid_constant__ GroupArgs g) {
  extern __shared__ float room[];
  __shared__ Grouping grouping;
  let_next_start();
  constexpr int kSide = kTokensOfCut<kCut>;
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int first = static_cast<int>(blockIdx.y) * kSide;
  if constexpr (kCut == RouterCut::kExact) {
    __shared__ __align__(16) ChunkSums sums;
    exact_tile<true>(p, blockIdx.x, first, tokens, sums);
  } else {
    const int64_t row = (static_cast<int64_t>(blockIdx.x) * kWarps + warp) * kSide;
    if constexpr (kCut == RouterCut::kSquares) {
      f32_square(p, row, first, tokens);
    } else {
      f32_row<true>(p, row, first);
    }
  }
  const int part = first / routed, begin = part * routed, end = min(begin + routed, tokens);
  const int blocks = (end - begin + kSide - 1) / kSide;
  if (!last_of(arrived + 1 + part, blocks * static_cast<int>(gridDim.x))) return;
  for (int64_t t = begin + warp; t < end; t += kWarps) {
    route_token<kMine>(p.out + t * p.out_stride, r, room + warp * routing_room(r),
                       ids + t * r.top_k, weights + t * r.top_k);
  }
  const int parts = (tokens + routed - 1) / routed;
  if (parts == 1) {
    __syncthreads();
  } else if (!last_of(arrived, parts)) {
    return;
  }
  group_tokens<256>(g, grouping);
}

// A thread's columns: 16 bytes of an expert's output, which is used as BF16.
template <bool kBF16>
struct Columns {
  static constexpr int kCount = kBF16 ? 8 : 4;
  uint4 bits;
  // From column c of a row, of which `left` columns exist; all of them if `whole`.
  __device__ __forceinline__ void load(const void* y, int64_t at, int64_t left, bool whole) {
    using Stored = std::conditional_t<kBF16, uint16_t, uint32_t>;
    const auto* from = static_cast<const Stored*>(y) + at;
    if (whole) {
      bits = *reinterpret_cast<const uint4*>(from);
      return;
    }
    Stored v[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = i < left ? from[i] : Stored{0};
    memcpy(&bits, v, 16);
  }
  __device__ __forceinline__ float at(int i) const {
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
    if constexpr (kBF16) {
      return __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000);
    } else {
      return given(__uint_as_float(words[i]));
    }
  }
};

// One block per token and column range; the loads of all of its experts overlap.
template <bool kBF16>
__global__ void __launch_bounds__(512)
    combine_kernel(Rows out, const void* y, GroupArgs a, int weighted, int add) {
  using Of = Columns<kBF16>;
  constexpr int kAtOnce = 8, kCount = Of::kCount;
  let_next_start();
  wait();
  const int64_t t = blockIdx.x, cols = out.cols;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t c = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * kCount;
  const int64_t left = cols - c;
  const bool whole = cols % kCount == 0 && left > 0;
  const bool wide = whole && whole_rows(out.data, out.stride);
  const bool mine = lane < a.top_k;
  const int32_t place = mine ? a.place[t * a.top_k + lane] : 0;
  const float weight = mine && weighted != 0 ? a.weights[t * a.top_k + lane] : 1.0f;
  float* to = out.data + t * out.stride + c;
  const auto four = [&](int i) { return reinterpret_cast<float4*>(to) + i / 4; };
  float before[kCount] = {}, sum[kCount];
#pragma unroll
  for (int i = 0; i < kCount && add != 0; i += 4) {
    if (wide) {
      *reinterpret_cast<float4*>(before + i) = *four(i);
      continue;
    }
#pragma unroll
    for (int k = i; k < i + 4; ++k) before[k] = k < left ? to[k] : 0.0f;
  }
  int order = 0;  // places ascend, hence experts do
  for (int k = 0; k < a.top_k; ++k) order += __shfl_sync(0xffffffff, place, k) < place;
  for (int base = 0; base < a.top_k; base += kAtOnce) {
    Of v[kAtOnce];
    float w[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (base + i >= a.top_k) break;
      const int from =
          __ffs(static_cast<int>(__ballot_sync(0xffffffff, mine && order == base + i)));
      w[i] = __shfl_sync(0xffffffff, weight, from - 1);
      const int64_t its = __shfl_sync(0xffffffff, place, from - 1);
      v[i].load(y, its * cols + c, left, whole);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (base + i >= a.top_k) break;
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        sum[k] = base + i == 0 ? __fmul_rn(v[i].at(k), w[i]) : __fmaf_rn(v[i].at(k), w[i], sum[k]);
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    if (add != 0) sum[k] = __fadd_rn(before[k], sum[k]);
    if (!wide && k < left) to[k] = sum[k];
  }
  if (!wide) return;
#pragma unroll
  for (int i = 0; i < kCount; i += 4) *four(i) = *reinterpret_cast<float4*>(sum + i);
}

}  // namespace

int route(const Context& ctx, const Rows* logits, const RoutingArgs* routing, int32_t* ids,
          float* weights) {
  const auto run = [&](auto kernel) {
    return launch(ctx, kernel, dim3(static_cast<unsigned>(ceil_div(logits->rows, kWarps))),
                  dim3(256), sizeof(float) * kWarps * routing_room(*routing), *logits, *routing,
                  ids, weights);
  };
  return routing->experts <= kFewExperts ? run(route_kernel<kFewExperts / 32>)
                                         : run(route_kernel<kMaxExperts / 32>);
}

int router(const Context& ctx, const ProductArgs* product, int64_t tokens,
           const RoutingArgs* routing, int32_t* ids, float* weights, const GroupArgs* groups) {
  if (!f32_aligned(*product)) return static_cast<int>(cudaErrorInvalidValue);
  const int routed = tokens <= kRoutedByBlock ? kRoutedByBlock : kWarps;
  const auto run = [&](auto kernel, int rows, int side) {
    const dim3 grid(static_cast<unsigned>(ceil_div(product->weight.rows, rows)),
                    static_cast<unsigned>(ceil_div(tokens, side)));
    return launch(ctx, kernel, grid, dim3(256), sizeof(float) * kWarps * routing_room(*routing),
                  *product, static_cast<int>(tokens), routed, *routing, ids, weights, *groups);
  };
  const auto run_cut = [&](auto mine) {
    constexpr int kMine = decltype(mine)::value;
    if (product->weight.code == Code::kExactF32) {
      return run(router_kernel<RouterCut::kExact, kMine>, 16, kTokensOfCut<RouterCut::kExact>);
    }
    if (tokens <= kWarps) return run(router_kernel<RouterCut::kRows, kMine>, kWarps, 1);
    return run(router_kernel<RouterCut::kSquares, kMine>, kWarps * kF32Side, kF32Side);
  };
  return routing->experts <= kFewExperts ? run_cut(std::integral_constant<int, kFewExperts / 32>{})
                                         : run_cut(std::integral_constant<int, kMaxExperts / 32>{});
}

int group(const Context& ctx, const GroupArgs* args) {
  const int64_t pairs = int64_t{args->tokens} * args->top_k;
  if (pairs > kPairsOfBlock && args->whole == 0) {
    const dim3 blocks(static_cast<unsigned>(ceil_div(pairs, kPairsOfBlock)));
    const int error = launch(ctx, count_kernel, blocks, dim3(kManyThreads), 0, *args);
    return error != 0 ? error : launch(ctx, place_kernel, blocks, dim3(kManyThreads), 0, *args);
  }
  return launch(ctx, group_kernel, dim3(1), dim3(kGroupThreads), 0, *args);
}

// For problems that moe_sm90_m1_8 doesn't support.
int experts_fused(const Context& ctx, const ExpertsArgs* e) {
  MoeProblem p;
  p.format = static_cast<int>(e->gate_up_code);
  p.down = e->down_code;
  p.tokens = e->groups.tokens;
  p.hidden = e->hidden, p.ff = e->ff;
  p.top_k = e->groups.top_k, p.experts = e->groups.experts;
  p.silu = e->glu.limit > 0.0f || e->glu.activation == 1;
  p.weight_before = true;
  const int row = choose(kMoeRows, ctx, p, ctx.forced[kForcedMoe]);
  return row == kMoeBf16 ? kTokenTile : row == kMoeQ ? 32 : 0;
}

int experts(const Context& ctx, const ExpertsArgs* e) {
  if (e->groups.whole == 0) {
    if (const int error = gather_places(ctx, *e); error != 0) return error;
  }
  if (e->gate_up_code == Code::kBF16) return run_experts_wgmma(ctx, *e);
  const int error = run_experts_gate(ctx, *e);
  return error != 0 ? error : run_experts_down(ctx, *e);
}

int combine(const Context& ctx, const Rows* out, const void* y, int bf16, const GroupArgs* args,
            int weighted, int add) {
  const auto run = [&](auto kernel, int threads, int columns) {
    const dim3 grid(static_cast<unsigned>(out->rows),
                    static_cast<unsigned>(ceil_div(out->cols, threads * columns)));
    return launch(ctx, kernel, grid, dim3(static_cast<unsigned>(threads)), 0, *out, y, *args,
                  weighted, add);
  };
  if (bf16 != 0) return run(combine_kernel<true>, 256, 8);
  return run(combine_kernel<false>, out->rows > ctx.multiprocessors ? 512 : 128,
             4);  // or more blocks
}

}  // namespace freshet::cuda

// Down of experts for at most 8 tokens, the second kernel of moe_gate_up_sm90_m1_8.cu.
#include "backend/cuda/moe/moe_sm90_m1_8.cuh"

namespace freshet::cuda {
namespace few {
namespace {

constexpr int kSums = kWarps * 32;  // float4

// A stage has a column unit of a row tile, and its tokens.
template <class F>
struct Down {
  static constexpr int kOfUnit = F::kUnit / 64;  // pieces per unit
  static constexpr int kStageBytes = F::kTileBytes + kOfUnit * 1024;
  // With more stages, the first kernel's blocks would not fit on the same SM.
  static constexpr int kMost = 12480 / kStageBytes;
  static constexpr int kStages = kMost < 2 ? 2 : kMost > 8 ? 8 : kMost;
  static constexpr int kRings = kWarps * kStages * kStageBytes;
  static constexpr int kBytes = kRings + kSets * kSums * 16;
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// A warp's weights: a split-K slice of every n-th expert.
template <class F>
struct DownLeaf {
  // Slices; experts processed side by side; this warp's slice and expert.
  int leaves, apart, leaf, phase;
  int first, units;
  __device__ DownLeaf(int64_t ff, int warp) : leaves(cuda::leaves(ff)) {
    apart = kWarps / leaves;
    leaf = warp % leaves;
    phase = warp / leaves;
    const auto all = static_cast<int>((ff + F::kUnit - 1) / F::kUnit);
    first = all * leaf / leaves;
    units = all * (leaf + 1) / leaves - first;
  }
};

// A warp's slices, one column unit per stage. Lanes copy by cp.async, since the copy engine is slow
// for such small copies. Tokens that aren't routed to an expert are zeros; with few tokens, most
// are.
template <class F>
struct DownStream {
  using S = Down<F>;
  const FewExpertsArgs& e;
  const Chosen& chosen;
  const DownLeaf<F>& l;
  int64_t first;  // byte offset of the slice within an expert
  uint8_t* ring;
  int lane;
  int slot, unit, stage;  // of the next copy

  __device__ __forceinline__ bool more() const { return slot < chosen.count; }
  __device__ __forceinline__ uint8_t* to() const {
    return ring + stage * S::kStageBytes + lane * 16;
  }
  __device__ __forceinline__ void ask_weights() const {
    const uint8_t* from = chosen.weights[slot] + first + unit * kUnitStep<F> + lane * 16;
#pragma unroll
    for (int i = 0; i < F::kTileBytes; i += 512) {
      if (i + 512 > F::kTileBytes && lane * 16 >= F::kTileBytes - i) break;
      cp_async16(to() + i, from + i);
    }
  }
  __device__ __forceinline__ void ask_tokens() const {
    const bool real = (chosen.tokens[slot] >> lane / 4 & 1) != 0;
    const uint8_t* from =
        e.act + (slot * (e.ff / 64) + (l.first + unit) * S::kOfUnit) * (kTokens * 64 * 2) +
        lane * 16;
#pragma unroll
    for (int i = 0; i < S::kOfUnit * 1024; i += 512) {
      cp_async16(to() + F::kTileBytes + i, from + i, real);
    }
  }
  __device__ __forceinline__ void next() {
    stage = stage + 1 < S::kStages ? stage + 1 : 0;
    if (++unit < l.units) return;
    unit = 0;
    slot += l.apart;
  }
};

// A warp's 16 rows of the result for 8 tokens in mma's layout: experts are added one by one.
struct Result {
  const FewExpertsArgs& e;
  int64_t row;
  int token;
  float before[4] = {}, sum[4] = {};
  bool began[2] = {};

  __device__ Result(const FewExpertsArgs& args, int64_t tile)
      : e(args),
        row(tile * 16 + threadIdx.x % 32 / 4),
        token(static_cast<int>(threadIdx.x % 4) * 2) {}
  __device__ __forceinline__ bool real(int i) const {
    return token + i % 2 < e.tokens && row + i / 2 * 8 < e.hidden;
  }
  __device__ __forceinline__ float* at(int i) const {
    return e.out.data + (token + i % 2) * e.out.stride + row + i / 2 * 8;
  }
  __device__ __forceinline__ void load() {
    if (e.add == 0) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (real(i)) before[i] = *at(i);
    }
  }
  __device__ __forceinline__ void add(const Chosen& c, int slot, const float (&from)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int t = token + i % 2;
      if ((c.tokens[slot] >> t & 1) == 0) continue;
      float v = from[i];
      if (e.down_bias != nullptr && row + i / 2 * 8 < e.hidden) {
        v = __fadd_rn(v, e.down_bias[c.expert[slot] * e.hidden + row + i / 2 * 8]);
      }
      v = given(v);
      const float w = c.weight[slot][t];
      sum[i] = began[i % 2] ? __fmaf_rn(v, w, sum[i]) : __fmul_rn(v, w);
    }
    began[0] = began[0] || (c.tokens[slot] >> token & 1) != 0;
    began[1] = began[1] || (c.tokens[slot] >> (token + 1) & 1) != 0;
  }
  __device__ __forceinline__ void store() const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (real(i)) *at(i) = e.add != 0 ? __fadd_rn(before[i], sum[i]) : sum[i];
    }
  }
};
#endif

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// Sums a warp's slices.
template <class F>
__device__ __forceinline__ void multiply_leaves(const FewExpertsArgs& e, const Chosen& chosen,
                                                const DownLeaf<F>& l, uint8_t* rings,
                                                Handover<kSums>& sums) {
  using S = Down<F>;
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  uint8_t* ring = rings + warp * S::kStages * S::kStageBytes;
  const int64_t first = tile_at<F>(blockIdx.x, e.ff) + l.first * kUnitStep<F>;
  DownStream<F> stream{e, chosen, l, first, ring, lane, l.phase, 0, 0};
  // The first kernel's results arrive later than the first weights.
  DownStream<F> tokens = stream;
#pragma unroll 1
  for (int s = 0; s < S::kStages && stream.more(); ++s, stream.next()) stream.ask_weights();
  wait();
#pragma unroll 1
  for (int s = 0; s < S::kStages && tokens.more(); ++s, tokens.next()) tokens.ask_tokens();
  cp_async_commit();
  cp_async_wait<0>();
  int stage = 0;
#pragma unroll 1
  for (int base = 0; base < chosen.count; base += l.apart) {
    float sum[1][4] = {};
    if (base + l.phase < chosen.count) {
#pragma unroll 1
      for (int unit = 0; unit < l.units; ++unit) {
        cp_async_wait<S::kStages - 1>();
        __syncwarp();
        const uint8_t* at = ring + stage * S::kStageBytes;
        const auto* its = reinterpret_cast<const uint4*>(at + F::kTileBytes) + lane;
#pragma unroll
        for (int piece = 0; piece < S::kOfUnit; ++piece) {
          const uint4 b[2] = {its[piece * 64], its[piece * 64 + 32]};
          add_pieces<F>(sum, at, F::kTileBytes, piece, b);
        }
        __syncwarp();
        if (stream.more()) {
          stream.ask_weights();
          stream.ask_tokens();
          stream.next();
        }
        cp_async_commit();  // an empty group, so that groups can be counted
        stage = stage + 1 < S::kStages ? stage + 1 : 0;
      }
    }
    const float(&v)[4] = sum[0];
    sums.to_write()[warp * 32 + lane] = make_float4(v[0], v[1], v[2], v[3]);
    sums.written();
  }
}

// Adds up slices and experts, by one warp.
template <class F>
__device__ __forceinline__ void add_experts(const FewExpertsArgs& e, const Chosen& chosen,
                                            const DownLeaf<F>& l, Handover<kSums>& sums) {
  Result result(e, blockIdx.x);
  wait();
  result.load();
#pragma unroll 1
  for (int base = 0; base < chosen.count; base += l.apart) {
    const float4* from = sums.to_read() + threadIdx.x % 32;
    float4 of[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) of[w] = from[w * 32];
    sums.read();
    float all[4];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const int slot = base + w / l.leaves;
      if (slot >= chosen.count) break;
      if (w % l.leaves == 0) {
        all[0] = of[w].x, all[1] = of[w].y, all[2] = of[w].z, all[3] = of[w].w;
      } else {
        add_leaf(all, of[w]);
      }
      if ((w + 1) % l.leaves != 0) continue;
#pragma unroll
      for (int k = 0; k < 4; ++k) all[k] = __fmul_rn(all[k], F::kUp);
      result.add(chosen, slot, all);
    }
  }
  result.store();
}
#endif

template <class F>
__global__ void __launch_bounds__(kThreads, 2)
    down_kernel(const __grid_constant__ FewExpertsArgs e) {
#if __CUDA_ARCH__ >= 900
  using S = Down<F>;
  extern __shared__ __align__(128) uint8_t rings[];
  __shared__ Chosen chosen;
  __shared__ uint64_t sums_full[kSets], sums_empty[kSets];
  let_next_start();
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  Handover<kSums> sums{reinterpret_cast<float4*>(rings + S::kRings), {sums_full, sums_empty}};
  if (thread == 0) sums.start(1);
  choose<true>(e, chosen, reinterpret_cast<float*>(sums.sums),
               thread < e.routing.experts ? e.down[thread] : nullptr);
  const DownLeaf<F> l(e.ff, warp);
  if (warp < kWarps) {
    multiply_leaves<F>(e, chosen, l, rings, sums);
  } else {
    add_experts<F>(e, chosen, l, sums);
  }
#endif
}

}  // namespace
}  // namespace few

int run_few_down(const Context& ctx, const FewExpertsArgs& e) {
  return few::with_taken(e.down_code, [&](auto f) {
    using F = decltype(f);
    // Beside the first kernel's blocks, these would compete with their copies in flight.
    constexpr int kAlone = 120 << 10;
    const int64_t blocks = ceil_div(e.hidden, 16);
    int bytes = few::Down<F>::kBytes;
    if (blocks <= ctx.multiprocessors && bytes < kAlone) bytes = kAlone;
    return few::launch_few(ctx, few::down_kernel<F>, blocks, bytes, e);
  });
}

}  // namespace freshet::cuda

// Experts with at most 8 tokens (Hopper), in two kernels: gate and up, and down with the weighted
// sums of the experts' outputs (moe_down_sm90_m1_8.cu).
//
// No kernel groups tokens: every block routes all of them from the router's logits, one token per
// warp, and lists the experts in use in ascending order. That costs less than a separate kernel. A
// block of the first kernel has an even share of the 16-row tiles of gate and up of all chosen
// experts, with a split-K slice per warp, as in gemm_bf16_sm90_m1_32.cu. A block of the second
// kernel has one row tile of all chosen experts, so that it can add their outputs; its warps take
// slices, and experts side by side. It routes and copies its first weights while the first kernel
// runs: both fit on an SM together. A ninth warp only adds up what the others multiply, so that
// these wait for nothing but their weights. Bit-identical to the kernels for more tokens.
#include "backend/cuda/gemm/glu_activation.cuh"
#include "backend/cuda/moe/moe_sm90_m1_8.cuh"
#include "backend/cuda/moe/moe_sm90_m1_8.h"
#include "backend/cuda/runtime/register_transpose.cuh"

namespace freshet::cuda {
namespace few {
namespace {

// Fewest pieces of 64 columns per split-K slice: there are as many slices as warps.
constexpr int kLeast = 4;

constexpr int kGateSums = kWarps * 2 * 32;  // float4

// A stage of a warp's pipeline: some columns of a tile of gate and of up, about 4 KB of weights, so
// that copies are efficient.
template <class F>
struct Gate {
  static constexpr int kOfUnit = F::kUnit / 64;  // pieces per unit
  // Column units of a tile per stage; only one if tiles are interleaved (panels), since a tile's
  // next unit isn't adjacent then.
  static constexpr int kUnits = kPanelTiles<F> > 1                       ? 1
                                : 8 * F::kTileBytes / kOfUnit <= 5 << 10 ? 4 / kOfUnit
                                : kOfUnit == 1                           ? 2
                                                                         : 1;
  static constexpr int kPieces = kUnits * kOfUnit;
  static constexpr int kHalfBytes = kPieces * F::kTileBytes / kOfUnit;
  static constexpr int kStageBytes = 2 * kHalfBytes;
  static constexpr int kStages = 2;  // with more in flight, all other loads wait longer
  static constexpr int kRing = kStages * kStageBytes;
  static constexpr int kNeeded = kWarps * kRing + kSets * kGateSums * 16;
  // Keeps two blocks from sharing an SM, which would leave other SMs idle.
  static constexpr int kBytes = kNeeded > 110 << 10 ? kNeeded : 110 << 10;
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
using Sums = Handover<kGateSums>;

// A block's share of gate's tiles over all chosen experts in order; up's tiles go with them.
struct GateShare {
  int tiles, begin, end;  // tiles per expert; range over all experts
  __device__ GateShare(const FewExpertsArgs& e, int chosen) : tiles(static_cast<int>(e.ff / 16)) {
    const int all = chosen * tiles, blocks = static_cast<int>(gridDim.x);
    // Far below 2^31, and a 32-bit division is fast.
    begin = all * static_cast<int>(blockIdx.x) / blocks;
    end = all * static_cast<int>(blockIdx.x + 1) / blocks;
  }
};

// A warp's slice of the share, tile after tile. One lane issues the copies.
template <class F>
struct GateStream {
  using S = Gate<F>;
  const Chosen& chosen;
  GateShare share;
  int64_t cols;
  int first, units;  // units in the slice
  const uint8_t* ring;
  Pipeline pipe;
  int at, unit = 0, stage = 0;  // of the next copy
  const uint8_t *gate = nullptr, *up = nullptr;

  __device__ __forceinline__ bool more() const { return at < share.end; }
  __device__ __forceinline__ void find() {
    const int slot = at / share.tiles, tile = at % share.tiles;
    const uint8_t* expert = chosen.weights[slot] + first * kUnitStep<F>;
    gate = expert + tile_at<F>(tile, cols);
    up = expert + tile_at<F>(tile + share.tiles, cols);
  }
  __device__ __forceinline__ void ask_next(uint64_t policy) {
    const int count = S::kUnits > 1 ? min(S::kUnits, units - unit) : 1;
    const auto bytes = static_cast<uint32_t>(count * F::kTileBytes);
    const uint32_t to = shared_address(ring) + static_cast<uint32_t>(stage * S::kStageBytes);
    const uint32_t barrier = shared_address(pipe.filled(stage));
    pipe.expect(stage, 2 * bytes);
    copy_weights(to, gate, bytes, barrier, policy);
    copy_weights(to + S::kHalfBytes, up, bytes, barrier, policy);
    gate += S::kUnits * kUnitStep<F>;
    up += S::kUnits * kUnitStep<F>;
    stage = stage + 1 < S::kStages ? stage + 1 : 0;
    unit += S::kUnits;
    if (unit < units) return;
    unit = 0;
    if (++at < share.end) find();
  }
};

// Writes the SwiGLU of a warp's 16 rows for 8 tokens, from row `tile` * 16 of an expert on.
__device__ __forceinline__ void put_gated(const FewExpertsArgs& e, const Chosen& c, int slot,
                                          int tile, const float (&gate)[4], const float (&up)[4]) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t row = static_cast<int64_t>(tile) * 16 + lane / 4;
  float v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float g = gate[i], u = up[i];
    if (e.gate_up_bias != nullptr) {
      const float* bias = e.gate_up_bias + c.expert[slot] * 2 * e.ff + row + i / 2 * 8;
      g = __fadd_rn(g, bias[0]);
      u = __fadd_rn(u, bias[e.ff]);
    }
    v[i] = gated(g, u, e.glu);
  }
  const uint2 two =
      make_uint2(transposed(pack_bf16(v[0], v[1])), transposed(pack_bf16(v[2], v[3])));
  const int64_t to = activation_at({e.act, 0, 0}, static_cast<int64_t>(slot) * kTokens + lane / 4,
                                   static_cast<int64_t>(tile) * 16 + lane % 4 * 2, e.ff);
  *reinterpret_cast<uint2*>(e.act + to * 2) = two;
}
// Sums a warp's slice of the share. b: a lane's activations of its `pieces`, of which there are
// kHeld, except in the variant with the largest kHeld (there: at most kHeld).
template <class F, int kHeld>
__device__ __forceinline__ void multiply_share(GateStream<F>& stream, Sums& sums,
                                               const uint4 (&b)[kHeld][2], int pieces,
                                               uint64_t policy) {
  using S = Gate<F>;
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  PipelineState ring_at;
  for (int at = stream.share.begin; at < stream.share.end; ++at) {
    float sum[2][4] = {};
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (kHeld > kLeast && k >= pieces) break;
      if (k % S::kPieces == 0) stream.pipe.wait(ring_at);
      const uint8_t* rows = stream.ring + ring_at.stage * S::kStageBytes +
                            k % S::kPieces / S::kOfUnit * F::kTileBytes;
      add_pieces<F>(sum, rows, S::kHalfBytes, k % S::kOfUnit, b[k]);
      if ((k + 1) % S::kPieces != 0 && k + 1 < pieces) continue;
      __syncwarp();
      if (lane == 0 && stream.more()) stream.ask_next(policy);
      ring_at.next(S::kStages);
    }
    float4* to = sums.to_write() + warp * 32 + lane;
#pragma unroll
    for (int matrix = 0; matrix < 2; ++matrix) {
      const float(&v)[4] = sum[matrix];
      to[matrix * kWarps * 32] = make_float4(v[0], v[1], v[2], v[3]);
    }
    sums.written();
  }
}

// Epilogue of the share, by one warp.
template <class F>
__device__ __forceinline__ void gate_share(const FewExpertsArgs& e, const Chosen& chosen,
                                           const GateShare& share, Sums& sums) {
  for (int at = share.begin; at < share.end; ++at) {
    const float4* from = sums.to_read() + threadIdx.x % 32;
    float4 of[2 * kWarps];
#pragma unroll
    for (int i = 0; i < 2 * kWarps; ++i) of[i] = from[i * 32];
    sums.read();
    float all[2][4];
#pragma unroll
    for (int matrix = 0; matrix < 2; ++matrix) {
      const float4& first = of[matrix * kWarps];
      all[matrix][0] = first.x, all[matrix][1] = first.y;
      all[matrix][2] = first.z, all[matrix][3] = first.w;
#pragma unroll
      for (int w = 1; w < kWarps; ++w) add_leaf(all[matrix], of[matrix * kWarps + w]);
#pragma unroll
      for (int i = 0; i < 4; ++i) all[matrix][i] = __fmul_rn(all[matrix][i], F::kUp);
    }
    put_gated(e, chosen, at / share.tiles, at % share.tiles, all[0], all[1]);
  }
}
#endif

// kHeld: upper bound of the pieces per split-K slice; their activations stay in registers.
template <class F, int kHeld>
__global__ void __maxnreg__(112) gate_kernel(const __grid_constant__ FewExpertsArgs e) {
#if __CUDA_ARCH__ >= 900
  using S = Gate<F>;
  extern __shared__ __align__(128) uint8_t rings[];
  __shared__ uint64_t full[kWarps][S::kStages];
  __shared__ Chosen chosen;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  __shared__ uint64_t sums_full[kSets], sums_empty[kSets];
  Sums sums{reinterpret_cast<float4*>(rings + kWarps * S::kRing), {sums_full, sums_empty}};
  if (lane == 0) {
    if (warp < kWarps) {
      Pipeline{full[warp]}.init_own(S::kStages);
    } else {
      sums.start(1);
    }
  }
  const uint8_t* mine = thread < e.routing.experts ? e.gate_up[thread] : nullptr;
  const auto all_units = static_cast<int>((e.hidden + F::kUnit - 1) / F::kUnit);
  const int first = all_units * warp / kWarps;
  const int units = all_units * (warp + 1) / kWarps - first;
  const int pieces = kHeld == kLeast ? kLeast : units * S::kOfUnit;
  wait();
  let_next_start();  // a kernel that starts now may rely on the logits
  uint4 b[kHeld][2] = {};
  const uint4* in = reinterpret_cast<const uint4*>(e.in) + first * S::kOfUnit * 64 + lane;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    if (k >= pieces || lane / 4 >= e.tokens || warp == kWarps) continue;
    b[k][0] = in[k * 64];
    b[k][1] = in[k * 64 + 32];
  }
  choose<false>(e, chosen, reinterpret_cast<float*>(sums.sums), mine);
  const GateShare share(e, chosen.count);
  if (warp == kWarps) return gate_share<F>(e, chosen, share, sums);
  const uint8_t* ring = rings + warp * S::kRing;
  GateStream<F> stream{chosen, share, e.hidden, first, units, ring, {full[warp]}, share.begin};
  const uint64_t policy = read_once();
  if (lane == 0 && stream.more()) {
    stream.find();
    for (int s = 0; s < S::kStages && stream.more(); ++s) stream.ask_next(policy);
  }
  if (blockIdx.x == 0 && e.logits != nullptr && thread < e.tokens * e.routing.top_k) {
    e.ids[thread] = chosen.ids[thread];
    e.weights[thread] = chosen.of_pair[thread];
  }
  __syncwarp();
  multiply_share<F, kHeld>(stream, sums, b, pieces, policy);
#endif
}

}  // namespace
}  // namespace few

static_assert(few::kMostChosen == kFewMostChosen && kFewExperts == kFewMostExperts &&
              2 * few::kLeast * kWarps * 64 == kFewMostHidden && few::kTokens == 8);

int few_experts_fit(const Context& ctx, const FewExpertsArgs* e) {
  MoeProblem p;
  p.format = static_cast<int>(e->gate_up_code);
  p.down = e->down_code;
  p.tokens = e->tokens;
  p.hidden = e->hidden, p.ff = e->ff;
  p.top_k = e->routing.top_k, p.experts = e->routing.experts;
  return choose(kMoeRows, ctx, p, ctx.forced[kForcedMoe]) == kMoeM1_8 ? 1 : 0;
}

int few_experts(const Context& ctx, const FewExpertsArgs* e) {
  const int error = few::with_taken(e->gate_up_code, [&](auto f) {
    using F = decltype(f);
    const auto run = [&](auto kernel) {
      return few::launch_few(ctx, kernel, ctx.multiprocessors, few::Gate<F>::kBytes, *e);
    };
    return e->hidden > few::kLeast * kWarps * 64 ? run(few::gate_kernel<F, 2 * few::kLeast>)
                                                 : run(few::gate_kernel<F, few::kLeast>);
  });
  return error != 0 ? error : run_few_down(ctx, *e);
}

}  // namespace freshet::cuda

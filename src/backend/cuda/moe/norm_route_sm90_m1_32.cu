// The norm, the router's GEMM and the routes of few tokens on Hopper: one cluster of blocks per
// token, instead of kernels that wait for each other.
//
// Every block normalises the row itself and multiplies it by 16 of the router's rows, which are in
// registers before the previous kernel has ended. A warp's threads normalise exactly the columns
// that they multiply. The first block receives all logits and routes. Bit-identical to norm.cu,
// gemm_f32_bf16x3.cu and moe_route.cu.
//
// For one token the whole computation runs twice, first with arbitrary data as a warm-up: fetching
// code takes as long as running it, and is done by the time the row is ready. With more tokens
// blocks start too late for that.
#include <algorithm>

#include "backend/cuda/gemm/gemm_f32_bf16x3.cuh"
#include "backend/cuda/moe/route_topk.cuh"
#include "backend/cuda/runtime/cluster.cuh"
#include "backend/cuda/runtime/kernels.cuh"

namespace freshet::cuda {
namespace {

constexpr int kMostCols = kWarps * 32 * kUnit;
constexpr int kOfWarp = kMostCols / kWarps / kChunk;  // chunks
constexpr int kRows = 16;                             // of the router, per block
constexpr int64_t kMostRouted = 32;  // with more, clusters would not all be resident at once

struct Shared {
  uint4 parts[kWarps][kParts][kOfWarp][4][kSteps / 2];  // of the row, in the layout of four lanes
  float4 sums[kRows][kWarps + 1];                       // of chunks
  uint64_t keys[kFewExperts];
  float logits[kFewExperts];
  int32_t better[kFewExperts];  // experts of the other half
  float squares[kWarps];
  float chosen[kMaxTopK];
  int32_t ids[kMaxTopK];
  uint64_t there;  // all logits have arrived
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__device__ __forceinline__ int token() {
  return static_cast<int>(blockIdx.y);
}

// A lane's operands of a tile's 16 rows, for chunks from `first` on; zeros after the last chunk.
// weights: the lane's first.
template <int kEach>
__device__ __forceinline__ void load_weights(uint4 (&w)[kEach][kSteps], const uint32_t* weights,
                                             int64_t first, int64_t chunks) {
#pragma unroll
  for (int c = 0; c < kEach; ++c) {
    const int64_t chunk = first + c;
    const uint32_t* from = weights + chunk * (ExactF32::kTileBytes / 4);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const auto core = [&](int rows, int half) {
        return chunk < chunks ? __ldg(from + (rows * 8 + k * 2 + half) * 32) : 0;
      };
      w[c][k] = make_uint4(core(0, 0), core(1, 0), core(0, 1), core(1, 1));
    }
  }
}

// v = a thread's columns of the cluster's row, normed as in norm.cu, whose other warps would have
// zeros.
__device__ __forceinline__ void norm_row(Shared& s, const RouteOneArgs& a, int first,
                                         const float (&weight)[kUnit], float (&v)[kUnit]) {
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const auto n = static_cast<int>(a.x.cols);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kUnit; i += 4) {  // bypasses L1, which may hold stale data
    const auto* four = reinterpret_cast<const float4*>(a.x.data + token() * a.x.stride + first + i);
    *reinterpret_cast<float4*>(v + i) = first < n ? __ldcg(four) : float4{};
  }
#pragma unroll
  for (const float each : v) sum = __fmaf_rn(each, each, sum);
  sum = warp_sum(sum);
  if (lane == 0) s.squares[warp] = sum;
  __syncthreads();
  sum = s.squares[lane % kWarps];
#pragma unroll
  for (int step = kWarps / 2; step > 0; step >>= 1) {
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffff, sum, step));
  }
  const float scale = rsqrtf(sum / static_cast<float>(n) + a.norm.eps);
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    v[i] = first < n ? __fmul_rn(__fmul_rn(v[i], scale), weight[i]) : 0.0f;
  }
}

// The sums of a warp's chunks, with the bits of exact_tile() for one token; lanes of other tokens
// have zeros.
__device__ __forceinline__ void multiply_chunks(Shared& s, const uint4 (&w)[kOfWarp][kSteps],
                                                const float (&v)[kUnit]) {
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    uint32_t low[kParts], high[kParts];
    split(v[h * 4], v[h * 4 + 1], low);
    split(v[h * 4 + 2], v[h * 4 + 3], high);
    const int step = lane % 8 / 2;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      uint4& to = s.parts[warp][part][lane / 8][lane % 2 * 2 + h][step / 2];
      reinterpret_cast<uint2*>(&to)[step % 2] = make_uint2(low[part], high[part]);
    }
  }
  __syncwarp();
  float sum[kOfWarp][4] = {};
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int k = 0; k < kSteps; k += 2) {
      uint4 b[kOfWarp] = {};
#pragma unroll
      for (int c = 0; c < kOfWarp; ++c) {
        if (lane < 4) b[c] = s.parts[warp][part][c][lane][k / 2];
      }
      // Independent accumulation chains.
#pragma unroll
      for (int c = 0; c < kOfWarp; ++c) mma(sum[c], w[c][k], b[c].x, b[c].y);
#pragma unroll
      for (int c = 0; c < kOfWarp; ++c) mma(sum[c], w[c][k + 1], b[c].z, b[c].w);
    }
  }
  static_assert(kOfWarp == 4);
  if (lane % 4 != 0) return;
  s.sums[lane / 4][warp] = make_float4(sum[0][0], sum[1][0], sum[2][0], sum[3][0]);
  s.sums[lane / 4 + 8][warp] = make_float4(sum[0][2], sum[1][2], sum[2][2], sum[3][2]);
}

// The logit of row `lane` of the block.
__device__ __forceinline__ float add_chunks(const Shared& s, const ProductArgs& p, int lane) {
  const auto chunks = static_cast<int>(ceil_div(p.weight.cols, kChunk));
  float total = -0.0f;  // the identity of addition
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    const float4 v = s.sums[lane % kRows][i];
    const float of[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int c = 0; c < kOfWarp; ++c) {
      if (i * kOfWarp + c < chunks) total = __fadd_rn(total, of[c]);
    }
  }
  return total;
}

// From the logits to the chosen experts and their weights, with route_token()'s result, by one
// block: two threads per expert count how many experts are better, half of them each. Choosing one
// after the other in a warp would take three times as long.
__device__ __forceinline__ void route_logits(Shared& s, const RouteOneArgs& a, bool counts) {
  constexpr int kHalf = kFewExperts / 2, kMine = kFewExperts / 32;
  const RoutingArgs& r = a.routing;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int expert = thread % kFewExperts, half = thread / kFewExperts;
  const bool real = expert < r.experts;
  float score = real ? s.logits[expert] : -INFINITY;
  if (r.score == 0) {  // softmax over all
    float each[kMine], most = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      each[i] = lane + i * 32 < r.experts ? s.logits[lane + i * 32] : -INFINITY;
      most = fmaxf(most, each[i]);
    }
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {
      most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, step));
    }
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      if (lane + i * 32 < r.experts) sum += expf(each[i] - most);
    }
    score = __fdiv_rn(real ? expf(score - most) : 0.0f, warp_sum(sum));
  } else if (r.score == 1) {
    score = __fdiv_rn(1.0f, 1.0f + expf(-score));
  }
  const float choice = r.correction != nullptr && real ? score + r.correction[expert] : score;
  // Minus infinity and NaN are never chosen; ties go to the lower id.
  const bool chosen = real && choice > -INFINITY;
  const uint64_t key =
      chosen ? static_cast<uint64_t>(key_of(choice)) << 32 | (kHalf * 2 - expert) : 0;
  if (half == 0) s.keys[expert] = key;
  if (expert == 0) {
    for (int k = half; k < r.top_k; k += 2) {  // if there are no others
      s.ids[k] = 0;
      s.chosen[k] = score;
    }
  }
  __syncthreads();
  int better = 0;
#pragma unroll 16
  for (int i = 0; i < kHalf; i += 2) {
    const ulonglong2 two = *reinterpret_cast<const ulonglong2*>(&s.keys[half * kHalf + i]);
    better += two.x > key;
    better += two.y > key;
  }
  if (half == 1) s.better[expert] = better;
  __syncthreads();
  if (half == 0 && chosen) {
    better += s.better[expert];
    if (better < r.top_k) {
      s.ids[better] = expert;
      s.chosen[better] = score;
    }
  }
  __syncthreads();
  if (thread >= r.top_k) return;
  float mine = s.chosen[lane], sum = 0.0f;
  if (r.score == 2) {  // softmax over the chosen
    float top = mine;
    for (int k = 0; k < r.top_k; ++k) top = fmaxf(top, s.chosen[k]);
    for (int k = 0; k < r.top_k; ++k) sum += expf(s.chosen[k] - top);
    mine = __fdiv_rn(expf(mine - top), sum);
  }
  float factor = r.scale;
  if (r.renormalize != 0) {
    sum = r.renormalize_eps;
    for (int k = 0; k < r.top_k; ++k) sum += s.chosen[k];
    factor = __fdiv_rn(factor, sum);
  }
  if (!counts) return;
  a.ids[token() * r.top_k + lane] = s.ids[lane];
  a.weights[token() * r.top_k + lane] = mine * factor;
}

// Writes the norm's result in F32, and encoded for the experts. The first token's blocks write the
// padding rows after the last token.
__device__ __forceinline__ void put_normed(const RouteOneArgs& a, int first,
                                           const float (&v)[kUnit]) {
  const int64_t n = a.x.cols;
  if (first >= padded_cols(a.act, n)) return;
  const auto blocks = static_cast<int>(gridDim.x);
  const auto all = static_cast<int>(ceil_div(a.x.rows, kTokenTile)) * kTokenTile;
  for (auto row = static_cast<int>(blockIdx.x); row < all; row += blocks) {
    const bool mine = row == token();
    if (!mine && (token() != 0 || row < a.x.rows)) continue;
    float its[kUnit];
#pragma unroll
    for (int i = 0; i < kUnit; ++i) its[i] = mine ? v[i] : 0.0f;
    put_unit(a.act, row, first, n, its);
    if (mine) store_unit(a.normed.data + row * a.normed.stride, its, first, n, true);
  }
}
#endif

__global__ void __launch_bounds__(kWarps * 32, 2)
    route_one_kernel(const __grid_constant__ RouteOneArgs a) {
#if __CUDA_ARCH__ >= 900
  __shared__ Shared s;
  let_next_start();
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + lane;
  const ProductArgs& p = a.product;
  if (thread == 0) {
    barrier_init(&s.there, 1);
    barriers_ready();
    if (blockIdx.x == 0) barrier_expect(&s.there, static_cast<uint32_t>(a.routing.experts) * 4);
  }
  cluster_arrive_relaxed();
  uint4 w[kOfWarp][kSteps];
  const int64_t tile = min(int64_t{blockIdx.x}, (p.weight.rows - 1) / kRows);
  const auto* weights = p.weight.data + tile_at<ExactF32>(tile, a.x.cols);
  load_weights(w, reinterpret_cast<const uint32_t*>(weights) + lane, warp * kOfWarp,
               ceil_div(a.x.cols, kChunk));
  const int first = thread * kUnit;
  float weight[kUnit];
  load_unit(weight, a.norm.weight, first, a.x.cols, true);
  cluster_wait();  // all blocks have started
#pragma unroll 1
  for (int turn = gridDim.y == 1 ? 0 : 1; turn < 2; ++turn) {
    const bool counts = turn == 1;
    if (counts) wait();
    float v[kUnit];
    norm_row(s, a, first, weight, v);
    multiply_chunks(s, w, v);
    if (counts) put_normed(a, first, v);
    __syncthreads();
    const float logit = f32_ended(p, min(row, p.weight.rows - 1), add_chunks(s, p, lane));
    if (counts && thread < kRows && row < p.weight.rows) {
      p.out[token() * p.out_stride + row] = logit;
      send_to_block(&s.logits[row], 0, logit, &s.there);
    }
    if (blockIdx.x != 0) continue;
    if (counts) barrier_wait(&s.there, 0);
    route_logits(s, a, counts);
  }
#endif
}

}  // namespace

int route_one_fits(const Context& ctx, const RouteOneArgs* a) {
  const WeightView& w = a->product.weight;
  const bool plain = a->norm.layer == 0 && a->norm.weight != nullptr && a->norm.bias == nullptr &&
                     whole_rows(a->norm.weight, 0) && whole_rows(a->x.data, a->x.stride) &&
                     whole_rows(a->normed.data, a->normed.stride);
  const bool bf16 = a->act.data != nullptr && a->act.e4m3 == 0 && a->act.int8 == 0;
  return ctx.capability == 90 && a->x.rows <= kMostRouted && w.code == Code::kExactF32 &&
         w.rows == a->routing.experts && a->routing.groups <= 1 &&
         (a->routing.score != 2 || a->routing.renormalize == 0) && w.rows <= kFewExperts &&
         w.cols == a->x.cols && w.cols <= kMostCols && w.cols % kUnit == 0 && a->product.add == 0 &&
         plain && bf16;
}

int route_one(const Context& ctx, const RouteOneArgs* a) {
  // A cluster of one block cannot send, so it gets a second block without rows.
  const auto blocks = std::max(2U, static_cast<unsigned>(ceil_div(a->product.weight.rows, kRows)));
  return launch_cluster(ctx, route_one_kernel, dim3(blocks, static_cast<unsigned>(a->x.rows)),
                        dim3(kWarps * 32), 0, dim3(blocks), *a);
}

}  // namespace freshet::cuda

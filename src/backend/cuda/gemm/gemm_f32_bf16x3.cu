// F32 GEMM with weights that BF16 represents exactly (gemm_f32_bf16x3.cuh): by mma.sync for few
// tokens, by wgmma for many.
#include "backend/cuda/gemm/gemm_f32_bf16x3.cuh"
#include "backend/cuda/mma/wgmma_bf16_rs.cuh"
#include "backend/cuda/runtime/pipeline.cuh"

namespace freshet::cuda {
namespace {

// kEach: chunks per warp. 1 keeps the code short: a single token tile would wait for longer code to
// be fetched.
template <bool kAligned, int kEach>
__global__ void __launch_bounds__(kChunksAtOnce / kEach * 32)
    exact_few_kernel(const __grid_constant__ ProductArgs p, int64_t tokens) {
  __shared__ __align__(16) ChunkSums sums;
  let_next_start();
  exact_tile<kAligned, kEach>(p, blockIdx.x, static_cast<int64_t>(blockIdx.y) * kTokenTile, tokens,
                              sums);
}

// Blocks of 128 tokens and 128 rows. Tokens are on the 64-row side of wgmma and in registers, since
// they are split into BF16 parts there; each thread copies its own values into shared memory ahead
// of time. A producer warp fills the pipeline of weights.
constexpr int kGroups = 2, kReaders = kGroups * 128, kManyThreads = kReaders + 128;
constexpr int kManyTokens = kGroups * 64, kManyRows = 128, kTiles = kManyRows / 8;
constexpr int kAhead = 4;           // chunks
constexpr int kFours = 2 * kSteps;  // per thread, of its two tokens
constexpr int kTokenStage = kFours * kReaders * 16;
constexpr int kWeightStage = kManyRows / 16 * ExactF32::kTileBytes;
constexpr int kManyBytes = kAhead * (kTokenStage + kWeightStage);

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ __forceinline__ void bring_weights(const ProductArgs& p, uint8_t* ring,
                                              const Pipeline& pipe) {
  const int64_t cols = p.weight.cols, first = static_cast<int64_t>(blockIdx.y) * (kManyRows / 16);
  const auto chunks = static_cast<int>(ceil_div(cols, kChunk));
  const auto lane = static_cast<int>(threadIdx.x % 32);
  const auto tiles =
      static_cast<int>(min(int64_t{kManyRows / 16}, ceil_div(p.weight.rows, 16) - first));
  const uint8_t* from = p.weight.data + tile_at<ExactF32>(first + min(lane, tiles - 1), cols);
  for (int c = 0; c < chunks; ++c) {
    const int stage = c % kAhead;
    if (c >= kAhead) pipe.acquire({stage, c / kAhead & 1});
    if (lane == 0) pipe.expect(stage, static_cast<uint32_t>(tiles * ExactF32::kTileBytes));
    __syncwarp();
    if (lane < tiles) {
      bulk_copy(ring + stage * kWeightStage + lane * ExactF32::kTileBytes,
                from + static_cast<int64_t>(c) * ExactF32::kTileBytes, ExactF32::kTileBytes,
                pipe.filled(stage));
    }
  }
}

// Sums of a warpgroup's 64 tokens.
__device__ __forceinline__ void sum_chunks(const ProductArgs& p, int64_t tokens, uint8_t* own,
                                           const uint8_t* ring, const Pipeline& pipe,
                                           float (&total)[kTiles][4]) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int64_t cols = p.weight.cols;
  const auto chunks = static_cast<int>(ceil_div(cols, kChunk));
  const int64_t token =
      static_cast<int64_t>(blockIdx.x) * kManyTokens + thread / 32 * 16 + lane / 4;
  const float* x[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    x[h] = p.x + min(token + h * 8, tokens - 1) * p.x_stride + lane % 4 * 4;
  }
  uint8_t* mine = own + thread * 16;
  const auto bring = [&](int chunk) {
    uint8_t* to = mine + chunk % kAhead * kTokenStage;
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const int64_t col = static_cast<int64_t>(chunk) * kChunk + i / 2 * 16;
      const bool real = col + lane % 4 * 4 < cols;
      cp_async16(to + i * kReaders * 16, x[i % 2] + (real ? col : 0), real);
    }
  };
  for (int c = 0; c < kAhead; ++c) {
    if (c < chunks) bring(c);
    cp_async_commit();
  }
  float sum[kTiles][4];
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) total[j][i] = -0.0f;  // -0 is the identity of addition
  }
#pragma unroll 1
  for (int c = 0; c < chunks; ++c) {
    cp_async_wait<kAhead - 1>();
    const uint8_t* from = mine + c % kAhead * kTokenStage;
    uint4 a[kParts][kSteps];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint32_t of[4][kParts];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float4 v = *reinterpret_cast<const float4*>(from + (k * 2 + h) * kReaders * 16);
        split(v.x, v.y, of[h]);
        split(v.z, v.w, of[2 + h]);
      }
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        uint4& its = a[part][k];
        its = make_uint4(of[0][part], of[1][part], of[2][part], of[3][part]);
        // Keep it in registers before the first wgmma begins.
        asm volatile("" : "+r"(its.x), "+r"(its.y), "+r"(its.z), "+r"(its.w));
      }
    }
    if (c + kAhead < chunks) bring(c + kAhead);
    cp_async_commit();
    pipe.wait({c % kAhead, c / kAhead & 1});
    const uint64_t b = operand_at(ring + c % kAhead * kWeightStage);
    wgmma_begin();
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) wgmma(sum, a[part][k], b + k * kNextStep, part + k > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    written(sum);
    pipe.release(c % kAhead);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) total[j][i] = __fadd_rn(total[j][i], sum[j][i]);
    }
  }
}
#endif

__global__ void __launch_bounds__(kManyThreads, 1)
    exact_many_kernel(const __grid_constant__ ProductArgs p, int64_t tokens) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ uint64_t full[kAhead], empty[kAhead];
  uint8_t* ring = shared + kAhead * kTokenStage;
  const Pipeline pipe{full, empty};
  if (threadIdx.x == 0) pipe.init(kAhead, kReaders / 32);
  __syncthreads();
  let_next_start();
  if (threadIdx.x >= kReaders) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    if (threadIdx.x < kReaders + 32) bring_weights(p, ring, pipe);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  wait();
  float total[kTiles][4];
  sum_chunks(p, tokens, shared, ring, pipe, total);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int64_t row = static_cast<int64_t>(blockIdx.y) * kManyRows + lane % 4 * 2;
  const int64_t token =
      static_cast<int64_t>(blockIdx.x) * kManyTokens + thread / 32 * 16 + lane / 4;
  const bool pairs = p.add == 0 && p.weight.rows % 2 == 0 && p.out_stride % 2 == 0 &&
                     reinterpret_cast<uintptr_t>(p.out) % 8 == 0;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t t = token + h * 8;
    if (t >= tokens) continue;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const int64_t r = row + j * 8;
      if (pairs && r < p.weight.rows) {
        *reinterpret_cast<float2*>(p.out + t * p.out_stride + r) =
            make_float2(f32_ended(p, r, total[j][h * 2]), f32_ended(p, r + 1, total[j][h * 2 + 1]));
        continue;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (r + i < p.weight.rows) f32_put(p, t, r + i, total[j][h * 2 + i]);
      }
    }
  }
#endif
}

}  // namespace

int run_exact(const Context& ctx, const ProductArgs& p, int64_t tokens) {
  const bool aligned = f32_aligned(p);
  constexpr int64_t kMost = 65535 * int64_t{kTokenTile};
  for (int64_t first = 0; first < tokens; first += kMost) {
    ProductArgs part = p;
    part.x += first * p.x_stride;
    part.out += first * p.out_stride;
    const int64_t count = tokens - first < kMost ? tokens - first : kMost;
    const dim3 grid(static_cast<unsigned>(ceil_div(p.weight.rows, 16)),
                    static_cast<unsigned>(ceil_div(count, kTokenTile)));
    const auto run = [&](auto kernel, int threads) {
      return launch(ctx, kernel, grid, dim3(static_cast<unsigned>(threads)), 0, part, count);
    };
    const int error = !aligned              ? run(exact_few_kernel<false, 4>, 256)
                      : count <= kTokenTile ? run(exact_few_kernel<true, 1>, 1024)
                                            : run(exact_few_kernel<true, 4>, 256);
    if (error != 0) return error;
  }
  return 0;
}

int run_exact_many(const Context& ctx, const ProductArgs& p, int64_t tokens) {
  if (const int error = raise_shared(exact_many_kernel, kManyBytes); error != 0) return error;
  const dim3 grid(static_cast<unsigned>(ceil_div(tokens, kManyTokens)),
                  static_cast<unsigned>(ceil_div(p.weight.rows, kManyRows)));
  return launch(ctx, exact_many_kernel, grid, dim3(kManyThreads), kManyBytes, p, tokens);
}

}  // namespace freshet::cuda

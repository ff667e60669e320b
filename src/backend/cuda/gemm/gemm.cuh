// Shared by the GEMM kernels: how K is cut, the epilogue, and the sum of a piece of 64 columns.
// Kernels differ in which warp computes what; the order of sums is the same in all of them.
#pragma once

#include "backend/cuda/formats/formats.cuh"
#include "backend/cuda/gemm/gemm_rows.h"

namespace freshet::cuda {

inline constexpr int kWarps = 8;

// Weights to prefetch: `parts` parts from each of these two addresses.
inline constexpr int kNextPart = 1024;
struct NextWeights {
  const uint8_t* from[2];
  int32_t parts;
};

struct ProductList {
  ProductArgs of[kMaxProducts];
  int32_t first_block[kMaxProducts + 1];
  int32_t count;
  NextWeights next;
};

// The number of blocks if each of a block's eight warps takes a split-K slice of a 16-row tile.
inline int64_t blocks_of_slices(int64_t rows, int64_t cols) {
  return ceil_div(ceil_div(rows, 16), kWarps / leaves(cols));
}

// The list with first_block set for blocks of `rows` rows each.
inline ProductList with_blocks(ProductList list, int64_t rows) {
  for (int i = 0; i < list.count; ++i) {
    const int64_t blocks = ceil_div(list.of[i].weight.rows, rows);
    list.first_block[i + 1] = list.first_block[i] + static_cast<int32_t>(blocks);
  }
  return list;
}

// Sets first_block so that every SM has at most one block. Returns the number of 16-row tiles per
// block.
inline int even_share(const Context& ctx, ProductList& list) {
  const ProductList given = list;
  int share = 0;
  do {
    list = with_blocks(given, 16 * ++share);
  } while (list.first_block[list.count] > ctx.multiprocessors && share < 1 << 16);
  return share;
}

// A tile of a GEMM: where its rows begin, in the kernel's unit (tiles of 16 rows, or panels), and
// its first tile of 8 tokens.
struct ProductTile {
  int product;
  int64_t unit, token_tile;
};

// The tile of a block of kUnits row units and NT token tiles. Neighbours in `index` share
// activations and weights in L2: kRowsAtOnce row blocks go through the tokens together.
template <int NT, int kUnits, int kRowsAtOnce = 16>
__device__ __forceinline__ ProductTile find_product_tile(const ProductList& list, int64_t tokens,
                                                         int index) {
  const int rows = list.first_block[list.count];
  const int columns = static_cast<int>((tokens + NT * 8 - 1) / (NT * 8));
  const int group = index / (kRowsAtOnce * columns), in = index % (kRowsAtOnce * columns);
  const int together = min(kRowsAtOnce, rows - group * kRowsAtOnce);
  const int block = group * kRowsAtOnce + in % together;
  int product = 0;
  while (product + 1 < list.count && block >= list.first_block[product + 1]) ++product;
  return {product, static_cast<int64_t>(block - list.first_block[product]) * kUnits,
          static_cast<int64_t>(in / together) * NT};
}

// Loads a lane's activations of 64 columns, from NT token tiles in fragment order.
template <int NT>
__device__ __forceinline__ void load_tokens(uint4 (&b)[NT][2], const uint4* const (&act)[NT],
                                            int piece) {
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    b[j][0] = act[j][static_cast<int64_t>(piece) * 64];
    b[j][1] = act[j][static_cast<int64_t>(piece) * 64 + 32];
  }
}

// The warp's index as a value that the compiler knows to be warp-uniform. Otherwise each lane would
// compute the matrix descriptors, which then have to be moved to uniform registers for wgmma.
__device__ __forceinline__ int warp_index() {
  return __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x / 32), 0);
}
// The same for any value, which is also kept rather than recomputed at each use.
__device__ __forceinline__ uint32_t kept(uint32_t v) {
  asm volatile("mov.b32 %0, %0;" : "+r"(v));
  return __shfl_sync(0xffffffff, v, 0);
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// L2 policy for bulk copies of weights that are read once per step: these lines are evicted first,
// and data that the kernels in between read again stays in L2.
__device__ __forceinline__ uint64_t read_once() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void copy_weights(uint32_t to, const void* from, uint32_t bytes,
                                             uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void copy_weights(void* to, const void* from, uint32_t bytes,
                                             uint64_t* barrier) {
  copy_weights(shared_address(to), from, bytes, shared_address(barrier), read_once());
}
// Bulk copy of weights that are read once per step (`once`), or several times.
__device__ __forceinline__ void copy_weights(void* to, const void* from, uint32_t bytes,
                                             uint64_t* barrier, bool once) {
  if (once) {
    copy_weights(to, from, bytes, barrier);
  } else {
    bulk_copy(to, from, bytes, barrier);
  }
}
#endif

// What a block needs to know of its GEMM.
struct Work {
  const uint8_t* weights;
  int64_t rows, cols;
  const uint8_t* act;
  int64_t act_chunks, act_tiles;
  float* out;
  int64_t out_stride, tokens;
  const float* bias;
  float scale;
  bool add;
  float up = 1.0f;  // restores the format's scaling by 2^-kDown
};

// The values that the sums of 16 rows and 8 tokens are added to, loaded before the sums are ready.
struct Before {
  float v[4];
  __device__ __forceinline__ void load(const Work& w, int64_t row_tile, int64_t token_tile,
                                       int lane) {
    const int64_t row = row_tile * 16 + lane / 4, token = token_tile * 8 + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int64_t r = row + n / 2 * 8, t = token + n % 2;
      if (r < w.rows && t < w.tokens) v[n] = w.out[t * w.out_stride + r];
    }
  }
};

// Epilogue: writes the sums of 16 rows for NT token tiles. The values to add to come from `known`,
// or are loaded for kAtOnce tiles at a time, so that the loads overlap.
template <int NT, int kAtOnce = NT % 2 == 0 ? 2 : 1>
__device__ __forceinline__ void finish(const Work& w, const float (&sum)[NT][4], int64_t row_tile,
                                       int64_t token_tile, int lane, const float* known = nullptr) {
  const int64_t row = row_tile * 16 + lane / 4, token = token_tile * 8 + lane % 4 * 2;
  const bool real[2] = {row < w.rows, row + 8 < w.rows};
  float bias[2] = {};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (w.bias != nullptr && real[r]) bias[r] = w.bias[row + r * 8];
  }
  float* at = w.out + token * w.out_stride + row;
  int64_t left = w.tokens - token;
#pragma unroll
  for (int first = 0; first < NT; first += kAtOnce) {
    const auto each = [&](auto&& body) {
#pragma unroll
      for (int n = 0; n < kAtOnce * 4; ++n) {
        const int to = n / 4 * 8 + n % 2, r = n % 4 / 2;
        if (to < left && real[r]) body(n, r, at + to * w.out_stride + r * 8);
      }
    };
    float before[kAtOnce * 4];
    if (w.add) {
      each([&](int n, int, const float* from) {
        before[n] = known != nullptr ? known[first * 4 + n] : *from;
      });
    }
    each([&](int n, int r, float* to) {
      float v = __fmul_rn(sum[first + n / 4][n % 4], w.up);
      if (w.bias != nullptr) v = __fadd_rn(v, bias[r]);
      v = __fmul_rn(v, w.scale);
      *to = w.add ? __fadd_rn(before[n], v) : v;
    });
    at += kAtOnce * 8 * w.out_stride;
    left -= kAtOnce * 8;
  }
}

// sum += part times the group's scales.
template <int NT>
__device__ __forceinline__ void add_scaled(float (&sum)[NT][4], const float (&part)[NT][4],
                                           float d0, float d1) {
#pragma unroll
  for (int j = 0; j < NT; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[j][i] = __fmaf_rn(part[j][i], i < 2 ? d0 : d1, sum[j][i]);
  }
}

// sum += a piece of 64 columns: a has its four operands, b the activations.
template <class F, int NT>
__device__ __forceinline__ void accumulate(float (&sum)[NT][4], const uint4 (&a)[4],
                                           const uint4 (&b)[NT][2], const Piece& piece, int index) {
  if constexpr (F::kGroup == 0) {
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      mma(sum[j], a[0], b[j][0].x, b[j][0].y);
      mma(sum[j], a[1], b[j][0].z, b[j][0].w);
      mma(sum[j], a[2], b[j][1].x, b[j][1].y);
      mma(sum[j], a[3], b[j][1].z, b[j][1].w);
    }
  } else {
#pragma unroll
    for (int group = 0; group < 4 / F::kGroup; ++group) {
      const Scales s = F::scales(piece, index, group);
      float part[NT][4] = {};
#pragma unroll
      for (int j = 0; j < NT; ++j) {
#pragma unroll
        for (int k = group * F::kGroup; k < (group + 1) * F::kGroup; ++k) {
          const uint4& v = b[j][k / 2];
          mma(part[j], a[k], k % 2 == 0 ? v.x : v.z, k % 2 == 0 ? v.y : v.w);
        }
      }
      add_scaled<NT>(sum, part, s.d0, s.d1);
    }
  }
}

// The problem that the tables of kernels (gemm_rows.h) select by.
inline GemmProblem problem_of(const ProductList& list, int64_t tokens) {
  GemmProblem p;
  p.tokens = tokens;
  for (int i = 0; i < list.count; ++i) {
    const WeightView& w = list.of[i].weight;
    p.add({w.code, w.rows, w.cols});
    p.same_tokens = p.same_tokens && list.of[i].act == list.of[0].act;
  }
  return p;
}

// The launcher of each row of the tables, by source file. Launchers of block formats are templates,
// instantiated where their kernels are.

// gemm_sm80_small_m.cu, gemm_sm80_large_m.cu
int run_small_m(const Context& ctx, const ProductList& list, int64_t tokens);
template <class F>
int run_tiles(const Context& ctx, const ProductList& list, int64_t tokens);

// gemm_bf16_sm90_m1_32.cu, and with a SwiGLU epilogue; swiglu_bf16_sm90_m17_32.cu
int run_few(const Context& ctx, const ProductList& list, int64_t tokens);
int run_few_gated(const Context& ctx, const ProductList& gate_and_up, int64_t tokens,
                  const Activations& act);
int run_gate_few(const Context& ctx, const ProductList& gate_and_up, int64_t tokens,
                 const Activations& act);

// gemm_q_sm90_m1_8.cu
template <class F>
int run_stream(const Context& ctx, const ProductList& list, int64_t tokens);
template <class F>
int run_stream_gated(const Context& ctx, const ProductList& gate_and_up, int64_t tokens,
                     const Activations& act);
// gemm_q_sm90_m1_8_small_n.cu
template <class F>
int run_once(const Context& ctx, const ProductList& list, int64_t tokens);
template <class F>
int run_once_pair(const Context& ctx, const ProductList& list, int64_t tokens);
// gemm_q_sm90_m1_8_long_k.cu
template <class F>
int run_long(const Context& ctx, const ProductList& list, int64_t tokens);
// swiglu_q_sm90_m1_8.cu: gate and up, and one weight of many rows
template <class F>
int run_quant_gate(const Context& ctx, const ProductList& gate_and_up, int64_t tokens,
                   const Activations& act);
template <class F>
int run_many_rows(const Context& ctx, const ProductList& list, int64_t tokens);
// prefetch_next_gemm.cu: which weights of the next GEMMs to prefetch. Affects speed only.
NextWeights next_weights(const Context& ctx, const NextProducts* next, int64_t tokens);

// gemm_q_sm90_m9_16.cu; gemm_q_sm90_m9_16_large_n.cu
template <class F>
int run_quant_few(const Context& ctx, const ProductList& list, int64_t tokens);
template <class F>
int run_quant_few_pair(const Context& ctx, const ProductList& list, int64_t tokens);
template <class F>
int run_quant_wide(const Context& ctx, const ProductList& list, int64_t tokens);
template <class F>
int run_quant_wide_gated(const Context& ctx, const ProductList& gate_and_up, int64_t tokens,
                         const Activations& act);

// gemm_q_sm90_m17_64.cuh: kSlices slices of K in parallel (1: K is whole), or 128 rows per
// warpgroup; gate and up with kRows rows of each per tile; blocks of 64 tokens and 128 rows
// whatever the size.
template <class F, int kSlices>
int run_middle(const Context& ctx, const ProductList& list, int64_t tokens);
template <class F>
int run_middle_deep(const Context& ctx, const ProductList& list, int64_t tokens);
template <class F, int kRows>
int run_middle_gated(const Context& ctx, const ProductList& gate_and_up, int64_t tokens,
                     const Activations& act);
template <class F>
int run_decode_rows(const Context& ctx, const ProductList& list, int64_t tokens);

// gemm_q_sm90_m65.cu: four slices of K in parallel, or K whole
template <class F>
int run_decode_split(const Context& ctx, const ProductList& list, int64_t tokens);
template <class F>
int run_decode(const Context& ctx, const ProductList& list, int64_t tokens);
template <class F>
int run_decode_gated(const Context& ctx, const ProductList& gate_and_up, int64_t tokens,
                     const Activations& act);

// gemm_q_sm90_two_formats.cu: weights in Q4_K or Q5_K followed by Q6_K; 17 to 64 tokens, or more
int run_pair_middle(const Context& ctx, const ProductList& list, int64_t tokens);
int run_pair_many(const Context& ctx, const ProductList& list, int64_t tokens);

// gemm_bf16_sm90_m65.cu
int run_wgmma(const Context& ctx, const ProductList& list, int64_t tokens);
int run_wgmma_gated(const Context& ctx, const ProductList& gate_and_up, int64_t tokens,
                    const Activations& act);
// gemm_bf16_sm90_m33_128_splitk2.cu
int run_halves(const Context& ctx, const ProductList& list, int64_t tokens);
// swiglu_bf16_sm90_m65_128.cu
int run_gate(const Context& ctx, const ProductList& gate_and_up, int64_t tokens,
             const Activations& act);
// gemm_bf16_sm90_m33_128_balanced.cu
int run_share(const Context& ctx, const ProductList& list, int64_t tokens);
int run_share_gated(const Context& ctx, const ProductList& gate_and_up, int64_t tokens,
                    const Activations& act);

// gemm_fp8_sm90_m1_64.cu, gemm_fp8_sm90_m65.cu, gemm_fp8_sm90_m65_128_splitk2.cu;
// swiglu_fp8_sm90_m1_64.cu, swiglu_fp8_sm90_m65.cu. All weights of a list have the same number of
// split-K slices.
int run_fp8_few(const Context& ctx, const ProductList& list, int64_t tokens);
int run_fp8_wide(const Context& ctx, const ProductList& list, int64_t tokens);
int run_fp8_many(const Context& ctx, const ProductList& list, int64_t tokens);
int run_fp8_halves(const Context& ctx, const ProductList& list, int64_t tokens);
int run_fp8_gated_few(const Context& ctx, const ProductList& gate_and_up, int64_t tokens,
                      const Activations& act);
int run_fp8_gated(const Context& ctx, const ProductList& gate_and_up, int64_t tokens,
                  const Activations& act);

// gemm_int8_sm90_m1_32.cu, gemm_int8_sm90_m33.cu, gemm_int8_sm80.cu. The SwiGLU epilogue uses
// gate's `out` as scratch.
int run_int8_few(const Context& ctx, const ProductList& list, int64_t tokens);
int run_int8_many(const Context& ctx, const ProductList& list, int64_t tokens);
int run_int8(const Context& ctx, const ProductList& list, int64_t tokens);
int run_int8_gated(const Context& ctx, const ProductList& gate_and_up, int64_t tokens,
                   const Activations& act);

}  // namespace freshet::cuda

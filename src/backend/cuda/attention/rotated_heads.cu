// Four-bit keys and values: the Hadamard transform of heads, and storing them. A warp has one head
// of one token in shared memory. The transform's additions are in the order of ops/hadamard.h, so
// that both are bit-identical.
#include "backend/cuda/attention/attention.cuh"
#include "backend/cuda/runtime/kernels.cuh"

namespace freshet::cuda {
namespace {

constexpr int kRotateWarps = 4;

// Transforms a head of `n` elements in place.
__device__ __forceinline__ void transform_head(float* head, int n) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int size = n & -n;
  __syncwarp();
  for (int half = 1; half < size; half *= 2) {
    for (int pair = lane; pair < n / 2; pair += 32) {
      const int at = pair / half * 2 * half + pair % half;
      const float a = head[at], b = head[at + half];
      head[at] = __fadd_rn(a, b);
      head[at + half] = __fsub_rn(a, b);
    }
    __syncwarp();
  }
  if (size == 1) return;
  const float factor = __fdiv_rn(1.0f, __fsqrt_rn(static_cast<float>(size)));
  for (int i = lane; i < n; i += 32) head[i] = __fmul_rn(head[i], factor);
  __syncwarp();
}

// Blocks: [row, heads].
__global__ void __launch_bounds__(kRotateWarps * 32)
    rotate_kernel(Rows out, Rows x, int heads, int dim) {
  extern __shared__ float rotate_room[];
  let_next_start();
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int h = static_cast<int>(blockIdx.y) * kRotateWarps + warp;
  if (h >= heads) return;
  float* const head = rotate_room + warp * dim;
  wait();
  const float* const from = x.data + blockIdx.x * x.stride + static_cast<int64_t>(h) * dim;
  for (int i = lane; i < dim; i += 32) head[i] = from[i];
  transform_head(head, dim);
  float* const to = out.data + blockIdx.x * out.stride + static_cast<int64_t>(h) * dim;
  for (int i = lane; i < dim; i += 32) to[i] = head[i];
}

__device__ __forceinline__ float extreme_of(float v, bool most) {
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) {
    const float other = __shfl_xor_sync(0xffffffff, v, apart);
    v = most ? fmaxf(v, other) : fminf(v, other);
  }
  return v;
}

// Where a token is stored; its sequence is found by bisection.
struct RotatedSlot {
  int64_t block;
  int at;
};
__device__ __forceinline__ RotatedSlot rotated_slot(const BatchArgs& b, int token) {
  int low = 0, high = b.sequences - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (b.query_start[middle] <= token) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const int position = b.context_len[low] - (b.query_start[low + 1] - token);
  return {b.tables[low * b.table_stride + position / kBlockTokens], position % kBlockTokens};
}

// Stores heads in four bits: codes and scales as ops::int4_scale() defines them, except that codes
// times scale are in F16's range. Grid: [token, heads of all parts].
__global__ void __launch_bounds__(kRotateWarps * 32)
    store_rotated_kernel(const __grid_constant__ HeadsArgs a, int room) {
  extern __shared__ float rotate_room[];
  let_next_start();
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int token = static_cast<int>(blockIdx.x);
  int h = static_cast<int>(blockIdx.y) * kRotateWarps + warp, p = 0;
  while (p < a.count && h >= a.of[p].heads) h -= a.of[p++].heads;
  if (p == a.count) return;
  const HeadsArgs::Part& part = a.of[p];
  const bool keys = part.store == HeadsArgs::kKeys;
  const int dim = part.head_dim;
  const RotatedSlot slot = rotated_slot(a.batch, token);
  uint8_t* const to = keys ? keys_at(a.cache, slot.block, h) : values_at(a.cache, slot.block, h);
  const ScalesAt scales = scales_at(CacheType::kInt4, slot.at, dim, keys);
  float* const head = rotate_room + warp * room;
  wait();
  const float* const x = part.x + token * part.stride + static_cast<int64_t>(h) * dim;
  for (int i = lane; i < dim; i += 32) head[i] = x[i];
  transform_head(head, dim);
  for (int g = 0; g < scales_of(dim); ++g) {
    const int c = g * 32 + lane;
    const float v = c < dim ? head[c] : 0.0f;
    const float least = extreme_of(v, false), most = extreme_of(v, true);
    const float widest = __fdiv_rn(most >= -least ? most : least, -8.0f);
    const __half scale = __float2half_rn(fminf(fmaxf(widest, -8188.0f), 8188.0f));
    const float its = __half2float(scale), to_code = its != 0.0f ? __fdiv_rn(1.0f, its) : 0.0f;
    const int code = __float2int_rn(fminf(fmaxf(__fmul_rn(v, to_code), -8.0f), 7.0f)) + 8;
    uint32_t quad = static_cast<uint32_t>(code) << bits_of_quad(lane);
#pragma unroll
    for (const int apart : {1, 2, 16}) quad |= __shfl_xor_sync(0xffffffff, quad, apart);
    if (lane % 4 == 0 && lane < 16) {
      *reinterpret_cast<uint32_t*>(to + slot_at(CacheType::kInt4, slot.at, dim) +
                                   feature_at(CacheType::kInt4, c)) = quad;
    }
    if (lane == 0) *reinterpret_cast<__half*>(to + scales.first + g * scales.apart) = scale;
  }
}

}  // namespace

int rotate_heads(const Context& ctx, const Rows* out, const Rows* x, int heads, int dim) {
  const dim3 grid(static_cast<unsigned>(x->rows),
                  static_cast<unsigned>(ceil_div(heads, kRotateWarps)));
  return launch(ctx, rotate_kernel, grid, dim3(kRotateWarps * 32),
                static_cast<size_t>(kRotateWarps * dim) * sizeof(float), *out, *x, heads, dim);
}

int store_rotated(const Context& ctx, const HeadsArgs& args) {
  int count = 0, longest = 0;
  for (int i = 0; i < args.count; ++i) {
    count += args.of[i].heads;
    longest = args.of[i].head_dim > longest ? args.of[i].head_dim : longest;
  }
  const dim3 grid(static_cast<unsigned>(args.tokens),
                  static_cast<unsigned>(ceil_div(count, kRotateWarps)));
  return launch(ctx, store_rotated_kernel, grid, dim3(kRotateWarps * 32),
                static_cast<size_t>(kRotateWarps * longest) * sizeof(float), args, longest);
}

}  // namespace freshet::cuda

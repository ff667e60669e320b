// Shared by all kernels of the plug-in: overlapping launches, fragments, exact arithmetic.
//
// Every kernel calls wait() before it reads what an earlier kernel wrote, or writes anything: it
// may start while its predecessor still runs (programmatic dependent launch), so that it can fetch
// weights in the meantime. Sums that must not depend on the batch are written with __fmaf_rn and
// similar intrinsics, which the compiler doesn't reorder or contract.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "backend/cuda/runtime/context.cuh"

namespace freshet::cuda {

inline constexpr size_t kSharedOfSm = 227 << 10;  // shared memory of a Hopper SM, in bytes

__device__ __forceinline__ void wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the next kernel start as soon as its blocks fit (programmatic dependent launch).
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// `cluster`: blocks per cluster; 1: no cluster.
template <class... P, class... A>
int launch_cluster(const Context& ctx, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared,
                   dim3 cluster, A... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return 0;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = ctx.stream;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster.x;
  attributes[1].val.clusterDim.y = cluster.y;
  attributes[1].val.clusterDim.z = cluster.z;
  config.attrs = attributes;
  config.numAttrs = cluster.x * cluster.y * cluster.z > 1 ? 2 : 1;
  return static_cast<int>(cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...));
}
template <class... P, class... A>
int launch(const Context& ctx, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared,
           A... args) {
  return launch_cluster(ctx, kernel, grid, block, shared, dim3(1), args...);
}

// Lets a kernel use `bytes` of dynamic shared memory. The driver keeps this for each device;
// it costs the host little, so launchers set it every time.
template <class Kernel>
int raise_shared(Kernel kernel, size_t bytes) {
  return static_cast<int>(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                               static_cast<int>(bytes)));
}

// Asks for the largest shared memory carve-out, so that blocks of another kernel fit on the same
// SM.
template <class Kernel>
int leave_shared(Kernel kernel) {
  return static_cast<int>(cudaFuncSetAttribute(
      kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
}

__host__ __device__ inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(v);
}

// d += a b for a [16, 16], b [16, 8]; lane l holds rows l / 4 and l / 4 + 8, columns 2 (l % 4) +
// 0, 1.
__device__ __forceinline__ void mma(float (&d)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void ldmatrix4(uint32_t (&r)[4], const void* row) {
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at));
}
__device__ __forceinline__ void ldmatrix4_trans(uint32_t (&r)[4], const void* row) {
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at));
}

__device__ __forceinline__ void ldmatrix2(uint32_t (&r)[2], const void* row) {
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(at));
}
__device__ __forceinline__ void ldmatrix2_trans(uint32_t (&r)[2], const void* row) {
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(at));
}

// Index of element (row, col) of the activations.
__device__ __forceinline__ int64_t activation_at(const Activations& act, int64_t row, int64_t col,
                                                 int64_t cols) {
  if (act.core_tiles > 0) {
    return ((col >> 6) * act.core_tiles + (row >> 3)) * 512 + (col & 63) / 8 * 64 + (row & 7) * 8 +
           (col & 7);
  }
  const int64_t chunks = (cols + kPadCols - 1) / kPadCols * (kPadCols / 32);
  const int64_t c = col & 31;
  const int64_t lane = (row & 7) * 4 + ((c & 7) >> 1);
  return (((row >> 3) * chunks + (col >> 5)) * 32 + lane) * 8 + (c >> 3) * 2 + (c & 1);
}
// Writes two adjacent activations, at an even column.
__device__ __forceinline__ void put_pair(const Activations& act, int64_t row, int64_t col,
                                         int64_t cols, float low, float high) {
  reinterpret_cast<uint32_t*>(act.data)[activation_at(act, row, col, cols) / 2] =
      pack_bf16(low, high);
}

// Converts to E4M3, rounding to nearest even and saturating.
__device__ __forceinline__ uint32_t two_e4m3(float low, float high) {
#if __CUDA_ARCH__ >= 890
  uint16_t v;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(v) : "f"(high), "f"(low));
  return v;
#else
  const auto one = [](float f) {
    const uint32_t bits = __float_as_uint(f), u = bits & 0x7fffffff;
    uint32_t code = ((u + 0x7ffff + (u >> 20 & 1)) >> 20) - (120 << 3);
    if (u < 121u << 23) code = __float_as_uint(__fadd_rn(__uint_as_float(u), 0x1p14f)) & 15;
    if (u >= 0x43e80000) code = u > 0x7f800000 ? 0x7f : 0x7e;
    return code | (bits >> 24 & 0x80);
  };
  return one(low) | one(high) << 8;
#endif
}
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
// Scales the largest magnitude of 128 values to 448, and back.
struct E4M3Scale {
  float up, down;
};
__device__ __forceinline__ E4M3Scale e4m3_scale(float most) {
  constexpr float kMost = 448.0f, kLeast = 1e-30f;
  if (!(most > kLeast)) return {0.0f, 0.0f};
  return {__fdiv_rn(kMost, most), __fdiv_rn(most, kMost)};
}
// Codes of eight adjacent values.
__device__ __forceinline__ uint2 e4m3_codes(const float (&v)[8], const E4M3Scale& scale) {
  const float up = scale.up;
  return make_uint2(two_e4m3(v[0] * up, v[1] * up) | two_e4m3(v[2] * up, v[3] * up) << 16,
                    two_e4m3(v[4] * up, v[5] * up) | two_e4m3(v[6] * up, v[7] * up) << 16);
}
// Writes eight adjacent activations, at a column that is a multiple of 8, with the scale of their
// group of 128.
__device__ __forceinline__ void put_scaled(const Activations& act, int64_t row, int64_t col,
                                           const float (&v)[8], const E4M3Scale& scale) {
  uint8_t* tile = act.data + ((col >> 7) * act.core_tiles + (row >> 3)) * kE4M3TileBytes;
  const int64_t in = col & 127, of_tile = row & 7;
  *reinterpret_cast<uint2*>(tile + (in >> 4) * 128 + of_tile * 16 + (in & 15)) =
      e4m3_codes(v, scale);
  if (in == 0) {
    reinterpret_cast<float*>(tile + kTokenTile * kE4M3Cols)[of_tile] = scale.down;
  }
}
// Largest magnitude among a half warp's 128 values.
__device__ __forceinline__ float most_of_128(const float (&v)[8]) {
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(v[i]));
  const uint32_t half = threadIdx.x % 32 < 16 ? 0x0000ffff : 0xffff0000;
#pragma unroll
  for (int step = 8; step > 0; step >>= 1) most = fmaxf(most, __shfl_xor_sync(half, most, step));
  return most;
}
__device__ __forceinline__ void put_e4m3(const Activations& act, int64_t row, int64_t col,
                                         const float (&v)[8]) {
  put_scaled(act, row, col, v, e4m3_scale(most_of_128(v)));
}
#endif

// Eight adjacent elements of a row: the unit that a thread of the row operations processes.
inline constexpr int kUnit = 8;
// Loads a unit of row `p` from column c on; zeros beyond n. `whole`: rows are 16-byte aligned.
__device__ __forceinline__ void load_unit(float (&v)[kUnit], const float* p, int64_t c, int64_t n,
                                          bool whole) {
  if (whole && c + kUnit <= n) {
    const float4 low = *reinterpret_cast<const float4*>(p + c);
    const float4 high = *reinterpret_cast<const float4*>(p + c + 4);
    v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
    v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
    return;
  }
#pragma unroll
  for (int i = 0; i < kUnit; ++i) v[i] = c + i < n ? p[c + i] : 0.0f;
}
__device__ __forceinline__ void store_unit(float* p, const float (&v)[kUnit], int64_t c, int64_t n,
                                           bool whole) {
  if (whole && c + kUnit <= n) {
    *reinterpret_cast<float4*>(p + c) = make_float4(v[0], v[1], v[2], v[3]);
    *reinterpret_cast<float4*>(p + c + 4) = make_float4(v[4], v[5], v[6], v[7]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    if (c + i < n) p[c + i] = v[i];
  }
}
__host__ __device__ inline bool whole_rows(const float* p, int64_t stride) {
  return (reinterpret_cast<uintptr_t>(p) / 4 | static_cast<uintptr_t>(stride)) % 4 == 0;
}
// Writes eight activations, at a column that is a multiple of 8.
__device__ __forceinline__ void put_unit(const Activations& act, int64_t row, int64_t col,
                                         int64_t cols, const float (&v)[kUnit]) {
  uint4 packed = make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]),
                            pack_bf16(v[6], v[7]));
  uint8_t* to = act.data + activation_at(act, row, col, cols) * 2;
  if (act.core_tiles > 0) {
    *reinterpret_cast<uint4*>(to) = packed;
    return;
  }
  // One pair per lane of the fragment.
  *reinterpret_cast<uint32_t*>(to) = packed.x;
  *reinterpret_cast<uint32_t*>(to + 16) = packed.y;
  *reinterpret_cast<uint32_t*>(to + 32) = packed.z;
  *reinterpret_cast<uint32_t*>(to + 48) = packed.w;
}

// Columns of a row of activations, including padding.
__host__ __device__ inline int64_t padded_cols(const Activations& act, int64_t cols) {
  const int64_t unit = act.e4m3 != 0 ? kE4M3Cols : kPadCols;
  return (cols + unit - 1) / unit * unit;
}
// The same in the layout of `act`; for E4M3 the 16 threads of a half warp write 128 adjacent
// values.
__device__ __forceinline__ void put_any(const Activations& act, int64_t row, int64_t col,
                                        int64_t cols, const float (&v)[kUnit]) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
  if (act.e4m3 != 0) {
    put_e4m3(act, row, col, v);
    return;
  }
#endif
  put_unit(act, row, col, cols, v);
}

__device__ __forceinline__ void cp_async16(void* to, const void* from, bool valid = true) {
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void cp_async_number(float* to, const float* from) {
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(at), "l"(from) : "memory");
}
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Barriers in shared memory, and the bulk copies that signal them (Hopper).
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}
__device__ __forceinline__ void barriers_ready() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra AGAIN;\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void bulk_copy(void* to, const void* from, uint32_t bytes,
                                          uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}
// Makes writes to global memory visible to bulk copies that follow a barrier.
__device__ __forceinline__ void memory_for_copies() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
// Bulk copies to global memory: their shared memory must be handed over with shared_for_copies()
// and a barrier.
__device__ __forceinline__ void shared_for_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void bulk_store(void* to, const void* from, uint32_t bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;" ::"l"(to),
      "r"(shared_address(from)), "r"(bytes)
      : "memory");
}
// Waits until this thread's bulk stores have read their shared memory, or have ended.
__device__ __forceinline__ void bulk_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void bulk_stores_done() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
#endif

}  // namespace freshet::cuda

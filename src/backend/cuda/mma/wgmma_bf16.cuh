// wgmma.m64nNk16 in BF16 and F16 with F32 sums. Operands in shared memory are core matrices of 8 by
// 8 elements, 128 bytes each. Bit-identical to mma.m16n8k16 for the same order of K.
#pragma once

#include "backend/cuda/runtime/common.cuh"

namespace freshet::cuda {

// Matrix descriptor of an operand: its address, and the byte distances between core matrices that
// are adjacent in K and in rows.
__device__ __forceinline__ uint64_t operand_at(const void* shared, uint64_t next_in_k,
                                               uint64_t next_rows) {
  // In a cluster the upper bits of an address hold the block's rank.
  return (shared_address(shared) >> 4 & 0x3fff) | next_in_k >> 4 << 16 | next_rows >> 4 << 32;
}
// Descriptor of consecutive tiles of 8 rows by 64 columns.
__device__ __forceinline__ uint64_t operand_at(const void* shared) {
  return operand_at(shared, 128, 1024);
}
inline constexpr uint64_t kNextStep = 256 >> 4;  // 16 columns, added to an operand's descriptor

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ __forceinline__ void wgmma_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// A compiler fence: computations of these registers do not move across it.
template <int N>
__device__ __forceinline__ void pin(float (&v)[N][4]) {
#pragma unroll
  for (int j = 0; j < N; ++j) {
    asm volatile("" : "+f"(v[j][0]), "+f"(v[j][1]), "+f"(v[j][2]), "+f"(v[j][3])::"memory");
  }
}

// clang-format off
#define FRESHET_SUM1(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define FRESHET_SUM2(i) FRESHET_SUM1(i), FRESHET_SUM1(i + 1)
#define FRESHET_SUM4(i) FRESHET_SUM2(i), FRESHET_SUM2(i + 2)
#define FRESHET_SUM6(i) FRESHET_SUM4(i), FRESHET_SUM2(i + 4)
#define FRESHET_SUM8(i) FRESHET_SUM4(i), FRESHET_SUM4(i + 4)
#define FRESHET_SUM12(i) FRESHET_SUM8(i), FRESHET_SUM4(i + 8)
#define FRESHET_SUM16(i) FRESHET_SUM8(i), FRESHET_SUM8(i + 8)
#define FRESHET_SUM24(i) FRESHET_SUM16(i), FRESHET_SUM8(i + 16)
#define FRESHET_SUM28(i) FRESHET_SUM16(i), FRESHET_SUM12(i + 16)
#define FRESHET_SUM32(i) FRESHET_SUM16(i), FRESHET_SUM16(i + 16)
#define FRESHET_R1 "%0, %1, %2, %3"
#define FRESHET_R2 FRESHET_R1 ", %4, %5, %6, %7"
#define FRESHET_R4 FRESHET_R2 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define FRESHET_R6 FRESHET_R4 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define FRESHET_R8 FRESHET_R6 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define FRESHET_R12 FRESHET_R8 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, " \
                               "%44, %45, %46, %47"
#define FRESHET_R16 FRESHET_R12 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, " \
                                "%60, %61, %62, %63"
#define FRESHET_R24 FRESHET_R16 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, " \
                               "%75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, " \
                               "%87, %88, %89, %90, %91, %92, %93, %94, %95"
#define FRESHET_R28 FRESHET_R24 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, " \
                               "%106, %107, %108, %109, %110, %111"
#define FRESHET_R32 FRESHET_R28 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, " \
                               "%122, %123, %124, %125, %126, %127"
// d = a b, or d += a b if `adds`, for `tiles` column tiles of b; d[j] has mma's accumulator layout.
#define FRESHET_WGMMA(name, type, tiles, n, a_and_b, add) \
  __device__ __forceinline__ void name(float (&d)[tiles][4], uint64_t a, uint64_t b, int adds) { \
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " add ", 0;\n" \
                 "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type \
                 " {" FRESHET_R##tiles "}, " a_and_b ", adds, 1, 1, 0, 0;\n}" \
                 : FRESHET_SUM##tiles(0) : "l"(a), "l"(b), "r"(adds)); \
  }
FRESHET_WGMMA(wgmma, "bf16", 1, "8", "%4, %5", "%6")
FRESHET_WGMMA(wgmma, "bf16", 2, "16", "%8, %9", "%10")
FRESHET_WGMMA(wgmma, "bf16", 4, "32", "%16, %17", "%18")
FRESHET_WGMMA(wgmma, "bf16", 6, "48", "%24, %25", "%26")
FRESHET_WGMMA(wgmma, "bf16", 8, "64", "%32, %33", "%34")
FRESHET_WGMMA(wgmma, "bf16", 12, "96", "%48, %49", "%50")
FRESHET_WGMMA(wgmma, "bf16", 16, "128", "%64, %65", "%66")
FRESHET_WGMMA(wgmma, "bf16", 24, "192", "%96, %97", "%98")
FRESHET_WGMMA(wgmma, "bf16", 28, "224", "%112, %113", "%114")
FRESHET_WGMMA(wgmma, "bf16", 32, "256", "%128, %129", "%130")
FRESHET_WGMMA(wgmma_half, "f16", 16, "128", "%64, %65", "%66")
#undef FRESHET_SUM1
#undef FRESHET_SUM2
#undef FRESHET_SUM4
#undef FRESHET_SUM6
#undef FRESHET_SUM8
#undef FRESHET_SUM12
#undef FRESHET_SUM16
#undef FRESHET_SUM24
#undef FRESHET_SUM28
#undef FRESHET_SUM32
#undef FRESHET_R1
#undef FRESHET_R2
#undef FRESHET_R4
#undef FRESHET_R6
#undef FRESHET_R8
#undef FRESHET_R12
#undef FRESHET_R16
#undef FRESHET_R24
#undef FRESHET_R28
#undef FRESHET_R32
#undef FRESHET_WGMMA
// clang-format on
#endif

}  // namespace freshet::cuda

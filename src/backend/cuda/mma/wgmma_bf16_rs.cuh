// wgmma.m64nNk16 in BF16 with the 64-row operand in registers, where it was dequantised: each warp
// of the warpgroup holds 16 rows in mma.m16n8k16's layout. The other operand is as in
// wgmma_bf16.cuh.
#pragma once

#include "backend/cuda/mma/wgmma_bf16.cuh"

namespace freshet::cuda {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// clang-format off
#define FRESHET_SUMS4(i) \
  "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3]), \
  "+f"(d[i + 1][0]), "+f"(d[i + 1][1]), "+f"(d[i + 1][2]), "+f"(d[i + 1][3]), \
  "+f"(d[i + 2][0]), "+f"(d[i + 2][1]), "+f"(d[i + 2][2]), "+f"(d[i + 2][3]), \
  "+f"(d[i + 3][0]), "+f"(d[i + 3][1]), "+f"(d[i + 3][2]), "+f"(d[i + 3][3])
#define FRESHET_WGMMA(n, registers, rows, tokens, add, ...) \
  asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " add ", 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 {" registers "}, " \
               "{" rows "}, " tokens ", adds, 1, 1, 0;\n}" : __VA_ARGS__ \
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(adds))
#define FRESHET_R0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define FRESHET_R1 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FRESHET_R2 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define FRESHET_R3 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// d = a b, or d += a b if `adds`, for 4, 8 or 16 token tiles; d[j] has mma's accumulator layout.
__device__ __forceinline__ void wgmma(float (&d)[4][4], const uint4& a, uint64_t b, int adds) {
  FRESHET_WGMMA("32", FRESHET_R0, "%16, %17, %18, %19", "%20", "%21", FRESHET_SUMS4(0));
}
__device__ __forceinline__ void wgmma(float (&d)[8][4], const uint4& a, uint64_t b, int adds) {
  FRESHET_WGMMA("64", FRESHET_R0 ", " FRESHET_R1, "%32, %33, %34, %35", "%36", "%37",
                FRESHET_SUMS4(0), FRESHET_SUMS4(4));
}
__device__ __forceinline__ void wgmma(float (&d)[16][4], const uint4& a, uint64_t b, int adds) {
  FRESHET_WGMMA("128", FRESHET_R0 ", " FRESHET_R1 ", " FRESHET_R2 ", " FRESHET_R3,
                "%64, %65, %66, %67", "%68", "%69",
                FRESHET_SUMS4(0), FRESHET_SUMS4(4), FRESHET_SUMS4(8), FRESHET_SUMS4(12));
}

#undef FRESHET_R0
#undef FRESHET_R1
#undef FRESHET_R2
#undef FRESHET_R3
#undef FRESHET_WGMMA
#undef FRESHET_SUMS4
// clang-format on

// A compiler fence: results of earlier wgmmas are read only after it.
template <int NT>
__device__ __forceinline__ void written(float (&d)[NT][4]) {
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    asm volatile("" : "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])::"memory");
  }
}
#endif

}  // namespace freshet::cuda

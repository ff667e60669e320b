// wgmma.m64nNk32 in E4M3 with F32 sums. Operands have the byte layout of wgmma_bf16.cuh: 128
// one-byte columns instead of 64 two-byte ones. A sum has the same bits for every N.
#pragma once

#include "backend/cuda/mma/wgmma_bf16.cuh"

namespace freshet::cuda {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// clang-format off
#define FRESHET_D1(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define FRESHET_D2(i) FRESHET_D1(i), FRESHET_D1(i + 1)
#define FRESHET_D4(i) FRESHET_D2(i), FRESHET_D2(i + 2)
#define FRESHET_D6(i) FRESHET_D4(i), FRESHET_D2(i + 4)
#define FRESHET_D8(i) FRESHET_D4(i), FRESHET_D4(i + 4)
#define FRESHET_D12(i) FRESHET_D8(i), FRESHET_D4(i + 8)
#define FRESHET_D14(i) FRESHET_D8(i), FRESHET_D6(i + 8)
#define FRESHET_D16(i) FRESHET_D8(i), FRESHET_D8(i + 8)
#define FRESHET_N1 "%0, %1, %2, %3"
#define FRESHET_N2 FRESHET_N1 ", %4, %5, %6, %7"
#define FRESHET_N4 FRESHET_N2 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define FRESHET_N6 FRESHET_N4 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define FRESHET_N8 FRESHET_N6 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define FRESHET_N12 FRESHET_N8 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, " \
                               "%44, %45, %46, %47"
#define FRESHET_N14 FRESHET_N12 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define FRESHET_N16 FRESHET_N14 ", %56, %57, %58, %59, %60, %61, %62, %63"
// d = a b, or d += a b if `adds`, for `tiles` tiles of b; d[j] has mma's accumulator layout.
#define FRESHET_WGMMA8(tiles, n, a_and_b, add) \
  __device__ __forceinline__ void wgmma8(float (&d)[tiles][4], uint64_t a, uint64_t b, int adds) { \
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " add ", 0;\n" \
                 "wgmma.mma_async.sync.aligned.m64n" n "k32.f32.e4m3.e4m3 {" FRESHET_N##tiles \
                 "}, " a_and_b ", adds, 1, 1;\n}" \
                 : FRESHET_D##tiles(0) : "l"(a), "l"(b), "r"(adds)); \
  }
FRESHET_WGMMA8(1, "8", "%4, %5", "%6")
FRESHET_WGMMA8(2, "16", "%8, %9", "%10")
FRESHET_WGMMA8(4, "32", "%16, %17", "%18")
FRESHET_WGMMA8(6, "48", "%24, %25", "%26")
FRESHET_WGMMA8(8, "64", "%32, %33", "%34")
FRESHET_WGMMA8(12, "96", "%48, %49", "%50")
FRESHET_WGMMA8(14, "112", "%56, %57", "%58")
FRESHET_WGMMA8(16, "128", "%64, %65", "%66")
#undef FRESHET_D1
#undef FRESHET_D2
#undef FRESHET_D4
#undef FRESHET_D6
#undef FRESHET_D8
#undef FRESHET_D12
#undef FRESHET_D14
#undef FRESHET_D16
#undef FRESHET_N1
#undef FRESHET_N2
#undef FRESHET_N4
#undef FRESHET_N6
#undef FRESHET_N8
#undef FRESHET_N12
#undef FRESHET_N14
#undef FRESHET_N16
#undef FRESHET_WGMMA8
// clang-format on
#endif

}  // namespace freshet::cuda

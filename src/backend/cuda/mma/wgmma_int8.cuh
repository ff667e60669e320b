// wgmma.m64nNk32 of signed bytes with 32-bit sums. Operands have the byte layout of wgmma_bf16.cuh:
// 128 one-byte columns instead of 64 two-byte ones.
#pragma once

#include "backend/cuda/mma/wgmma_bf16.cuh"

namespace freshet::cuda {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// clang-format off
#define FRESHET_I1(i) "+r"(d[i][0]), "+r"(d[i][1]), "+r"(d[i][2]), "+r"(d[i][3])
#define FRESHET_I4(i) FRESHET_I1(i), FRESHET_I1(i + 1), FRESHET_I1(i + 2), FRESHET_I1(i + 3)
#define FRESHET_I8(i) FRESHET_I4(i), FRESHET_I4(i + 4)
#define FRESHET_I12(i) FRESHET_I8(i), FRESHET_I4(i + 8)
#define FRESHET_I16(i) FRESHET_I12(i), FRESHET_I4(i + 12)
#define FRESHET_I28(i) FRESHET_I16(i), FRESHET_I12(i + 16)
#define FRESHET_I32(i) FRESHET_I16(i), FRESHET_I16(i + 16)
#define FRESHET_M8 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, " \
                   "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FRESHET_M12 FRESHET_M8 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, " \
                    "%44, %45, %46, %47"
#define FRESHET_M16 FRESHET_M12 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, " \
                    "%60, %61, %62, %63"
#define FRESHET_M28 FRESHET_M16 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, " \
                    "%76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, " \
                    "%91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, " \
                    "%105, %106, %107, %108, %109, %110, %111"
#define FRESHET_M32 FRESHET_M28 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, " \
                    "%122, %123, %124, %125, %126, %127"
// d = a b, or d += a b if `adds`, for `tiles` tiles of b; d[j] has mma's accumulator layout.
#define FRESHET_WGMMA_INT8(tiles, n, a_and_b, add) \
  __device__ __forceinline__ void wgmma_int8(int (&d)[tiles][4], uint64_t a, uint64_t b, \
                                             int adds) { \
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " add ", 0;\n" \
                 "wgmma.mma_async.sync.aligned.m64n" n "k32.s32.s8.s8 {" FRESHET_M##tiles "}, " \
                 a_and_b ", adds;\n}" \
                 : FRESHET_I##tiles(0) : "l"(a), "l"(b), "r"(adds)); \
  }
FRESHET_WGMMA_INT8(8, "64", "%32, %33", "%34")
FRESHET_WGMMA_INT8(12, "96", "%48, %49", "%50")
FRESHET_WGMMA_INT8(16, "128", "%64, %65", "%66")
FRESHET_WGMMA_INT8(28, "224", "%112, %113", "%114")
FRESHET_WGMMA_INT8(32, "256", "%128, %129", "%130")
#undef FRESHET_I1
#undef FRESHET_I4
#undef FRESHET_I8
#undef FRESHET_I12
#undef FRESHET_I16
#undef FRESHET_I28
#undef FRESHET_I32
#undef FRESHET_M8
#undef FRESHET_M12
#undef FRESHET_M16
#undef FRESHET_M28
#undef FRESHET_M32
#undef FRESHET_WGMMA_INT8
// clang-format on
#endif

}  // namespace freshet::cuda

// wgmma.m64nNk16 in BF16 with sums in F32: both operands are core matrices in shared memory, tiles
// of 8 rows by 64 columns one after the other. For the same order of K it gives the bits of
// mma.m16n8k16.
#pragma once

#include "backend/cuda/common.cuh"

namespace freshet::cuda {

// Where an operand lies: neighbours in K are 128 bytes apart, tiles of 8 rows 1,024.
__device__ __forceinline__ uint64_t operand_at(const void* shared) {
  constexpr uint64_t kNextInK = 128 >> 4, kNextRows = 1024 >> 4;
  // In a cluster an address has the block's rank in its upper bits.
  return (shared_address(shared) >> 4 & 0x3fff) | kNextInK << 16 | kNextRows << 32;
}
inline constexpr uint64_t kNextStep = 256 >> 4;  // of 16 columns, added to an operand's place

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

// clang-format off
#define FRESHET_SUMS4(i) \
  "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3]), \
  "+f"(d[i + 1][0]), "+f"(d[i + 1][1]), "+f"(d[i + 1][2]), "+f"(d[i + 1][3]), \
  "+f"(d[i + 2][0]), "+f"(d[i + 2][1]), "+f"(d[i + 2][2]), "+f"(d[i + 2][3]), \
  "+f"(d[i + 3][0]), "+f"(d[i + 3][1]), "+f"(d[i + 3][2]), "+f"(d[i + 3][3])
#define FRESHET_WGMMA(n, registers, a_and_b, add, ...) \
  asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " add ", 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 {" registers "}, " a_and_b \
               ", adds, 1, 1, 0, 0;\n}" : __VA_ARGS__ : "l"(a), "l"(b), "r"(adds))
#define FRESHET_R0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define FRESHET_R1 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FRESHET_R2 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define FRESHET_R3 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// d = a b, or d += a b if `adds`, for 8 tiles of tokens; d[j] is as mma has it.
__device__ __forceinline__ void wgmma(float (&d)[8][4], uint64_t a, uint64_t b, int adds) {
  FRESHET_WGMMA("64", FRESHET_R0 ", " FRESHET_R1, "%32, %33", "%34",
                FRESHET_SUMS4(0), FRESHET_SUMS4(4));
}

// d = a b, or d += a b if `adds`, for 16 tiles of tokens; d[j] is as mma has it.
__device__ __forceinline__ void wgmma(float (&d)[16][4], uint64_t a, uint64_t b, int adds) {
  FRESHET_WGMMA("128", FRESHET_R0 ", " FRESHET_R1 ", " FRESHET_R2 ", " FRESHET_R3, "%64, %65",
                "%66",
                FRESHET_SUMS4(0), FRESHET_SUMS4(4), FRESHET_SUMS4(8), FRESHET_SUMS4(12));
}

#undef FRESHET_R0
#undef FRESHET_R1
#undef FRESHET_R2
#undef FRESHET_R3
#undef FRESHET_WGMMA
#undef FRESHET_SUMS4
// clang-format on
#endif

}  // namespace freshet::cuda

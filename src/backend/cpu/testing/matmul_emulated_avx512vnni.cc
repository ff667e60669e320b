// GEMM on emulated byte tiles, for the tests.
#define FRESHET_SIMD "backend/cpu/simd_avx512.h"
#define FRESHET_TILES "backend/cpu/tiles_emulated.h"

#include "backend/cpu/matmul_amx_blocks.inl"
#include "backend/cpu/matmul_amx_int8.inl"

namespace freshet::cpu {

extern const IsaKernels kEmulatedTileKernels;
const IsaKernels kEmulatedTileKernels = {
    .run = {nullptr, nullptr, nullptr, nullptr, run_int8_tiles, FRESHET_TILE_BLOCKS},
    .bf16 = nullptr,
    .q8x256 = nullptr,
    .int8 = nullptr,
    .gates = 1u << static_cast<int>(Format::kINT8)};

}  // namespace freshet::cpu

// Kernels compiled for AMX.
//
// For one tile of 16 x 16 sums: a multiplication takes 16 cycles, storing it 16, loading an operand
// 8; storing and loading exclude each other, and while tiles are busy one F32 FMA a cycle is left.
//
// BF16 weights: a tile multiplication adds products of even and of odd k apart, each in order,
// starting from zero, and then both to what the tile holds; every step rounds to nearest and takes
// denormals as zero (Intel SDM, TDPBF16PS). FMA in F32 lanes does the same, so a row of the result
// has one value whatever the number of tokens.
#define FRESHET_SIMD "backend/cpu/simd_avx512.h"
#define FRESHET_TILES "backend/cpu/tiles_amx.h"

#include "backend/cpu/matmul_amx_bf16.inl"
#include "backend/cpu/matmul_amx_blocks.inl"
#include "backend/cpu/matmul_amx_int8.inl"

namespace freshet::cpu {

// By quant::Format.
const IsaKernels kAmxKernels = {
    .run = {nullptr, nullptr, run_bf16, nullptr, run_int8_tiles, FRESHET_TILE_BLOCKS},
    .bf16 = nullptr,
    .q8x256 = nullptr,
    .int8 = nullptr,
    .gates = 1u << static_cast<int>(Format::kBF16) | 1u << static_cast<int>(Format::kINT8)};

}  // namespace freshet::cpu

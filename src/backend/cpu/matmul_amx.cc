// Kernels compiled for AMX.
//
// Costs per tile of 16 x 16 sums: 16 cycles for a multiplication, 16 for a store, 8 to load an
// operand. Stores and loads exclude each other, and while the tiles are busy one F32 FMA per cycle
// is free.
//
// BF16 weights: a tile multiplication sums the products of even and of odd k separately, each in
// order and starting from zero, and then adds both to the accumulator. Every step rounds to nearest
// and treats denormals as zero (Intel SDM, TDPBF16PS). FMA in F32 lanes does the same, so a row of
// the result has one value for any number of tokens.
#define FRESHET_SIMD "backend/cpu/simd_avx512.h"
#define FRESHET_TILES "backend/cpu/tiles_amx.h"

#include "backend/cpu/matmul_amx_bf16.inl"
#include "backend/cpu/matmul_amx_blocks.inl"
#include "backend/cpu/matmul_amx_f32.inl"
#include "backend/cpu/matmul_amx_int8.inl"

namespace freshet::cpu {

// In the order of quant::Format.
const IsaKernels kAmxKernels = {
    .run = {run_split_f32, nullptr, run_bf16, nullptr, run_int8_tiles, FRESHET_TILE_BLOCKS},
    .bf16 = nullptr,
    .q8x256 = nullptr,
    .int8 = nullptr,
    .gates = 1u << static_cast<int>(Format::kBF16) | 1u << static_cast<int>(Format::kINT8)};

}  // namespace freshet::cpu

// Kernels compiled for AMX: BF16 tiles for many tokens and, with the same bits, AVX-512 for one or
// two.
//
// A tile multiplication adds products of even and of odd k apart, each in order, starting from
// zero, and then both to what the tile holds; every step rounds to nearest and takes denormals as
// zero (Intel SDM, TDPBF16PS). FMA in F32 lanes does the same, so a row of the result has one value
// whatever the number of tokens.
//
// For one tile of 16 x 16 sums: the multiplication takes 16 cycles, storing it 16, loading an
// operand 8; storing and loading exclude each other, and while tiles are busy one F32 FMA a cycle
// is left.
#define FRESHET_SIMD "backend/cpu/simd_avx512.h"

#include "backend/cpu/matmul_amx_bf16.inl"
#include "backend/cpu/matmul_amx_blocks.inl"

namespace freshet::cpu {

// By quant::Format.
const IsaKernels kAmxKernels = {
    .run = {nullptr, nullptr, run_bf16, run_blocks<BlockQ4_0>, run_blocks<BlockQ4_1>,
            run_blocks<BlockQ5_0>, run_blocks<BlockQ5_1>, run_blocks<BlockQ8_0>,
            run_blocks<BlockQ2_K>, run_blocks<BlockQ3_K>, run_blocks<BlockQ4_K>,
            run_blocks<BlockQ5_K>, run_blocks<BlockQ6_K>, run_blocks<BlockIQ4_NL>,
            run_blocks<BlockIQ4_XS>, run_blocks<BlockMXFP4>},
    .bf16 = nullptr,
    .q8x32 = nullptr,
    .q8x256 = nullptr};

}  // namespace freshet::cpu

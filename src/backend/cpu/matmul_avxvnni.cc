// Kernels compiled for avxvnni.
#define FRESHET_SIMD "backend/cpu/simd_avx2.h"

#include "backend/cpu/matmul_call.h"
#include "backend/cpu/matmul_nest.inl"

namespace freshet::cpu {

// In the order of quant::Format.
const IsaKernels kAvxVnniKernels = {
    .run = {nullptr, nullptr, nullptr, nullptr, FRESHET_WHOLE_NUMBER_KERNELS,
            FRESHET_NO_SMALL_FLOAT_KERNELS, FRESHET_GROUP_KERNELS},
    .bf16 = nullptr,
    .q8x256 = nullptr,
    .int8 = nullptr,
    .grids = kAvxVnniGrids};

}  // namespace freshet::cpu

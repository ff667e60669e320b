// Kernels compiled for avx512vnni.
#define FRESHET_SIMD "backend/cpu/simd_avx512.h"

#include "backend/cpu/matmul_call.h"
#include "backend/cpu/matmul_nest.inl"

namespace freshet::cpu {

// In the order of quant::Format.
const IsaKernels kAvx512VnniKernels = {
    .run = {nullptr, nullptr, nullptr, nullptr, FRESHET_WHOLE_NUMBER_KERNELS,
            FRESHET_NO_SMALL_FLOAT_KERNELS, FRESHET_GROUP_KERNELS},
    .bf16 = nullptr,
    .q8x256 = nullptr,
    .int8 = nullptr,
    .grids = kAvx512VnniGrids};

}  // namespace freshet::cpu

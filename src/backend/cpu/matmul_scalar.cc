// Kernels compiled for scalar.
#define FRESHET_SIMD "backend/cpu/simd_scalar.h"

#include "backend/cpu/act_encode.inl"
#include "backend/cpu/matmul_call.h"
#include "backend/cpu/matmul_nest.inl"

namespace freshet::cpu {

// In the order of quant::Format.
const IsaKernels kScalarKernels = {
    .run = {run_f32<LinesF32>, run_f32<LinesF16>, run<FamilyBf16, LinesBF16>, run_fp8<LinesFP8>,
            FRESHET_WHOLE_NUMBER_KERNELS, FRESHET_SMALL_FLOAT_KERNELS, FRESHET_GROUP_KERNELS},
    .bf16 = encode_bf16,
    .q8x256 = encode_q8x256,
    .int8 = encode_int8,
    .grids = kScalarGrids,
};

}  // namespace freshet::cpu

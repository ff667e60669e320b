// Kernels compiled for neon.
#define FRESHET_SIMD "backend/cpu/simd_neon.h"

#include "backend/cpu/act_encode.inl"
#include "backend/cpu/matmul_call.h"
#include "backend/cpu/matmul_nest.inl"

namespace freshet::cpu {

// By quant::Format.
const IsaKernels kNeonKernels = {
    .run = {run_f32<LinesF32>,
            run_f32<LinesF16>,
            run<FamilyBf16, LinesBF16>,
            run_fp8,
            run_family<FamilyInt8>,
            run<Family256, BlockQ4_0>,
            run<Family256, BlockQ4_1>,
            run<Family256, BlockQ5_0>,
            run<Family256, BlockQ5_1>,
            run<Family256, BlockQ8_0>,
            run<Family256, BlockQ2_K>,
            run<Family256, BlockQ3_K>,
            run<Family256, BlockQ4_K>,
            run<Family256, BlockQ5_K>,
            run<Family256, BlockQ6_K>,
            run<Family256, BlockIQ4_NL>,
            run<Family256, BlockIQ4_XS>,
            run<Family256, BlockMXFP4>,
            run<FamilyInt4, BlockInt4<128>>,
            run<FamilyInt4, BlockInt4<32>>},
    .bf16 = encode_bf16,
    .q8x256 = encode_q8x256,
    .int8 = encode_int8,
};

}  // namespace freshet::cpu

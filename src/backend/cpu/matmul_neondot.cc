// Kernels compiled for neondot.
#define FRESHET_SIMD "backend/cpu/simd_neon.h"

#include "backend/cpu/matmul_call.h"
#include "backend/cpu/matmul_nest.inl"

namespace freshet::cpu {

// By quant::Format.
const IsaKernels kNeonDotKernels = {.run = {nullptr,
                                            nullptr,
                                            nullptr,
                                            nullptr,
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
                                    .bf16 = nullptr,
                                    .q8x256 = nullptr,
                                    .int8 = nullptr};

}  // namespace freshet::cpu

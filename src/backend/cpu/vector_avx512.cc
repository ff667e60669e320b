#include "backend/cpu/vector_isa.h"
#include "backend/cpu/vector_kernels.h"
#include "backend/cpu/vector_simd_avx512.h"

namespace freshet::cpu {

const ops::VectorKernels kVectorAvx512 =
    VectorOps<Avx512>::table("vector.avx512", ops::CpuIsa::kAvx512);

}  // namespace freshet::cpu

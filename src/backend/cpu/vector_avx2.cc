#include "backend/cpu/vector_isa.h"
#include "backend/cpu/vector_kernels.h"
#include "backend/cpu/vector_simd_avx2.h"

namespace freshet::cpu {

const ops::VectorKernels kVectorAvx2 = VectorOps<Avx2>::table("vector.avx2", ops::CpuIsa::kAvx2);

}  // namespace freshet::cpu

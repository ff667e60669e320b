#include "backend/cpu/vector_isa.h"
#include "backend/cpu/vector_kernels.h"
#include "backend/cpu/vector_simd_neon.h"

namespace freshet::cpu {

const ops::VectorKernels kVectorNeon = VectorOps<Neon>::table("vector.neon", ops::CpuIsa::kNeon);

}  // namespace freshet::cpu

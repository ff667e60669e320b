#include "backend/cpu/tables.h"
#include "backend/cpu/vector_isa.h"

namespace freshet::cpu {

std::span<const ops::VectorKernels> vector_kernels() {
#if defined(__aarch64__)
  static const ops::VectorKernels kRows[] = {kVectorNeon};
#else
  static const ops::VectorKernels kRows[] = {kVectorAvx512, kVectorAvx2};
#endif
  return kRows;
}

}  // namespace freshet::cpu

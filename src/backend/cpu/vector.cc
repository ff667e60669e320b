#include "backend/cpu/tables.h"
#include "backend/cpu/vector_isa.h"

namespace freshet::cpu {

std::span<const ops::VectorKernels> vector_kernels() {
  static const ops::VectorKernels kRows[] = {kVectorAvx512, kVectorAvx2};
  return kRows;
}

}  // namespace freshet::cpu

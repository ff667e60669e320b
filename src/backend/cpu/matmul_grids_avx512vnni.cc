// Kernels of grid and ternary formats, compiled for avx512vnni.
#define FRESHET_SIMD "backend/cpu/simd_avx512.h"

#include "backend/cpu/matmul_call.h"
#include "backend/cpu/matmul_grids.inl"

namespace freshet::cpu {

const MatmulRun kAvx512VnniGrids[kGrids] = {FRESHET_GRID_KERNELS};

}  // namespace freshet::cpu

// Kernels of grid and ternary formats, compiled for avx2.
#define FRESHET_SIMD "backend/cpu/simd_avx2.h"

#include "backend/cpu/matmul_call.h"
#include "backend/cpu/matmul_grids.inl"

namespace freshet::cpu {

const MatmulRun kAvx2Grids[kGrids] = {FRESHET_GRID_KERNELS};

}  // namespace freshet::cpu

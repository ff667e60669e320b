// Kernels of grid and ternary formats, compiled for neondot.
#define FRESHET_SIMD "backend/cpu/simd_neon.h"

#include "backend/cpu/matmul_call.h"
#include "backend/cpu/matmul_grids.inl"

namespace freshet::cpu {

const MatmulRun kNeonDotGrids[kGrids] = {FRESHET_GRID_KERNELS};

}  // namespace freshet::cpu

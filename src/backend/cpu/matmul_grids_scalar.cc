// Kernels of grid and ternary formats, compiled for scalar.
#define FRESHET_SIMD "backend/cpu/simd_scalar.h"

#include "backend/cpu/matmul_call.h"
#include "backend/cpu/matmul_grids.inl"

namespace freshet::cpu {

const MatmulRun kScalarGrids[kGrids] = {FRESHET_GRID_KERNELS};

}  // namespace freshet::cpu

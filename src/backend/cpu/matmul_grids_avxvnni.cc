// Kernels of grid and ternary formats, compiled for avxvnni.
#define FRESHET_SIMD "backend/cpu/simd_avx2.h"

#include "backend/cpu/matmul_call.h"
#include "backend/cpu/matmul_grids.inl"

namespace freshet::cpu {

const MatmulRun kAvxVnniGrids[kGrids] = {FRESHET_GRID_KERNELS};

}  // namespace freshet::cpu

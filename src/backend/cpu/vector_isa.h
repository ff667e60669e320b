// The sets of vector kernels, one per source vector_<isa>.cc.
#pragma once

#include "ops/kernel_table.h"

namespace freshet::cpu {

extern const ops::VectorKernels kVectorAvx2;
extern const ops::VectorKernels kVectorAvx512;
extern const ops::VectorKernels kVectorNeon;

}  // namespace freshet::cpu

// The rows of the reference table, by op; internal to this directory.
//
// Plain code that defines each op; every other row is tested against it. GEMMs sum in F32 partial
// sums of fixed size, which are added in double; everything else is computed in double and rounded
// once.
#pragma once

#include <span>

#include "ops/kernel_table.h"

namespace freshet::ops {

std::span<const MatmulKernel> reference_matmul();        // in the order of quant::Format
std::span<const AttentionKernel> reference_attention();  // one row, for every shape
std::span<const VectorKernels> reference_vector();       // one row
std::span<const ScoreKernel> reference_scores();         // one row

}  // namespace freshet::ops

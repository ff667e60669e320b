// The rows of the reference table, by op; internal to this room.
//
// Plain code that says what each op means; every other row is tested against it. Sums of products
// run in F32 partial sums of fixed size that add up in double, and all else in double, rounded
// once.
#pragma once

#include <span>

#include "ops/kernel_table.h"

namespace freshet::ops {

std::span<const MatmulKernel> reference_matmul();        // in the order of quant::Format
std::span<const AttentionKernel> reference_attention();  // one row, for every shape
std::span<const VectorKernels> reference_vector();       // one row

}  // namespace freshet::ops

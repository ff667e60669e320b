// The rows of the CPU table, each list best first, as the kernel sources of this room export them;
// table.cc puts them together. Immutable, thread-safe. A list may name rows that this processor
// cannot run: Ops asks Capabilities before it takes one.
#pragma once

#include <span>

#include "ops/kernel_table.h"

namespace freshet::cpu {

std::span<const ops::MatmulKernel> matmul_kernels();
std::span<const ops::ActEncoder> act_encoders();
std::span<const ops::AttentionKernel> attention_kernels();
std::span<const ops::VectorKernels> vector_kernels();

}  // namespace freshet::cpu

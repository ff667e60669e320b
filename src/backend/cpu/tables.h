// The rows of the CPU table, each list best first, as the kernel sources of this room export them;
// table.cc puts them together. Immutable, thread-safe. A list may name rows that this processor
// cannot run: Ops asks Capabilities before it takes one.
#pragma once

#include <span>

#include "backend/cpu/matmul_call.h"
#include "ops/kernel_table.h"

namespace freshet::cpu {

std::span<const ops::MatmulKernel> matmul_kernels();
// The call as the kernels of a row take it; `gate`: room for its gate.
MatmulCall call_of(const ops::MatmulArgs& args, const uint8_t* act, int64_t act_row_bytes,
                   GateCall& gate);
std::span<const ops::ActEncoder> act_encoders();
std::span<const ops::AttentionKernel> attention_kernels();
std::span<const ops::VectorKernels> vector_kernels();

}  // namespace freshet::cpu

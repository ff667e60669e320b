// The rows of the CPU kernel table, each list with the best row first, as exported by the kernel
// sources of this directory; table.cc joins them. Immutable, thread-safe. A list may contain rows
// that this processor cannot run: Ops checks Capabilities before it picks one.
#pragma once

#include <span>

#include "backend/cpu/matmul_call.h"
#include "ops/kernel_table.h"

namespace freshet::cpu {

std::span<const ops::MatmulKernel> matmul_kernels();
// Converts the arguments to a kernel's call; `gate` is storage for its gate.
MatmulCall call_of(const ops::MatmulArgs& args, const uint8_t* act, int64_t act_row_bytes,
                   GateCall& gate);
std::span<const ops::ActEncoder> act_encoders();
std::span<const ops::AttentionKernel> attention_kernels();
std::span<const ops::VectorKernels> vector_kernels();
std::span<const ops::ScoreKernel> score_kernels();

}  // namespace freshet::cpu

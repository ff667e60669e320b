// The CPU backend: what the processor can do, and the kernels for it.
#pragma once

#include "ops/kernel_table.h"

namespace freshet::cpu {

// Detects the processor's features (CPUID bits, XGETBV, the system's permission for tiles; on ARM
// the kernel's hardware capabilities; never a model name), capped at `limit`.
ops::Capabilities detect(ops::CpuIsa limit = ops::kAnyIsa);

// All rows that this program was built with, for any processor. Thread-safe, immutable.
const ops::KernelTable& kernels();

}  // namespace freshet::cpu

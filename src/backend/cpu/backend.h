// The CPU backend: what the processor can do, and the kernels for it.
#pragma once

#include "ops/kernel_table.h"

namespace freshet::cpu {

// What the processor can do (CPUID bits, XGETBV, the system's permission for tiles; the kernel's
// hardware capabilities on ARM; never a model name), capped at `limit`.
ops::Capabilities detect(ops::CpuIsa limit = ops::kAnyIsa);

// Every row this program was built with, whatever the processor; thread-safe, immutable.
const ops::KernelTable& kernels();

}  // namespace freshet::cpu

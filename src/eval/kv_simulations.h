// Published ways of keeping keys and values that the engine does not serve, computed plainly for
// comparison: kernels for the reference path that store F32 and read what a method would read.
// Pure and thread-safe.
//
// KIVI (arXiv:2402.02750): keys in groups of 32 tokens of a channel, values in groups of 32
// channels of a token, each rounded to 2^bits steps between its least and its largest number, which
// are kept as an F16 step and an F16 minimum. The newest tokens stay as they are: keys until 128 of
// them are full, 128 values. Every token reads what it would have read in generation, one token at
// a time, so the figures do not depend on how a text is cut.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "layers/spec.h"
#include "ops/kernel_table.h"

namespace freshet::eval {

// One line that says why a model cannot be simulated, or ok.
Status check_simulated(const ModelSpec& spec);

// bits: 2 or 4. The sessions keep F32 and compute with reference = true.
const ops::KernelTable& kivi_kernels(int bits);
// With the full-precision part in F16, after `tokens` tokens.
double kivi_bytes_per_token(const ModelSpec& spec, int bits, int64_t tokens);

}  // namespace freshet::eval

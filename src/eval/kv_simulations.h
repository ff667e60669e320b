// Published ways of keeping keys and values that the engine does not serve, computed plainly for
// comparison: kernels for the reference path that store F32 and read what a method would read.
// Pure and thread-safe.
//
// Numbers are rounded to 2^bits steps between a least and a greatest number, in F16. Every token
// reads what it would have read in generation, one token at a time, so the figures do not depend on
// how a text is cut (behind the first 128 tokens).
// - kivi (arXiv:2402.02750): keys in groups of 32 tokens of a channel, values in groups of 32
//   channels of a token. The newest tokens stay as they are: keys until 128 of them are full, 128
//   values.
// - gear (arXiv:2403.05527): chunks of 64 tokens, which stay as they are until they are full. Of a
//   key's channel and of a value's token the least and the greatest number (values: 1 % at either
//   end) stay exact. What rounding the others leaves is added as a matrix of rank 4.
// - wkvquant (arXiv:2402.12065) without what it learns: channels are shifted and scaled by their
//   ranges in the first 128 tokens, then a head of a token is a group. A token reads its own key
//   and value exactly.
// - kvquant (arXiv:2401.18079) after the rotary embedding and with equal steps: a key's channel has
//   the range of the first 128 tokens without the outermost percents, a value's token its own; what
//   lies outside is exact, and so are the first 4 tokens.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "layers/spec.h"
#include "ops/kernel_table.h"

namespace freshet::eval {

// One line that says why a model cannot be simulated, or ok.
Status check_simulated(const ModelSpec& spec);

// "kivi2", "kivi4", "gear2" ...: with the number of bits.
std::vector<std::string_view> simulated_methods();
// method: an index in that list. The sessions keep F32 and compute with reference = true.
const ops::KernelTable& simulated_kernels(int method);
// What stays exact counts as F16. After `tokens` tokens.
double simulated_bytes_per_token(const ModelSpec& spec, int method, int64_t tokens);

}  // namespace freshet::eval

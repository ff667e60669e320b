// Published FP8 weights as rows of the storage format.
//
// A tensor of type F8_E4M3 has a second one of scales that its numbers are multiplied by, named as
// it is with "_scale_inv" (quant_method "fp8") or "_scale" (compressed-tensors, FBGEMM) at the end.
// Its shape says what it means: one number for the whole, one a row, or one a block of rows and
// columns, which quantization_config gives (128 by 128 where it does not). Scales of activations
// are not read: ours are found as they come. Pure.
#pragma once

#include "models/weight_reader.h"

namespace freshet::models {

// The matrix [rows, cols] number `index` of `count` in `weight`, which lie one after the other.
Result<Rows> fp8_rows(const WeightReader& reader, const loader::TensorSource& weight, int64_t index,
                      int64_t count, int64_t rows, int64_t cols);

}  // namespace freshet::models

// Published FP8 and INT8 weights as rows of the storage formats.
//
// A tensor of type F8_E4M3 or I8 has a second one of scales that its numbers are multiplied by,
// named as it is with "_scale_inv" (quant_method "fp8") or "_scale" (compressed-tensors, FBGEMM) at
// the end. Its shape says what it means: one number for the whole, one a row or, of FP8, one a
// block of rows and columns, which quantization_config gives (128 by 128 where it does not). Scales
// of activations are not read: ours are found as they come. Pure.
#pragma once

#include "models/weight_reader.h"

namespace freshet::models {

// Whether a tensor of this type is read here.
inline bool has_scales(std::string_view dtype) {
  return dtype == "F8_E4M3" || dtype == "I8";
}

// The matrix [rows, cols] number `index` of `count` in `weight`, which lie one after the other.
Result<Rows> scaled_rows(const WeightReader& reader, const loader::TensorSource& weight,
                         int64_t index, int64_t count, int64_t rows, int64_t cols);

}  // namespace freshet::models

// Published FP8 and INT8 weights as rows of the storage formats.
//
// A tensor of type F8_E4M3 or I8 comes with a tensor of scales, which has its name with
// "_scale_inv" (quant_method "fp8") or "_scale" (compressed-tensors, FBGEMM) at the end. Numbers
// are multiplied by their scale. The shape tells what a scale is for: the whole matrix, a row, or
// for FP8 a block of rows and columns, whose size is in quantization_config (128 by 128 if it is
// not). Scales of activations are not read: activations are quantised dynamically. Pure.
#pragma once

#include "models/weight_reader.h"

namespace freshet::models {

// Whether a tensor of this type is read here.
inline bool has_scales(std::string_view dtype) {
  return dtype == "F8_E4M3" || dtype == "I8";
}

// Matrix `index` of `count` matrices [rows, cols], which lie one after the other in `weight`.
Result<Rows> scaled_rows(const WeightReader& reader, const loader::TensorSource& weight,
                         int64_t index, int64_t count, int64_t rows, int64_t cols);

}  // namespace freshet::models

// Published FP8 and INT8 weights as rows of the storage formats.
//
// A tensor of type F8_E4M3 or I8 comes with a tensor of scales, which has its name with
// "_scale_inv" (quant_method "fp8") or "_scale" (compressed-tensors, ModelOpt, FBGEMM) at the end,
// or is X.SCB for X.weight (bitsandbytes: the largest magnitude of each row, 127 times the scale).
// Numbers are multiplied by their scale; scales of type U8 or F8_E8M0 are powers of two. The shape
// tells what a scale is for: the whole matrix, a row, a group of a row's columns, or for FP8 a
// block of rows and columns, whose size is in quantization_config (128 by 128 if it is not). INT8
// may have zero points. Beside an X.weight of INT8 there may be outlier columns, whose activations
// are not rounded: X.outlier_columns, I32 [n] ascending, and their numbers X.outlier_weight [N, n]
// in 16 bits; what X.weight holds there does not count. Scales of activations are not read:
// activations are quantised dynamically or not at all. Pure.
#pragma once

#include <string>
#include <string_view>

#include "models/weight_reader.h"

namespace freshet::models {

// Whether a tensor of this type is read here.
inline bool has_scales(std::string_view dtype) {
  return dtype == "F8_E4M3" || dtype == "I8";
}

// The name of the scales that bitsandbytes writes beside a weight of 8 bits.
std::string bitsandbytes_scale(std::string_view weight);

// Matrix `index` of `count` matrices [rows, cols], which lie one after the other in `weight`.
Result<Rows> scaled_rows(const WeightReader& reader, const loader::TensorSource& weight,
                         int64_t index, int64_t count, int64_t rows, int64_t cols, Inputs inputs);

// The most columns of a weight that has outlier columns, with these; 0: no weight has any.
int64_t split_cols(const loader::Checkpoint& checkpoint);

// The names of the outlier columns of a weight of 8 bits, and of their numbers.
std::string outlier_columns_of(std::string_view weight);
std::string outlier_weight_of(std::string_view weight);

}  // namespace freshet::models

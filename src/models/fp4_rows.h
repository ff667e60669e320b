// Published NVFP4 and MXFP4 weights of linear layers as rows of the storage formats.
//
// A byte holds two E2M1 codes, the even column in the low half. K inputs, N outputs:
//
//   compressed-tensors   X.weight_packed U8 [N, K / 2]; NVFP4: X.weight_scale F8_E4M3 [N, K / 16]
//   and
//                        X.weight_global_scale F32, by which the scales are divided; MXFP4:
//                        X.weight_scale U8 [N, K / 32], exponents of two with a bias of 127
//   ModelOpt             X.weight U8 [N, K / 2], X.weight_scale F8_E4M3 [N, K / 16] and
//                        X.weight_scale_2 F32, by which the scales are multiplied
//
// The types of the tensors decide; quantization_config is not read. Scales of activations are not
// used: activations keep their precision. Pure.
#pragma once

#include "models/weight_reader.h"

namespace freshet::models {

// Whether `source` holds such codes: U8, with its scales beside it.
bool is_fp4(const WeightReader& reader, const loader::TensorSource& source);

// The matrix [rows, cols].
Result<Rows> fp4_rows(const WeightReader& reader, const loader::TensorSource& packed, int64_t rows,
                      int64_t cols);

}  // namespace freshet::models

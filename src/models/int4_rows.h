// Published weights of 4 bits in groups, as rows of a storage format: GPTQ, AWQ (GEMM) and the
// "pack-quantized" of compressed-tensors.
//
// All hold whole numbers q in I32 words, lowest first, and mean (q - z) * d with a scale d and a
// zero point z a group of inputs. K inputs, N outputs, G groups:
//
//   GPTQ   X.qweight [K / 8, N], X.qzeros [G, N / 8] (one less than z, as one number of 32 bits;
//          with checkpoint_format "gptq_v2" z itself), X.scales [G, N], X.g_idx [K]
//   AWQ    X.qweight [K, N / 8], X.qzeros [G, N / 8], X.scales [G, N]; of each eight outputs the
//          even ones come first
//   compressed-tensors   X.weight_packed [N, K / 8], X.weight_scale [N, G], X.weight_zero_point
//          [N / 8, G] (none: 8), X.weight_g_idx [K]
//
// GPTQ and compressed-tensors hold numbers of 8 bits likewise, four a word. Shapes say how many
// bits and groups there are, since modules may differ; quantization_config says which layout it is.
// g_idx names each input's group; where groups are no runs of inputs (act-order, desc_act), columns
// are sorted by group, and Rows::inputs says which they are. Pure.
#pragma once

#include "models/weight_reader.h"

namespace freshet::models {

// What the names of such tensors end with, in place of ".weight".
inline constexpr std::string_view kPackedSuffixes[] = {".qweight", ".weight_packed"};
bool is_packed(const loader::TensorSource& source);

// The matrix [rows, cols]: int4_g128 where groups are whole blocks of it, else int4_g32, or q4_0
// where that holds the same numbers and is smaller, or all that the device multiplies; of 8 bits
// q8_0.
Result<Rows> int4_rows(const WeightReader& reader, const loader::TensorSource& packed, int64_t rows,
                       int64_t cols, Inputs inputs);

}  // namespace freshet::models

// Published weights of integers in groups, as rows of a storage format: GPTQ, AWQ (GEMM) and the
// "pack-quantized" of compressed-tensors.
//
// All hold integers q of b bits in I32 words, lowest bits first, and mean (q - z) * d with a scale
// d and a zero point z for each group of inputs. K inputs, N outputs, G groups:
//
//   GPTQ   X.qweight [K b / 32, N], X.qzeros [G, N b / 32] (z - 1, subtracted from the whole word
//   of
//          32 bits; z itself with checkpoint_format "gptq_v2"), X.scales [G, N], X.g_idx [K]
//   AWQ    4 bits: X.qweight [K, N / 8], X.qzeros [G, N / 8], X.scales [G, N]; in each eight
//   outputs
//          the even ones come first
//   compressed-tensors   X.weight_packed [N, K b / 32], X.weight_scale [N, G], [N] or one,
//          X.weight_zero_point [N b / 32, G] (none: 2^(b - 1)), X.weight_g_idx [K]
//
// b is 2 to 8. Numbers of 3, 5, 6 and 7 bits straddle words; compressed-tensors packed whole
// numbers into each word until 2025, which the width of weight_packed tells. The shapes tell how
// many bits and groups there are, since modules may differ; quantization_config tells the layout.
// g_idx gives the group of each input. If groups are not runs of inputs (act-order, desc_act),
// columns are sorted by group, and Rows::inputs gives their inputs. Pure.
#pragma once

#include "models/weight_reader.h"

namespace freshet::models {

// How the names of such tensors end, in place of ".weight".
inline constexpr std::string_view kPackedSuffixes[] = {".qweight", ".weight_packed"};
bool is_packed(const loader::TensorSource& source);

// The matrix [rows, cols] in a format that holds the same numbers: int2, int3 (int4 on a device
// without them), int4 or q4_0, q8_0 or int8; f32 if groups are not multiples of 32.
Result<Rows> integer_rows(const WeightReader& reader, const loader::TensorSource& packed,
                          int64_t rows, int64_t cols, Inputs inputs);

}  // namespace freshet::models

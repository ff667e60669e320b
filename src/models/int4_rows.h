// Published weights of 4 bits in groups, as rows of a storage format: GPTQ, AWQ (GEMM) and the
// "pack-quantized" of compressed-tensors.
//
// All hold integers q in I32 words, lowest bits first, and mean (q - z) * d with a scale d and a
// zero point z for each group of inputs. K inputs, N outputs, G groups:
//
//   GPTQ   X.qweight [K / 8, N], X.qzeros [G, N / 8] (z - 1, subtracted from the whole word of 32
//          bits; z itself with checkpoint_format "gptq_v2"), X.scales [G, N], X.g_idx [K]
//   AWQ    X.qweight [K, N / 8], X.qzeros [G, N / 8], X.scales [G, N]; in each eight outputs the
//          even ones come first
//   compressed-tensors   X.weight_packed [N, K / 8], X.weight_scale [N, G], X.weight_zero_point
//          [N / 8, G] (none: 8), X.weight_g_idx [K]
//
// GPTQ and compressed-tensors hold numbers of 8 bits likewise, four in a word. The shapes tell how
// many bits and groups there are, since modules may differ; quantization_config tells the layout.
// g_idx gives the group of each input. If groups are not runs of inputs (act-order, desc_act),
// columns are sorted by group, and Rows::inputs gives their inputs. Pure.
#pragma once

#include "models/weight_reader.h"

namespace freshet::models {

// How the names of such tensors end, in place of ".weight".
inline constexpr std::string_view kPackedSuffixes[] = {".qweight", ".weight_packed"};
bool is_packed(const loader::TensorSource& source);

// The matrix [rows, cols]: int4_g128 if groups are whole blocks of it, otherwise int4_g32, or q4_0
// if that holds the same numbers; q8_0 for 8 bits.
Result<Rows> int4_rows(const WeightReader& reader, const loader::TensorSource& packed, int64_t rows,
                       int64_t cols, Inputs inputs);

}  // namespace freshet::models

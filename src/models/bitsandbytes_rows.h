// Published NF4 and FP4 weights of bitsandbytes as rows of the storage formats.
//
//   X.weight          codes, two in a byte, the first in the high half, row by row
//   X.weight.absmax   F32 for each block of codes; or U8, an index into .nested_quant_map, times
//                     .nested_absmax (F32 for each block of absmax), plus nested_offset
//   X.weight.quant_map    F32 [16], the levels of the codes
//   X.weight.quant_state.bitsandbytes__nf4 (or __fp4)   the text of a JSON object with quant_type,
//                     blocksize, shape, nested_blocksize and nested_offset
//
// Blocks run through the weight row by row. Where a row is no whole number of 64 codes, the matrix
// becomes F32, since blocks straddle rows. Pure.
#pragma once

#include "models/weight_reader.h"

namespace freshet::models {

bool is_bitsandbytes4(const WeightReader& reader, const loader::TensorSource& source);

// The matrix [rows, cols].
Result<Rows> bitsandbytes4_rows(const WeightReader& reader, const loader::TensorSource& weight,
                                int64_t rows, int64_t cols);

}  // namespace freshet::models

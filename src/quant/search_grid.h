// The search of the encoders of grid and ternary formats: as search.h, but the values of a block
// are entries of a grid, which are found among those near the rounded values.
//
// x must be finite and some w positive; prepare_block() ensures both. The result is the same on
// every machine. Thread-safe; the first call for a grid builds its table of neighbours.
#pragma once

#include <cstdint>

#include "quant/format.h"

namespace freshet::quant {

// 256 values, x ~ (d / parts * (2 scale + 1)) * entry, with the `parts` of the format's definition.
struct GridBlock {
  uint16_t d = 0;           // f16
  uint8_t scale[16] = {};   // by group
  uint16_t entry[64] = {};  // by 8 values (by 4 in IQ3)
  uint8_t minus[32] =
      {};  // by 8 values: bit i is set if value i is negative; for IQ1, 1 if delta is
};

// f: a format of IQ1, IQ2 or IQ3.
void fit_grid_block(Format f, const float* x, const float* w, GridBlock& out);

// 256 values, x ~ d * q with q of -1, 0, 1: the best d and q, exactly but for the rounding of d.
uint16_t fit_ternary_block(const float* x, const float* w, int8_t* q);

}  // namespace freshet::quant

// The grids of the IQ formats: lists of 8 or 4 values that belong together, found by an index.
//
// An entry is stored as quads: four values in the bytes of a uint32_t, the first in the lowest
// byte; entries of 8 values are two consecutive quads. The values of IQ2 and IQ3 are magnitudes;
// those of IQ1 are 0, 1, 2 for -1, 0, 1. Immutable data without constructors, so that sources
// compiled for one instruction set may use it.
#pragma once

#include <cstdint>

namespace freshet::quant {

template <int kEntries, int kQuads>
struct alignas(64) IqGrid {
  static constexpr int kCount = kEntries;
  static constexpr int kValues = 4 * kQuads;  // of an entry
  uint32_t quads[kEntries * kQuads];

  int value(int entry, int i) const {
    return static_cast<int>(quads[entry * kQuads + i / 4] >> (8 * (i % 4)) & 255);
  }
};

extern const IqGrid<256, 2> kGridIQ2_XXS;  // 8, 25 or 43
extern const IqGrid<512, 2> kGridIQ2_XS;
extern const IqGrid<1024, 2> kGridIQ2_S;
extern const IqGrid<256, 1> kGridIQ3_XXS;  // 4, 12 .. 52, 62
extern const IqGrid<512, 1> kGridIQ3_S;    // 1, 3 .. 15
extern const IqGrid<2048, 2> kGridIQ1;     // IQ1_S and IQ1_M

// The signs of 8 values from the 7 that are stored: their number of minuses is even.
inline uint32_t iq_even_signs(uint32_t seven) {
  uint32_t odd = seven ^ seven >> 4;
  odd ^= odd >> 2;
  odd ^= odd >> 1;
  return seven | (odd & 1) << 7;
}

// out[i] = d times entry `entry` of the grid, negated where bit i of `signs` is set.
template <class Grid>
inline void decode_entry(const Grid& grid, int entry, uint32_t signs, float d, float* out) {
  for (int i = 0; i < Grid::kValues; ++i) {
    const float v = d * static_cast<float>(grid.value(entry, i));
    out[i] = (signs >> i & 1) != 0 ? -v : v;
  }
}

}  // namespace freshet::quant

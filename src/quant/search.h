// The scale search of the encoders: weighted least squares over a fixed list of candidates.
//
// Every function minimises sum w (x - decoded)^2 over one block: it tries scales around the one
// that just covers the block, refits each in closed form, and keeps the best. Sums run in a fixed
// order in plain float lanes, so the result is the same on every machine. x must be finite and some
// w positive; prepare_block() ensures both. Pure and thread-safe.
#pragma once

#include <cstdint>

#include "quant/format.h"
#include "tensor/dtype.h"

namespace freshet::quant {

// Copies n values and their weights. NaN becomes 0 and magnitudes are capped (no format here could
// store them); missing or unusable weights become equal weights.
void prepare_block(const float* in, const float* importance, int n, float* x, float* w);

// The levels lo .. hi: all integers between them.
struct LinearGrid {
  int lo;
  int hi;
};
// Sixteen ascending levels.
struct TableGrid {
  const int8_t* levels;
};

// A block's parameters and levels, between a format's fit() and store(). encode() is both; an
// encoder that chooses other levels for the same parameters changes q in between.
struct SymmetricBlock {
  uint16_t d;  // f16
  int8_t q[32];
};
struct AffineBlock {
  uint16_t d;  // f16
  uint16_t m;  // f16
  int8_t q[32];
};

// Finds d (an f16, returned) and the levels q of a block of N values, x ~ d * q. N is 32.
template <int N>
uint16_t fit_symmetric_block(const float* x, const float* w, int lo, int hi, int8_t* q);
template <int N>
uint16_t fit_table_block(const float* x, const float* w, const int8_t* levels, int8_t* q);

// The same with d = 2^e, e in [e_lo, e_hi], which is returned. N is 32.
template <int N>
int fit_power_block(const float* x, const float* w, const int8_t* levels, int e_lo, int e_hi,
                    int8_t* q);

// Finds d >= 0, m and q in [0, top], x ~ d * q + m. N is 32.
template <int N>
void fit_affine_block(const float* x, const float* w, int top, int8_t* q, uint16_t& d, uint16_t& m);

// 256 values in G groups, x ~ (d * scale[group]) * q.
template <int G>
struct SymmetricSuperBlock {
  uint16_t d;  // f16
  int scale[G];
  int8_t q[256];  // levels, not their indices
};
template <int G, class Grid>
void fit_symmetric_super_block(const float* x, const float* w, Grid grid, int scale_lo,
                               int scale_hi, SymmetricSuperBlock<G>& out);

// 256 values in G groups, x ~ (d * scale[group]) * q - dmin * min[group], q in [0, top].
template <int G>
struct AffineSuperBlock {
  uint16_t d;     // f16
  uint16_t dmin;  // f16
  uint8_t scale[G];
  uint8_t min[G];
  int8_t q[256];
};
template <int G>
void fit_affine_super_block(const float* x, const float* w, int top, int scale_top,
                            AffineSuperBlock<G>& out);

}  // namespace freshet::quant

// The arguments of a kernel that is compiled for an instruction set. Plain data only, so that its
// translation unit needs no inline function of the standard library: the linker might keep the copy
// compiled there, and use it on processors that lack the instructions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "quant/format.h"

namespace freshet::cpu {

// See ops::GateArgs.
struct GateCall {
  const uint8_t* packed;
  const float* bias;
  float scale;
  void (*glu)(float* out, const float* gate, const float* up, int64_t n, int activation,
              float limit, float alpha);
  int activation;
  float limit;
  float alpha;
};

struct MatmulCall {
  const uint8_t* packed;
  int64_t rows;
  int64_t cols;
  int64_t tokens;
  const int32_t* rows_index;  // nullptr: activation rows in order
  const uint8_t* act;
  int64_t act_row_bytes;
  float* out;  // [tokens, rows]
  int64_t out_stride;
  const float* bias;
  float scale;
  bool add;
  const GateCall* gate = nullptr;
};

// Computes panels [first, last) for all tokens.
using MatmulRun = void (*)(const MatmulCall& call, int64_t first, int64_t last);
// Encodes a part of a row, see ops::ActEncoder.
using EncodeRow = void (*)(const float* x, int64_t cols, int64_t first, int64_t last, bool fine,
                           uint8_t* out);

inline constexpr int kFormats = 40;

// Grid and ternary formats, which are adjacent in quant::Format. Their kernels are compiled as
// separate sources.
inline constexpr quant::Format kFirstGrid = quant::Format::kIQ1_S;
inline constexpr int kGrids = 9;
static_assert(static_cast<int>(quant::Format::kTQ2_0) - static_cast<int>(kFirstGrid) == kGrids - 1);

// The kernels of one instruction set; nullptr if it has none of its own.
struct IsaKernels {
  MatmulRun run[kFormats];  // by quant::Format, except `grids`
  EncodeRow bf16;
  EncodeRow q8x256;
  EncodeRow int8;
  uint64_t gates = 0;                // bit f: whether GEMMs of format f accept MatmulCall::gate
  const MatmulRun* grids = nullptr;  // by quant::Format, from kFirstGrid on

  constexpr MatmulRun run_of(quant::Format f) const {
    const int at = static_cast<int>(f) - static_cast<int>(kFirstGrid);
    const bool in_grids = grids != nullptr && at >= 0 && at < kGrids;
    return in_grids ? grids[at] : run[static_cast<int>(f)];
  }
};

extern const IsaKernels kScalarKernels;
extern const IsaKernels kAvx2Kernels;
extern const IsaKernels kAvxVnniKernels;
extern const IsaKernels kAvx512Kernels;
extern const IsaKernels kAvx512VnniKernels;
extern const IsaKernels kAmxKernels;
extern const IsaKernels kNeonKernels;
extern const IsaKernels kNeonDotKernels;

extern const MatmulRun kScalarGrids[kGrids];
extern const MatmulRun kAvx2Grids[kGrids];
extern const MatmulRun kAvxVnniGrids[kGrids];
extern const MatmulRun kAvx512VnniGrids[kGrids];
extern const MatmulRun kNeonGrids[kGrids];
extern const MatmulRun kNeonDotGrids[kGrids];

}  // namespace freshet::cpu

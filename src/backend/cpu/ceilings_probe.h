// Loops that keep one kind of arithmetic unit busy, compiled for each instruction set. Plain data
// only; matmul_call.h says why.
#pragma once

#include <cstdint>

namespace freshet::cpu {

struct Probe {
  const char* name;   // "avx2 f32"
  double operations;  // per iteration of the loop
  void (*run)(int64_t turns);
};

// nullptr: this build has no such arithmetic.
struct IsaProbes {
  Probe f32;
  Probe int8;
};
extern const IsaProbes kAvx2Probes;
extern const IsaProbes kAvxVnniProbes;
extern const IsaProbes kAvx512Probes;
extern const IsaProbes kAvx512VnniProbes;
extern const Probe kTileBf16Probe;
extern const Probe kTileInt8Probe;
extern const IsaProbes kNeonProbes;
extern const IsaProbes kNeonDotProbes;

}  // namespace freshet::cpu

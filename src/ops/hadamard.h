// The Hadamard transform of keys, values and queries (KvFormat::rotated), for kernels of every
// instruction set: each source compiles its own copy. Additions are in a fixed order and followed
// by one multiplication, so all copies are bit-identical.
#pragma once

#include <cmath>

#include "ops/kv_type.h"

namespace freshet::ops {
namespace {

// Transforms n values in place, in blocks of rotation_size(n).
[[maybe_unused]] void hadamard(float* x, int n) {
  const int size = rotation_size(n);
  if (size == 1) return;
  const float factor = 1.0f / std::sqrt(static_cast<float>(size));
  for (float* const end = x + n; x < end; x += size) {
    for (int half = 1; half < size; half *= 2) {
      for (int i = 0; i < size; i += 2 * half) {
        for (int j = i; j < i + half; ++j) {
          const float a = x[j], b = x[j + half];
          x[j] = a + b;
          x[j + half] = a - b;
        }
      }
    }
    for (int i = 0; i < size; ++i) x[i] *= factor;
  }
}

}  // namespace
}  // namespace freshet::ops

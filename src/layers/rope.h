// Frequencies of rotary embeddings.
//
// Computed as Hugging Face transformers does, in F32 where it does, since a last-bit difference in
// a frequency grows with the position. Pure.
#pragma once

#include <cstdint>
#include <vector>

#include "layers/spec.h"

namespace freshet {

// [rotary_dim / 2]. If the frequencies depend on the length (dynamic, LongRoPE), they are those for
// sequences of up to `context` tokens. The plan fixes them, not the current batch, so that a cached
// key stays valid as its sequence grows.
std::vector<float> rope_frequencies(const RopeSpec& rope, int64_t context);

// YaRN's temperature, 0.1 * mscale * ln(factor) + 1.
double yarn_mscale(double factor, double mscale);

}  // namespace freshet

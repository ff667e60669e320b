// bitsandbytes' double quantisation: the scales (absmax) of 4-bit blocks, less their mean, become
// codes of 8 bits on a map of 256 numbers, in blocks of 256 with an F32 scale each. Pure;
// thread-safe.
#pragma once

#include <array>
#include <span>
#include <vector>

#include "quantizer/coded_matrix.h"

namespace freshet::quantizer {

inline constexpr int64_t kScalesPerBlock = 256;  // of the second quantisation

// The signed dynamic map, in rising order: decades from 1e-6 to 1, each with twice as many numbers
// as the one below it (Dettmers et al., 8-bit Optimizers via Block-wise Quantization).
const std::array<float, 256>& dynamic_map();

// Ties between two numbers of the map go to the lower one.
DoubleScales double_quantise(std::span<const float> absmax);

// What the scales are after it.
std::vector<float> scales_of(const DoubleScales& scales);

}  // namespace freshet::quantizer

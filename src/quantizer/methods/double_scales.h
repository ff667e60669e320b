// Double quantisation of NF4's and FP4's scales, as bitsandbytes stores them: the scales less their
// mean, in blocks of 256 with an F32 each, as codes of its signed 8-bit "dynamic" map.
//
// Pure; thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace freshet::quantizer {

struct DoubleScales {
  static constexpr int kBlock = 256;
  std::vector<uint8_t> codes;
  std::vector<float> block_max;  // nested_absmax
  float offset = 0.0f;           // nested_offset
  // The scales that readers compute.
  std::vector<float> values() const;
};
DoubleScales double_quantise(const std::vector<float>& scales);

// The map's 256 numbers, ascending from -1 + to 1.
const std::array<float, 256>& dynamic_map();

}  // namespace freshet::quantizer

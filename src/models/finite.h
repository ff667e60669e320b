// Whether stored weights are numbers: a NaN or an infinity in one block would spread through every
// sum that touches it, and a truncated or corrupt file is better refused than run.
#pragma once

#include <cstdint>
#include <span>

#include "quant/format.h"

namespace freshet::models {

// Checks `n` stored numbers (a multiple of the format's block size). Reads only what can make a
// block infinite: its F16 scales, where it has such, and otherwise all of it.
bool all_finite(quant::Format format, const uint8_t* data, int64_t n);
bool all_finite(std::span<const float> values);

}  // namespace freshet::models

// Checks that stored weights are finite. A NaN or an infinity in one block would spread through
// every sum that reads it, so a corrupt file is refused.
#pragma once

#include <cstdint>
#include <span>

#include "quant/format.h"

namespace freshet::models {

// Checks `n` stored numbers (a multiple of the format's block size). Reads only the bytes that can
// make a block infinite: its F16 scales, if it has any, otherwise all of it.
bool all_finite(quant::Format format, const uint8_t* data, int64_t n);
bool all_finite(std::span<const float> values);

}  // namespace freshet::models

// Schemes of quantisation by name: compressed-tensors' presets, bitsandbytes' types, and forms of
// them with another group.
//
// Names are read in any case, with '-' or '_'. Suffixes change a preset: _G<n> (groups of n
// columns, e.g. W4A16_G32), _CHANNEL (one scale per row), _ASYM (zero points), _PLAIN (NF4 and FP4
// without double quantisation), _OUTLIERS (LLM_INT8 with the outlier columns that calibration
// found). Pure; thread-safe.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "quantizer/coded_matrix.h"

namespace freshet::quantizer {

// An unknown name is an error that gives the nearest one and the list.
Result<Scheme> scheme_by_name(std::string_view name);

// The presets, without suffixes, in the order of the documentation.
std::vector<std::string> scheme_names();

// Whether activations have a scale that calibration must find (CodedMatrix::input_scale).
bool needs_input_scale(const Scheme& scheme);
// Whether calibration must see the inputs, whatever the method is.
bool needs_inputs(const Scheme& scheme);

}  // namespace freshet::quantizer

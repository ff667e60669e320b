// The methods of a quantisation, as --method names them: "gptq", "awq+gptq". Pure; thread-safe.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"

namespace freshet::quantizer {

struct MethodSet {
  bool imatrix = false;      // errors weighted by the inputs' mean squares
  bool gptq = false;         // error feedback
  bool awq = false;          // scales of input channels by the loss after rounding
  bool smoothquant = false;  // ... by the magnitudes of inputs and weights

  // Names joined by '+'; "rtn" is none of them.
  static Result<MethodSet> parse(std::string_view text);
  std::string name() const;
  bool needs_text() const { return imatrix || gptq || awq || smoothquant; }
  bool scales_channels() const { return awq || smoothquant; }
};

}  // namespace freshet::quantizer

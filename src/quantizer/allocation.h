// Chooses one option for each item so that the sum of losses is small within a budget of bytes.
//
// For tensors and their formats, or layers and their schemes. The search is a dynamic program over
// bytes in units: the common divisor of the options' sizes where the budget has few enough of them,
// which gives the optimum; otherwise coarser units, rounded up so that the budget holds, and then
// single changes for as long as one of them lowers the loss within the budget. Deterministic; pure.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"

namespace freshet::quantizer {

struct AllocationOption {
  int64_t bytes = 0;
  double loss = 0;
};
// What one item may be; at least one option.
using AllocationItem = std::vector<AllocationOption>;

struct Allocation {
  std::vector<int> choice;  // an option of each item
  int64_t bytes = 0;
  double loss = 0;
};

// `known`: choices that the result must not be worse than, for instance fixed recipes; those that
// exceed the budget are ignored. An error tells the smallest budget if nothing fits.
Result<Allocation> allocate(std::span<const AllocationItem> items, int64_t budget,
                            std::span<const std::vector<int>> known = {});

}  // namespace freshet::quantizer

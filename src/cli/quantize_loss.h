// The loss of a quantised model, measured as it will be served, and its record in the output.
//
// Single-threaded; on_interrupt handlers must be set by the caller.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "cli/command.h"
#include "eval/compare.h"

namespace freshet::cli {

// Compares the output with the model that it was made from, over windows of 512.
Result<eval::ModelComparison> measure_loss(const std::string& base, const std::string& output,
                                           const std::vector<std::string>& texts, int threads,
                                           Context& context);

// GGUF metadata that record_loss() fills in later: key, and a value written as JSON.
std::vector<std::pair<std::string, std::string>> unmeasured_loss();

// Writes the loss beside the method that the output holds already: in config.json under "freshet",
// or in place of unmeasured_loss().
Status record_loss(const std::string& output, bool gguf, const eval::ModelComparison& loss);

}  // namespace freshet::cli

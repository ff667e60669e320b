// The comparison of models with their base, as subcommands start it.
#pragma once

#include <string>

#include "cli/command.h"
#include "cli/options.h"
#include "eval/compare.h"

namespace freshet::cli {

// Loads the base, a folder, file or name. `run` and `progress` must outlive the result, which opens
// further models with them.
Result<eval::Comparer> open_comparer(eval::Comparer::Options options, const std::string& base,
                                     const RunOptions& run, ProgressLine& progress);

}  // namespace freshet::cli

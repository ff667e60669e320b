// --speculative-config, and llama.cpp's names for the same settings.
//
// add_speculative_options() declares them; after parsing, speculative_config() makes one JSON
// object of what was given. Single-threaded.
#pragma once

#include <string>

#include <CLI/CLI.hpp>

#include "base/status.h"

namespace freshet::cli {

struct SpeculativeOptions {
  std::string config;       // JSON
  std::string draft_model;  // a name, folder or file
  int max_drafts = 0;       // 0: not given
};
void add_speculative_options(CLI::App& command, SpeculativeOptions& options);
// Empty: no speculation.
Result<std::string> speculative_config(const SpeculativeOptions& options);

}  // namespace freshet::cli

// Options of llama.cpp and vLLM, translated into this program's before CLI11 reads them.
//
// An option that the command has itself always wins. Otherwise the table in foreign_options.cc
// decides: options of the same meaning are rewritten, those that ask for what always happens are
// dropped, and others are an error that says what to use here. An option that nobody knows is an
// error that names the nearest known one. docs/cli.md lists the table. Thread-safe.
#pragma once

#include <span>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "base/status.h"

namespace freshet::cli {

enum class ForeignKind {
  kSame,    // takes a value, which goes to the first of `ours` that the command has
  kFlag,    // takes no value; `ours` replaces it, e.g. "--log-stats-interval=0"
  kText,    // takes a value, which becomes the last positional argument
  kAlways,  // takes one of the values `ours`, or none if that is empty, and has no effect
  kCache,   // llama.cpp's type of keys or of values, which together are a --kv-cache-dtype
  kHint,    // an error: `says` tells what to use here
};

struct ForeignOption {
  const char* names;  // "-c,--ctx-size"
  ForeignKind kind;
  const char* ours;
  const char* says;  // why other values of kAlways are refused, or for which options kSame has none
};

std::span<const ForeignOption> foreign_options();

// `arguments`: without the program's name, in order. The error is one line.
Result<std::vector<std::string>> translate_options(const CLI::App& program,
                                                   const std::vector<std::string>& arguments);

}  // namespace freshet::cli

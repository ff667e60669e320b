// Reads the prompts of `run`: files, standard input, lists of ids.
//
// Thread-compatible.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/status.h"

namespace freshet::cli {

// Reads a JSON list of lists of token ids. Ids are not checked against a vocabulary.
Result<std::vector<std::vector<int32_t>>> read_ids(const std::string& path);

// Reads one prompt per line. Lines that are a JSON string are decoded; empty lines are skipped.
// "-": standard input.
Result<std::vector<std::string>> read_prompts(const std::string& path);

// Reads all of standard input, without the last line break.
Result<std::string> read_stdin();

json::Array ids_to_json(const std::vector<int32_t>& ids);
// An error for anything but an array of integers in [0, 2^31).
Result<std::vector<int32_t>> ids_from_json(const json::Value& value);

}  // namespace freshet::cli

// Where `run` gets its prompts from: the command line, a file, standard input, lists of ids.
//
// Thread-compatible.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/status.h"

namespace freshet::cli {

// A JSON list of lists of token ids, as the file holds it. Ids are not compared with a vocabulary.
Result<std::vector<std::vector<int32_t>>> read_ids(const std::string& path);

// A prompt a line; lines that are a JSON string are unquoted, empty ones left out. "-": standard
// input.
Result<std::vector<std::string>> read_prompts(const std::string& path);

// All of standard input, without the last line break.
Result<std::string> read_stdin();

json::Array ids_to_json(const std::vector<int32_t>& ids);
// Refuses anything but an array of integers in [0, 2^31).
Result<std::vector<int32_t>> ids_from_json(const json::Value& value);

}  // namespace freshet::cli

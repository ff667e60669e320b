// The texts that `freshet eval` measures on. Thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace freshet::cli {

// The first `count` characters.
std::string_view first_characters(std::string_view text, int64_t count);

// The contents of the files; with max_chars > 0 only the first characters of all of them together.
Result<std::vector<std::string>> read_texts(const std::vector<std::string>& files,
                                            int64_t max_chars);

}  // namespace freshet::cli

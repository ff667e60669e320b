// How much memory this process may still take, and how sizes are written. Reads the system's files
// anew on each call; thread-safe.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace freshet::engine {

// What the system says is available, and what the process's control group leaves: the smaller. 0:
// unknown.
size_t available_memory();

// The pieces, exposed for tests. 0: not said.
size_t mem_available_of(std::string_view meminfo);
// What a group of `limit` ("max" or bytes) that uses `used` bytes leaves, pages of files that can
// be dropped (`inactive_file` of memory.stat) not counted. SIZE_MAX: no limit.
size_t left_in_group(std::string_view limit, std::string_view used, std::string_view stat);

std::string format_bytes(size_t bytes);  // "9.1 GiB", "512 MiB"

}  // namespace freshet::engine

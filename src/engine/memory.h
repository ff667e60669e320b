// How much memory this process may still take, and how sizes are written. Reads the system's files
// anew on each call; thread-safe.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace freshet::engine {

// The smaller of the memory that the system reports as available and the rest of the process's
// control group. 0: unknown.
size_t available_memory();

// The parts, exposed for tests. 0: not stated.
size_t mem_available_of(std::string_view meminfo);
// The rest of a group of `limit` ("max" or bytes) that uses `used` bytes, without the file pages
// that can be dropped (`inactive_file` of memory.stat). SIZE_MAX: no limit.
size_t left_in_group(std::string_view limit, std::string_view used, std::string_view stat);

std::string format_bytes(size_t bytes);  // "9.1 GiB", "512 MiB"

}  // namespace freshet::engine

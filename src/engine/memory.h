// The memory that this process may still take. Reads the system's files on each call; thread-safe.
#pragma once

#include <cstddef>
#include <string_view>

namespace freshet::engine {

// The smaller of the system's available memory and the room in the process's control group. 0:
// unknown.
size_t available_memory();

// The parts, exposed for tests. 0: not reported.
size_t mem_available_of(std::string_view meminfo);
// The room in a control group of `limit` ("max" or bytes) that uses `used` bytes. Pages of files
// that can be dropped (`inactive_file` of memory.stat) do not count as used. SIZE_MAX: no limit.
size_t left_in_group(std::string_view limit, std::string_view used, std::string_view stat);

}  // namespace freshet::engine

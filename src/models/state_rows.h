// Orders of the rows of linear attention's matrices, which files arrange in three ways. Pure.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

namespace freshet::models {

// From rows that are stored head by head, each with parts of these sizes, to all heads' rows of the
// first part, then of the second ...
std::vector<int64_t> rows_by_part(int64_t heads, std::initializer_list<int64_t> sizes);

// From value heads whose neighbours use one key head to value heads tiled over the key heads
// (DeltaNetSpec::tiled): the rows of head 0 of each key head, then those of head 1 ... `ratio`:
// value heads per key head; each has `size` rows, and `before` rows in front of all stay.
std::vector<int64_t> tiled_rows(int64_t key_heads, int64_t ratio, int64_t size, int64_t before = 0);

}  // namespace freshet::models

// Reading the cache selectively (Quest): which blocks the queries of generated tokens read. Pure.
//
// Queries of the prompt read everything. A query of a generated token reads, for each KV head, its
// own block and those whose bounds promise the highest scores, `budget` tokens together. So the
// rule follows from the sequence alone.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/status.h"

namespace freshet::kv_cache {

struct SparseAttention {
  int32_t budget = 0;        // tokens, a multiple of the block; 0: every query reads everything
  int32_t dense_layers = 2;  // the first layers of the cache, whose queries read everything
  bool selects() const { return budget > 0; }
};

// From a JSON object, {"policy": "quest", "budget": 1024, "dense_layers": 2} or {"policy": "none"}.
// A budget is rounded up to whole blocks. Errors name the key.
Result<SparseAttention> make_sparse_attention(std::string_view json);

}  // namespace freshet::kv_cache

// Reading the cache selectively: which keys and values a request's queries read. Pure.
//
// - quest: a query of a generated token reads, for each KV head, its own block and those whose
//   bounds promise the highest scores, `budget` tokens together.
// - sparq: it reads the newest tokens and those that have the largest weights as far as a few
//   features of the keys tell, `budget` together; the mean of the values stands for the others.
// - static: it reads the first `sinks` tokens, the newest `window`, and blocks at multiples of
//   `stride`; or the prompt's queries do, up to its last `dense_last` tokens, or both.
//
// All others read everything. So the rule follows from the sequence alone.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"
#include "ops/attention.h"

namespace freshet::kv_cache {

enum class SparsePolicy : uint8_t { kNone, kQuest, kSparq, kStatic };

struct SparseAttention {
  int32_t budget = 0;        // of quest and sparq: tokens, a multiple of the block
  int32_t dense_layers = 2;  // the first layers of the cache, whose queries read everything
  SparsePolicy policy = SparsePolicy::kNone;
  int32_t components = 16;                    // of sparq: features
  int32_t sinks = 0, window = 0, stride = 0;  // of static: tokens, multiples of the block
  bool prompt = false, generated = true;      // whose queries select
  int32_t dense_last = 0;                     // of the prompt: these tokens read everything

  bool selects() const { return policy != SparsePolicy::kNone; }
  // Of a prompt of this many tokens.
  ops::BlockSelection rule(int32_t prompt_tokens) const;
  // Of the first `count` tokens of a text, those whose keys and values follow from the tokens and
  // salt() alone and may be shared.
  int32_t sharable(int32_t prompt_tokens, int32_t count) const;
  // Empty, or what the keys and values of prompts depend on besides the tokens.
  std::string salt() const;
  // "sparq"
  std::string_view name() const;
};

// From a JSON object, {"policy": "quest", "budget": 1024, "dense_layers": 2} or {"policy": "none"}.
// Numbers of tokens are rounded up to whole blocks. Errors name the key.
Result<SparseAttention> make_sparse_attention(std::string_view json);

}  // namespace freshet::kv_cache

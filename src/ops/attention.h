// Arguments of attention over a paged cache.
//
// A sequence's cache is a list of blocks of kBlockTokens tokens, given by ids in a block table;
// token p of the sequence is slot p % kBlockTokens of block table[p / kBlockTokens]. The layout of
// a block is private to the kernels that write and read it (block_bytes() gives its size). Entries
// of blocks that have left a sliding window may be -1; they are never read.
#pragma once

#include <cstdint>
#include <span>

#include "base/status.h"
#include "ops/kv_type.h"

namespace freshet::ops {

inline constexpr int kBlockTokens = 16;

// One layer's shape of the cache.
struct KvShape {
  KvType type = KvType::kF16;
  int kv_heads = 0;
  int key_dim = 0;
  int value_dim = 0;
  bool value_is_key_prefix = false;  // MLA: a value is the first value_dim features of its key
  bool biased = false;               // attention adds AttentionParams::distance_bias or ::slopes
  // A block's heads are followed by bounds of its keys: BF16 [kv_heads, 2, key_dim], the minimum
  // and the maximum of each feature, rounded outward. They are valid only for full blocks.
  bool bounded = false;
  // Behind all that, F32 [kv_heads, value_dim]: the sum of the values of the sequence's tokens up
  // to the end of the block. Only those of full blocks are valid.
  bool summed = false;
  // Blocks lie within those of another shape (coarse_shape()): an id counts units of kNestedUnit
  // bytes.
  bool nested = false;
  size_t id_bytes() const;     // block b starts at data + b * id_bytes()
  size_t head_bytes() const;   // of one KV head in a block, scales included
  size_t bounds_at() const;    // where the bounds begin in a block
  size_t sums_at() const;      // where the sums begin
  size_t block_bytes() const;  // of one block of this layer, a multiple of 64
};

// Whether any kernel supports the shape: a value that is a prefix of its key (MLA) can't be stored
// in 4 bits.
Status check_shape(const KvShape& shape);

inline constexpr size_t kNestedUnit = 64;

// Tokens kept in 4 bits beside others (MiKV): blocks of this shape, which take up whole blocks of
// `fine` coarse_parts() at a time. A part of a cache block is known by the unit where it begins.
KvShape coarse_shape(const KvShape& fine);
// 0 or 1: nothing is gained, or the shape can't be stored in 4 bits.
int32_t coarse_parts(const KvShape& fine);

// One layer's blocks: block b starts at data + b * shape.id_bytes().
struct KvView {
  KvShape shape;
  uint8_t* data = nullptr;
  int32_t blocks = 0;
};

// The slots [first, end) of its sequence that a query attends to; never empty.
struct KeyRange {
  int32_t first = 0;
  int32_t end = 0;
};

inline std::span<const int32_t> numbers_of(std::span<const KeyRange> ranges) {
  static_assert(sizeof(KeyRange) == 2 * sizeof(int32_t));
  if (ranges.empty()) return {};
  return {&ranges.front().first, 2 * ranges.size()};
}

// The ragged batch, as attention sees it. Sequence s has queries [query_start[s], query_start[s +
// 1]) of the flattened tokens, at least one; they are the last of its context_len[s] tokens.
//
// With `ranges`, each query attends to its own range instead of itself and the tokens before it
// (and AttentionParams::window is not used). Within a sequence neither bound may decrease from one
// query to the next, and all are in [0, context_len[s]]. If the keys belong to another sequence
// than the queries, as in cross-attention, there are always ranges.
struct AttentionBatch {
  std::span<const int32_t> query_start;   // [sequences + 1]
  std::span<const int32_t> context_len;   // [sequences], including this step's tokens
  const int32_t* block_tables = nullptr;  // [sequences, table_stride]
  int64_t table_stride = 0;
  std::span<const KeyRange> ranges = {};  // empty, or [tokens]
  // > 0: every KV head has a block table of its own, this many entries apart within the sequence's
  // table_stride. 0: all heads share one.
  int64_t head_stride = 0;
  int sequences() const { return static_cast<int>(context_len.size()); }
};

// What the sequences of a batch keep in 4 bits. Token i of these is in slot i % kBlockTokens of
// coarse block c = i / kBlockTokens, which is part c % parts of the cache block blocks[c / parts].
// All queries of a sequence see all of them.
struct CoarseTokens {
  std::span<const int32_t> slots;   // [sequences], or empty: no sequence has any
  const int32_t* blocks = nullptr;  // [sequences, stride]
  int64_t stride = 0;
  int32_t parts = 0;
  bool any() const { return !slots.empty(); }
};

// What Ops::recode_kv() writes: slots dropped[head * count + i], ascending in a head, become tokens
// before + i of a sequence's coarse tokens, which are in the blocks `from` so far.
struct Recoding {
  const int32_t* dropped = nullptr;
  int32_t count = 0;
  int32_t before = 0;
  int32_t parts = 0;
  std::span<const int32_t> from, to;  // equal, but for the last of `from` if that isn't full
};

// Queries whose softmax weights are added up by key (Ops::key_scores()): the last `queries` of the
// sequence's queries.
struct ScoredQueries {
  int32_t sequence = 0;
  int32_t queries = 0;
  int64_t* sums = nullptr;  // [kv_heads, stride], of one layer; or [queries, kv_heads, stride]
  int64_t stride = 0;       // at least the sequence's context_len
  bool apart = false;       // each query has sums of its own
};
inline constexpr float kScoreUnits = 0x1p30f;  // for a weight of 1

// What queries of a sequence read (Ops::selected_attention()). Those in slots from `before` to
// `from` read everything. Others read
// - `blocks` blocks, by the bounds of their keys, which the cache must have, or
// - with `components`, as many tokens, by that many features of their keys; the cache must have
//   sums of its values, or
// - with `window`, a fixed pattern: of the blocks up to their own the first `sinks`, the last
//   `window`, and those at distances that are multiples of `stride`.
struct BlockSelection {
  int32_t from = 0;
  int32_t blocks = 0;
  int32_t before = 0;
  int32_t components = 0;  // a multiple of 8
  int32_t sinks = 0;
  int32_t window = 0;
  int32_t stride = 0;  // 0: none
  bool selects() const { return blocks > 0 || window > 0; }
};

struct AttentionParams {
  int heads = 0;
  float scale = 1.0f;
  float softcap = 0.0f;  // > 0: scores become cap * tanh(score / cap)
  int window = 0;        // > 0: a query attends to itself and the window - 1 tokens before it
  const float* sinks =
      nullptr;  // [heads]: one logit each, which adds to the softmax's denominator only
  // [heads, 2 * bias_reach + 1]: added to the score of a key at distance d (its position minus the
  // query's, clamped to +-bias_reach) is entry bias_reach + d. Only for shapes that are `biased`.
  const float* distance_bias = nullptr;
  int bias_reach = 0;
  // [heads]: slopes[h] * d is added to the score of a key at distance d (ALiBi, arXiv:2108.12409).
  // Only for shapes that are `biased`, and not together with distance_bias.
  const float* slopes = nullptr;
  // [tokens, heads, 2], on the host only: a number m of the size of the largest score, and the sum
  // of exp(score - m), for results that are merged with others'.
  float* sums = nullptr;
};

}  // namespace freshet::ops

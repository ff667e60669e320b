// Arguments of attention over a paged cache.
//
// A sequence's cache is a list of blocks of kBlockTokens tokens, given by ids in a block table;
// token p of the sequence is slot p % kBlockTokens of block table[p / kBlockTokens]. The layout of
// a block is private to the kernels that write and read it (block_bytes() gives its size). Entries
// of blocks that have left a sliding window may be -1; they are never read.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "base/status.h"

namespace freshet::ops {

inline constexpr int kBlockTokens = 16;

// kFP8: E4M3 without a scale; saturates at the largest value, 448. kInt8: every 32 features of a
// head are integers in [-127, 127] times an F16 scale, as in llama.cpp's q8_0. One scale for all
// features of a head would be coarser if few of them are large.
enum class KvType : uint8_t { kF32, kF16, kBF16, kFP8, kInt8 };
Result<KvType> kv_type_by_name(std::string_view name);
std::string_view name_of(KvType type);
size_t element_bytes(KvType type);  // per element, without its share of a scale

inline constexpr int kScaledFeatures = 32;  // features per scale in kInt8
constexpr int scales_of(int features) {
  return (features + kScaledFeatures - 1) / kScaledFeatures;
}
// x is stored as x * to_code, rounded to the nearest (ties go to even) and clamped to +-127. It is
// read as that integer times the scale.
struct Int8Scale {
  uint16_t bits;  // F16
  float to_code;
};
// The scale that maps the largest magnitude, given by its bits, to about 127. An infinity is
// treated as a value beyond F16; a NaN makes the scale NaN.
Int8Scale int8_scale(uint32_t largest);

// One layer's shape of the cache.
struct KvShape {
  KvType type = KvType::kF16;
  int kv_heads = 0;
  int key_dim = 0;
  int value_dim = 0;
  bool value_is_key_prefix = false;  // MLA: a value is the first value_dim features of its key
  size_t head_bytes() const;         // of one KV head in a block, scales included
  size_t block_bytes() const;        // of one block of this layer, a multiple of 64
};

// One layer's blocks: block b starts at data + b * shape.block_bytes().
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

// The ragged batch, as attention sees it. Sequence s has queries [query_start[s], query_start[s +
// 1]) of the flattened tokens, at least one; they are the last of its context_len[s] tokens.
//
// With `ranges`, each query attends to its own range instead of itself and the tokens before it
// (and AttentionParams::window is not used). Within a sequence neither end of the ranges may fall
// from one query to the next, and all lie in [0, context_len[s]). Queries of another sequence than
// the keys, as in cross-attention, always have ranges.
struct AttentionBatch {
  std::span<const int32_t> query_start;   // [sequences + 1]
  std::span<const int32_t> context_len;   // [sequences], including this step's tokens
  const int32_t* block_tables = nullptr;  // [sequences, table_stride]
  int64_t table_stride = 0;
  std::span<const KeyRange> ranges = {};  // empty, or [tokens]
  int sequences() const { return static_cast<int>(context_len.size()); }
};

struct AttentionParams {
  int heads = 0;
  float scale = 1.0f;
  float softcap = 0.0f;  // > 0: scores become cap * tanh(score / cap)
  int window = 0;        // > 0: a query attends to itself and the window - 1 tokens before it
  const float* sinks =
      nullptr;  // [heads]: one logit each, which adds to the softmax's denominator only
};

}  // namespace freshet::ops

// Arguments of attention over a paged cache.
//
// A sequence's cache is a list of blocks of kBlockTokens tokens, named by ids in a block table;
// token p of the sequence is slot p % kBlockTokens of block table[p / kBlockTokens]. What the bytes
// of a block mean is private to the kernels that write and read it (block_bytes() gives their
// number). Entries of blocks that fell out of a sliding window may be -1; they are never read.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "base/status.h"

namespace freshet::ops {

inline constexpr int kBlockTokens = 16;

// kFP8: E4M3 without a scale; what lies beyond the largest number, 448, becomes it.
// kInt8: 32 features of a head at a time are whole numbers in [-127, 127] times an F16 scale, as in
// llama.cpp's q8_0. A scale for all features of a head is coarser where few of them are large.
enum class KvType : uint8_t { kF32, kF16, kBF16, kFP8, kInt8 };
Result<KvType> kv_type_by_name(std::string_view name);
std::string_view name_of(KvType type);
size_t element_bytes(KvType type);  // of a number, without its share of a scale

inline constexpr int kScaledFeatures = 32;  // that have a scale together in kInt8
constexpr int scales_of(int features) {
  return (features + kScaledFeatures - 1) / kScaledFeatures;
}
// x becomes x * to_code, rounded to the nearest, of two to the even one, at most 127 from zero, and
// is read as that times the scale.
struct Int8Scale {
  uint16_t bits;  // F16
  float to_code;
};
// The scale that takes the largest magnitude, given as its bits, to about 127. An infinity counts
// as what lies beyond F16; a NaN makes the scale one.
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

// The ragged batch as attention sees it. Sequence s has queries [query_start[s], query_start[s +
// 1]) of the flattened tokens, at least one; they are the last of its context_len[s] tokens.
struct AttentionBatch {
  std::span<const int32_t> query_start;   // [sequences + 1]
  std::span<const int32_t> context_len;   // [sequences], this step's tokens included
  const int32_t* block_tables = nullptr;  // [sequences, table_stride]
  int64_t table_stride = 0;
  int sequences() const { return static_cast<int>(context_len.size()); }
};

struct AttentionParams {
  int heads = 0;
  float scale = 1.0f;
  float softcap = 0.0f;  // > 0: scores become cap * tanh(score / cap)
  int window = 0;        // > 0: a query sees itself and the window - 1 tokens before it
  const float* sinks =
      nullptr;  // [heads]: a logit each that takes part in the softmax and adds nothing
};

}  // namespace freshet::ops

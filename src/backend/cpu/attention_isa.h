// The interface between attention on the CPU and its instruction sets, and the CPU layout of a KV
// block.
//
// The keys of a block are transposed, so that lanes are tokens. Values are plain, so that lanes are
// features: [kv_heads] of {keys [key_dim, 16], values [16, value_dim]}. If a value is the prefix of
// its key (MLA), a block holds only the keys, plain: [16, key_dim]. With INT8 the keys are followed
// by their scales, [16], and by the scales of the values, [16]. Types with 4-bit codes have another
// layout, see attention_coded.h.
//
// The unit of work is a tile: up to kAttendRows (query, head) rows that read one KV head of one
// sequence. The context is split at multiples of kSplit tokens from the sequence's start. For every
// split of a row, the kernel computes scores, their maximum, exponentials, their sum and the
// weighted values, each summed in order of position. The splits are then merged from left to right.
// A split's result depends only on its row, so any worker may compute any rows and splits at any
// time. A masked score has weight zero and changes no sum.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/kernel_table.h"

namespace freshet::cpu {

inline constexpr int kSplit = 256;      // tokens
inline constexpr int kAttendRows = 64;  // rows per tile
inline constexpr int kScaledRows = 8;   // rows whose weights are multiplied by scales together
inline constexpr int kCodedRows = 4;    // rows processed together over 4-bit codes
inline constexpr int kMostKeyDim = 1024;

struct AttentionTile {
  ops::KvShape shape;
  size_t block_bytes = 0;
  const uint8_t* data = nullptr;  // of block 0, at this KV head
  size_t scales_at = 0;           // offset of the scales in bytes, if the type has any
  size_t values_at = 0;
  size_t value_scales_at = 0;
  const int32_t* table = nullptr;  // the sequence's blocks
  // Row r is head r % group of query r / group; q and out point to row 0 of the sequence.
  const float* q = nullptr;
  int64_t q_stride = 0;  // floats per token
  float* out = nullptr;
  int64_t out_stride = 0;
  float* sums = nullptr;  // as AttentionParams::sums, of row 0 of the sequence; nullptr: none
  int64_t sums_stride = 0;
  const float* sinks = nullptr;  // [group] or nullptr
  int group = 1;
  int64_t first_row = 0;
  int rows = 0;
  int64_t first_position = 0;  // of the sequence's first query
  float scale = 1.0f;
  float softcap = 0.0f;
  int window = 0;
  const ops::KeyRange* ranges = nullptr;  // of the sequence's queries; nullptr: causal
  const float* bias = nullptr;            // of head 0, as in AttentionParams; nullptr: none
  int bias_reach = 0;
  const float* slopes = nullptr;  // [group], as in AttentionParams; nullptr: none
  int64_t until = 0;              // last split of the tile in the caller's current request
  float* scratch = nullptr;       // attention_scratch_floats()

  bool biased() const { return bias != nullptr || slopes != nullptr; }
  // Row r of the tile attends to positions [first_seen, last_seen].
  int64_t last_seen(int r) const {
    const int64_t query = (first_row + r) / group;
    return ranges != nullptr ? ranges[query].end - 1 : first_position + query;
  }
  int64_t first_seen(int r) const {
    if (ranges != nullptr) return ranges[(first_row + r) / group].first;
    const int64_t from = last_seen(r) - window + 1;
    return window > 0 && from > 0 ? from : 0;
  }
  int64_t first_split() const { return first_seen(0) / kSplit; }
  int64_t last_split() const { return last_seen(rows - 1) / kSplit; }
};

// Row strides in floats, padded to whole vectors.
constexpr int64_t padded_key_dim(const ops::KvShape& s) {
  return (s.key_dim + 15) / 16 * 16;
}
constexpr int64_t padded_value_dim(const ops::KvShape& s) {
  return (s.value_dim + 31) / 32 * 32;
}
constexpr int64_t attention_scratch_floats(const ops::KvShape& s) {
  const int64_t vectors = kAttendRows * (padded_key_dim(s) + kSplit) +  // q, scores
                          32 * padded_key_dim(s) + kSplit * 32 +        // converted keys, values
                          kScaledRows * kSplit;                         // scaled weights
  const int64_t tiles = 32 * padded_key_dim(s) + 128 * padded_value_dim(s) +  // q, values
                        19 * kSplit + 5 * 1024;  // scores and scales, sums, weights
  const int64_t groups = ops::scales_of(s.key_dim);
  const int64_t coded = (2 * kCodedRows + 1) * kSplit + 2 * kAttendRows * groups +  // scores, sums
                        kAttendRows * groups * ops::kScaledFeatures;                // queries
  const int64_t rest = vectors > tiles ? vectors : tiles;
  return kAttendRows * (padded_value_dim(s) + 8) + (rest > coded ? rest : coded);
}
// Size of a split's result: [rows, padded_value_dim], then a maximum and a sum per row.
constexpr int64_t attention_partial_floats(const ops::KvShape& s, int64_t rows) {
  return rows * (padded_value_dim(s) + 2);
}

struct AttentionIsa {
  // Processes all splits and writes the tile's rows of `out`.
  void (*attend)(const AttentionTile& tile);
  // Processes splits [first, tile.until], each into a partial; these are partial_floats apart.
  void (*attend_splits)(const AttentionTile& tile, int64_t first, float* partials,
                        int64_t partial_floats);
  // Merges the partials of the tile's splits, which are partial_floats apart, into `out`.
  void (*merge)(const AttentionTile& tile, const float* partials, int64_t partial_floats);
  // Rounds n values (a multiple of 8) to the cache's type. With INT8, scale i goes to scales[16 *
  // i]. F16 saturates, because an infinity would turn the zero weight of a masked token into NaN.
  void (*convert)(ops::KvType type, const float* x, int64_t n, void* out, uint16_t* scales);
  // Stores one token's key and value of a head (values begin at values_at): for the shapes that
  // supports() accepts, store_head, and for types with 4-bit codes, store_coded. nullptr: convert()
  // is used.
  void (*store_head)(const ops::KvShape& shape, const float* k, const float* v, int64_t slot,
                     size_t values_at, uint8_t* head) = nullptr;
  void (*store_coded)(const ops::KvShape& shape, const float* k, const float* v, int64_t slot,
                      size_t values_at, uint8_t* head) = nullptr;
  bool (*supports)(const ops::KvShape& shape) = nullptr;
};

extern const AttentionIsa kAttentionAvx2;
extern const AttentionIsa kAttentionAvx512;
extern const AttentionIsa kAttentionAvx512Vnni;
extern const AttentionIsa kAttentionAmx;
extern const AttentionIsa kAttentionNeon;

}  // namespace freshet::cpu

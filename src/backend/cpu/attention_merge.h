// The running state of an attention tile's rows from split to split, over a Simd type: maxima, sums
// and weighted values. The kernels that process splits derive from it.
#pragma once

#include "backend/cpu/attention_isa.h"
#include "backend/cpu/vector_math.h"
#include "ops/hadamard.h"

namespace freshet::cpu {
namespace {

template <class S>
class SplitMerger {
 protected:
  using F = typename S::F;
  static constexpr int kLanes = S::kLanes;
  static constexpr float kNegInf = -__builtin_inff();

  // Rows that are computed together, and the tokens of a split that they need.
  struct Group {
    int first;  // first row, within the tile
    int rows;
    int from;  // tokens within the split; a multiple of 16
    int to;
    int to_block() const { return (to + 15) & ~15; }
  };

  const AttentionTile& t_;
  const int key_dim_ = t_.shape.key_dim;
  const int value_dim_ = t_.shape.value_dim;
  const int64_t value_stride_ = padded_value_dim(t_.shape);
  float* const total_ = t_.scratch;                          // [rows, value_stride]
  float* const max_ = total_ + kAttendRows * value_stride_;  // over all splits so far
  float* const sum_ = max_ + kAttendRows;
  float* const split_max_ = sum_ + kAttendRows;
  float* const split_sum_ = split_max_ + kAttendRows;
  float* const keep_ = split_sum_ + kAttendRows;  // factors: of the old sums, of the new split
  float* const take_ = keep_ + kAttendRows;
  float* const free_ = take_ + kAttendRows;  // for the derived kernel

  explicit SplitMerger(const AttentionTile& tile) : t_(tile) {}

  static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
  static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

  // At most `together` rows, and the part of the split that they attend to.
  Group group_at(int first, int together, int64_t split) const {
    const int rows = static_cast<int>(least(together, t_.rows - first));
    const int64_t start = split * kSplit;
    const int64_t from = most(t_.first_seen(first), start) - start;
    const int64_t to = least(t_.last_seen(first + rows - 1) + 1, start + kSplit) - start;
    return {first, rows, static_cast<int>(from & ~int64_t{15}), static_cast<int>(to)};
  }

  const uint8_t* block(int64_t split, int token) const {
    return t_.data +
           static_cast<size_t>(t_.table[split * (kSplit / 16) + token / 16]) * t_.block_bytes;
  }

  void begin() {
    for (int r = 0; r < t_.rows; ++r) {
      max_[r] = kNegInf;
      sum_[r] = 0.0f;
    }
    for (int64_t i = 0; i < t_.rows * value_stride_; i += kLanes) S::store(total_ + i, S::zero());
  }

  // Merges the maxima and sums of a split into those of rows [first, first + rows), rows <= kLanes,
  // and computes the factors for the values.
  void advance(int first, int rows, const float* split_max, const float* split_sum) {
    const F old_max = S::load_n(max_ + first, rows), new_max = S::load_n(split_max, rows);
    const F max = S::max(old_max, new_max);
    const F base = S::if_less(S::set(kNegInf), max, max, S::zero());
    const F keep = Math<S>::exp(S::sub(old_max, base)), take = Math<S>::exp(S::sub(new_max, base));
    S::store_n(keep_ + first, keep, rows);
    S::store_n(take_ + first, take, rows);
    S::store_n(max_ + first, max, rows);
    const F sum = S::mul(S::load_n(split_sum, rows), take);
    S::store_n(sum_ + first, S::fma(S::load_n(sum_ + first, rows), keep, sum), rows);
  }

  // Calls run(split, partial) for splits [first, tile.until], and completes the partial results.
  template <class Run>
  void each_partial(int64_t first, float* partial, int64_t partial_floats, const Run& run) const {
    const int64_t values = t_.rows * value_stride_;
    for (int64_t split = first; split <= t_.until; ++split, partial += partial_floats) {
      // Rows that attend to nothing in the split have zeros.
      for (int64_t i = 0; i < values; i += kLanes) S::store(partial + i, S::zero());
      run(split, partial);
      for (int r = 0; r < t_.rows; ++r) {
        partial[values + r] = split_max_[r];
        partial[values + t_.rows + r] = split_sum_[r];
      }
    }
  }

  // A sink counts as one more split at the end, with one score and no value.
  void finish() {
    for (int r = 0; r < t_.rows; ++r) {
      const int64_t row = t_.first_row + r;
      if (t_.sinks != nullptr) {
        const float one = 1.0f;
        advance(r, 1, t_.sinks + row % t_.group, &one);
      }
      const F keep = S::set(t_.sinks != nullptr ? keep_[r] : 1.0f), sum = S::set(sum_[r]);
      const float* from = total_ + r * value_stride_;
      float* to = t_.out + row / t_.group * t_.out_stride + row % t_.group * value_dim_;
      for (int d = 0; d < value_dim_; d += kLanes) {
        const F v = S::div(S::mul(S::load(from + d), keep), sum);
        S::store_n(to + d, v, static_cast<int>(least(kLanes, value_dim_ - d)));
      }
      if (ops::info(t_.shape.type).value.rotated) ops::hadamard(to, value_dim_);
      if (t_.sums == nullptr) continue;
      float* const sums = t_.sums + row / t_.group * t_.sums_stride + row % t_.group * 2;
      sums[0] = max_[r];
      sums[1] = sum_[r];
    }
  }

 public:
  static void merge(const AttentionTile& tile, const float* partials, int64_t partial_floats) {
    SplitMerger a(tile);
    a.begin();
    const int64_t values = tile.rows * a.value_stride_;
    for (int64_t s = tile.first_split(); s <= tile.last_split(); ++s, partials += partial_floats) {
      for (int r = 0; r < tile.rows; ++r) {
        a.advance(r, 1, partials + values + r, partials + values + tile.rows + r);
        const F keep = S::set(a.keep_[r]), take = S::set(a.take_[r]);
        float* to = a.total_ + r * a.value_stride_;
        const float* from = partials + r * a.value_stride_;
        for (int64_t d = 0; d < a.value_stride_; d += kLanes) {
          S::store(to + d, S::fma(S::load(to + d), keep, S::mul(S::load(from + d), take)));
        }
      }
    }
    a.finish();
  }
};

}  // namespace
}  // namespace freshet::cpu

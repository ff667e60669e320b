// Attention of one tile over a Simd type; attention_<isa>.cc makes an AttentionIsa of it.
#pragma once

#if defined(__aarch64__)
#include "backend/cpu/attention_convert_neon.h"
#else
#include "backend/cpu/attention_convert.h"
#endif
#include "backend/cpu/attention_kernels.h"
#include "backend/cpu/attention_merge.h"

namespace freshet::cpu {
namespace {

template <class S>
class TileAttention : SplitMerger<S> {
  using Base = SplitMerger<S>;
  using typename Base::F;
  using typename Base::Group;
  using K = AttentionKernels<S>;
  using Base::advance, Base::begin, Base::block, Base::finish, Base::key_dim_, Base::keep_;
  using Base::kLanes, Base::kNegInf, Base::least, Base::most, Base::split_max_, Base::split_sum_;
  using Base::t_, Base::take_, Base::total_, Base::value_dim_, Base::value_stride_;
  static constexpr int kRows = S::kTileRows;

  const int64_t key_stride_ = padded_key_dim(t_.shape);
  float* const q_ = Base::free_;  // groups of [key_dim, rows]; with plain keys [rows, key_stride]
  float* const scores_ = q_ + kAttendRows * key_stride_;  // [rows, kSplit]
  float* const keys_ = scores_ + kAttendRows * kSplit;    // two blocks, converted
  float* const values_ = keys_ + 32 * key_stride_;        // [kSplit, 2 vectors], converted
  float* const scaled_ = values_ + kSplit * 32;           // weights times scales

  explicit TileAttention(const AttentionTile& tile) : Base(tile) {}

  bool plain_keys() const { return t_.shape.value_is_key_prefix; }
  int groups() const { return (t_.rows + kRows - 1) / kRows; }
  Group group(int g, int64_t split) const { return Base::group_at(g * kRows, kRows, split); }
  // The range that all groups need together.
  Group all(int64_t split) const {
    const Group a = group(0, split), b = group(groups() - 1, split);
    return {0, t_.rows, a.from, b.to};
  }

  // FP8 values are loaded in units of 2^-8; queries and weights compensate for that exactly.
  static constexpr float kUnitFP8 = 256.0f;

  void load_queries() {
    const float unit = t_.shape.type == ops::KvType::kFP8 ? kUnitFP8 : 1.0f;
    for (int r = 0; r < t_.rows; ++r) {
      const int64_t row = t_.first_row + r;
      const float* from = t_.q + row / t_.group * t_.q_stride + row % t_.group * key_dim_;
      if (plain_keys()) {
        float* to = q_ + r * key_stride_;
        for (int64_t d = 0; d < key_stride_; ++d) to[d] = d < key_dim_ ? from[d] * unit : 0.0f;
      } else {
        const int first = r / kRows * kRows;
        const int rows = static_cast<int>(least(kRows, t_.rows - first));
        float* to = q_ + int64_t{first} * key_dim_ + (r - first);
        for (int d = 0; d < key_dim_; ++d) to[int64_t{d} * rows] = from[d] * unit;
      }
    }
  }

  const uint16_t* key_scales(int64_t split, int token) const {
    return reinterpret_cast<const uint16_t*>(block(split, token) + t_.scales_at);
  }

  // Computes scores_ of all groups for the split.
  template <class T>
  void score(int64_t split) {
    const Group need = all(split);
    if (plain_keys()) return score_plain<T>(split, need);
    constexpr bool kScaled = kHasScales<T>;
    const uint16_t* scales[kSplit / 16];
    for (int b = need.from / 16; kScaled && b < need.to_block() / 16; ++b) {
      scales[b] = key_scales(split, b * 16);
    }
    if (groups() == 1) {
      const T* blocks[kSplit / 16];
      for (int b = need.from / 16; b < need.to_block() / 16; ++b) {
        blocks[b] = reinterpret_cast<const T*>(block(split, b * 16));
      }
      K::template score<true, kScaled>(q_, blocks, scales, key_dim_, need.rows, need.from,
                                       need.to_block(), scores_);
      return;
    }
    const float* blocks[kSplit / 16];
    for (int b = need.from; b < need.to_block(); b += 32) {
      const int end = static_cast<int>(least(b + 32, need.to_block()));
      for (int i = b; i < end; i += 16) {
        float* to = keys_ + (i - b) * key_dim_;
        K::load_all(reinterpret_cast<const T*>(block(split, i)), int64_t{16} * key_dim_, to);
        blocks[i / 16] = to;
      }
      for (int g = 0; g < groups(); ++g) {
        const Group some = group(g, split);
        K::template score<false, kScaled>(q_ + int64_t{some.first} * key_dim_, blocks, scales,
                                          key_dim_, some.rows, static_cast<int>(most(b, some.from)),
                                          static_cast<int>(least(end, some.to_block())),
                                          scores_ + some.first * kSplit);
      }
    }
  }

  template <class T>
  void score_plain(int64_t split, const Group& need) {
    for (int b = need.from; b < need.to_block(); b += 16) {
      const T* from = reinterpret_cast<const T*>(block(split, b));
      for (int i = 0; i < 16; ++i) {
        K::load_row(from + i * key_dim_, key_dim_, keys_ + i * key_stride_, key_stride_);
      }
      if (kHasScales<T>) K::scale_rows(keys_, key_stride_, key_scales(split, b));
      for (int g = 0; g < groups(); ++g) {
        const Group some = group(g, split);
        if (b < some.from || b >= some.to) continue;
        K::score_plain(q_ + some.first * key_stride_, keys_, key_stride_, some.rows,
                       scores_ + some.first * kSplit + b);
      }
    }
  }

  // Turns the scores of row r into weights. Records their maximum (before) and their sum. With
  // soft-capping, the scores already include the scale.
  void weigh(int r, const Group& g, int64_t split) {
    const F unit = S::set(t_.shape.type == ops::KvType::kFP8 ? kUnitFP8 : 1.0f);
    float* s = scores_ + r * kSplit;
    const int64_t start = split * kSplit;
    const int64_t first = t_.first_seen(r) - start, end = t_.last_seen(r) + 1 - start;
    const F none = S::set(kNegInf);
    if (t_.softcap > 0.0f) cap_scores(s, g);
    if (t_.biased()) bias_scores(s, r, g, start);
    F max = none;
    for (int i = g.from; i < g.to_block(); i += kLanes) {
      F v = S::load(s + i);
      if (i < first || i + kLanes > end) {
        v = S::keep_range(v, first - i, end - i, none);
        S::store(s + i, v);
      }
      max = S::max(max, v);
    }
    const float m = S::reduce_max(max);
    const float scale = t_.softcap > 0.0f || t_.biased() ? 1.0f : t_.scale;
    const F to_power = S::set(scale * 1.44269504f);
    const F base = S::set(m == kNegInf ? 0.0f : m * (scale * 1.44269504f));
    F sum = S::zero();
    for (int i = g.from; i < g.to_block(); i += kLanes) {
      const F p = Math<S>::power_of_two(S::fms(S::load(s + i), to_power, base));
      S::store(s + i, S::mul(p, unit));
      sum = S::add(sum, p);
    }
    split_max_[r] = m * scale;
    split_sum_[r] = S::reduce_add(sum);
  }
  void cap_scores(float* s, const Group& g) {
    const F scale = S::set(t_.scale), cap = S::set(t_.softcap);
    for (int i = g.from; i < g.to_block(); i += kLanes) {
      const F v = S::div(S::mul(S::load(s + i), scale), cap);
      S::store(s + i, S::mul(cap, Math<S>::tanh(v)));
    }
  }

  // Scales the scores of row r and adds the bias of each distance.
  void bias_scores(float* s, int r, const Group& g, int64_t start) {
    const int64_t row = t_.first_row + r, reach = t_.bias_reach;
    const int64_t position = t_.first_position + row / t_.group;
    const float scale = t_.softcap > 0.0f ? 1.0f : t_.scale;
    if (t_.slopes != nullptr) {
      const float slope = t_.slopes[row % t_.group];
      for (int i = g.from; i < g.to_block(); ++i)
        s[i] = s[i] * scale + slope * static_cast<float>(start + i - position);
      return;
    }
    const float* const bias = t_.bias + row % t_.group * (2 * reach + 1) + reach;
    for (int i = g.from; i < g.to_block(); ++i) {
      const int64_t distance = start + i - position;
      s[i] = s[i] * scale + bias[distance < -reach ? -reach : distance > reach ? reach : distance];
    }
  }

  // Adds a split's weighted values to total_, or writes them to partial.
  template <class T>
  void add_values(int64_t split, float* partial) {
    const Group need = all(split);
    const int64_t row = plain_keys() ? key_dim_ : value_dim_;
    const int32_t* const table = t_.table + split * (kSplit / 16);
    const int64_t later =
        split < t_.until ? t_.last_seen(t_.rows - 1) + 1 - (split + 1) * kSplit : 0;
    const PagedRows<T> stored{t_.data + t_.values_at,
                              table,
                              t_.block_bytes,
                              row,
                              t_.data,
                              table + kSplit / 16,
                              static_cast<int>(least(later, kSplit)),
                              int64_t{key_dim_} * static_cast<int64_t>(sizeof(T)),
                              t_.data + t_.value_scales_at,
                              scaled_};
    const auto target = [&](const Group& g) {
      float* at = (partial != nullptr ? partial : total_) + g.first * value_stride_;
      return ValueTarget{at, value_stride_, partial != nullptr ? nullptr : keep_ + g.first,
                         take_ + g.first};
    };
    if (groups() == 1) {
      K::values(scores_, stored, need.rows, need.from, need.to, value_dim_, target(need));
      return;
    }
    for (int d = 0; d < value_dim_; d += 2 * kLanes) {
      const int lanes = static_cast<int>(least(2 * kLanes, value_dim_ - d));
      K::load_columns(stored, need.from, need.to, d, lanes, values_);
      for (int g = 0; g < groups(); ++g) {
        const Group some = group(g, split);
        if (some.from >= some.to) continue;
        const float* weights = scores_ + some.first * kSplit;
        if constexpr (kHasScales<T>) {
          K::scale_weights(weights, some.rows, stored, some.from, some.to, d, scaled_);
          weights = scaled_;
        }
        K::converted_values(weights, values_ - int64_t{need.from} * 2 * kLanes, some.rows,
                            some.from, some.to, target(some).at_column(d));
      }
    }
  }

  template <class T>
  void do_split(int64_t split, float* partial) {
    score<T>(split);
    for (int g = 0; g < groups(); ++g) {
      const Group some = group(g, split);
      for (int r = some.first; r < some.first + some.rows; ++r) weigh(r, some, split);
      if (partial == nullptr && some.from < some.to) {
        advance(some.first, some.rows, split_max_ + some.first, split_sum_ + some.first);
      }
    }
    add_values<T>(split, partial);
  }

  void do_split(int64_t split, float* partial) {
    switch (t_.shape.type) {
      case ops::KvType::kF32:
        return do_split<float>(split, partial);
      case ops::KvType::kF16:
        return do_split<F16Bits>(split, partial);
      case ops::KvType::kBF16:
        return do_split<BF16Bits>(split, partial);
      case ops::KvType::kFP8:
        return do_split<E4M3Bits>(split, partial);
      case ops::KvType::kInt8:
        return do_split<Int8>(split, partial);
      case ops::KvType::kInt4:
      case ops::KvType::kK8V4:
        break;  // attention_coded.h
    }
  }

 public:
  static void attend(const AttentionTile& tile) {
    TileAttention a(tile);
    a.load_queries();
    a.begin();
    for (int64_t s = tile.first_split(); s <= tile.last_split(); ++s) a.do_split(s, nullptr);
    a.finish();
  }

  static void attend_splits(const AttentionTile& tile, int64_t first, float* partials,
                            int64_t partial_floats) {
    TileAttention a(tile);
    a.load_queries();
    a.each_partial(first, partials, partial_floats,
                   [&](int64_t split, float* partial) { a.do_split(split, partial); });
  }

  static constexpr AttentionIsa isa() {
    return {attend, attend_splits, Base::merge, convert_to_cache};
  }
};

}  // namespace
}  // namespace freshet::cpu

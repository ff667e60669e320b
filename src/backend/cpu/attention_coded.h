// Attention of one tile over a cache with 4-bit codes (int4, k8v4), by integer dot products.
//
// Four adjacent codes form a word of 32 bits, and lanes are words: four features of a token for
// keys, four tokens of a feature for values. A head's block begins with the keys: 4-bit keys as
// [eight features, 16 tokens] words, in which a byte has feature i in its low half and i + 4 in its
// high half; 8-bit keys as [four features, 16 tokens] words of code + 128. The scales of keys and
// of values follow, [groups, 16] each. The values are [groups, 4 quads of tokens, 16] words: byte t
// of a word holds two features of token t of the quad, paired as in keys.
//
// Queries are rotated like the keys and rounded to integers with one scale per group: to 8 bits for
// 4-bit keys, whose own error is ten times as large, and to 16 bits for 8-bit keys. For each split,
// a row's weights times the scales of a group of values are rounded to 16 bits. All sums of
// products are exact, so rows and tokens may be processed together in any way. The remaining F32
// sums are in the order of positions or of groups.
//
// I: the integer operations of an instruction set, see attention_codes_<isa>.h.
#pragma once

#include "backend/cpu/attention_merge.h"
#include "ops/hadamard.h"

namespace freshet::cpu {
namespace {

template <class S, class I>
class CodedAttention : SplitMerger<S> {
  using Base = SplitMerger<S>;
  using typename Base::F;
  using typename Base::Group;
  using V = typename I::V;
  using Base::advance, Base::begin, Base::block, Base::each_partial, Base::finish;
  using Base::key_dim_, Base::keep_;
  using Base::kLanes, Base::kNegInf, Base::least, Base::most, Base::split_max_, Base::split_sum_;
  using Base::t_, Base::take_, Base::total_, Base::value_dim_, Base::value_stride_;
  static constexpr int kRows = kCodedRows, kGroup = ops::kScaledFeatures;
  static constexpr float kTop = 127 * 256;  // the largest integer of 16 bits; low bytes add to it

  const bool int4_keys_ = ops::info(t_.shape.type).key.code == ops::KvCode::kInt4;
  const int key_groups_ = ops::scales_of(key_dim_), value_groups_ = ops::scales_of(value_dim_);
  static constexpr int kQuads = kSplit / 4;
  const int query_steps_ = key_groups_ * kGroup / 4;
  const int query_words_ = query_steps_ * (int4_keys_ ? I::kCoarse : I::kFine);  // per row
  float* const scores_ = Base::free_;                                            // [kRows, kSplit]
  float* const scaled_ = scores_ + 4 * kSplit;  // [kSplit], weights times scales
  float* const q_scale_ = scaled_ + kSplit;     // [rows / kRows, groups, kRows]
  int32_t* const q_fix_ = reinterpret_cast<int32_t*>(q_scale_ + kAttendRows * key_groups_);
  int32_t* const weights_ = q_fix_ + kAttendRows * key_groups_;  // [kRows, kFine, kQuads]
  int32_t* const q_ = weights_ + kRows * I::kFine * kQuads;      // [rows, words, steps]
  float unit_[kRows];                                            // unit of the weights
  int32_t fix_[kRows];                                           // correction of the sums of values

  explicit CodedAttention(const AttentionTile& tile) : Base(tile) {}

  int groups() const { return (t_.rows + kRows - 1) / kRows; }
  Group group(int g, int64_t split) const { return Base::group_at(g * kRows, kRows, split); }

  // Rounds the queries.
  void load_queries() {
    for (int r = 0; r < t_.rows; ++r) {
      const int64_t row = t_.first_row + r;
      const float* from = t_.q + row / t_.group * t_.q_stride + row % t_.group * key_dim_;
      float* const x = scores_;
      for (int d = 0; d < key_groups_ * kGroup; d += kLanes) {
        S::store(x + d,
                 S::load_n(from + d, static_cast<int>(most(0, least(kLanes, key_dim_ - d)))));
      }
      if (int4_keys_) ops::hadamard(x, key_dim_);
      for (int g = 0; g < key_groups_; ++g) {
        int32_t* const words = q_ + int64_t{r} * query_words_ + g * kGroup / 4;
        const int64_t i = (int64_t{r / kRows} * key_groups_ + g) * kRows + r % kRows;
        if (int4_keys_) {
          round_query<I::kCoarse>(x + g * kGroup, words, q_scale_ + i, q_fix_ + i);
        } else {
          round_query<I::kFine>(x + g * kGroup, words, q_scale_ + i, q_fix_ + i);
        }
      }
    }
  }

  template <int kWords>
  void round_query(const float* x, int32_t* words, float* scale, int32_t* fix) {
    F largest = S::zero(), bad = S::zero();
    for (int d = 0; d < kGroup; d += kLanes) largest = S::max(largest, S::abs(S::load(x + d)));
    const float top = S::reduce_max(largest), limit = int4_keys_ ? 127.0f : kTop;
    const F inverse = S::set(top > 1e-30f ? limit / top : 0.0f);
    for (int d = 0; d < kGroup; d += kLanes) {  // becomes NaN if an element is not finite
      const F v = S::mul(S::load(x + d), inverse);
      bad = S::add(bad, S::sub(v, v));
    }
    V sum = I::zero();
    for (int d = 0; d < kGroup; d += 16) {
      I::template pack<kWords>(x + d, inverse, words + d / 4, query_steps_, sum);
    }
    *fix = I::reduce_add(sum) * (int4_keys_ ? -8 : -128);
    *scale = top / limit + S::reduce_add(bad);
  }

  const uint16_t* key_scales(const uint8_t* of_block) const {
    return reinterpret_cast<const uint16_t*>(of_block + t_.scales_at);
  }
  const uint16_t* value_scales(const uint8_t* of_block) const {
    return reinterpret_cast<const uint16_t*>(of_block + t_.value_scales_at);
  }

  // Scores of a block's 16 tokens for R rows, the `set`-th set of rows.
  template <int R, bool kInt4>
  void score_block(const uint8_t* of_block, int set, float* out) {
    const uint16_t* scales = key_scales(of_block);
    for (int v = 0; v < 16; v += kLanes) {
      const uint8_t* k = of_block + v * 4;
      const int32_t* q = q_ + int64_t{set} * kRows * query_words_;
      const float* q_scale = q_scale_ + int64_t{set} * key_groups_ * kRows;
      const int32_t* fix = q_fix_ + int64_t{set} * key_groups_ * kRows;
      F total[R];
#pragma GCC unroll 8
      for (F& x : total) x = S::zero();
      for (int g = 0; g < key_groups_; ++g, q_scale += kRows, fix += kRows) {
        V sum[R];
        if constexpr (kInt4) {
          typename I::Coarse part[R] = {};
#pragma GCC unroll 4
          for (int unit = 0; unit < kGroup / 8; ++unit, k += 64) {
            const V codes = I::load(k), low = I::low(codes), high = I::high(codes);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
              I::add(part[r], low, q + r * query_words_, query_steps_);
              I::add(part[r], high, q + r * query_words_ + 1, query_steps_);
            }
            q += 2;
          }
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) sum[r] = I::total(part[r], fix[r]);
        } else {
          typename I::Fine part[R] = {};
          const int steps = static_cast<int>(least(kGroup, key_dim_ - g * kGroup)) / 4;
          for (int i = 0; i < steps; ++i, k += 64) {
            const V codes = I::load(k);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
              I::add(part[r], codes, q + r * query_words_, query_steps_);
            }
            ++q;
          }
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) sum[r] = I::total(part[r], fix[r]);
        }
        const F scale = S::load_f16(scales + g * 16 + v);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          total[r] = S::fma(I::to_float(sum[r]), S::mul(scale, S::set(q_scale[r])), total[r]);
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) S::store(out + r * kSplit + v, total[r]);
    }
  }

  template <int R>
  void score(const Group& g, int64_t split) {
    const int set = g.first / kRows;
    for (int t = g.from; t < g.to; t += 16) {
      const uint8_t* const at = block(split, t);
      fetch(at + t_.value_scales_at, t_.shape.head_bytes() - t_.value_scales_at);
      if (t + 32 < g.to) fetch(block(split, t + 32), t_.value_scales_at);
      if (int4_keys_) {
        score_block<R, true>(at, set, scores_ + t);
      } else {
        score_block<R, false>(at, set, scores_ + t);
      }
    }
  }
  static void fetch(const uint8_t* from, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
  }

  // Turns the scores of a row into weights. Records their maximum (before) and their sum.
  void weigh(int r, const Group& g, int64_t split) {
    float* const s = scores_ + (r - g.first) * kSplit;
    const int64_t start = split * kSplit;
    const int64_t first = t_.first_seen(r) - start, end = t_.last_seen(r) + 1 - start;
    const F none = S::set(kNegInf);
    if (t_.softcap > 0.0f) cap_scores(s, g);
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
    const float scale = t_.softcap > 0.0f ? 1.0f : t_.scale;
    const F to_power = S::set(scale * 1.44269504f);
    const F base = S::set(m == kNegInf ? 0.0f : m * (scale * 1.44269504f));
    F sum = S::zero();
    for (int i = g.from; i < g.to_block(); i += kLanes) {
      const F p = Math<S>::power_of_two(S::fms(S::load(s + i), to_power, base));
      S::store(s + i, p);
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

  // Rounds row r's weights, times the scales of feature group d, to integers.
  void round_weights(int r, const Group& g, int64_t split, int d) {
    const float* const p = scores_ + r * kSplit;
    const int64_t start = split * kSplit;
    const int64_t first = t_.first_seen(g.first + r) - start;
    const int64_t end = t_.last_seen(g.first + r) + 1 - start;
    F largest = S::zero(), sum_of_all = S::zero();  // NaN if a scale is
    for (int t = g.from; t < g.to_block(); t += 16) {
      const uint16_t* const scales = value_scales(block(split, t)) + d * 16;
      for (int i = 0; i < 16; i += kLanes) {
        F v = S::mul(S::load(p + t + i), S::load_f16(scales + i));
        // A masked token, whose weight is zero, may have any scale.
        if (t + i < first || t + i + kLanes > end) {
          v = S::keep_range(v, first - t - i, end - t - i, S::zero());
        }
        largest = S::max(largest, S::abs(v));
        sum_of_all = S::add(sum_of_all, v);
        S::store(scaled_ + t + i, v);
      }
    }
    const float top = S::reduce_max(largest);
    const F inverse = S::set(top > 1e-30f ? kTop / top : 0.0f);
    V sum = I::zero();
    int32_t* const to = weights_ + r * I::kFine * kQuads;
    for (int t = g.from; t < g.to_block(); t += 16) {
      I::template pack<I::kFine>(scaled_ + t, inverse, to + t / 4, kQuads, sum);
    }
    fix_[r] = I::reduce_add(sum) * -8;
    unit_[r] = top / kTop + S::reduce_add(S::mul(sum_of_all, S::zero()));
  }

  // Adds the weighted values of feature group d to total_, or writes them to partial.
  template <int R>
  void values_of(const Group& g, int64_t split, int d, float* partial) {
    for (int r = 0; r < R; ++r) round_weights(r, g, split, d);
    for (int c = 0; c < 16; c += kLanes) {
      typename I::Fine low[R] = {}, high[R] = {};
      for (int t = g.from; t < g.to; t += 16) {
        const uint8_t* const v = block(split, t) + t_.values_at + d * 256 + c * 4;
        const int32_t* const w = weights_ + t / 4;
#pragma GCC unroll 4
        for (int quad = 0; quad < 4; ++quad) {
          const V codes = I::load(v + quad * 64), lows = I::low(codes), highs = I::high(codes);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            I::add(low[r], lows, w + r * I::kFine * kQuads + quad, kQuads);
            I::add(high[r], highs, w + r * I::kFine * kQuads + quad, kQuads);
          }
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        F out[2];
        I::in_order(I::to_float(I::total(low[r], fix_[r])), I::to_float(I::total(high[r], fix_[r])),
                    out);
        put(g.first + r, d * kGroup + 2 * c, S::mul(out[0], S::set(unit_[r])), partial);
        put(g.first + r, d * kGroup + 2 * c + kLanes, S::mul(out[1], S::set(unit_[r])), partial);
      }
    }
  }
  void put(int row, int feature, F v, float* partial) {
    const int64_t at = row * value_stride_ + feature;
    if (partial != nullptr) return S::store(partial + at, v);
    v = S::fma(S::load(total_ + at), S::set(keep_[row]), S::mul(v, S::set(take_[row])));
    S::store(total_ + at, v);
  }

  template <int R>
  void do_rows(const Group& g, int64_t split, float* partial) {
    score<R>(g, split);
    for (int r = g.first; r < g.first + R; ++r) weigh(r, g, split);
    if (g.from >= g.to) return;
    if (partial == nullptr) advance(g.first, R, split_max_ + g.first, split_sum_ + g.first);
    for (int d = 0; d < value_groups_; ++d) values_of<R>(g, split, d, partial);
  }

  void do_split(int64_t split, float* partial) {
    for (int i = 0; i < groups(); ++i) {
      const Group g = group(i, split);
      switch (g.rows) {
        case 1:
          do_rows<1>(g, split, partial);
          break;
        case 2:
          do_rows<2>(g, split, partial);
          break;
        case 3:
          do_rows<3>(g, split, partial);
          break;
        default:
          do_rows<4>(g, split, partial);
      }
    }
  }

  // Packs n <= 32 values into 16 bytes, in the pairs that the kernels expect. Returns the scale.
  static uint16_t pack_group(const float* x, int n, uint8_t* bytes) {
    float lowest = x[0], highest = x[0], sum = 0.0f;
    for (int i = 0; i < n; ++i) {
      lowest = x[i] < lowest ? x[i] : lowest;
      highest = x[i] > highest ? x[i] : highest;
      sum += x[i];
    }
    const ops::KvScale scale = ops::int4_scale(lowest, highest, sum);
    alignas(64) float code[kGroup];
    const F to_code = S::set(scale.to_code);
    for (int i = 0; i < kGroup; i += kLanes) {
      const int lanes = static_cast<int>(most(0, least(kLanes, n - i)));
      const F v = S::round(S::mul(S::load_n(x + i, lanes), to_code));
      S::store(code + i, S::max(S::min(v, S::set(7.0f)), S::set(-8.0f)));
    }
    for (int i = 0; i < 16; ++i) {
      const int at = i / 4 * 8 + i % 4;
      const int low = static_cast<int>(code[at]) + 8, high = static_cast<int>(code[at + 4]) + 8;
      bytes[i] = static_cast<uint8_t>(low | high << 4);
    }
    return scale.bits;
  }

  static uint16_t pack_int8(const float* x, int n, uint8_t* bytes) {
    uint32_t largest = 0;
    for (int i = 0; i < n; ++i) {
      uint32_t bits;
      __builtin_memcpy(&bits, x + i, sizeof bits);
      bits &= 0x7fffffffu;
      largest = bits > largest ? bits : largest;
    }
    const ops::KvScale scale = ops::int8_scale(largest);
    alignas(64) float code[kGroup];
    for (int i = 0; i < kGroup; i += kLanes) {
      const int lanes = static_cast<int>(most(0, least(kLanes, n - i)));
      const F v = S::round(S::mul(S::load_n(x + i, lanes), S::set(scale.to_code)));
      S::store(code + i, S::max(S::min(v, S::set(127.0f)), S::set(-127.0f)));
    }
    for (int i = 0; i < n; ++i) bytes[i] = static_cast<uint8_t>(static_cast<int>(code[i]) + 128);
    return scale.bits;
  }

 public:
  using Base::merge;

  static void attend(const AttentionTile& tile) {
    CodedAttention a(tile);
    a.load_queries();
    a.begin();
    for (int64_t s = tile.first_split(); s <= tile.last_split(); ++s) a.do_split(s, nullptr);
    a.finish();
  }

  static void attend_splits(const AttentionTile& tile, int64_t first, float* partials,
                            int64_t partial_floats) {
    CodedAttention a(tile);
    a.load_queries();
    a.each_partial(first, partials, partial_floats,
                   [&](int64_t split, float* partial) { a.do_split(split, partial); });
  }

  // Stores one token's key and value of a head, whose block is at `head`.
  static void store_head(const ops::KvShape& s, const float* k, const float* v, int64_t slot,
                         size_t values_at, uint8_t* head) {
    const ops::KvFormat& key = ops::info(s.type).key;
    auto* const scales =
        reinterpret_cast<uint16_t*>(head + ops::kBlockTokens * ops::code_bytes(key, s.key_dim)) +
        slot;
    alignas(64) float x[kMostKeyDim];
    uint8_t bytes[kGroup];
    const bool int4 = key.code == ops::KvCode::kInt4;
    for (int d = 0; d < s.key_dim; ++d) x[d] = k[d];
    if (key.rotated) ops::hadamard(x, s.key_dim);
    for (int d = 0; d < s.key_dim; d += kGroup) {
      const int n = static_cast<int>(least(kGroup, s.key_dim - d)), size = int4 ? 16 : n;
      scales[d / kGroup * 16] = int4 ? pack_group(x + d, n, bytes) : pack_int8(x + d, n, bytes);
      uint8_t* const to = head + (int4 ? d / 8 : d / 4) * 64 + slot * 4;
      for (int i = 0; i < size; i += 4) __builtin_memcpy(to + i * 16, bytes + i, 4);
    }
    for (int d = 0; d < s.value_dim; ++d) x[d] = v[d];
    ops::hadamard(x, s.value_dim);
    for (int d = 0; d < s.value_dim; d += kGroup) {
      const int n = static_cast<int>(least(kGroup, s.value_dim - d));
      scales[(ops::scales_of(s.key_dim) + d / kGroup) * 16] = pack_group(x + d, n, bytes);
      uint8_t* const to = head + values_at + d * 8 + slot / 4 * 64 + slot % 4;
      for (int i = 0; i < 16; ++i) to[i * 4] = bytes[i];
    }
  }
};

// The interface of an instruction set whose kernels support 4-bit codes only.
template <class Coded>
constexpr AttentionIsa coded_isa() {
  AttentionIsa isa{Coded::attend, Coded::attend_splits, Coded::merge, nullptr};
  isa.store_coded = Coded::store_head;
  isa.supports = [](const ops::KvShape& s) { return ops::has_int4(s.type); };
  return isa;
}

// The interface of one that supports all types: 4-bit codes by Coded, the others by Plain.
template <class Plain, class Coded>
constexpr AttentionIsa both_isa() {
  AttentionIsa isa = Plain::isa();
  isa.attend = [](const AttentionTile& tile) {
    return ops::has_int4(tile.shape.type) ? Coded::attend(tile) : Plain::attend(tile);
  };
  isa.attend_splits = [](const AttentionTile& tile, int64_t first, float* partials,
                         int64_t partial_floats) {
    return ops::has_int4(tile.shape.type)
               ? Coded::attend_splits(tile, first, partials, partial_floats)
               : Plain::attend_splits(tile, first, partials, partial_floats);
  };
  isa.store_coded = Coded::store_head;
  return isa;
}

}  // namespace
}  // namespace freshet::cpu

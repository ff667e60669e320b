#include "quant/search_grid.h"

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>
#include <vector>

#include "base/status.h"
#include "quant/iq_grids.h"
#include "quant/search_fit.h"

namespace freshet::quant {

using namespace fit;

namespace {

// How a format uses its grid. kAll: eight signs per 8 values; kEven: seven.
enum class Signs { kAll, kEven, kDeltaOfGroup, kDeltaOfEntry };

template <Format f>
struct Rules;
template <>
struct Rules<Format::kIQ1_S> {
  static constexpr auto& kGrid = kGridIQ1;
  static constexpr Signs kSigns = Signs::kDeltaOfGroup;
  static constexpr int kGroup = 32, kScaleTop = 7, kNear = 32;
  static constexpr float kParts = 8;
};
template <>
struct Rules<Format::kIQ1_M> {
  static constexpr auto& kGrid = kGridIQ1;
  static constexpr Signs kSigns = Signs::kDeltaOfEntry;
  static constexpr int kGroup = 16, kScaleTop = 7, kNear = 32;
  static constexpr float kParts = 8;
};
template <>
struct Rules<Format::kIQ2_XXS> {
  static constexpr auto& kGrid = kGridIQ2_XXS;
  static constexpr Signs kSigns = Signs::kEven;
  static constexpr int kGroup = 32, kScaleTop = 15, kNear = 24;
  static constexpr float kParts = 8;
};
template <>
struct Rules<Format::kIQ2_XS> {
  static constexpr auto& kGrid = kGridIQ2_XS;
  static constexpr Signs kSigns = Signs::kEven;
  static constexpr int kGroup = 16, kScaleTop = 15, kNear = 24;
  static constexpr float kParts = 8;
};
template <>
struct Rules<Format::kIQ2_S> {
  static constexpr auto& kGrid = kGridIQ2_S;
  static constexpr Signs kSigns = Signs::kAll;
  static constexpr int kGroup = 16, kScaleTop = 15, kNear = 24;
  static constexpr float kParts = 8;
};
template <>
struct Rules<Format::kIQ3_XXS> {
  static constexpr auto& kGrid = kGridIQ3_XXS;
  static constexpr Signs kSigns = Signs::kEven;
  static constexpr int kGroup = 32, kScaleTop = 15, kNear = 16;
  static constexpr float kParts = 4;
};
template <>
struct Rules<Format::kIQ3_S> {
  static constexpr auto& kGrid = kGridIQ3_S;
  static constexpr Signs kSigns = Signs::kAll;
  static constexpr int kGroup = 32, kScaleTop = 15, kNear = 16;
  static constexpr float kParts = 1;
};

// The values of a grid's entries, and the nearest entries for each combination of levels (a cell),
// nearest first. IQ1's values are in eighths, without delta.
template <class R>
class Neighbours {
 public:
  static constexpr int kValues = R::kGrid.kValues;
  static constexpr int kLevels = kValues == 8 ? 3 : 8;
  static constexpr bool kSigned = R::kGrid.kCount == 2048;

  Neighbours() {
    for (int e = 0; e < R::kGrid.kCount; ++e) {
      for (int i = 0; i < kValues; ++i) {
        const auto v = static_cast<float>(R::kGrid.value(e, i));
        values_[static_cast<size_t>(e * kValues + i)] = kSigned ? 8 * v - 8 : v;
      }
    }
    std::vector<float> all(values_.begin(), values_.end());
    std::sort(all.begin(), all.end());
    all.erase(std::unique(all.begin(), all.end()), all.end());
    FRESHET_CHECK(all.size() == kLevels);
    for (int i = 0; i + 1 < kLevels; ++i) {
      const auto at = static_cast<size_t>(i);
      middle_[at] = 0.5f * (all[at] + all[at + 1]);
    }
    top_ = all.back();
    int cells = 1;
    for (int i = 0; i < kValues; ++i) cells *= kLevels;
    near_.resize(static_cast<size_t>(cells) * R::kNear);
    for (int cell = 0; cell < cells; ++cell) list(cell, all);
  }

  const float* values(int entry) const { return &values_[static_cast<size_t>(entry * kValues)]; }
  float top() const { return top_; }

  // The best entry for t among the first `count` of its cell, and its weighted error.
  int nearest(const float* t, const float* w, int count, float& error) const {
    F4 digits = {};
    for (int i = 0; i < kValues; i += 4) {
      const F4 v = load4(t + i);
      F4 level = {};
      for (const float m : middle_) level += v > splat(m) ? splat(1) : F4{};
      digits = i == 0 ? level : digits + splat(power(4)) * level;
    }
    const F4 places = {1, power(1), power(2), power(3)};
    const auto cell = static_cast<size_t>(sum4(digits * places));
    const uint16_t* const list = &near_[cell * R::kNear];
    int best = list[0];
    error = std::numeric_limits<float>::max();
    for (int k = 0; k < count; ++k) {
      const float* const v = values(list[k]);
      F4 sum = {};
      for (int i = 0; i < kValues; i += 4) {
        const F4 off = load4(v + i) - load4(t + i);
        sum += load4(w + i) * off * off;
      }
      const float e = sum4(sum);
      if (e < error) {
        error = e;
        best = list[k];
      }
    }
    return best;
  }

 private:
  static constexpr float power(int n) {
    float p = 1;
    for (int i = 0; i < n; ++i) p *= kLevels;
    return p;
  }
  void list(int cell, const std::vector<float>& levels) {
    float at[kValues];
    for (int i = 0, left = cell; i < kValues; ++i, left /= kLevels) {
      at[i] = levels[static_cast<size_t>(left % kLevels)];
    }
    std::array<std::pair<float, uint16_t>, static_cast<size_t>(R::kGrid.kCount)> order;
    for (int e = 0; e < R::kGrid.kCount; ++e) {
      float distance = 0;
      for (int i = 0; i < kValues; ++i) {
        const float off = values(e)[i] - at[i];
        distance += off * off;
      }
      order[static_cast<size_t>(e)] = {distance, static_cast<uint16_t>(e)};
    }
    std::partial_sort(order.begin(), order.begin() + R::kNear, order.end());
    for (size_t k = 0; k < R::kNear; ++k) {
      near_[static_cast<size_t>(cell) * R::kNear + k] = order[k].second;
    }
  }

  std::array<float, static_cast<size_t>(R::kGrid.kCount* R::kGrid.kValues)> values_;
  std::array<float, kLevels - 1> middle_;
  float top_ = 0;
  std::vector<uint16_t> near_;
};

template <class R>
const Neighbours<R>& neighbours() {
  static const Neighbours<R> all;
  return all;
}

struct GroupFit {
  ScaleSums sums = {0, 0};
  float error = 0;  // of x / scale
};

// Chooses the entries of a group for x / scale, and writes them if `entry` is not null.
template <class R>
class Group {
 public:
  static constexpr int kValues = R::kGrid.kValues, kEntries = R::kGroup / kValues;
  static constexpr bool kDelta =
      R::kSigns == Signs::kDeltaOfGroup || R::kSigns == Signs::kDeltaOfEntry;
  struct Choice {
    uint16_t entry[kEntries];
    float delta[kEntries];
  };

  Group(const Neighbours<R>& grid, const float* x, const float* w) : grid_(grid), x_(x), w_(w) {}

  GroupFit choose(float inverse, int width, Choice& c) const {
    float t[R::kGroup];
    for (int i = 0; i < R::kGroup; ++i) t[i] = x_[i] * inverse;
    GroupFit fit;
    fit.error = entries(t, kDelta ? 1.0f : 0.0f, width, c);
    if constexpr (R::kSigns == Signs::kDeltaOfGroup) {
      Choice other;
      const float below = entries(t, -1, width, other);
      if (below < fit.error) {
        c = other;
        fit.error = below;
      }
    }
    fit.sums = sums(c);
    return fit;
  }

  ScaleSums sums(const Choice& c) const {
    F4 qx = {};
    F4 qq = {};
    for (int e = 0; e < kEntries; ++e) {
      const float* const v = grid_.values(c.entry[e]);
      for (int i = 0; i < kValues; i += 4) {
        const F4 q = load4(v + i) + splat(kDelta ? c.delta[e] : 0.0f);
        const F4 wq = load4(w_ + e * kValues + i) * q;
        qx += wq * load4(x_ + e * kValues + i);
        qq += wq * q;
      }
    }
    return {sum4(qx), sum4(qq)};
  }

  // The best scale of the group alone.
  float fit_scale(int width) const {
    float most = 0;
    for (int i = 0; i < R::kGroup; ++i) most = std::max(most, std::abs(x_[i]));
    if (most == 0) return 0;
    GroupFit best;
    Choice c;
    float ratio = kFirstRatio;
    for (int k = 0; k < kRatios; ++k, ratio *= kNextRatio) {
      const float inverse = grid_.top() * ratio / most;
      if (!std::isfinite(inverse)) return 0;
      const GroupFit now = choose(inverse, width, c);
      if (now.sums.qx > 0 && now.sums.gain() > best.sums.gain()) best = now;
    }
    for (int round = 0; round < 2 && best.sums.qx > 0; ++round) {
      const GroupFit now = choose(best.sums.qq / best.sums.qx, width, c);
      if (!(now.sums.qx > 0 && now.sums.gain() > best.sums.gain())) break;
      best = now;
    }
    return best.sums.qq > 0 ? best.sums.qx / best.sums.qq : 0.0f;
  }

 private:
  // Scales that are tried, relative to the one at which the largest value is the largest level.
  static constexpr float kFirstRatio = 0.8f, kNextRatio = 1.08f;
  static constexpr int kRatios = 15;

  // Entries with this delta; with kDeltaOfEntry, each with the better sign of it.
  float entries(const float* t, float delta, int width, Choice& c) const {
    float total = 0;
    for (int e = 0; e < kEntries; ++e) {
      float error = one(t, e, delta, width, c.entry[e]);
      c.delta[e] = delta;
      if constexpr (R::kSigns == Signs::kDeltaOfEntry) {
        uint16_t entry = 0;
        const float below = one(t, e, -delta, width, entry);
        if (below < error) {
          error = below;
          c.entry[e] = entry;
          c.delta[e] = -delta;
        }
      }
      total += error;
    }
    return total;
  }
  float one(const float* t, int e, float delta, int width, uint16_t& entry) const {
    float shifted[kValues];
    for (int i = 0; i < kValues; ++i) shifted[i] = t[e * kValues + i] - delta;
    float error = 0;
    entry = static_cast<uint16_t>(grid_.nearest(shifted, w_ + e * kValues, width, error));
    return error;
  }

  const Neighbours<R>& grid_;
  const float* x_;
  const float* w_;
};

// Magnitudes in place of x, and their signs. With seven signs per 8 values, an odd number of
// minuses makes the value that matters least a negative magnitude.
template <class R>
void split_signs(const float* x, const float* w, float* size, uint8_t* minus) {
  for (int k = 0; k < 32; ++k) {
    uint32_t signs = 0;
    int least = 0;
    for (int i = 0; i < 8; ++i) {
      const int at = 8 * k + i;
      size[at] = std::abs(x[at]);
      signs |= uint32_t{x[at] < 0} << i;
      if (w[at] * size[at] < w[8 * k + least] * size[8 * k + least]) least = i;
    }
    if (R::kSigns == Signs::kEven && std::popcount(signs) % 2 != 0) {
      signs ^= 1u << least;
      size[8 * k + least] = -size[8 * k + least];
    }
    minus[k] = static_cast<uint8_t>(signs);
  }
}

// For known scales: negates another value than the least where that gives a smaller error.
template <class R>
void move_odd_signs(const Neighbours<R>& grid, const float* w, float inverse, float* size,
                    uint8_t& minus) {
  constexpr int kValues = R::kGrid.kValues;
  int odd = -1;
  float t[8];
  for (int i = 0; i < 8; ++i) {
    if (size[i] < 0) odd = i;
    t[i] = size[i] * inverse;
  }
  if (odd < 0) return;
  const auto error = [&] {
    float total = 0;
    for (int i = 0; i < 8; i += kValues) {
      float e = 0;
      grid.nearest(t + i, w + i, R::kNear, e);
      total += e;
    }
    return total;
  };
  int best = odd;
  float least = error();
  t[odd] = -t[odd];
  for (int i = 0; i < 8; ++i) {
    if (i == odd) continue;
    t[i] = -t[i];
    const float e = error();
    t[i] = -t[i];
    if (e < least) {
      least = e;
      best = i;
    }
  }
  size[odd] = -size[odd];
  size[best] = -size[best];
  minus = static_cast<uint8_t>(minus ^ 1u << odd ^ 1u << best);
}

template <class R>
struct Coded {
  static constexpr int kGroups = 256 / R::kGroup;
  uint16_t d = 0;
  uint8_t scale[kGroups] = {};
  typename Group<R>::Choice choice[kGroups] = {};
};

// Scales and entries of all groups for the best d near one that is given. Returns the error.
template <class R>
class SuperBlock {
 public:
  static constexpr int kGroups = Coded<R>::kGroups, kFew = 8;

  SuperBlock(const Neighbours<R>& grid, const float* x, const float* w)
      : grid_(grid), x_(x), w_(w) {
    for (int g = 0; g < kGroups; ++g) {
      ideal_[g] = group(g).fit_scale(kFew);
      most_ = std::max(most_, ideal_[g]);
    }
  }
  float most() const { return most_; }

  float code(float unit, Coded<R>& best) const {
    float least = std::numeric_limits<float>::max();
    for (int round = 0; round < 3; ++round) {
      Coded<R> now;
      now.d = to_f16(unit * R::kParts);
      double up = 0;  // numerator of the least-squares unit for these scales and entries
      double down = 0;
      const float error = code_groups(f16_to_f32(now.d) / R::kParts, now, up, down);
      if (!(error < least)) break;
      least = error;
      best = now;
      if (!(down > 0 && up > 0)) break;
      unit = static_cast<float>(up / down);
    }
    return least;
  }

  // The last choice of scales and entries, among all neighbours.
  float code_groups(float unit, Coded<R>& c, double& up, double& down) const {
    float total = 0;
    for (int g = 0; g < kGroups; ++g) {
      const float odd = std::min(ideal_[g] * inverse(unit), 1000.0f);
      const int middle = static_cast<int>(std::lround((odd - 1) / 2));
      float least = std::numeric_limits<float>::max();
      ScaleSums sums = {0, 0};
      for (int step = -1; step <= 1; ++step) {
        const int scale = std::clamp(middle + step, 0, R::kScaleTop);
        const float dl = unit * static_cast<float>(2 * scale + 1);
        typename Group<R>::Choice choice;
        const GroupFit fit = group(g).choose(inverse(dl), R::kNear, choice);
        const float error = fit.error * dl * dl;
        if (error < least) {
          least = error;
          sums = fit.sums;
          c.scale[g] = static_cast<uint8_t>(scale);
          c.choice[g] = choice;
        }
      }
      total += least;
      const int odd_scale = 2 * c.scale[g] + 1;
      up += static_cast<double>(sums.qx) * odd_scale;
      down += static_cast<double>(sums.qq) * odd_scale * odd_scale;
    }
    return total;
  }

 private:
  Group<R> group(int g) const { return {grid_, x_ + g * R::kGroup, w_ + g * R::kGroup}; }

  const Neighbours<R>& grid_;
  const float* x_;
  const float* w_;
  float ideal_[kGroups];
  float most_ = 0;
};

template <class R>
void fit_grid(const float* x, const float* w, GridBlock& out) {
  const Neighbours<R>& grid = neighbours<R>();
  constexpr bool kDelta = Group<R>::kDelta;
  float size[256];
  out = {};
  if constexpr (kDelta) {
    std::copy(x, x + 256, size);
  } else {
    split_signs<R>(x, w, size, out.minus);
  }
  const SuperBlock<R> block(grid, size, w);
  if (block.most() == 0) return;
  Coded<R> best;
  float least = std::numeric_limits<float>::max();
  for (const int top : {2 * R::kScaleTop + 1, 2 * R::kScaleTop - 1}) {
    Coded<R> now;
    const float error = block.code(block.most() / static_cast<float>(top), now);
    if (error < least) {
      least = error;
      best = now;
    }
  }
  const float unit = f16_to_f32(best.d) / R::kParts;
  if constexpr (R::kSigns == Signs::kEven) {
    for (int k = 0; k < 32; ++k) {
      const float dl = unit * static_cast<float>(2 * best.scale[8 * k / R::kGroup] + 1);
      move_odd_signs<R>(grid, w + 8 * k, inverse(dl), size + 8 * k, out.minus[k]);
    }
    double up = 0;
    double down = 0;
    block.code_groups(unit, best, up, down);
  }
  constexpr int kEntries = Group<R>::kEntries;
  out.d = best.d;
  for (int g = 0; g < Coded<R>::kGroups; ++g) {
    out.scale[g] = best.scale[g];
    for (int e = 0; e < kEntries; ++e) {
      out.entry[g * kEntries + e] = best.choice[g].entry[e];
      if (kDelta) out.minus[g * kEntries + e] = best.choice[g].delta[e] < 0;
    }
  }
}

}  // namespace

void fit_grid_block(Format f, const float* x, const float* w, GridBlock& out) {
  switch (f) {
    case Format::kIQ1_S:
      return fit_grid<Rules<Format::kIQ1_S>>(x, w, out);
    case Format::kIQ1_M:
      return fit_grid<Rules<Format::kIQ1_M>>(x, w, out);
    case Format::kIQ2_XXS:
      return fit_grid<Rules<Format::kIQ2_XXS>>(x, w, out);
    case Format::kIQ2_XS:
      return fit_grid<Rules<Format::kIQ2_XS>>(x, w, out);
    case Format::kIQ2_S:
      return fit_grid<Rules<Format::kIQ2_S>>(x, w, out);
    case Format::kIQ3_XXS:
      return fit_grid<Rules<Format::kIQ3_XXS>>(x, w, out);
    case Format::kIQ3_S:
      return fit_grid<Rules<Format::kIQ3_S>>(x, w, out);
    default:
      FRESHET_CHECK(false, "{} has no grid", info(f).name);
  }
}

uint16_t fit_ternary_block(const float* x, const float* w, int8_t* q) {
  int order[256];
  std::iota(order, order + 256, 0);
  std::sort(order, order + 256, [x](int a, int b) {
    return std::abs(x[a]) != std::abs(x[b]) ? std::abs(x[a]) > std::abs(x[b]) : a < b;
  });
  // With the k largest values at +-d, the best d is their mean, and removes sum^2 / weight.
  double sum = 0;
  double weight = 0;
  double gain = 0;
  double best = 0;
  for (int k = 0; k < 256; ++k) {
    const int i = order[k];
    sum += static_cast<double>(w[i]) * std::abs(x[i]);
    weight += w[i];
    if (weight > 0 && sum * sum / weight > gain) {
      gain = sum * sum / weight;
      best = sum / weight;
    }
  }
  const uint16_t d = to_f16(static_cast<float>(best));
  const float half = 0.5f * f16_to_f32(d);
  for (int i = 0; i < 256; ++i) {
    q[i] = static_cast<int8_t>(std::abs(x[i]) > half ? (x[i] < 0 ? -1 : 1) : 0);
  }
  return d;
}

}  // namespace freshet::quant

// The search for the scale of a group: weighted least squares over a list of candidates.
//
// Each function minimises the sum of w (x - decoded)^2. Sums run in eight lanes in a fixed order.
// `Round` rounds a scale to what the container can store. Pure; thread-safe.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "quantizer/methods/alphabet.h"
#include "quantizer/methods/grid.h"

namespace freshet::quantizer {

// The numbers of a group, padded with zeros of weight zero to whole lanes.
class Group {
 public:
  static constexpr int64_t kLanes = 8;
  // `weights`: nullptr for equal ones.
  Group(const float* x, const float* weights, int64_t n);

  int64_t size() const { return static_cast<int64_t>(x_.size()); }
  float largest() const { return largest_; }  // by magnitude, with its sign
  float least() const { return least_; }
  float most() const { return most_; }

  struct Sums {
    float qx = 0.0f;
    float qq = 0.0f;
    float gain() const { return qq > 0 ? qx * qx / qq : 0.0f; }
  };
  // For the levels that are nearest with this scale.
  Sums sums(const Alphabet& alphabet, float scale) const;
  float error(const Alphabet& alphabet, float scale, float offset) const;
  // For integers q in [0, top] and x ~ scale (q - zero): the best scale for the levels so chosen.
  float refit_about(int top, float scale, float zero) const;

 private:
  std::vector<float> x_;
  std::vector<float> w_;
  float largest_ = 0.0f, least_ = 0.0f, most_ = 0.0f;
};

struct ScaleSearch {
  bool negative = false;  // the scale may be negative: the larger extreme gets the longer side
  float widest = 1.1f;    // the range's end as a share of the extreme value: from here
  float narrowest = 0.6f;
  int steps = 26;
};

// The best scale for x ~ scale * level; 0 for a group of zeros.
template <class Round>
float search_scale(const Group& g, const Alphabet& a, const ScaleSearch& options,
                   const Round& round) {
  const float extreme = std::abs(g.largest());
  if (!(extreme > 1e-30f)) return 0.0f;
  const float ends[] = {a.highest(), a.lowest()};
  Group::Sums best;
  float best_scale = round(extreme / a.highest());
  for (int side = 0; side < (options.negative ? 2 : 1); ++side) {
    for (int k = 0; k <= options.steps; ++k) {
      const float share = options.widest - (options.widest - options.narrowest) *
                                               static_cast<float>(k) /
                                               static_cast<float>(options.steps);
      const float from = options.negative ? g.largest() : extreme;
      const Group::Sums s = g.sums(a, share * from / ends[side]);
      if (s.gain() > best.gain()) best = s;
    }
  }
  for (int turn = 0; turn < 4 && best.qx != 0.0f; ++turn) {
    const Group::Sums s = g.sums(a, best.qx / best.qq);
    if (!(s.gain() > best.gain())) break;
    best = s;
  }
  // Rounded scales are compared by their true errors, with the one that just covers the range.
  float least = g.error(a, best_scale, 0.0f);
  if (best.qq > 0) {
    const float found = round(best.qx / best.qq);
    if (g.error(a, found, 0.0f) < least) best_scale = found;
  }
  return best_scale;
}

struct ScaleZero {
  float scale = 0.0f;
  int zero = 0;
};
// The best scale and zero point for x ~ scale * (q - zero), q and zero in [0, top]. Without
// `search`: those that cover the range and zero.
template <class Round>
ScaleZero search_scale_zero(const Group& g, const Alphabet& a, bool search, const Round& round) {
  const int top = static_cast<int>(a.highest());
  const float low = std::min(g.least(), 0.0f);
  const float high = std::max(g.most(), 0.0f);
  if (!(high - low > 1e-30f)) return {};
  const auto zero_of = [top](float at, float scale) {
    return static_cast<int>(std::clamp(std::nearbyint(-at / scale), 0.0f, static_cast<float>(top)));
  };
  ScaleZero best = {round((high - low) / static_cast<float>(top)), 0};
  best.zero = zero_of(low, best.scale);
  if (!search) return best;
  float least = g.error(a, best.scale, best.scale * static_cast<float>(best.zero));
  const auto try_pair = [&](float scale, int zero) {
    scale = round(scale);
    if (!(scale > 0.0f)) return;
    const float e = g.error(a, scale, scale * static_cast<float>(zero));
    if (e < least) {
      least = e;
      best = {scale, zero};
    }
  };
  for (int k = 0; k <= 10; ++k) {
    const float share = 1.04f - 0.05f * static_cast<float>(k);
    const float scale = share * (high - low) / static_cast<float>(top);
    const float slack = (1.0f - share) * (high - low);
    int last = -1;
    for (int side = 0; side < 3; ++side) {
      const int zero = zero_of(low + 0.5f * slack * static_cast<float>(side), scale);
      if (zero == last) continue;
      last = zero;
      try_pair(g.refit_about(top, scale, static_cast<float>(zero)), zero);
    }
  }
  for (int turn = 0; turn < 2; ++turn) {
    const ScaleZero from = best;
    for (int zero = std::max(from.zero - 1, 0); zero <= std::min(from.zero + 1, top); ++zero) {
      try_pair(g.refit_about(top, from.scale, static_cast<float>(zero)), zero);
    }
  }
  return best;
}

}  // namespace freshet::quantizer

// The inner loops of the encoders' search: levels of a grid, weighted sums, fits of one group.
// Included by the sources of search.h only.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "quant/search.h"

namespace freshet::quant::fit {

inline constexpr float kRound =
    0x1.8p23f;  // adding and subtracting it rounds |v| < 2^22 to an integer

// Four lanes: the compiler maps them to the baseline instruction set of any machine, and the source
// fixes the order of every sum.
using F4 = float __attribute__((vector_size(16)));
using I4 = int32_t __attribute__((vector_size(16)));

inline F4 load4(const float* p) {
  F4 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline F4 splat(float f) {
  return F4{f, f, f, f};
}
inline float sum4(F4 v) {
  return (v[0] + v[1]) + (v[2] + v[3]);
}

// The nearest level for each lane; NaN gets the lowest.
class LinearLevels {
 public:
  explicit LinearLevels(LinearGrid g)
      : lo_(static_cast<float>(g.lo)), hi_(static_cast<float>(g.hi)) {}
  F4 nearest(F4 t) const {
    const F4 lo = splat(lo_);
    const F4 hi = splat(hi_);
    t = t > lo ? t : lo;
    t = t < hi ? t : hi;
    return (t + splat(kRound)) - splat(kRound);
  }
  float lo() const { return lo_; }
  float hi() const { return hi_; }
  // Relative distance of two candidate scales: an eighth of a level at the end of the range.
  float step() const { return 0.125f / std::max(-lo_, hi_); }

 private:
  float lo_;
  float hi_;
};

class TableLevels {
 public:
  explicit TableLevels(TableGrid g) : first_(g.levels[0]), last_(g.levels[15]) {
    for (int i = 0; i < 15; ++i) {
      middle_[i] = 0.5f * static_cast<float>(g.levels[i] + g.levels[i + 1]);
      gap_[i] = static_cast<float>(g.levels[i + 1] - g.levels[i]);
    }
  }
  F4 nearest(F4 t) const {
    F4 level = splat(first_);
    const F4 zero = {};
    for (int i = 0; i < 15; ++i) level += t > splat(middle_[i]) ? splat(gap_[i]) : zero;
    return level;
  }
  float lo() const { return first_; }
  float hi() const { return last_; }
  float step() const { return 0.0156f; }

 private:
  float first_;
  float last_;
  float middle_[15];
  float gap_[15];
};

inline LinearLevels levels_of(LinearGrid g) {
  return LinearLevels(g);
}
inline TableLevels levels_of(TableGrid g) {
  return TableLevels(g);
}

inline float inverse(float d) {
  return d != 0 ? 1.0f / d : 0.0f;
}

// Converts to an f16 that is never infinite.
inline uint16_t to_f16(float f) {
  return f32_to_f16(std::clamp(f, -65504.0f, 65504.0f));
}

struct ScaleSums {
  float qx;
  float qq;
  // The error that a scale of qx / qq removes.
  float gain() const { return qq > 0 ? qx * qx / qq : 0.0f; }
};

template <int N, class Levels>
ScaleSums scale_sums(const float* x, const float* w, const Levels& levels, float inv) {
  F4 qx = {};
  F4 qq = {};
  for (int i = 0; i < N; i += 4) {
    const F4 xi = load4(x + i);
    const F4 q = levels.nearest(xi * splat(inv));
    const F4 wq = load4(w + i) * q;
    qx += wq * xi;
    qq += wq * q;
  }
  return {sum4(qx), sum4(qq)};
}

// The error of x ~ d * q + m for the best q.
template <int N, class Levels>
float error_of(const float* x, const float* w, const Levels& levels, float d, float m) {
  const float inv = inverse(d);
  F4 e = {};
  for (int i = 0; i < N; i += 4) {
    const F4 xi = load4(x + i) - splat(m);
    const F4 r = xi - splat(d) * levels.nearest(xi * splat(inv));
    e += load4(w + i) * r * r;
  }
  return sum4(e);
}

template <int N, class Levels>
void quantize(const float* x, const Levels& levels, float d, float m, int8_t* q) {
  const float inv = inverse(d);
  for (int i = 0; i < N; i += 4) {
    const F4 v = levels.nearest((load4(x + i) - splat(m)) * splat(inv));
    for (int lane = 0; lane < 4; ++lane) q[i + lane] = static_cast<int8_t>(v[lane]);
  }
}

template <int N>
float largest(const float* x) {  // by magnitude, with its sign
  float best = 0;
  for (int i = 0; i < N; ++i) {
    if (std::abs(x[i]) > std::abs(best)) best = x[i];
  }
  return best;
}

// The best float scale for x ~ d * q.
template <int N, class Levels>
float fit_scale(const float* x, const float* w, const Levels& levels) {
  const float max = largest<N>(x);
  if (max == 0) return 0;
  const float ends[2] = {levels.lo(), levels.hi()};
  const int sides = levels.lo() == -levels.hi() ? 1 : 2;
  ScaleSums best = {0, 0};
  for (int side = 0; side < sides; ++side) {
    for (int k = -8; k <= 12; ++k) {
      const float inv = ends[side] * (1.0f + static_cast<float>(k) * levels.step()) / max;
      if (!std::isfinite(inv)) return 0;
      const ScaleSums s = scale_sums<N>(x, w, levels, inv);
      if (s.gain() > best.gain()) best = s;
    }
  }
  for (int round = 0; round < 3 && best.qx != 0; ++round) {
    const ScaleSums s = scale_sums<N>(x, w, levels, best.qq / best.qx);
    if (!(s.gain() > best.gain())) break;
    best = s;
  }
  return best.qq > 0 ? best.qx / best.qq : 0.0f;
}

template <int N, class Levels>
uint16_t fit_block(const float* x, const float* w, const Levels& levels, int8_t* q) {
  uint16_t best = to_f16(fit_scale<N>(x, w, levels));
  float best_error = error_of<N>(x, w, levels, f16_to_f32(best), 0);
  // The sums above lose digits that matter for eight bits: compare the plain scale and the
  // neighbouring f16 values by their true errors.
  const uint16_t plain = to_f16(largest<N>(x) / levels.lo());
  const uint16_t candidates[] = {plain, static_cast<uint16_t>(plain - 1),
                                 static_cast<uint16_t>(best - 1), static_cast<uint16_t>(best + 1)};
  for (const uint16_t c : candidates) {
    if ((c & 0x7c00) == 0x7c00 || (c & 0x7fff) == 0) continue;
    const float e = error_of<N>(x, w, levels, f16_to_f32(c), 0);
    if (e < best_error) {
      best_error = e;
      best = c;
    }
  }
  quantize<N>(x, levels, f16_to_f32(best), 0, q);
  return best;
}

// Moments of q for x ~ d * q + m.
struct Line {
  float d;
  float m;
};
struct LineFit {
  Line line;
  float error;
};

struct Moments {
  float w;
  float x;
  float xx;
};

template <int N>
Moments moments_of(const float* x, const float* w) {
  F4 sw = {};
  F4 sx = {};
  F4 sxx = {};
  for (int i = 0; i < N; i += 4) {
    const F4 xi = load4(x + i);
    const F4 wi = load4(w + i);
    sw += wi;
    sx += wi * xi;
    sxx += wi * xi * xi;
  }
  return {sum4(sw), sum4(sx), sum4(sxx)};
}

// Quantises with `from` and refits the line to those q. With `floor`, m must not be positive.
template <int N>
LineFit refit_line(const float* x, const float* w, const LinearLevels& levels, const Moments& s,
                   Line from, bool floor) {
  const float inv = inverse(from.d);
  F4 sq = {};
  F4 sqq = {};
  F4 sqx = {};
  for (int i = 0; i < N; i += 4) {
    const F4 xi = load4(x + i);
    const F4 q = levels.nearest((xi - splat(from.m)) * splat(inv));
    const F4 wq = load4(w + i) * q;
    sq += wq;
    sqq += wq * q;
    sqx += wq * xi;
  }
  const float q = sum4(sq);
  const float qq = sum4(sqq);
  const float qx = sum4(sqx);
  const float determinant = s.w * qq - q * q;
  Line line = from;
  if (determinant > 0) {
    line = {(s.w * qx - s.x * q) / determinant, (qq * s.x - q * qx) / determinant};
  }
  if (floor && line.m > 0) line = {qq > 0 ? qx / qq : 0.0f, 0.0f};
  const float error = s.xx - 2 * line.d * qx - 2 * line.m * s.x + line.d * line.d * qq +
                      2 * line.d * line.m * q + line.m * line.m * s.w;
  return {line, error};
}

template <int N>
Line fit_line(const float* x, const float* w, int top, bool floor) {
  const LinearLevels levels({0, top});
  const auto [low_it, high_it] = std::minmax_element(x, x + N);
  const float low = floor ? std::min(*low_it, 0.0f) : *low_it;
  const float high = *high_it;
  if (!(high > low)) return {0, low};
  const Moments s = moments_of<N>(x, w);
  const auto levels_wide = static_cast<float>(top);
  LineFit best = {{0, low}, std::numeric_limits<float>::max()};
  for (int k = -4; k <= 10; ++k) {
    const float d = (high - low) / (levels_wide + 0.2f * static_cast<float>(k));
    const float slack = (high - low) - d * levels_wide;  // total clipping: at one end or at both
    for (int side = 0; side < 3; ++side) {
      const float m = low + 0.5f * slack * static_cast<float>(side);
      const LineFit f = refit_line<N>(x, w, levels, s, {d, m}, floor);
      if (f.error < best.error && f.line.d > 0) best = f;
    }
  }
  for (int round = 0; round < 3 && best.line.d > 0; ++round) {
    const LineFit f = refit_line<N>(x, w, levels, s, best.line, floor);
    if (!(f.error < best.error && f.line.d > 0)) break;
    best = f;
  }
  return best.line;
}

}  // namespace freshet::quant::fit

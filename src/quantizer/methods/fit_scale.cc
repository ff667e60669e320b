#include "quantizer/methods/fit_scale.h"

namespace freshet::quantizer {
namespace {

constexpr int kLanes = Group::kLanes;

struct LaneSum {
  float lane[kLanes] = {};
  float total() const {
    float pair[4];
    for (int i = 0; i < 4; ++i) pair[i] = lane[i] + lane[i + 4];
    return (pair[0] + pair[1]) + (pair[2] + pair[3]);
  }
};

// The level nearest to t, in a form that the compiler makes lanes of.
struct RoundedInteger {
  float lo, hi;
  float operator()(float t) const {
    t = t > lo ? t : lo;
    t = t < hi ? t : hi;
    return (t + 0x1.8p23f) - 0x1.8p23f;
  }
};
template <Alphabet::Kind kKind>
struct LookedUp {
  const Alphabet& a;
  float operator()(float t) const { return a.level(a.nearest<kKind>(t)); }
};

template <class F>
auto with_levels(const Alphabet& a, const F& f) {
  switch (a.kind()) {
    case Alphabet::Kind::kInteger:
      return f(RoundedInteger{a.lowest(), a.highest()});
    case Alphabet::Kind::kTable:
      return f(LookedUp<Alphabet::Kind::kTable>{a});
    case Alphabet::Kind::kE4M3:
      break;
  }
  return f(LookedUp<Alphabet::Kind::kE4M3>{a});
}

float inverse_or_zero(float scale) {
  const float inverse = 1.0f / scale;
  return std::isfinite(inverse) ? inverse : 0.0f;
}

}  // namespace

Group::Group(const float* x, const float* weights, int64_t n) {
  const auto padded = static_cast<size_t>((n + kLanes - 1) / kLanes * kLanes);
  x_.assign(padded, 0.0f);
  w_.assign(padded, 0.0f);
  if (n > 0) least_ = most_ = x[0];
  float top = 0.0f;
  for (int64_t i = 0; i < n; ++i) {
    const auto at = static_cast<size_t>(i);
    x_[at] = x[i];
    w_[at] = weights != nullptr ? weights[i] : 1.0f;
    top = std::max(top, w_[at]);
    least_ = std::min(least_, x[i]);
    most_ = std::max(most_, x[i]);
  }
  largest_ = most_ >= -least_ ? most_ : least_;
  // Only ratios of weights matter; without usable ones they are equal.
  for (int64_t i = 0; i < n; ++i) {
    float& w = w_[static_cast<size_t>(i)];
    w = top > 0.0f ? w / top : 1.0f;
  }
}

Group::Sums Group::sums(const Alphabet& alphabet, float scale) const {
  const float inverse = inverse_or_zero(scale);
  return with_levels(alphabet, [&](const auto& nearest) {
    LaneSum qx, qq;
    for (size_t i = 0; i < x_.size(); i += kLanes) {
      for (size_t lane = 0; lane < kLanes; ++lane) {
        const float q = nearest(x_[i + lane] * inverse);
        const float wq = w_[i + lane] * q;
        qx.lane[lane] += wq * x_[i + lane];
        qq.lane[lane] += wq * q;
      }
    }
    return Sums{qx.total(), qq.total()};
  });
}

float Group::error(const Alphabet& alphabet, float scale, float offset) const {
  const float inverse = inverse_or_zero(scale);
  return with_levels(alphabet, [&](const auto& nearest) {
    LaneSum e;
    for (size_t i = 0; i < x_.size(); i += kLanes) {
      for (size_t lane = 0; lane < kLanes; ++lane) {
        const float x = x_[i + lane] + offset;
        const float off = x - scale * nearest(x * inverse);
        e.lane[lane] += w_[i + lane] * off * off;
      }
    }
    return e.total();
  });
}

float Group::refit_about(int top, float scale, float zero) const {
  const RoundedInteger nearest = {-zero, static_cast<float>(top) - zero};
  const float inverse = inverse_or_zero(scale);
  LaneSum qx, qq;
  for (size_t i = 0; i < x_.size(); i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const float q = nearest(x_[i + lane] * inverse);
      const float wq = w_[i + lane] * q;
      qx.lane[lane] += wq * x_[i + lane];
      qq.lane[lane] += wq * q;
    }
  }
  const float down = qq.total();
  return down > 0.0f ? qx.total() / down : scale;
}

}  // namespace freshet::quantizer

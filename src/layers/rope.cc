#include "layers/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace freshet {
namespace {

// theta ^ (2i / dim), F32 as torch computes it.
std::vector<float> wave_numbers(double theta, int dim) {
  std::vector<float> powers(static_cast<size_t>(dim / 2));
  for (int i = 0; i < dim / 2; ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(dim);
    powers[static_cast<size_t>(i)] =
        static_cast<float>(std::pow(static_cast<double>(static_cast<float>(theta)), exponent));
  }
  return powers;
}

void scale_llama3(const RopeSpec& rope, std::vector<float>& freq) {
  const auto low = static_cast<float>(rope.low_freq_factor);
  const auto high = static_cast<float>(rope.high_freq_factor);
  const auto context = static_cast<float>(rope.original_context);
  const auto factor = static_cast<float>(rope.factor);
  for (float& f : freq) {
    const float wavelength = static_cast<float>(2 * std::numbers::pi) / f;
    if (wavelength > context / low) {
      f /= factor;
    } else if (wavelength >= context / high) {
      const float smooth = (context / wavelength - low) / (high - low);
      f = (1 - smooth) * f / factor + smooth * f;
    }
  }
}

void scale_yarn(const RopeSpec& rope, const std::vector<float>& powers, std::vector<float>& freq) {
  // The dimension that makes `rotations` turns within the original context.
  const auto dimension = [&](double rotations) {
    return rope.rotary_dim * std::log(rope.original_context / (rotations * 2 * std::numbers::pi)) /
           (2 * std::log(rope.theta));
  };
  double low = dimension(rope.beta_fast);
  double high = dimension(rope.beta_slow);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, rope.rotary_dim - 1.0);
  if (low == high) high += 0.001;
  for (size_t i = 0; i < freq.size(); ++i) {
    const auto ramp =
        static_cast<float>(std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0));
    const float stretched = 1.0f / (static_cast<float>(rope.factor) * powers[i]);
    freq[i] = stretched * ramp + freq[i] * (1 - ramp);
  }
}

}  // namespace

double yarn_mscale(double factor, double mscale) {
  return factor <= 1 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

std::vector<float> rope_frequencies(const RopeSpec& rope, int64_t context) {
  using S = RopeSpec::Scaling;
  double theta = rope.theta;
  const auto length = static_cast<double>(context);
  if (rope.scaling == S::kDynamic && length > rope.original_context && rope.rotary_dim > 2) {
    const double dim = rope.rotary_dim;
    theta *=
        std::pow(rope.factor * length / rope.original_context - (rope.factor - 1), dim / (dim - 2));
  }
  if (rope.axial) {
    const int axes = rope.axis_count();
    std::vector<float> all;
    if (rope.axial_turns) {
      const std::vector<float> shared = wave_numbers(theta, rope.rotary_dim);
      const auto turns = static_cast<size_t>(axes);
      for (size_t axis = 0; axis < turns; ++axis) {
        for (size_t i = axis; i < shared.size(); i += turns) all.push_back(1.0f / shared[i]);
      }
      return all;
    }
    const std::vector<float> own = wave_numbers(theta, rope.rotary_dim / axes);
    for (int axis = 0; axis < axes; ++axis) {
      for (const float power : own) all.push_back(1.0f / power);
    }
    return all;
  }
  const std::vector<float> powers = wave_numbers(theta, rope.rotary_dim);
  std::vector<float> freq(powers.size());
  for (size_t i = 0; i < freq.size(); ++i) freq[i] = 1.0f / powers[i];
  switch (rope.scaling) {
    case S::kNone:
    case S::kDynamic:
      break;
    case S::kTemperature:
      std::fill(freq.begin(), freq.end(), 0.0f);
      break;
    case S::kLinear:
      for (float& f : freq) f /= static_cast<float>(rope.factor);
      break;
    case S::kLlama3:
      scale_llama3(rope, freq);
      break;
    case S::kYarn:
      scale_yarn(rope, powers, freq);
      break;
    case S::kLongRope:
    case S::kFactors: {
      const bool is_long = rope.scaling == S::kLongRope && length > rope.original_context;
      const std::vector<float>& factors = is_long ? rope.long_factors : rope.short_factors;
      for (size_t i = 0; i < freq.size(); ++i) freq[i] = 1.0f / (factors[i] * powers[i]);
      break;
    }
  }
  return freq;
}

}  // namespace freshet

#include "quantizer/containers/double_quantisation.h"

#include <algorithm>
#include <cmath>

namespace freshet::quantizer {
namespace {

// Number i of n that divide [0.1, 1] evenly. Counted from the nearer end, with one rounding, as
// PyTorch's linspace.
float even_step(int i, int n) {
  const float step = (1.0f - 0.1f) / static_cast<float>(n - 1);
  return i < n / 2 ? std::fma(step, static_cast<float>(i), 0.1f)
                   : std::fma(-step, static_cast<float>(n - 1 - i), 1.0f);
}

std::array<float, 256> make_dynamic_map() {
  constexpr int kDecades = 7;
  std::array<float, 256> map{};
  size_t n = 0;
  for (int i = 0; i < kDecades; ++i) {
    const int points = (1 << i) + 1;
    const auto unit = static_cast<float>(std::pow(10.0, i - kDecades + 1));
    for (int k = 0; k + 1 < points; ++k) {
      const float mean = (even_step(k, points) + even_step(k + 1, points)) / 2.0f;
      map[n++] = unit * mean;
      map[n++] = -(unit * mean);
    }
  }
  map[n++] = 0.0f;
  map[n] = 1.0f;
  std::ranges::sort(map);
  return map;
}

uint8_t nearest_code(float v) {
  const std::array<float, 256>& map = dynamic_map();
  const auto above = std::ranges::lower_bound(map, v) - map.begin();
  if (above == 0) return 0;
  if (above == 256) return 255;
  const float middle = (map[static_cast<size_t>(above) - 1] + map[static_cast<size_t>(above)]) / 2;
  return static_cast<uint8_t>(v <= middle ? above - 1 : above);
}

}  // namespace

const std::array<float, 256>& dynamic_map() {
  static const std::array<float, 256> map = make_dynamic_map();
  return map;
}

DoubleScales double_quantise(std::span<const float> absmax) {
  constexpr float kLeast = 1e-38f;
  DoubleScales out;
  double sum = 0;
  for (const float v : absmax) sum += v;
  out.offset = absmax.empty() ? 0.0f : static_cast<float>(sum / static_cast<double>(absmax.size()));
  for (size_t first = 0; first < absmax.size(); first += kScalesPerBlock) {
    const auto block = absmax.subspan(
        first, std::min<size_t>(absmax.size() - first, static_cast<size_t>(kScalesPerBlock)));
    float most = 0.0f;
    for (const float v : block) most = std::max(most, std::fabs(v - out.offset));
    out.absmax.push_back(most);
    const float inverse = 1.0f / std::max(most, kLeast);
    for (const float v : block) {
      out.codes.push_back(nearest_code(std::clamp((v - out.offset) * inverse, -1.0f, 1.0f)));
    }
  }
  return out;
}

std::vector<float> scales_of(const DoubleScales& scales) {
  std::vector<float> out(scales.codes.size());
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = dynamic_map()[scales.codes[i]] * scales.absmax[i / kScalesPerBlock] + scales.offset;
  }
  return out;
}

}  // namespace freshet::quantizer

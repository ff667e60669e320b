#include "quantizer/methods/double_scales.h"

#include <algorithm>
#include <cmath>

namespace freshet::quantizer {

// Seven decades: decade i has 2^i numbers of each sign, the middles of equal parts of [.1, 1],
// times 10^(i - 6); besides 0 and 1.
const std::array<float, 256>& dynamic_map() {
  static const std::array<float, 256> kMap = [] {
    std::array<float, 256> map{};
    size_t n = 0;
    for (int decade = 0; decade < 7; ++decade) {
      const int parts = 1 << decade;
      const double unit = std::pow(10.0, decade - 6);
      for (int i = 0; i < parts; ++i) {
        const double low = 0.1 + 0.9 * i / parts;
        const double high = 0.1 + 0.9 * (i + 1) / parts;
        const auto v = static_cast<float>(unit * 0.5 * (low + high));
        map[n++] = v;
        map[n++] = -v;
      }
    }
    map[n++] = 0.0f;
    map[n++] = 1.0f;
    std::sort(map.begin(), map.end());
    return map;
  }();
  return kMap;
}

DoubleScales double_quantise(const std::vector<float>& scales) {
  const std::array<float, 256>& map = dynamic_map();
  DoubleScales out;
  double sum = 0.0;
  for (const float s : scales) sum += s;
  out.offset = scales.empty() ? 0.0f : static_cast<float>(sum / static_cast<double>(scales.size()));
  out.codes.resize(scales.size());
  for (size_t first = 0; first < scales.size(); first += DoubleScales::kBlock) {
    const size_t end = std::min(scales.size(), first + DoubleScales::kBlock);
    float most = 0.0f;
    for (size_t i = first; i < end; ++i) most = std::max(most, std::abs(scales[i] - out.offset));
    out.block_max.push_back(most);
    for (size_t i = first; i < end; ++i) {
      const float t = most > 0.0f ? (scales[i] - out.offset) / most : 0.0f;
      const auto above = std::lower_bound(map.begin(), map.end(), t);
      auto best = above == map.end() ? map.end() - 1 : above;
      if (best != map.begin() && t - *(best - 1) < *best - t) --best;
      out.codes[i] = static_cast<uint8_t>(best - map.begin());
    }
  }
  return out;
}

std::vector<float> DoubleScales::values() const {
  std::vector<float> out(codes.size());
  for (size_t i = 0; i < codes.size(); ++i) {
    out[i] = dynamic_map()[codes[i]] * block_max[i / kBlock] + offset;
  }
  return out;
}

}  // namespace freshet::quantizer

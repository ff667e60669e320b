#include "media/resample.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>

#include "base/status.h"

namespace freshet::media {
namespace {

constexpr int kWeightBits = 22;

double sinc(double x) {
  if (x == 0) return 1;
  x *= std::numbers::pi;
  return std::sin(x) / x;
}

double hamming(double x) {
  if (x == 0) return 1;
  x *= std::numbers::pi;
  return std::sin(x) / x * (0.54 + 0.46 * std::cos(x));
}

double cubic(double x) {
  constexpr double a = -0.5;
  if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
  return (((x - 5) * x + 8) * x - 4) * a;
}

double filter_support(Filter filter) {
  switch (filter) {
    case Filter::kBox:
      return 0.5;
    case Filter::kBilinear:
    case Filter::kHamming:
      return 1;
    case Filter::kBicubic:
      return 2;
    case Filter::kLanczos:
      return 3;
    case Filter::kNearest:
      break;
  }
  return 0;
}

double filter_value(Filter filter, double x) {
  if (filter == Filter::kBox) return x > -0.5 && x <= 0.5 ? 1 : 0;
  if (filter == Filter::kLanczos) return x >= -3 && x < 3 ? sinc(x) * sinc(x / 3) : 0;
  x = std::abs(x);
  if (x >= filter_support(filter)) return 0;
  switch (filter) {
    case Filter::kBilinear:
      return 1 - x;
    case Filter::kHamming:
      return hamming(x);
    default:
      return cubic(x);
  }
}

// Which inputs each output takes, along one axis.
struct AxisWeights {
  struct Range {
    int first = 0;
    int count = 0;
  };
  std::vector<Range> ranges;
  std::vector<int32_t> weights;  // `stride` for each output
  size_t stride = 0;
};

AxisWeights axis_weights(int inputs, int outputs, Filter filter) {
  const double scale = static_cast<double>(inputs) / outputs;
  const double filter_scale = std::max(scale, 1.0);
  const double support = filter_support(filter) * filter_scale;
  AxisWeights axis;
  axis.stride = static_cast<size_t>(std::ceil(support)) * 2 + 1;
  axis.ranges.resize(static_cast<size_t>(outputs));
  axis.weights.assign(axis.stride * static_cast<size_t>(outputs), 0);
  std::vector<double> exact(axis.stride);
  for (int i = 0; i < outputs; ++i) {
    const double center = (i + 0.5) * scale;
    const double inverse = 1.0 / filter_scale;
    const int first = std::max(static_cast<int>(center - support + 0.5), 0);
    const int last = std::min(static_cast<int>(center + support + 0.5), inputs);
    const int count = last - first;
    double sum = 0;
    for (int k = 0; k < count; ++k) {
      exact[static_cast<size_t>(k)] = filter_value(filter, (k + first - center + 0.5) * inverse);
      sum += exact[static_cast<size_t>(k)];
    }
    int32_t* weights = axis.weights.data() + static_cast<size_t>(i) * axis.stride;
    for (int k = 0; k < count; ++k) {
      double w = exact[static_cast<size_t>(k)];
      if (sum != 0) w /= sum;
      weights[k] = static_cast<int32_t>((w < 0 ? -0.5 : 0.5) + w * (1 << kWeightBits));
    }
    axis.ranges[static_cast<size_t>(i)] = {first, count};
  }
  return axis;
}

uint8_t rounded(int32_t sum) {
  return static_cast<uint8_t>(std::clamp(sum >> kWeightBits, 0, 255));
}

Picture resize_rows(const Picture& in, int width, int first_row, int rows,
                    const AxisWeights& axis) {
  Picture out(width, rows);
  constexpr int32_t kRounding = 1 << (kWeightBits - 1);
  for (int y = 0; y < rows; ++y) {
    const uint8_t* from = in.row(first_row + y);
    uint8_t* to = out.row(y);
    for (size_t x = 0; x < static_cast<size_t>(width); ++x, to += 3) {
      const auto [first, count] = axis.ranges[x];
      const int32_t* weights = axis.weights.data() + x * axis.stride;
      const uint8_t* pixel = from + static_cast<size_t>(first) * 3;
      int32_t r = kRounding, g = kRounding, b = kRounding;
      for (int k = 0; k < count; ++k, pixel += 3) {
        r += pixel[0] * weights[k];
        g += pixel[1] * weights[k];
        b += pixel[2] * weights[k];
      }
      to[0] = rounded(r);
      to[1] = rounded(g);
      to[2] = rounded(b);
    }
  }
  return out;
}

// Row 0 of `in` is row `offset` of the picture that the weights are for.
Picture resize_columns(const Picture& in, int offset, int height, const AxisWeights& axis) {
  Picture out(in.width, height);
  const size_t n = static_cast<size_t>(in.width) * 3;
  std::vector<int32_t> sums(n);
  for (int y = 0; y < height; ++y) {
    const auto [first, count] = axis.ranges[static_cast<size_t>(y)];
    const int32_t* weights = axis.weights.data() + static_cast<size_t>(y) * axis.stride;
    std::fill(sums.begin(), sums.end(), 1 << (kWeightBits - 1));
    for (int k = 0; k < count; ++k) {
      const uint8_t* from = in.row(first - offset + k);
      const int32_t weight = weights[k];
      for (size_t x = 0; x < n; ++x) sums[x] += from[x] * weight;
    }
    uint8_t* to = out.row(y);
    for (size_t x = 0; x < n; ++x) to[x] = rounded(sums[x]);
  }
  return out;
}

std::vector<int> nearest_inputs(int inputs, int outputs) {
  // The position is summed up, not multiplied, as Pillow does it: the rounding differs.
  std::vector<int> chosen(static_cast<size_t>(outputs));
  const double scale = static_cast<double>(inputs) / outputs;
  double at = scale * 0.5;
  for (int& c : chosen) {
    c = std::clamp(static_cast<int>(at), 0, inputs - 1);
    at += scale;
  }
  return chosen;
}

Picture resize_nearest(const Picture& in, int width, int height) {
  const std::vector<int> columns = nearest_inputs(in.width, width);
  const std::vector<int> rows = nearest_inputs(in.height, height);
  Picture out(width, height);
  for (int y = 0; y < height; ++y) {
    const uint8_t* from = in.row(rows[static_cast<size_t>(y)]);
    uint8_t* to = out.row(y);
    for (const int column : columns) {
      std::memcpy(to, from + static_cast<size_t>(column) * 3, 3);
      to += 3;
    }
  }
  return out;
}

}  // namespace

std::optional<Filter> filter_of(int64_t number) {
  if (number < 0 || number > 5) return std::nullopt;
  return static_cast<Filter>(number);
}

Picture resize(const Picture& picture, int width, int height, Filter filter) {
  FRESHET_CHECK(width > 0 && height > 0 && picture.width > 0 && picture.height > 0);
  if (width == picture.width && height == picture.height) return picture;
  if (filter == Filter::kNearest) return resize_nearest(picture, width, height);
  if (height == picture.height) {
    return resize_rows(picture, width, 0, height, axis_weights(picture.width, width, filter));
  }
  const AxisWeights vertical = axis_weights(picture.height, height, filter);
  if (width == picture.width) return resize_columns(picture, 0, height, vertical);
  const AxisWeights horizontal = axis_weights(picture.width, width, filter);
  const bool columns_first =
      height < picture.height && picture.height - height > 2 * (picture.width - width);
  if (columns_first) {
    return resize_rows(resize_columns(picture, 0, height, vertical), width, 0, height, horizontal);
  }
  // Only the rows that the second pass reads.
  const int first = vertical.ranges.front().first;
  const int last = vertical.ranges.back().first + vertical.ranges.back().count;
  return resize_columns(resize_rows(picture, width, first, last - first, horizontal), first, height,
                        vertical);
}

Picture crop(const Picture& picture, int left, int top, int width, int height) {
  Picture out(width, height);
  const int x0 = std::max(left, 0);
  const int x1 = std::min(left + width, picture.width);
  if (x1 <= x0) return out;
  for (int y = std::max(top, 0); y < std::min(top + height, picture.height); ++y) {
    std::memcpy(out.row(y - top) + static_cast<size_t>(x0 - left) * 3,
                picture.row(y) + static_cast<size_t>(x0) * 3, static_cast<size_t>(x1 - x0) * 3);
  }
  return out;
}

}  // namespace freshet::media

#include "media/image_plan.h"

#include <algorithm>
#include <cmath>

namespace freshet::media {
namespace {

constexpr int kIdeficsMost = 4096;
constexpr int kMostSide = 1 << 15;

Result<Size> checked(double height, double width) {
  if (!(height >= 1 && width >= 1)) {
    return invalid_argument("the picture is too narrow: resizing leaves a side of 0 pixels");
  }
  if (height > kMostSide || width > kMostSide) {
    return resource_exhausted(
        "the picture would be resized to {} x {} pixels; the limit of a side "
        "is {}",
        width, height, kMostSide);
  }
  return Size{static_cast<int>(height), static_cast<int>(width)};
}

// The largest size within `bounds` with the proportions of `picture`.
template <class Round>
Size fitted(Size picture, Size bounds, Round round) {
  const double by_width = static_cast<double>(bounds.width) / picture.width;
  const double by_height = static_cast<double>(bounds.height) / picture.height;
  if (by_width < by_height) {
    return {std::min(round(picture.height * by_width), bounds.height), bounds.width};
  }
  return {bounds.height, std::min(round(picture.width * by_height), bounds.width)};
}

int whole_squares(double side, int square) {
  return static_cast<int>(std::ceil(side / square)) * square;
}

// The longest side becomes `most`; the other one is even.
Size idefics_longest(Size picture, int most) {
  const double ratio = static_cast<double>(picture.width) / picture.height;
  Size out = picture;
  if (picture.width >= picture.height) {
    out.width = most;
    out.height = static_cast<int>(most / ratio);
    if (out.height % 2 != 0) ++out.height;
  } else {
    out.height = most;
    out.width = static_cast<int>(most * ratio);
    if (out.width % 2 != 0) ++out.width;
  }
  return {std::max(out.height, 1), std::max(out.width, 1)};
}

Size idefics_bounded(Size picture) {
  const double ratio = static_cast<double>(picture.width) / picture.height;
  Size out = picture;
  if (picture.width >= picture.height && picture.width > kIdeficsMost) {
    out = {static_cast<int>(kIdeficsMost / ratio), kIdeficsMost};
  } else if (picture.height > picture.width && picture.height > kIdeficsMost) {
    out = {kIdeficsMost, static_cast<int>(kIdeficsMost * ratio)};
  }
  return {std::max(out.height, 1), std::max(out.width, 1)};
}

}  // namespace

Result<Size> single_size(Size picture, const ImageSettings& settings) {
  if (!settings.resize) return picture;
  if (settings.shortest_edge == 0) return Size{settings.height, settings.width};
  const bool upright = picture.width <= picture.height;
  const int shorter = upright ? picture.width : picture.height;
  const int longer = upright ? picture.height : picture.width;
  const double scaled = static_cast<double>(int64_t{settings.shortest_edge} * longer) / shorter;
  return upright ? checked(scaled, settings.shortest_edge)
                 : checked(settings.shortest_edge, scaled);
}

Result<Size> qwen_size(Size picture, const ImageSettings& settings) {
  const double factor = static_cast<double>(settings.patch_size) * settings.merge_size;
  const double height = picture.height;
  const double width = picture.width;
  if (std::max(height, width) / std::min(height, width) > 200) {
    return invalid_argument(
        "the picture has {} x {} pixels; one side may be at most 200 times the "
        "other",
        picture.width, picture.height);
  }
  if (!settings.resize) {
    if (std::fmod(height, factor) != 0 || std::fmod(width, factor) != 0) {
      return invalid_argument("without resizing, sides must be multiples of {} pixels", factor);
    }
    return picture;
  }
  // Halves are rounded to even.
  double h = std::nearbyint(height / factor) * factor;
  double w = std::nearbyint(width / factor) * factor;
  if (h * w > static_cast<double>(settings.max_pixels)) {
    const double beta = std::sqrt(height * width / static_cast<double>(settings.max_pixels));
    h = std::max(factor, std::floor(height / beta / factor) * factor);
    w = std::max(factor, std::floor(width / beta / factor) * factor);
  } else if (h * w < static_cast<double>(settings.min_pixels)) {
    const double beta = std::sqrt(static_cast<double>(settings.min_pixels) / (height * width));
    h = std::ceil(height * beta / factor) * factor;
    w = std::ceil(width * beta / factor) * factor;
  }
  return checked(h, w);
}

Result<IdeficsPlan> idefics_plan(Size picture, const ImageSettings& settings) {
  IdeficsPlan plan;
  plan.first = picture;
  if (settings.resize && settings.longest_edge > 0) {
    plan.first = idefics_bounded(idefics_longest(picture, settings.longest_edge));
  } else if (settings.resize) {
    plan.first = {settings.height, settings.width};
  }
  const int side = settings.tile_side;
  if (!settings.split) {
    plan.second = {side, side};
    return plan;
  }
  const double ratio = static_cast<double>(plan.first.width) / plan.first.height;
  double height, width;
  if (plan.first.width >= plan.first.height) {
    width = whole_squares(plan.first.width, side);
    height = whole_squares(std::trunc(width / ratio), side);
  } else {
    height = whole_squares(plan.first.height, side);
    width = whole_squares(std::trunc(height * ratio), side);
  }
  FRESHET_ASSIGN_OR_RETURN(plan.second, checked(height, width));
  if (plan.second.height > side || plan.second.width > side) {
    plan.grid = {plan.second.height / side, plan.second.width / side};
  }
  return plan;
}

CanvasPlan mllama_plan(Size picture, const ImageSettings& settings) {
  const int side = settings.height;
  // The smallest enlargement, or else the largest reduction; of equal ones the smallest canvas.
  double best = 0;
  int64_t best_area = 0;
  CanvasPlan plan;
  for (int rows = 1; rows <= settings.max_tiles; ++rows) {
    for (int columns = 1; rows * columns <= settings.max_tiles; ++columns) {
      const double by_height = static_cast<double>(rows * side) / picture.height;
      const double by_width = static_cast<double>(columns * side) / picture.width;
      const double scale = std::min(by_height, by_width);
      const int64_t area = int64_t{rows} * columns;
      const bool better = best == 0       ? true
                          : scale == best ? area < best_area
                          : best >= 1     ? scale >= 1 && scale < best
                                          : scale > best;
      if (!better) continue;
      best = scale;
      best_area = area;
      plan.canvas = {rows * side, columns * side};
    }
  }
  // A picture smaller than a square grows to it; one that fits the canvas keeps its size.
  const Size bounds = {std::clamp(picture.height, side, plan.canvas.height),
                       std::clamp(picture.width, side, plan.canvas.width)};
  plan.resized = fitted(picture, bounds, [](double side_length) {
    return std::max(static_cast<int>(std::floor(side_length)), 1);
  });
  return plan;
}

int64_t mllama_aspect_ratio_id(Size grid, int max_tiles) {
  int64_t id = 0;
  for (int rows = 1; rows <= max_tiles; ++rows) {
    for (int columns = 1; rows * columns <= max_tiles; ++columns) {
      ++id;
      if (rows == grid.height && columns == grid.width) return id;
    }
  }
  return 0;
}

int llava_next_square(const ImageSettings& settings) {
  if (settings.crop_height > 0) return settings.crop_height;
  return settings.height > 0 ? settings.height : settings.shortest_edge;
}

Result<CanvasPlan> llava_next_plan(Size picture, const ImageSettings& settings) {
  // The grid in which most of the picture's pixels survive; of equal ones the least wasted.
  CanvasPlan plan;
  int64_t most = 0;
  int64_t least_wasted = INT64_MAX;
  for (const auto& [height, width] : settings.grids) {
    const double scale = std::min(static_cast<double>(width) / picture.width,
                                  static_cast<double>(height) / picture.height);
    const auto kept = std::min(
        static_cast<int64_t>(picture.width * scale) * static_cast<int64_t>(picture.height * scale),
        int64_t{picture.width} * picture.height);
    const int64_t wasted = int64_t{width} * height - kept;
    if (kept > most || (kept == most && wasted < least_wasted)) {
      most = kept;
      least_wasted = wasted;
      plan.canvas = {height, width};
    }
  }
  const int square = llava_next_square(settings);
  if (plan.canvas.height % square != 0 || plan.canvas.width % square != 0 ||
      plan.canvas.height == 0) {
    return invalid_argument("\"image_grid_pinpoints\" must be multiples of {} pixels", square);
  }
  plan.resized = fitted(picture, plan.canvas, [](double side_length) {
    return static_cast<int>(std::ceil(side_length));
  });
  return plan;
}

std::array<int64_t, 2> llava_next_kept(Size picture, Size canvas, const ImageSettings& settings) {
  const int square = llava_next_square(settings);
  int64_t height = int64_t{settings.square_patches} * (canvas.height / square);
  int64_t width = int64_t{settings.square_patches} * (canvas.width / square);
  // Seven digits, so that an exact integer does not become the next smaller one.
  const auto whole = [](double v) { return static_cast<int64_t>(std::nearbyint(v * 1e7) / 1e7); };
  const double ratio = static_cast<double>(picture.width) / picture.height;
  if (ratio > static_cast<double>(width) / static_cast<double>(height)) {
    const int64_t kept = whole(picture.height * (static_cast<double>(width) / picture.width));
    height -= (height - kept) / 2 * 2;
  } else {
    const int64_t kept = whole(picture.width * (static_cast<double>(height) / picture.height));
    width -= (width - kept) / 2 * 2;
  }
  return {height, width};
}

Result<Size> pixtral_size(Size picture, const ImageSettings& settings) {
  const bool both = settings.longest_edge == 0;
  const double ratio = std::max(
      static_cast<double>(picture.height) / (both ? settings.height : settings.longest_edge),
      static_cast<double>(picture.width) / (both ? settings.width : settings.longest_edge));
  const int merged = settings.patch_size * settings.merge_size;
  const auto side = [&](int given) {
    const int fitting = ratio > 1 ? static_cast<int>(std::floor(given / ratio)) : given;
    return (fitting + merged - 1) / merged * merged;
  };
  const Size size{side(picture.height), side(picture.width)};
  if (size.height > 0 && size.width > 0) return size;
  return invalid_argument("a picture of {} x {} pixels is too narrow: it is reduced to nothing",
                          picture.width, picture.height);
}

}  // namespace freshet::media

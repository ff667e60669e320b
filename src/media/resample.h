// Resizing of pictures, equal in every bit to Image.resize() of Pillow 13 for 8-bit RGB.
//
// Each output pixel is a weighted mean over the filter's support, which grows with the scale when a
// picture is made smaller. Weights are integers of 22 fractional bits. The picture is resized along
// one axis and then along the other; the result of the first pass is rounded to 8 bits, so the
// order matters. Rows come first, unless the height shrinks by more than twice what the width
// shrinks by (Pillow before version 13 always begins with the rows, and rounds those pictures
// differently). Pure; the time is proportional to the larger of input and output times the support.
#pragma once

#include <optional>

#include "media/picture.h"

namespace freshet::media {

// The numbers are those of Pillow and of the field "resample" in processor files.
enum class Filter {
  kNearest = 0,
  kLanczos = 1,
  kBilinear = 2,
  kBicubic = 3,
  kBox = 4,
  kHamming = 5
};
std::optional<Filter> filter_of(int64_t number);

// REQUIRES: all sides are at least 1.
Picture resize(const Picture& picture, int width, int height, Filter filter);

// The part from (left, top) of the given size. What lies outside of the picture is black.
Picture crop(const Picture& picture, int left, int top, int width, int height);

}  // namespace freshet::media

// Pictures as 8-bit RGB, and the limits that hold for them before they are decoded.
//
// Plain values without synchronisation. Pixels are rows from top to bottom, each pixel three bytes
// R, G, B, without padding.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace freshet::media {

struct Picture {
  int width = 0;
  int height = 0;
  std::vector<uint8_t> rgb;  // height * width * 3

  Picture() = default;
  Picture(int w, int h) : width(w), height(h), rgb(static_cast<size_t>(w) * h * 3) {}
  uint8_t* row(int y) { return rgb.data() + static_cast<size_t>(y) * width * 3; }
  const uint8_t* row(int y) const { return rgb.data() + static_cast<size_t>(y) * width * 3; }
  bool operator==(const Picture&) const = default;
};

// All of these are read from a file's header, before memory for pixels is taken.
struct PictureLimits {
  size_t encoded_bytes = size_t{20} << 20;
  int64_t pixels = 50'000'000;
  int side = 32'768;
  // Scans of a progressive JPEG: each visits every coefficient. Encoders write about ten.
  int jpeg_scans = 64;
};

}  // namespace freshet::media

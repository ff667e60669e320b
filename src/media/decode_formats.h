// The decoders of single formats, used by decode.cc alone. Pure.
//
// REQUIRES: `picture` has the size that the header states, and the limits hold. On an error the
// pixels are unspecified.
#pragma once

#include <span>

#include "base/status.h"
#include "media/picture.h"

namespace freshet::media {

struct PictureSize {
  int64_t width = 0;
  int64_t height = 0;
};

// The size that a header states; an error names what is wrong with the header.
Result<PictureSize> png_size(std::span<const uint8_t> bytes);
Result<PictureSize> jpeg_size(std::span<const uint8_t> bytes);
Result<PictureSize> webp_size(std::span<const uint8_t> bytes);

Status decode_png(std::span<const uint8_t> bytes, Picture& picture);
Status decode_jpeg(std::span<const uint8_t> bytes, int max_scans, Picture& picture);
Status decode_webp(std::span<const uint8_t> bytes, Picture& picture);

}  // namespace freshet::media

// Decodes PNG, JPEG and WebP to 8-bit RGB, as Pillow's Image.open(...).convert("RGB") does.
//
// - Transparency is dropped, not blended. Palettes are looked up, grey becomes R = G = B.
// - 16-bit channels keep their high byte; 16-bit grey without alpha is cut off at 255 (Pillow does
// so).
// - CMYK JPEGs are taken as inverted, as Adobe writes them.
// - A picture is not turned by its EXIF orientation, and colour profiles are not applied.
// - An animated PNG gives its first picture. Animated WebP and GIF are refused.
//
// The limits are checked on the header, before memory for pixels is taken. Decoding then takes at
// most 3 bytes a pixel for the result and about as much again for the library's state: 4 bytes a
// pixel for WebP, 6 for a progressive JPEG, 8 for an interlaced PNG with 16 bits a channel. A file
// that ends early or has a wrong checksum is an error, never a partly filled picture.
// All functions are pure and safe to call from many threads.
#pragma once

#include <span>

#include "base/status.h"
#include "media/picture.h"

namespace freshet::media {

enum class PictureFormat { kPng, kJpeg, kWebp };
const char* name_of(PictureFormat format);  // "PNG"

struct PictureHeader {
  PictureFormat format = PictureFormat::kPng;
  int width = 0;
  int height = 0;
};

// Format and size, with the limits checked. Reads the header only: the rest may still be broken.
Result<PictureHeader> read_picture_header(std::span<const uint8_t> bytes,
                                          const PictureLimits& limits = {});

Result<Picture> decode_picture(std::span<const uint8_t> bytes, const PictureLimits& limits = {});

}  // namespace freshet::media

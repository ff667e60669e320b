// WebP by libwebp: lossy and lossless, with or without transparency.
#include <webp/decode.h>

#include "media/decode_formats.h"

namespace freshet::media {
namespace {

const char* webp_problem(VP8StatusCode code) {
  switch (code) {
    case VP8_STATUS_OUT_OF_MEMORY:
      return "no memory for the decoder";
    case VP8_STATUS_NOT_ENOUGH_DATA:
      return "the file ends early";
    case VP8_STATUS_UNSUPPORTED_FEATURE:
      return "an unsupported feature";
    default:
      return "the file is broken";
  }
}

}  // namespace

Result<PictureSize> webp_size(std::span<const uint8_t> bytes) {
  WebPBitstreamFeatures features;
  const VP8StatusCode code = WebPGetFeatures(bytes.data(), bytes.size(), &features);
  if (code == VP8_STATUS_NOT_ENOUGH_DATA) return invalid_argument("the file ends in its header");
  if (code != VP8_STATUS_OK) return invalid_argument("the header is broken");
  if (features.has_animation != 0) {
    return unsupported("animations are not supported; send one picture");
  }
  return PictureSize{features.width, features.height};
}

Status decode_webp(std::span<const uint8_t> bytes, Picture& picture) {
  // As RGB the library drops the transparency by itself, without changing colours.
  const size_t stride = static_cast<size_t>(picture.width) * 3;
  WebPDecoderConfig config;
  if (WebPInitDecoderConfig(&config) == 0) return internal_error("libwebp has another version");
  config.output.colorspace = MODE_RGB;
  config.output.is_external_memory = 1;
  config.output.u.RGBA.rgba = picture.rgb.data();
  config.output.u.RGBA.stride = static_cast<int>(stride);
  config.output.u.RGBA.size = picture.rgb.size();
  const VP8StatusCode code = WebPDecode(bytes.data(), bytes.size(), &config);
  WebPFreeDecBuffer(&config.output);
  if (code != VP8_STATUS_OK) return invalid_argument("{}", webp_problem(code));
  return {};
}

}  // namespace freshet::media

// Any bytes as a picture: no crash, bounded memory, and a decoded picture has the size that its
// header stated.
#include <cstddef>
#include <cstdint>
#include <span>

#include "media/decode.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace freshet;
  const media::PictureLimits limits{.encoded_bytes = 1 << 16, .pixels = 1 << 16, .side = 4096};
  const std::span<const uint8_t> bytes(data, size);
  const auto header = media::read_picture_header(bytes, limits);
  const auto picture = media::decode_picture(bytes, limits);
  if (!picture.ok()) {
    FRESHET_CHECK(!picture.status().message().empty());
    FRESHET_CHECK(picture.status().code() != StatusCode::kInternal);
    FRESHET_CHECK(picture.status().message().find('\n') == std::string::npos);
    return 0;
  }
  FRESHET_CHECK(header.ok());
  FRESHET_CHECK(header->width == picture->width && header->height == picture->height);
  FRESHET_CHECK(int64_t{picture->width} * picture->height <= limits.pixels);
  FRESHET_CHECK(picture->rgb.size() == size_t{3} * picture->width * picture->height);
  return 0;
}

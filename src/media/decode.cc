#include "media/decode.h"

#include <algorithm>
#include <string_view>

#include "media/decode_formats.h"

namespace freshet::media {
namespace {

bool has_at(std::span<const uint8_t> bytes, size_t at, std::string_view text) {
  return bytes.size() >= at + text.size() &&
         std::equal(text.begin(), text.end(), bytes.begin() + static_cast<ptrdiff_t>(at),
                    [](char c, uint8_t b) { return static_cast<uint8_t>(c) == b; });
}

Result<PictureFormat> picture_format(std::span<const uint8_t> bytes) {
  if (has_at(bytes, 0, "\x89PNG\r\n\x1a\n")) return PictureFormat::kPng;
  if (has_at(bytes, 0, "\xff\xd8\xff")) return PictureFormat::kJpeg;
  if (has_at(bytes, 0, "RIFF") && has_at(bytes, 8, "WEBP")) return PictureFormat::kWebp;
  struct Other {
    size_t at;
    std::string_view magic;
    const char* name;
  };
  static constexpr Other kOthers[] = {
      {0, "GIF8", "GIF"},      {0, "BM", "BMP"},        {0, "II*\0", "TIFF"}, {0, "MM\0*", "TIFF"},
      {4, "ftypavif", "AVIF"}, {4, "ftypheic", "HEIC"}, {0, "<svg", "SVG"},   {0, "%PDF", "PDF"}};
  for (const Other& other : kOthers) {
    if (has_at(bytes, other.at, other.magic)) {
      return unsupported("{} pictures are not supported; send PNG, JPEG or WebP", other.name);
    }
  }
  return invalid_argument("this is no PNG, JPEG or WebP picture");
}

Result<PictureSize> picture_size(PictureFormat format, std::span<const uint8_t> bytes) {
  switch (format) {
    case PictureFormat::kPng:
      return png_size(bytes);
    case PictureFormat::kJpeg:
      return jpeg_size(bytes);
    case PictureFormat::kWebp:
      return webp_size(bytes);
  }
  return internal_error("unknown picture format");
}

}  // namespace

const char* name_of(PictureFormat format) {
  switch (format) {
    case PictureFormat::kPng:
      return "PNG";
    case PictureFormat::kJpeg:
      return "JPEG";
    case PictureFormat::kWebp:
      return "WebP";
  }
  return "";
}

Result<PictureHeader> read_picture_header(std::span<const uint8_t> bytes,
                                          const PictureLimits& limits) {
  if (bytes.empty()) return invalid_argument("the picture is empty");
  if (bytes.size() > limits.encoded_bytes) {
    return resource_exhausted("the picture has {} bytes; the limit is {}", bytes.size(),
                              limits.encoded_bytes);
  }
  FRESHET_ASSIGN_OR_RETURN(const PictureFormat format, picture_format(bytes));
  const auto size = picture_size(format, bytes);
  if (!size.ok()) return size.status().with_context(name_of(format));
  if (size->width < 1 || size->height < 1) {
    return invalid_argument("{}: the header states a size of {} x {} pixels", name_of(format),
                            size->width, size->height);
  }
  if (size->width > limits.side || size->height > limits.side) {
    return resource_exhausted("the picture has {} x {} pixels; the limit of a side is {}",
                              size->width, size->height, limits.side);
  }
  if (size->width * size->height > limits.pixels) {
    return resource_exhausted("the picture has {} x {} pixels; the limit is {} pixels", size->width,
                              size->height, limits.pixels);
  }
  return PictureHeader{format, static_cast<int>(size->width), static_cast<int>(size->height)};
}

Result<Picture> decode_picture(std::span<const uint8_t> bytes, const PictureLimits& limits) {
  FRESHET_ASSIGN_OR_RETURN(const PictureHeader header, read_picture_header(bytes, limits));
  Picture picture(header.width, header.height);
  Status status;
  switch (header.format) {
    case PictureFormat::kPng:
      status = decode_png(bytes, picture);
      break;
    case PictureFormat::kJpeg:
      status = decode_jpeg(bytes, limits.jpeg_scans, picture);
      break;
    case PictureFormat::kWebp:
      status = decode_webp(bytes, picture);
      break;
  }
  if (!status.ok()) return status.with_context(name_of(header.format));
  return picture;
}

}  // namespace freshet::media

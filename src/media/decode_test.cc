#include "media/decode.h"

#include <filesystem>
#include <fstream>
#include <iterator>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "media/test_pictures.h"

namespace freshet::media {
namespace {

using Bytes = std::vector<uint8_t>;
using testing::HasSubstr;

Bytes sample_picture(const std::string& name) {
  std::ifstream in(FRESHET_SOURCE_DIR "/tests/fuzz/corpus/fuzz_picture/" + name, std::ios::binary);
  EXPECT_TRUE(in) << name;
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

std::string error_of(const Bytes& bytes, const PictureLimits& limits = {}) {
  const auto picture = decode_picture(bytes, limits);
  if (picture.ok()) return "";
  EXPECT_THAT(picture.status().message(), testing::Not(HasSubstr("\n")));
  return picture.status().message();
}

void put_word(Bytes& bytes, size_t at, uint32_t v) {
  for (size_t i = 0; i < 4; ++i) bytes[at + i] = static_cast<uint8_t>(v >> (24 - 8 * i));
}

// A PNG whose header states a size, with the right checksum (of the 17 bytes from "IHDR" on).
Bytes png_of_size(uint32_t width, uint32_t height) {
  Bytes bytes = sample_picture("rgb.png");
  put_word(bytes, 16, width);
  put_word(bytes, 20, height);
  put_word(bytes, 29, static_cast<uint32_t>(std::stoul(crc_of(&bytes[12], 17), nullptr, 16)));
  return bytes;
}

// Files by format and kind of pixels against checksums of what Pillow decodes.
TEST(Decode, EqualsPillow) {
  size_t count = 0;
  for (const auto& [name, wanted] : golden_media().find("decoded")->as_object()) {
    const Bytes bytes = sample_picture(name);
    const auto header = read_picture_header(bytes);
    ASSERT_TRUE(header.ok()) << name << ": " << header.status().message();
    const auto picture = decode_picture(bytes);
    ASSERT_TRUE(picture.ok()) << name << ": " << picture.status().message();
    EXPECT_EQ(header->width, picture->width);
    EXPECT_EQ(header->height, picture->height);
    EXPECT_EQ(fmt::format("{}x{} {}", picture->width, picture->height,
                          crc_of(picture->rgb.data(), picture->rgb.size())),
              wanted.as_string())
        << name;
    ++count;
  }
  EXPECT_EQ(count, 28u);
}

TEST(Decode, RefusesOtherFormats) {
  const auto of = [](std::string_view text) { return error_of(Bytes(text.begin(), text.end())); };
  EXPECT_EQ(of(""), "the picture is empty");
  EXPECT_EQ(of("hello"), "this is no PNG, JPEG or WebP picture");
  EXPECT_EQ(of("GIF89a...."), "GIF pictures are not supported; send PNG, JPEG or WebP");
  EXPECT_EQ(of("\x89PNG\r\n\x1a\n"), "PNG: the file ends in its header");
  EXPECT_EQ(of("\xff\xd8\xff"), "JPEG: the file ends in its header");
  EXPECT_EQ(of(std::string_view("RIFF\0\0\0\0WEBP", 12)), "WebP: the header is broken");
}

TEST(Decode, ChecksLimitsInTheHeader) {
  // A thousand bytes that would be 12 GB.
  EXPECT_EQ(error_of(png_of_size(65535, 65535)),
            "the picture has 65535 x 65535 pixels; the limit of a side is 32768");
  EXPECT_EQ(error_of(png_of_size(30000, 30000)),
            "the picture has 30000 x 30000 pixels; the limit is 50000000 pixels");
  EXPECT_EQ(error_of(png_of_size(0, 5)), "PNG: the header states a size of 0 x 5 pixels");
  EXPECT_EQ(error_of(png_of_size(0xffffffff, 1)),
            "the picture has 4294967295 x 1 pixels; the limit of a side is 32768");
  EXPECT_EQ(error_of(sample_picture("rgb.png"), {.encoded_bytes = 50}),
            "the picture has 99 bytes; the limit is 50");
  for (const char* name : {"baseline.jpg", "lossy.webp", "lossless_alpha.webp", "rgb.png"}) {
    EXPECT_EQ(error_of(sample_picture(name), {.pixels = 142}),
              "the picture has 13 x 11 pixels; the limit is 142 pixels");
    EXPECT_EQ(error_of(sample_picture(name), {.side = 12}),
              "the picture has 13 x 11 pixels; the limit of a side is 12");
  }
  EXPECT_EQ(error_of(sample_picture("progressive.jpg"), {.jpeg_scans = 3}),
            "JPEG: the file is broken: more than 3 scans");
  EXPECT_EQ(error_of(sample_picture("progressive.jpg"), {.jpeg_scans = 10}), "");
}

// Every file, cut off at every length, is an error. JPEG's and PNG's end markers may be missing.
TEST(Decode, RefusesFilesThatEndEarly) {
  for (const auto& [name, wanted] : golden_media().find("decoded")->as_object()) {
    const Bytes bytes = sample_picture(name);
    for (size_t n = 0; n + 13 < bytes.size(); ++n) {
      EXPECT_NE(error_of(Bytes(bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(n))), "")
          << name << " cut to " << n << " of " << bytes.size();
    }
  }
}

TEST(Decode, RefusesDamage) {
  Bytes png = sample_picture("rgb.png");
  png[50] ^= 0x10;
  EXPECT_THAT(error_of(png), HasSubstr("PNG: the file is broken: "));
  // The header states more rows than there are.
  EXPECT_THAT(error_of(png_of_size(13, 12)), HasSubstr("PNG: the file is broken: "));
  // A later frame header that states another size than the first.
  Bytes jpeg = sample_picture("baseline.jpg");
  const Bytes frame = {0xff, 0xc0};
  const auto sof = std::search(jpeg.begin(), jpeg.end(), frame.begin(), frame.end());
  ASSERT_NE(sof, jpeg.end());
  Bytes twice(jpeg.begin(), sof);
  Bytes second(sof, sof + 19);
  second[6] = 200;
  twice.insert(twice.end(), sof, sof + 19);
  twice.insert(twice.end(), second.begin(), second.end());
  twice.insert(twice.end(), sof + 19, jpeg.end());
  EXPECT_THAT(error_of(twice), HasSubstr("JPEG: the file is broken: "));
}

}  // namespace
}  // namespace freshet::media

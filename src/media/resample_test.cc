#include "media/resample.h"

#include <gtest/gtest.h>

#include "media/test_pictures.h"

namespace freshet::media {
namespace {

// 200 pictures by filter against checksums that Pillow's results have.
TEST(Resample, EqualsPillow) {
  const std::pair<const char*, Filter> filters[] = {
      {"nearest", Filter::kNearest}, {"lanczos", Filter::kLanczos}, {"bilinear", Filter::kBilinear},
      {"bicubic", Filter::kBicubic}, {"box", Filter::kBox},         {"hamming", Filter::kHamming}};
  for (const auto& [name, filter] : filters) {
    const auto wanted = words_of(golden_media().find("resampled")->get_string(name, ""));
    ASSERT_EQ(wanted.size(), 200u) << name;
    for (int i = 0; i < 200; ++i) {
      const Picture in = test_picture(i);
      const int width = i % 7 == 0 ? in.width : 1 + i * 53 % 120;
      const int height = i % 9 == 0 ? in.height : 1 + i * 71 % 110;
      const Picture out = resize(in, width, height, filter);
      ASSERT_EQ(out.width, width);
      ASSERT_EQ(out.height, height);
      EXPECT_EQ(crc_of(out.rgb.data(), out.rgb.size()), wanted[static_cast<size_t>(i)])
          << name << ", picture " << i << ": " << in.width << " x " << in.height << " to " << width
          << " x " << height;
    }
  }
}

TEST(Resample, CropFillsWithBlack) {
  Picture in(2, 2);
  for (size_t i = 0; i < in.rgb.size(); ++i) in.rgb[i] = static_cast<uint8_t>(i + 1);
  const Picture out = crop(in, -1, 1, 4, 2);
  const std::vector<uint8_t> wanted = {0, 0, 0, 7, 8, 9, 10, 11, 12, 0, 0, 0,
                                       0, 0, 0, 0, 0, 0, 0,  0,  0,  0, 0, 0};
  EXPECT_EQ(out.rgb, wanted);
  EXPECT_EQ(crop(in, 5, 5, 1, 1).rgb, std::vector<uint8_t>(3));
}

TEST(Resample, KnowsPillowsNumbers) {
  EXPECT_EQ(filter_of(3), Filter::kBicubic);
  EXPECT_FALSE(filter_of(6));
  EXPECT_FALSE(filter_of(-1));
}

}  // namespace
}  // namespace freshet::media

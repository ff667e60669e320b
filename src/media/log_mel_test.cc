#include "media/log_mel.h"

#include <chrono>
#include <cmath>
#include <numbers>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "media/features.h"
#include "media/test_pictures.h"

namespace freshet::media {
namespace {

// A chirp, clicks and noise, then silence: the same as in tools/golden_media.py.
std::vector<float> test_sound(int64_t count) {
  std::vector<float> out;
  for (int64_t n = 0; n < count; ++n) {
    const int64_t noise = (n * 1103515245 + 12345) % 2147483648 % 601 - 300;
    const int64_t saw = n * (n / 64 + 20) % 16001 - 8000;
    const int64_t floored = noise >= 0 ? noise / 40 : -((39 - noise) / 40);
    const int64_t v = n % 4000 < 3000 ? saw + noise : n % 4000 < 3600 ? floored : 0;
    out.push_back(static_cast<float>(v) / 32768.0F);
  }
  return out;
}

TEST(RealFft, EqualsTheDefinition) {
  for (const int size : {2, 4, 10, 14, 64, 400}) {
    std::vector<double> x, power(static_cast<size_t>(size) / 2 + 1);
    for (int i = 0; i < size; ++i) x.push_back(std::sin(i * i * 0.37) + 0.2);
    RealFft::Workspace space;
    RealFft(size).power(x.data(), power.data(), space);
    for (int k = 0; k <= size / 2; ++k) {
      std::complex<double> sum = 0;
      for (int i = 0; i < size; ++i) {
        sum += x[static_cast<size_t>(i)] *
               std::polar(1.0, -2 * std::numbers::pi * ((int64_t{k} * i) % size) / size);
      }
      EXPECT_NEAR(power[static_cast<size_t>(k)], std::norm(sum), 1e-10 * size * size) << size;
    }
  }
}

// Every 23rd value of what transformers' WhisperFeatureExtractor makes of one second.
TEST(LogMel, EqualsTransformers) {
  const std::vector<float> sound = test_sound(13000);
  for (const int mels : {80, 128}) {
    MelSettings settings;
    settings.mels = mels;
    settings.samples = 16000;
    const auto features = LogMel(settings).features(sound);
    const json::Array& wanted = golden_media().find("mel")->find(std::to_string(mels))->as_array();
    ASSERT_EQ(features.size(), static_cast<size_t>(mels) * 100);
    ASSERT_EQ(wanted.size(), (features.size() + 22) / 23);
    double worst = 0;
    double sum = 0;
    for (size_t i = 0; i < wanted.size(); ++i) {
      const double apart = std::abs(features[i * 23] - wanted[i].as_double());
      worst = std::max(worst, apart);
      sum += apart;
    }
    EXPECT_LT(worst, 5e-5) << mels;
    EXPECT_LT(sum / static_cast<double>(wanted.size()), 1e-6) << mels;
  }
}

TEST(LogMel, SameBitsForAnyThreads) {
  const LogMel mel({});
  const std::vector<float> sound = test_sound(300'000);
  const auto start = std::chrono::steady_clock::now();
  const auto alone = mel.features(sound);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  RecordProperty("seconds", std::to_string(took.count()));
  EXPECT_EQ(alone.size(), 80u * 3000);
  for (const int threads : {1, 2, 3}) {
    ThreadPool pool(threads, false);
    EXPECT_EQ(mel.features(sound, &pool), alone) << threads;
  }
}

TEST(LogMel, CutsAndPads) {
  MelSettings settings;
  settings.samples = 16000;
  const LogMel mel(settings);
  std::vector<float> sound = test_sound(20000);
  const auto cut = mel.features(std::span(sound).first(16000));
  EXPECT_EQ(mel.features(sound), cut);
  // Silence is log10(1e-10), cut off at nothing: (-10 + 4) / 4.
  for (const float v : mel.features({})) EXPECT_EQ(v, -1.5F);
}

TEST(LogMel, ReadsSettings) {
  const auto of = [](std::string_view text) { return mel_settings(json::parse(text).value()); };
  const auto large = of(R"({"feature_size":128,"n_fft":400,"hop_length":160,"chunk_length":30,
                            "sampling_rate":16000,"dither":0.0,"n_samples":480000})");
  ASSERT_TRUE(large.ok());
  EXPECT_EQ(large->mels, 128);
  EXPECT_EQ(large->frames(), 3000);
  EXPECT_EQ(of(R"({"n_fft":401})").status().message(), "\"n_fft\" must be even, not 401");
  EXPECT_EQ(of(R"({"hop_length":0})").status().message(),
            "\"hop_length\" must be an integer from 1 to 16384");
  EXPECT_FALSE(of(R"({"dither":0.1})").ok());
}

TEST(Features, JoinsPicturesAndNamesThem) {
  ImageSettings settings;
  settings.family = ImageFamily::kQwen;
  settings.patch_size = 4;
  settings.min_pixels = 256;
  settings.max_pixels = 1024;
  const std::vector<Picture> pictures = {test_picture(1, 40, 30), test_picture(2, 28, 28)};
  const auto joined = features_of(pictures, settings);
  ASSERT_TRUE(joined.ok());
  ASSERT_EQ(joined->pictures.size(), 2u);
  std::vector<float> values;
  int64_t rows = 0;
  for (const Picture& p : pictures) {
    const auto input = image_input(p, settings);
    values.insert(values.end(), input->values.begin(), input->values.end());
    rows += input->shape[0];
  }
  EXPECT_EQ(joined->shape, (std::vector<int64_t>{rows, 96}));
  EXPECT_EQ(joined->values, values);
  const std::vector<Picture> narrow = {pictures[0], test_picture(1, 300, 1)};
  EXPECT_THAT(features_of(narrow, settings).status().message(),
              testing::StartsWith("picture 2: the picture has 300 x 1 pixels"));
  MelSettings short_window;
  short_window.samples = 16000;
  const auto heard = features_of(test_sound(5000), LogMel(short_window));
  EXPECT_EQ(heard.shape, (std::vector<int64_t>{80, 100}));
}

}  // namespace
}  // namespace freshet::media

#include "media/audio.h"

#include <bit>
#include <cmath>
#include <numbers>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "media/test_sounds.h"

namespace freshet::media {
namespace {

using Bytes = std::vector<uint8_t>;
using testing::HasSubstr;

std::vector<float> samples_of(const Bytes& bytes, const AudioLimits& limits = {}) {
  auto sound = decode_audio(bytes, limits);
  EXPECT_TRUE(sound.ok()) << sound.status().message();
  return sound.ok() ? std::move(sound->samples) : std::vector<float>();
}

std::string sound_error(const Bytes& bytes, const AudioLimits& limits = {}) {
  const auto sound = decode_audio(bytes, limits);
  if (sound.ok()) return "";
  EXPECT_THAT(sound.status().message(), testing::Not(HasSubstr("\n")));
  return sound.status().message();
}

Bytes stored(const std::vector<int64_t>& values, int bytes) {
  Bytes out;
  for (const int64_t v : values) put_number(out, static_cast<uint64_t>(v), bytes);
  return out;
}

std::vector<float> tone(int rate, double hertz, int count) {
  std::vector<float> out;
  for (int i = 0; i < count; ++i) {
    out.push_back(static_cast<float>(0.5 * std::sin(2 * std::numbers::pi * hertz * i / rate)));
  }
  return out;
}

TEST(Wav, ReadsEveryWidth) {
  const std::vector<float> wanted = {0, 0.5, -1, -0.25};
  EXPECT_EQ(samples_of(wav_of(1, 8, 1, 8000, {128, 192, 0, 96})), wanted);
  EXPECT_EQ(samples_of(wav_of(1, 16, 1, 8000, stored({0, 16384, -32768, -8192}, 2))), wanted);
  EXPECT_EQ(samples_of(wav_of(1, 24, 1, 8000, stored({0, 1 << 22, -(1 << 23), -(1 << 21)}, 3))),
            wanted);
  const Bytes wide = stored({0, 1 << 30, -(int64_t{1} << 31), -(1 << 29)}, 4);
  EXPECT_EQ(samples_of(wav_of(1, 32, 1, 8000, wide)), wanted);
  EXPECT_EQ(samples_of(wav_of(1, 32, 1, 8000, wide, true)), wanted);
  Bytes floats, doubles;
  for (const float v : wanted) {
    put_number(floats, std::bit_cast<uint32_t>(v), 4);
    put_number(doubles, std::bit_cast<uint64_t>(static_cast<double>(v)), 8);
  }
  EXPECT_EQ(samples_of(wav_of(3, 32, 1, 8000, floats)), wanted);
  EXPECT_EQ(samples_of(wav_of(3, 64, 1, 8000, doubles, true)), wanted);
}

TEST(Wav, AveragesChannels) {
  const auto stereo = stored({16384, 0, -32768, -16384, 8192, -8192}, 2);
  EXPECT_EQ(samples_of(wav_of(1, 16, 2, 44100, stereo)), (std::vector<float>{0.25, -0.75, 0}));
  // A frame that is not whole is left out.
  EXPECT_EQ(samples_of(wav_of(1, 16, 2, 44100, stored({16384, 0, 7}, 2))),
            (std::vector<float>{0.25}));
}

TEST(Wav, LengthOfAPipeMeansTheRest) {
  Bytes wav = wav_of(1, 16, 1, 8000, stored({0, 16384}, 2));
  for (size_t i = 0; i < 4; ++i) wav[wav.size() - 8 + i] = 0xff;
  EXPECT_EQ(samples_of(wav), (std::vector<float>{0, 0.5}));
}

TEST(Wav, RefusesInOneLine) {
  const Bytes good = wav_of(1, 16, 1, 8000, stored({1, 2, 3, 4}, 2));
  for (size_t n = 0; n < good.size(); ++n) {
    EXPECT_NE(sound_error(Bytes(good.begin(), good.begin() + static_cast<ptrdiff_t>(n))), "") << n;
  }
  EXPECT_EQ(sound_error(wav_of(6, 8, 1, 8000, {1})),
            "WAV: samples in A-law are not supported; send PCM or FLAC");
  EXPECT_EQ(sound_error(wav_of(1, 12, 1, 8000, {1})), "WAV: integers of 12 bits are not supported");
  EXPECT_EQ(sound_error(wav_of(1, 16, 0, 8000, {})),
            "WAV: 0 channels of 16 bits do not make frames of 0 bytes");
  EXPECT_EQ(sound_error(wav_of(1, 16, 1, 500, {})),
            "WAV: the header states a rate of 500 Hz; 1000 to 384000 are supported");
  EXPECT_EQ(sound_error(wav_of(1, 8, 200, 8000, {})),
            "the sound has 200 channels; the limit is 32");
  Bytes nan;
  put_number(nan, 0x7fc00000, 4);
  EXPECT_EQ(sound_error(wav_of(3, 32, 1, 8000, nan)), "WAV: a sample is not a finite number");
  EXPECT_EQ(sound_error(good, {.samples = 3}), "the sound has 4 samples; the limit is 3");
  EXPECT_EQ(sound_error(good, {.encoded_bytes = 40}),
            fmt::format("the sound file has {} bytes; the limit is 40", good.size()));
  EXPECT_EQ(sound_error({'I', 'D', '3', 4}), "MP3 files are not supported; send WAV or FLAC");
  EXPECT_EQ(sound_error({'x'}), "this is no WAV or FLAC file");
}

std::vector<int32_t> integers(int count, int bits) {
  std::vector<int32_t> out;
  uint32_t state = 7;
  for (int i = 0; i < count; ++i) {
    state = state * 1664525 + 1013904223;
    out.push_back(static_cast<int32_t>(state) >> (32 - bits));
  }
  return out;
}

TEST(Flac, EqualsWhatWasEncoded) {
  for (const int bits : {8, 16, 24}) {
    for (const int channels : {1, 2, 5}) {
      const auto values = integers(600 * channels, bits);
      const Bytes flac = flac_of(bits, channels, 44100, values);
      const auto header = read_audio_header(flac);
      ASSERT_TRUE(header.ok());
      EXPECT_EQ(header->rate, 44100);
      EXPECT_EQ(header->channels, channels);
      EXPECT_EQ(header->samples, 600);
      const auto samples = samples_of(flac);
      ASSERT_EQ(samples.size(), 600u);
      for (size_t i = 0; i < samples.size(); ++i) {
        double sum = 0;
        for (int c = 0; c < channels; ++c) sum += values[i * channels + c];
        EXPECT_FLOAT_EQ(samples[i], static_cast<float>(sum / channels / (1 << (bits - 1))));
      }
    }
  }
}

TEST(Flac, RefusesDamageAndLimits) {
  const Bytes good = flac_of(16, 2, 16000, integers(2000, 16));
  for (size_t n = 0; n < good.size(); n += 13) {
    EXPECT_NE(sound_error(Bytes(good.begin(), good.begin() + static_cast<ptrdiff_t>(n))), "") << n;
  }
  Bytes damaged = good;
  damaged[good.size() / 2] ^= 4;
  EXPECT_THAT(sound_error(damaged), HasSubstr("FLAC: the file is broken"));
  EXPECT_EQ(sound_error(good, {.samples = 999}), "the sound has 1000 samples; the limit is 999");
  // The header states no length: the limit holds while decoding.
  Bytes open = good;
  open[21] &= 0xf0;
  for (size_t i = 22; i < 26; ++i) open[i] = 0;
  EXPECT_EQ(samples_of(open).size(), 1000u);
  EXPECT_EQ(sound_error(open, {.samples = 999}),
            "FLAC: the sound has 1000 samples; the limit is 999");
  // An hour of silence in a few kilobytes.
  const Bytes silence = flac_of(16, 1, 8000, std::vector<int32_t>(8000 * 200));
  EXPECT_LT(silence.size(), 100'000u);
  EXPECT_EQ(sound_error(silence, {.seconds = 199}), "the sound lasts 200 s; the limit is 199 s");
}

// A tone, resampled, is the tone at the new rate.
TEST(ResampleAudio, KeepsTones) {
  for (const auto& [from, to] : std::initializer_list<std::pair<int, int>>{
           {48000, 16000}, {44100, 16000}, {8000, 16000}, {22050, 16000}, {44101, 16000}}) {
    for (const double hertz : {100.0, 1000.0, 3300.0}) {
      const auto out = resample_audio(tone(from, hertz, from / 2), from, to);
      const auto wanted = tone(to, hertz, to / 2);
      ASSERT_NEAR(static_cast<double>(out.size()), to / 2, 1) << from;
      double worst = 0;
      for (size_t i = 1000; i + 1000 < wanted.size(); ++i) {
        worst = std::max(worst, static_cast<double>(std::abs(out[i] - wanted[i])));
      }
      EXPECT_LT(worst, 1e-4) << from << " " << hertz;
    }
  }
}

// What the new rate cannot hold is 80 dB down.
TEST(ResampleAudio, RemovesHighTones) {
  for (const double hertz : {8200.0, 9000.0, 12000.0, 20000.0}) {
    const auto out = resample_audio(tone(48000, hertz, 24000), 48000, 16000);
    double power = 0;
    for (size_t i = 1000; i < 7000; ++i) power += double{out[i]} * out[i] / 6000;
    EXPECT_LT(std::sqrt(power * 2) / 0.5, 1e-4) << hertz;
  }
}

TEST(ResampleAudio, EdgeCases) {
  EXPECT_TRUE(resample_audio({}, 8000, 16000).empty());
  const std::vector<float> one = {0.5};
  EXPECT_EQ(resample_audio(one, 16000, 16000), one);
  EXPECT_EQ(resample_audio(one, 8000, 16000).size(), 2u);
  EXPECT_EQ(resample_audio(one, 48000, 16000).size(), 1u);
}

}  // namespace
}  // namespace freshet::media

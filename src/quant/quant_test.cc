// Compares decoding bit for bit with the GGUF package's, and encoding with the errors of the
// package and of ggml (tools/golden_quant.py).
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "quant/format.h"
#include "quant/q8_0.h"

namespace freshet::quant {
namespace {

std::string data_path(const std::string& name) {
  return FRESHET_UNPACKED_DATA "/quant/" + name;
}

template <class T>
std::vector<T> read_all(const std::string& name) {
  std::ifstream in(data_path(name), std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(in)), {});
  std::vector<T> out(bytes.size() / sizeof(T));
  std::memcpy(out.data(), bytes.data(), out.size() * sizeof(T));
  return out;
}

std::vector<float> round_trip(const FormatInfo& f, std::span<const float> x,
                              const float* importance = nullptr) {
  const auto n = static_cast<int64_t>(x.size());
  std::vector<uint8_t> blocks(row_bytes(f.format, n));
  std::vector<float> y(x.size());
  f.encode(x.data(), blocks.data(), n, importance);
  f.decode(blocks.data(), y.data(), n);
  return y;
}

double rmse(std::span<const float> x, std::span<const float> y, const float* w = nullptr) {
  double e = 0;
  double total = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double d = static_cast<double>(x[i]) - y[i];
    const double wi = w != nullptr ? w[i] : 1.0;
    e += wi * d * d;
    total += wi;
  }
  return std::sqrt(e / total);
}

class EachFormat : public testing::TestWithParam<FormatInfo> {};
class EachWrittenFormat : public testing::TestWithParam<FormatInfo> {};
class EachBlockFormat : public testing::TestWithParam<FormatInfo> {};

TEST_P(EachFormat, DecodesAsThePackageDoes) {
  const FormatInfo& f = GetParam();
  const auto blocks = read_all<uint8_t>(std::string(f.name) + ".blocks");
  const auto expected = read_all<float>(std::string(f.name) + ".f32");
  ASSERT_GT(expected.size(), 0u);
  ASSERT_EQ(blocks.size(), row_bytes(f.format, static_cast<int64_t>(expected.size())));
  // From an odd address, as may happen in files.
  std::vector<uint8_t> shifted(blocks.size() + 1);
  std::copy(blocks.begin(), blocks.end(), shifted.begin() + 1);
  std::vector<float> out(expected.size());
  f.decode(shifted.data() + 1, out.data(), static_cast<int64_t>(out.size()));
  for (size_t i = 0; i < out.size(); ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(out[i]), std::bit_cast<uint32_t>(expected[i]))
        << "number " << i << ": " << out[i] << ", expected " << expected[i];
  }
}

TEST_P(EachWrittenFormat, EncodesNoWorseThanOthers) {
  const FormatInfo& f = GetParam();
  const auto input = read_all<float>("input.f32");
  std::ifstream lines(data_path("rmse.txt"));
  std::string format, distribution;
  double theirs = 0;
  size_t count = 0;
  while (lines >> format >> distribution >> theirs) {
    if (format != f.name) continue;
    const size_t rows = input.size() / 8;
    const std::span<const float> x(input.data() + count++ * rows, rows);
    const double ours = rmse(x, round_trip(f, x));
    // The last digits of the file are rounded.
    EXPECT_LE(ours, theirs * (1 + 1e-8)) << distribution;
    RecordProperty(distribution, std::to_string(ours / theirs));
  }
  EXPECT_EQ(count, f.format == Format::kF32 ? 0u : 8u);  // F32 is lossless
}

// Decoded values are exactly representable, so encoding them again must not move them far.
TEST_P(EachWrittenFormat, EncodingWhatItDecodedLosesLittle) {
  const FormatInfo& f = GetParam();
  const auto input = read_all<float>("input.f32");
  const std::vector<float> once = round_trip(f, std::span(input).first(4096));
  const std::vector<float> twice = round_trip(f, once);
  const double loss = rmse(std::span(input).first(4096), once);
  EXPECT_LE(rmse(once, twice), 0.3 * loss + 1e-30);
}

TEST_P(EachBlockFormat, HonoursImportance) {
  const FormatInfo& f = GetParam();
  const auto input = read_all<float>("input.f32");
  const std::span<const float> x = std::span(input).first(4096);
  std::mt19937 random(5);
  std::vector<float> w(x.size());
  for (float& v : w) v = std::exp(static_cast<float>(random() % 1000) / 150.0f);
  const double blind = rmse(x, round_trip(f, x), w.data());
  const double seeing = rmse(x, round_trip(f, x, w.data()), w.data());
  // A power of two below levels that are floating-point numbers leaves nothing to choose.
  if (f.format == Format::kMXFP8) {
    EXPECT_LE(seeing, blind);
  } else {
    EXPECT_LT(seeing, blind);
  }
  // Only the ratios of weights matter.
  std::vector<float> scaled = w;
  for (float& v : scaled) v *= 1024.0f;
  EXPECT_EQ(round_trip(f, x, w.data()), round_trip(f, x, scaled.data()));
}

TEST_P(EachBlockFormat, SurvivesAnyInput) {
  const FormatInfo& f = GetParam();
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<std::vector<float>> patterns = {{0},
                                                    {-0.0f},
                                                    {kNan},
                                                    {kInf},
                                                    {-kInf, 1},
                                                    {3e38f, -3e38f},
                                                    {1e-45f, -1e-45f},
                                                    {1e-30f, 0},
                                                    {5},
                                                    {-5},
                                                    {70000, 1},
                                                    {kNan, kInf, -kInf, 0, 1e-20f, 1e20f}};
  for (const auto& pattern : patterns) {
    std::vector<float> x(256);
    for (size_t i = 0; i < x.size(); ++i) x[i] = pattern[i % pattern.size()];
    for (const float y : round_trip(f, x)) EXPECT_TRUE(std::isfinite(y));
    std::vector<float> w(256, 0.0f);  // useless weights are ignored
    w[7] = kNan;
    EXPECT_EQ(round_trip(f, x, w.data()), round_trip(f, x));
  }
  for (const float y : round_trip(f, std::vector<float>(256, 0.0f))) EXPECT_EQ(y, 0.0f);
}

std::string name_of(const testing::TestParamInfo<FormatInfo>& test) {
  return std::string(test.param.name);
}

std::vector<FormatInfo> written_formats() {
  std::vector<FormatInfo> all(all_formats().begin(), all_formats().end());
  std::erase_if(all, [](const FormatInfo& f) { return f.encode == nullptr; });
  return all;
}
// The quantising formats: several weights share a scale.
std::vector<FormatInfo> block_formats() {
  std::vector<FormatInfo> all = written_formats();
  std::erase_if(all, [](const FormatInfo& f) { return f.block_size == 1; });
  return all;
}

INSTANTIATE_TEST_SUITE_P(Quant, EachFormat,
                         testing::ValuesIn(all_formats().begin(), all_formats().end()), name_of);
INSTANTIATE_TEST_SUITE_P(Quant, EachWrittenFormat, testing::ValuesIn(written_formats()), name_of);
INSTANTIATE_TEST_SUITE_P(Quant, EachBlockFormat, testing::ValuesIn(block_formats()), name_of);

TEST(Formats, AreFoundByNameAndNumber) {
  for (const FormatInfo& i : all_formats()) {
    EXPECT_EQ(format_by_name(i.name), i.format);
    if (i.ggml_type == kNoGgmlType) {
      EXPECT_EQ(format_by_ggml_type(i.ggml_type), std::nullopt);
    } else {
      EXPECT_EQ(format_by_ggml_type(i.ggml_type), i.format);
    }
    EXPECT_EQ(&info(i.format), &i);
  }
  EXPECT_EQ(format_by_name("Q4_K"), Format::kQ4_K);
  EXPECT_EQ(format_by_name("q4"), std::nullopt);
  EXPECT_EQ(format_by_name("q4_kk"), std::nullopt);
  EXPECT_EQ(format_by_name(""), std::nullopt);
  EXPECT_EQ(format_by_ggml_type(15), std::nullopt);
}

TEST(Q8_0Encoder, NeverWritesMinus128) {
  const auto input = read_all<float>("input.f32");
  std::vector<Q8_0::Block> blocks(input.size() / 32);
  info(Format::kQ8_0)
      .encode(input.data(), blocks.data(), static_cast<int64_t>(input.size()), nullptr);
  for (const auto& b : blocks) {
    for (const int8_t q : b.qs) ASSERT_NE(q, -128);
  }
}

}  // namespace
}  // namespace freshet::quant

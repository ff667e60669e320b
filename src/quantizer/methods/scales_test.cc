// AWQ and SmoothQuant: the losses that they promise, measured again here in double.
#include "quantizer/methods/scales.h"

#include <cmath>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "quantizer/containers/double_quantisation.h"

namespace freshet::quantizer {
namespace {

constexpr int64_t kCols = 128;
constexpr int64_t kTokens = 300;

// Inputs with a few large channels, as transformers have.
struct Layer {
  std::vector<float> x, w;
  int64_t rows = 24;
  InputStats stats;
  Layer() {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    x.resize(static_cast<size_t>(kTokens * kCols));
    w.resize(static_cast<size_t>(rows * kCols));
    for (size_t i = 0; i < x.size(); ++i) {
      const size_t j = i % kCols;
      x[i] = normal(random) * (j % 32 == 5 ? 30.0f : 1.0f + 0.02f * static_cast<float>(j));
    }
    for (float& v : w) v = normal(random) * 0.1f;
    stats.tokens = kTokens;
    stats.cols = kCols;
    stats.mean_abs.resize(kCols);
    stats.max_abs.resize(kCols);
    stats.mean_square.resize(kCols);
    stats.gram.resize(kCols * kCols);
    for (int64_t t = 0; t < kTokens; ++t) {
      const float* const v = x.data() + t * kCols;
      for (size_t i = 0; i < kCols; ++i) {
        stats.mean_abs[i] += std::abs(v[i]) / kTokens;
        stats.max_abs[i] = std::max(stats.max_abs[i], std::abs(v[i]));
        stats.mean_square[i] += v[i] * v[i] / kTokens;
        for (size_t j = 0; j < kCols; ++j) stats.gram[i * kCols + j] += v[i] * v[j] / kTokens;
      }
    }
  }
  LinearWeights linear() const { return {w.data(), rows}; }
};

// The mean squared output error of round-to-nearest weights with scales.
double output_error(const Layer& l, const Target& target, const std::vector<float>& scales,
                    const MethodOptions& options) {
  ThreadPool pool(1, false);
  std::vector<float> scaled = l.w;
  for (size_t i = 0; i < scaled.size(); ++i) scaled[i] *= scales[i % kCols];
  const auto q = quantise_linear(scaled.data(), l.rows, kCols, target, {}, options, pool);
  EXPECT_TRUE(q.ok());
  const std::vector<float> decoded = dequantise(q->matrix, std::get_if<Scheme>(&target));
  double total = 0.0;
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t r = 0; r < l.rows; ++r) {
      double y = 0.0;
      for (size_t j = 0; j < kCols; ++j) {
        const auto at = static_cast<size_t>(r * kCols) + j;
        y += double{l.x[static_cast<size_t>(t * kCols) + j]} * (l.w[at] - decoded[at] / scales[j]);
      }
      total += y * y / kTokens;
    }
  }
  return total;
}

TEST(Awq, LowersTheErrorThatItReports) {
  const Layer l;
  const Target target = Scheme{.bits = 3, .group = 64};
  ThreadPool pool(2, false);
  const LinearWeights linears[] = {l.linear()};
  const auto found = awq_search(linears, target, l.stats, pool);
  ASSERT_TRUE(found.ok());
  MethodOptions plain;
  plain.search_ranges = false;
  const std::vector<float> ones(kCols, 1.0f);
  EXPECT_NEAR(found->error_before / output_error(l, target, ones, plain), 1.0, 1e-3);
  EXPECT_NEAR(found->error / output_error(l, target, found->scales, plain), 1.0, 1e-3);
  EXPECT_LT(found->error, 0.7 * found->error_before);
  EXPECT_GT(found->alpha, 0.0f);
}

TEST(SmoothQuant, SearchFindsAnAlphaThatHelps) {
  const Layer l;
  ThreadPool pool(2, false);
  const LinearWeights linears[] = {l.linear()};
  const auto found = smooth_scales(linears, l.stats, 0.0f, l.x, pool);
  ASSERT_TRUE(found.ok());
  EXPECT_LT(found->error, 0.5 * found->error_before);
  for (const float alpha : {0.3f, 0.5f, 0.8f}) {
    const auto given = smooth_scales(linears, l.stats, alpha, l.x, pool);
    ASSERT_TRUE(given.ok());
    EXPECT_GE(given->error, found->error);
    // The formula.
    for (size_t j = 0; j < kCols; j += 17) {
      double most = 0.0;
      for (size_t i = j; i < l.w.size(); i += kCols)
        most = std::max(most, std::abs(double{l.w[i]}));
      const double expected =
          std::pow(double{l.stats.max_abs[j]}, alpha) / std::pow(most, 1.0 - alpha);
      EXPECT_NEAR(given->scales[j] / expected, 1.0, 1e-5);
    }
  }
  EXPECT_EQ(smooth_scales(linears, l.stats, 0.0f, {}, pool)->alpha, 0.8f);
}

TEST(Scales, FollowDeadInputsAndMissingStatistics) {
  Layer l;
  l.stats.mean_abs[9] = l.stats.max_abs[9] = 0.0f;
  ThreadPool pool(1, false);
  const LinearWeights linears[] = {l.linear()};
  const auto awq = awq_search(linears, Scheme{.bits = 4, .group = 64}, l.stats, pool);
  ASSERT_TRUE(awq.ok());
  EXPECT_EQ(awq->scales[9], 1.0f);
  EXPECT_EQ(smooth_scales(linears, l.stats, 0.5f, {}, pool)->scales[9], 1.0f);
  const InputStats halved = scaled_stats(l.stats, std::vector<float>(kCols, 2.0f));
  EXPECT_FLOAT_EQ(halved.gram[5], l.stats.gram[5] / 4.0f);
  EXPECT_FLOAT_EQ(halved.max_abs[5], l.stats.max_abs[5] / 2.0f);
  l.stats.gram.clear();
  EXPECT_EQ(awq_search(linears, Scheme{}, l.stats, pool).status().message(),
            "AWQ needs the second moments of the inputs");
}

// bitsandbytes' map: 0, 1, and the middles of 2^i parts of [.1, 1] times powers of ten.
TEST(DoubleScales, AreNearTheOriginals) {
  const auto& map = dynamic_map();
  EXPECT_EQ(map.back(), 1.0f);
  EXPECT_FLOAT_EQ(map[0], -0.99296875f);
  EXPECT_FLOAT_EQ(map[254], 0.99296875f);
  EXPECT_EQ(map[127], 0.0f);
  EXPECT_FLOAT_EQ(map[128], 5.5e-7f);
  std::vector<float> scales;
  for (int i = 0; i < 700; ++i) scales.push_back(0.5f + 0.0005f * static_cast<float>(i));
  const DoubleScales d = double_quantise(scales);
  EXPECT_EQ(d.absmax.size(), 3u);
  const std::vector<float> back = scales_of(d);
  for (size_t i = 0; i < scales.size(); ++i) EXPECT_NEAR(back[i], scales[i], 0.0015f);
}

}  // namespace
}  // namespace freshet::quantizer

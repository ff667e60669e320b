// Compares error feedback with the textbook's loop in double precision, and checks what must hold
// for every target: the gain over rounding to the nearest, independence of threads, and hostile
// input.
#include "quantizer/methods/methods.h"

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace freshet::quantizer {
namespace {

struct Problem {
  int64_t rows, cols;
  std::vector<float> w;
  InputStats stats;
};

// Correlated inputs (a random walk over columns plus noise, some columns large) and heavy-tailed
// weights.
Problem random_problem(int64_t rows, int64_t cols, int64_t tokens, unsigned seed) {
  Problem p{rows, cols, std::vector<float>(static_cast<size_t>(rows * cols)), {}};
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (float& v : p.w) v = normal(random) * std::exp(0.3f * normal(random)) * 0.05f;
  std::vector<float> size(static_cast<size_t>(cols));
  for (float& v : size) v = std::exp(0.7f * normal(random));
  const auto n = static_cast<size_t>(cols);
  std::vector<double> gram(n * n);
  std::vector<float> x(n);
  for (int64_t t = 0; t < tokens; ++t) {
    float walk = 0.0f;
    for (size_t j = 0; j < n; ++j) {
      walk = 0.9f * walk + 0.4f * normal(random);
      x[j] = (walk + 0.5f * normal(random)) * size[j];
    }
    for (size_t i = 0; i < n; ++i) {
      for (size_t j = 0; j < n; ++j) gram[i * n + j] += double{x[i]} * x[j];
    }
  }
  p.stats.tokens = tokens;
  p.stats.cols = cols;
  for (const double g : gram) {
    p.stats.gram.push_back(static_cast<float>(g / static_cast<double>(tokens)));
  }
  return p;
}

Quantised quantised(const Problem& p, const Target& target, const MethodOptions& options,
                    int threads = 1, const HessianOptions& damping = {}) {
  ThreadPool pool(threads, false);
  const Inputs inputs = prepare_inputs(p.stats, p.stats.gram, true, damping, pool);
  auto q = quantise_linear(p.w.data(), p.rows, p.cols, target, inputs, options, pool);
  EXPECT_TRUE(q.ok()) << q.status().message();
  return std::move(*q);
}

std::vector<float> values(const Quantised& q, const Target& target) {
  return dequantise(q.matrix, std::get_if<Scheme>(&target));
}

double quadratic_error(const Problem& p, const std::vector<float>& decoded) {
  double total = 0.0;
  for (int64_t r = 0; r < p.rows; ++r) {
    for (int64_t i = 0; i < p.cols; ++i) {
      const auto at = static_cast<size_t>(r * p.cols);
      const double di =
          double{p.w[at + static_cast<size_t>(i)]} - decoded[at + static_cast<size_t>(i)];
      for (int64_t j = 0; j < p.cols; ++j) {
        const double dj =
            double{p.w[at + static_cast<size_t>(j)]} - decoded[at + static_cast<size_t>(j)];
        total += di * dj * p.stats.gram[static_cast<size_t>(i * p.cols + j)];
      }
    }
  }
  return total;
}

// GPTQ as published: the inverse by Gauss-Jordan, its Cholesky factor, one column after another.
std::vector<double> textbook_gptq(const Problem& p, const CodedMatrix& scales, const Scheme& scheme,
                                  double damping) {
  const auto n = static_cast<size_t>(p.cols);
  std::vector<double> h(p.stats.gram.begin(), p.stats.gram.end());
  double mean = 0.0;
  for (size_t j = 0; j < n; ++j) mean += h[j * n + j] / static_cast<double>(n);
  for (size_t j = 0; j < n; ++j) h[j * n + j] += damping * mean;
  std::vector<double> inverse(n * n);
  for (size_t j = 0; j < n; ++j) inverse[j * n + j] = 1.0;
  for (size_t c = 0; c < n; ++c) {
    const double pivot = h[c * n + c];
    for (size_t j = 0; j < n; ++j) h[c * n + j] /= pivot, inverse[c * n + j] /= pivot;
    for (size_t i = 0; i < n; ++i) {
      const double by = h[i * n + c];
      if (i == c) continue;
      for (size_t j = 0; j < n; ++j) {
        h[i * n + j] -= by * h[c * n + j];
        inverse[i * n + j] -= by * inverse[c * n + j];
      }
    }
  }
  std::vector<double> upper(n * n);  // upper^T upper = inverse
  for (size_t i = 0; i < n; ++i) {
    for (size_t j = i; j < n; ++j) {
      double v = inverse[i * n + j];
      for (size_t k = 0; k < i; ++k) v -= upper[k * n + i] * upper[k * n + j];
      upper[i * n + j] = i == j ? std::sqrt(v) : v / upper[i * n + i];
    }
  }
  const double half = 1 << (scheme.bits - 1);
  const auto groups = static_cast<size_t>(p.cols / scheme.group);
  std::vector<double> out(p.w.size());
  for (size_t r = 0; r < static_cast<size_t>(p.rows); ++r) {
    std::vector<double> x(p.w.begin() + static_cast<int64_t>(r * n),
                          p.w.begin() + static_cast<int64_t>((r + 1) * n));
    for (size_t j = 0; j < n; ++j) {
      const double s = scales.scales[r * groups + j / static_cast<size_t>(scheme.group)];
      const double q = s * std::clamp(std::nearbyint(x[j] / s), -half, half - 1);
      out[r * n + j] = q;
      const double e = (x[j] - q) / upper[j * n + j];
      for (size_t i = j; i < n; ++i) x[i] -= e * upper[j * n + i];
    }
  }
  return out;
}

TEST(Feedback, IsTheTextbooksLoop) {
  const Problem p = random_problem(12, 160, 400, 1);
  const Scheme scheme = {.bits = 4, .group = 32};
  MethodOptions options;
  options.rounding = Rounding::kFeedback;
  options.sweeps = 0;
  const Quantised q = quantised(p, scheme, options, 1, {.falling_order = false});
  const std::vector<double> expected =
      textbook_gptq(p, std::get<CodedMatrix>(q.matrix), scheme, 0.01);
  const std::vector<float> got = values(q, scheme);
  // A number near the middle of two levels may fall to the other side, and others follow it.
  int64_t different = 0;
  for (size_t i = 0; i < got.size(); ++i) different += std::abs(got[i] - expected[i]) > 1e-4;
  EXPECT_LT(different, static_cast<int64_t>(got.size()) / 100);
}

struct Case {
  std::string name;
  Target target;
  double share;  // feedback's error must be below this share of the nearest's
};

std::vector<Case> cases() {
  using quant::Format;
  const Scheme mxfp4 = {.levels = Levels::kE2M1, .group = 32, .scale = ScaleType::kE8M0};
  const Scheme mxfp8 = {.levels = Levels::kE4M3, .bits = 8, .group = 32, .scale = ScaleType::kE8M0};
  const Scheme nvfp4 = {.levels = Levels::kE2M1, .group = 16, .scale = ScaleType::kE4M3};
  Scheme nf4 = {.levels = Levels::kNF4, .group = 64, .scale = ScaleType::kF32};
  Scheme fp4 = nf4;
  fp4.levels = Levels::kFP4;
  nf4.double_quantised = true;
  const Scheme fp8 = {.levels = Levels::kE4M3, .bits = 8, .group = 0, .scale = ScaleType::kBF16};
  Scheme fp8_block = {.levels = Levels::kE4M3,
                      .bits = 8,
                      .group = 128,
                      .group_rows = 128,
                      .scale = ScaleType::kF32};
  Scheme fp8_tensor = fp8;
  fp8_tensor.group_rows = 0;
  const Scheme w4a = {.bits = 4, .group = 128, .symmetric = false};
  const Scheme w3a = {.bits = 3, .group = 64, .symmetric = false, .scale = ScaleType::kBF16};
  return {
      {"w2", Scheme{.bits = 2, .group = 32}, 0.7},
      {"w3", Scheme{.bits = 3, .group = 128}, 0.7},
      {"w4", Scheme{.bits = 4, .group = 128}, 0.7},
      {"w4_ragged", Scheme{.bits = 4, .group = 96}, 0.7},
      {"w4_asymmetric", w4a, 0.7},
      {"w3_asymmetric", w3a, 0.7},
      {"int8", Scheme{.bits = 8, .group = 0, .scale = ScaleType::kF32}, 0.7},
      {"mxfp4", mxfp4, 0.7},
      {"mxfp8", mxfp8, 0.7},
      {"nvfp4", nvfp4, 0.7},
      {"nf4", nf4, 0.7},
      {"fp4", fp4, 0.8},
      {"fp8", fp8, 0.7},
      {"fp8_block", fp8_block, 0.7},
      {"fp8_tensor", fp8_tensor, 0.7},
      {"q4_0", Format::kQ4_0, 0.7},
      {"q4_1", Format::kQ4_1, 0.7},
      {"q5_0", Format::kQ5_0, 0.7},
      {"q5_1", Format::kQ5_1, 0.7},
      {"q8_0", Format::kQ8_0, 0.7},
      {"q2_k", Format::kQ2_K, 0.7},
      {"q3_k", Format::kQ3_K, 0.7},
      {"q4_k", Format::kQ4_K, 0.7},
      {"q5_k", Format::kQ5_K, 0.7},
      {"q6_k", Format::kQ6_K, 0.7},
      {"iq4_nl", Format::kIQ4_NL, 0.7},
      {"iq4_xs", Format::kIQ4_XS, 0.7},
  };
}

const Problem& shared_problem() {
  static const Problem kProblem = random_problem(40, 256, 700, 3);
  return kProblem;
}

class EachTarget : public testing::TestWithParam<Case> {};

TEST_P(EachTarget, FeedbackBeatsTheNearest) {
  const Problem& p = shared_problem();
  const Target& target = GetParam().target;
  MethodOptions options;
  const Quantised nearest = quantised(p, target, options);
  options.rounding = Rounding::kFeedback;
  options.sweeps = 0;
  const Quantised plain = quantised(p, target, options);
  options.sweeps = 4;
  const Quantised improved = quantised(p, target, options);
  const double e0 = quadratic_error(p, values(nearest, target));
  const double e1 = quadratic_error(p, values(plain, target));
  const double e2 = quadratic_error(p, values(improved, target));
  EXPECT_LT(e1, e0);
  EXPECT_LE(e2, e1 * 1.0001);
  EXPECT_LT(e2, e0 * GetParam().share);
  RecordProperty("plain", std::to_string(e1 / e0));
  RecordProperty("improved", std::to_string(e2 / e0));
  // The report tells the damped error, which is a little larger.
  EXPECT_GE(improved.report.error, e2 * 0.999);
  EXPECT_LE(improved.report.error, e2 * 1.5);
  EXPECT_TRUE(improved.report.note.empty());
}

TEST_P(EachTarget, DoesNotDependOnThreads) {
  const Problem& p = shared_problem();
  MethodOptions options;
  options.rounding = Rounding::kFeedback;
  const auto one = values(quantised(p, GetParam().target, options, 1), GetParam().target);
  EXPECT_EQ(values(quantised(p, GetParam().target, options, 3), GetParam().target), one);
}

// With one thread a panel has 128 of these rows, with five 32.
TEST(QuantiseLinear, DoesNotDependOnPanels) {
  const Problem p = random_problem(520, 256, 64, 5);
  MethodOptions options;
  options.rounding = Rounding::kFeedback;
  for (const Target& target : {Target(quant::Format::kQ4_K), Target(quant::Format::kQ6_K)}) {
    const Quantised one = quantised(p, target, options, 1);
    const Quantised five = quantised(p, target, options, 5);
    EXPECT_EQ(values(one, target), values(five, target));
    EXPECT_EQ(one.report.error, five.report.error);
    EXPECT_EQ(one.report.energy, five.report.energy);
  }
}

TEST_P(EachTarget, SurvivesAnyWeights) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  Problem p = random_problem(6, 256, 1, 4);  // one token: the moments have rank one
  std::fill_n(p.w.begin(), 256, 0.0f);
  p.w[256] = kNan;
  p.w[300] = kInf;
  p.w[301] = -kInf;
  std::fill_n(p.w.begin() + 512, 256, 1e-40f);
  std::fill_n(p.w.begin() + 768, 256, 3e4f);
  // A dead column.
  for (size_t i = 0; i < 256; ++i) p.stats.gram[7 * 256 + i] = p.stats.gram[i * 256 + 7] = 0.0f;
  MethodOptions options;
  options.rounding = Rounding::kFeedback;
  const Quantised q = quantised(p, GetParam().target, options);
  EXPECT_EQ(q.report.non_finite, 3);
  EXPECT_EQ(q.report.dead_columns, 1);
  EXPECT_GT(q.report.damping, 0.0f);
  for (const float v : values(q, GetParam().target)) EXPECT_TRUE(std::isfinite(v));
  for (size_t i = 0; i < 256; ++i) EXPECT_EQ(values(q, GetParam().target)[i], 0.0f);
}

INSTANTIATE_TEST_SUITE_P(Methods, EachTarget, testing::ValuesIn(cases()),
                         [](const auto& test) { return test.param.name; });

TEST(Methods, ReportsWhyThereIsNoFeedback) {
  Problem p = random_problem(4, 64, 8, 5);
  MethodOptions options;
  options.rounding = Rounding::kFeedback;
  const Target target = Scheme{.bits = 4, .group = 32};
  p.stats.gram[3] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(quantised(p, target, options).report.note,
            "the inputs' second moments are not finite: rounded to the nearest");
  p.stats.gram.clear();
  EXPECT_EQ(quantised(p, target, options).report.note,
            "no second moments of the inputs were collected: rounded to the nearest");
}

TEST(Methods, RefusesWhatCannotBeStored) {
  const Problem p = random_problem(2, 96, 8, 6);
  ThreadPool pool(1, false);
  const auto message = [&](const Target& t) {
    return quantise_linear(p.w.data(), 2, 96, t, {}, {}, pool).status().message();
  };
  EXPECT_EQ(message(quant::Format::kQ4_K), "rows of 96 numbers do not fill blocks of 256 (q4_k)");
  EXPECT_EQ(message(Scheme{.bits = 9}), "integers of 9 bits; 2 to 8 can be written");
}

}  // namespace
}  // namespace freshet::quantizer

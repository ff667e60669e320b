// Rules of acceptance on evenly spaced random bits, against their definitions in long double.
#include "speculative/acceptance.h"

#include <algorithm>
#include <cmath>
#include <random>

#include <gtest/gtest.h>

#include "speculative/config.h"

namespace freshet::speculative {
namespace {

using Shares = std::vector<long double>;

constexpr int kVocab = 12;
constexpr uint64_t kGrid = 1 << 16;

// The middle of part `i` of kGrid equal parts of all random bits.
uint64_t grid_bits(uint64_t i) {
  return (2 * i + 1) << 47;
}

// Weights of very different sizes, some of them zero; the list leaves out some ids.
std::vector<Candidate> random_list(std::mt19937& random) {
  std::vector<Candidate> list;
  std::uniform_real_distribution<double> size(0.0, 44.0);
  for (int32_t id = 0; id < kVocab; ++id) {
    if (random() % 4 == 0) continue;
    const bool zero = random() % 5 == 0;
    list.push_back({id, 0.0f, zero ? 0 : static_cast<Weight>(std::exp2(size(random)))});
  }
  list.push_back({kVocab, 0.0f, Weight{1} << 40});
  return list;
}

Shares shares_of(Distribution d) {
  Shares shares(kVocab + 1, 0.0L);
  long double sum = 0.0L;
  for (const Candidate& c : d) sum += static_cast<long double>(c.weight);
  for (const Candidate& c : d)
    shares[static_cast<size_t>(c.id)] = static_cast<long double>(c.weight) / sum;
  return shares;
}

// Fractions of the grid on which `draw` gives each token.
template <class Draw>
void expect_fractions(const Shares& want, const Draw& draw) {
  std::vector<int64_t> seen(want.size(), 0);
  for (uint64_t i = 0; i < kGrid; ++i) ++seen.at(static_cast<size_t>(draw(grid_bits(i))));
  for (size_t id = 0; id < want.size(); ++id) {
    EXPECT_NEAR(static_cast<double>(seen[id]), static_cast<double>(want[id] * kGrid), 1.01)
        << "token " << id;
    if (want[id] == 0.0L) {
      EXPECT_EQ(seen[id], 0);
    }
  }
}

Shares excess_of(long double product, const Shares& p, const Shares& q) {
  Shares excess(p.size());
  long double sum = 0.0L;
  for (size_t id = 0; id < p.size(); ++id)
    sum += excess[id] = std::max(0.0L, product * p[id] - q[id]);
  for (long double& e : excess) e /= sum;
  return excess;
}

TEST(Acceptance, DrawsAreTheDefinitions) {
  std::mt19937 random(1);
  for (int round = 0; round < 20; ++round) {
    const auto p = random_list(random), q = random_list(random);
    const Shares of_p = shares_of(p), of_q = shares_of(q);
    expect_fractions(of_q, [&](uint64_t bits) { return draw_token(q, bits); });
    expect_fractions(excess_of(1.0L, of_p, of_q),
                     [&](uint64_t bits) { return draw_residual(p, q, bits); });
    const double product = 0.25 + 0.03 * round;
    expect_fractions(excess_of(product, of_p, of_q),
                     [&](uint64_t bits) { return draw_block_residual(product, p, q, bits); });
    long double distance = 0.0L;
    for (size_t id = 0; id < of_p.size(); ++id) distance += std::abs(of_p[id] - of_q[id]) / 2;
    EXPECT_NEAR(total_variation(p, q), static_cast<double>(distance), 1e-14);
    for (const Candidate& c : q) {
      if (c.weight == 0) continue;
      const auto id = static_cast<size_t>(c.id);
      const long double odds = std::min(1.0L, of_p[id] / of_q[id]);
      int64_t kept = 0;
      for (uint64_t i = 0; i < kGrid; ++i) kept += keeps_draft(p, q, c.id, grid_bits(i));
      EXPECT_NEAR(static_cast<double>(kept), static_cast<double>(odds * kGrid), 1.01);
      EXPECT_NEAR(block_product(product, p, q, c.id),
                  static_cast<double>(std::min(1.0L, product * of_p[id] / of_q[id])), 1e-14);
    }
  }
}

// All of a vocabulary of the greatest size at the greatest weights, and a single token.
TEST(Acceptance, TheLargestSumsFit) {
  std::vector<Candidate> p, q;
  for (int32_t id = 0; id < kMostVocab; ++id) {
    p.push_back({id, 0.0f, Weight{1} << kWeightBits});
    q.push_back({id, 0.0f, (Weight{1} << kWeightBits) - (id % 2 == 0 ? 0 : Weight{1} << 43)});
  }
  EXPECT_NEAR(total_variation(p, q), 1.0 / 6.0, 1e-12);
  EXPECT_TRUE(keeps_draft(p, q, 1, ~uint64_t{0}));
  EXPECT_TRUE(keeps_draft(p, q, 0, (uint64_t{3} << 62) - 1));
  EXPECT_FALSE(keeps_draft(p, q, 0, (uint64_t{3} << 62) + 1));
  EXPECT_EQ(draw_residual(p, q, 0), 1);
  EXPECT_EQ(draw_residual(p, q, ~uint64_t{0}), kMostVocab - 1);
  EXPECT_EQ(draw_token(p, ~uint64_t{0}), kMostVocab - 1);
  const Candidate one{7, 0.0f, 1};
  EXPECT_NEAR(total_variation(p, {&one, 1}), 1.0 - std::exp2(-19), 1e-15);
  EXPECT_EQ(draw_residual(p, {&one, 1}, 0), 0);
  EXPECT_FALSE(keeps_draft(p, {&one, 1}, 7, uint64_t{1} << 45));
  EXPECT_TRUE(keeps_draft(p, {&one, 1}, 7, (uint64_t{1} << 45) - 1));
}

TEST(Acceptance, BlocksAreKeptByTheirShare) {
  for (const auto& [product, residual] : {std::pair{0.3, 0.2}, {0.99, 0.0}, {0.0, 0.0}, {0.5, 1}}) {
    int64_t kept = 0;
    for (uint64_t i = 0; i < kGrid; ++i) kept += keeps_block(product, residual, grid_bits(i));
    EXPECT_NEAR(static_cast<double>(kept), residual / (residual + 1 - product) * kGrid, 1.01);
  }
  EXPECT_TRUE(keeps_block(1.0, 0.0, ~uint64_t{0}));
  // Behind the last draft the residual is the product, and the share is, too.
  EXPECT_TRUE(keeps_block(0.25, 0.25, (uint64_t{1} << 62) - 1));
  EXPECT_FALSE(keeps_block(0.25, 0.25, uint64_t{1} << 62));
}

// Medusa's rule, with figures worked out by hand: entropy 0.8018 nats, exp(-0.8018) = 0.4485.
TEST(Acceptance, TypicalTokens) {
  const std::vector<Candidate> p = {{1, 0, 70}, {3, 0, 20}, {8, 0, 10}};
  AcceptanceOptions o;
  EXPECT_TRUE(is_typical(p, 1, o));
  EXPECT_TRUE(is_typical(p, 8, o));   // 0.1 > 0.09
  EXPECT_FALSE(is_typical(p, 2, o));  // not possible
  o.posterior_threshold = 0.15;
  EXPECT_FALSE(is_typical(p, 8, o));  // 0.1 < min(0.15, 0.1346)
  EXPECT_TRUE(is_typical(p, 3, o));
  o.posterior_alpha = 0.2;  // min(0.15, 0.0897)
  EXPECT_TRUE(is_typical(p, 8, o));
}

TEST(Acceptance, SyntheticRates) {
  const std::vector<double> rates = {0.73, 0.52, 0.36, 0.23, 0.15};
  for (const int drafts : {0, 3, 5, 9}) {
    std::vector<int64_t> all(10, 0);
    for (uint64_t i = 0; i < kGrid; ++i) {
      const int kept = synthetic_drafts(rates, drafts, grid_bits(i));
      ASSERT_LE(kept, drafts);
      for (int d = 0; d < kept; ++d) ++all[static_cast<size_t>(d)];
    }
    for (size_t d = 0; d < all.size(); ++d) {
      const bool drafted = d < rates.size() && static_cast<int>(d) < drafts;
      EXPECT_NEAR(static_cast<double>(all[d]), drafted ? rates[d] * kGrid : 0.0, 1.01);
    }
  }
}

Status error_of(std::string_view text) {
  return parse_config(text).status();
}

TEST(Acceptance, Configuration) {
  const auto config = parse_config(R"({"method": "ngram", "rejection_sample_method": "standard",
                                       "posterior_threshold": 0.2, "posterior_alpha": 0.5})");
  ASSERT_TRUE(config.ok());
  EXPECT_EQ(config->acceptance.method, Acceptance::kRejection);
  EXPECT_EQ(config->acceptance.posterior_threshold, 0.2);
  EXPECT_EQ(config->acceptance.posterior_alpha, 0.5);
  const auto length = parse_config(R"({"method": "ngram", "num_speculative_tokens": 5,
      "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.99})");
  ASSERT_TRUE(length.ok());
  ASSERT_EQ(length->acceptance.rates.size(), 5u);
  double sum = 1.0;
  for (const double rate : length->acceptance.rates) sum += rate;
  EXPECT_NEAR(sum, 2.99, 1e-9);
  for (const std::string_view text :
       {R"({"method": "ngram", "rejection_sample_method": "greedy"})",
        R"({"method": "ngram", "posterior_threshold": 2})",
        R"({"method": "ngram", "rejection_sample_method": "synthetic"})",
        R"({"method": "ngram", "synthetic_acceptance_rates": [0.5]})",
        R"({"method": "ngram", "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": [0.5, 0.6]})",
        R"({"method": "ngram", "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": [0.5], "synthetic_acceptance_length": 1.5})",
        R"({"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": 4.5})"}) {
    EXPECT_EQ(error_of(text).code(), StatusCode::kInvalidArgument) << text;
  }
}

}  // namespace
}  // namespace freshet::speculative

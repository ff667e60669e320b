#include "sampling/race.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include <gtest/gtest.h>

#include "base/philox.h"
#include "sampling/race_noise.h"

namespace freshet {
namespace {

// The value that a chi-square variable with `df` degrees of freedom exceeds with probability 1e-6
// (Wilson and Hilferty's approximation).
double chi_square_limit(double df) {
  const double z = 4.7534;
  return df * std::pow(1.0 - 2.0 / (9.0 * df) + z * std::sqrt(2.0 / (9.0 * df)), 3.0);
}

double chi_square(const std::vector<int>& seen, const std::vector<double>& shares, int draws) {
  double chi = 0.0;
  for (size_t i = 0; i < seen.size(); ++i) {
    const double e = shares[i] * draws;
    chi += (seen[i] - e) * (seen[i] - e) / e;
  }
  return chi;
}

std::vector<Candidate> candidates_of(const std::vector<Weight>& weights) {
  std::vector<Candidate> c;
  for (const Weight w : weights) c.push_back({static_cast<int32_t>(c.size()), 0.0f, w});
  return c;
}

std::vector<double> shares_of(const std::vector<Candidate>& c) {
  double sum = 0.0;
  std::vector<double> shares;
  for (const Candidate& x : c) sum += static_cast<double>(x.weight);
  for (const Candidate& x : c) shares.push_back(static_cast<double>(x.weight) / sum);
  return shares;
}

// The definition, token by token.
int32_t plain_winner(const Race& race, const std::vector<Candidate>& candidates) {
  uint64_t first = std::numeric_limits<uint64_t>::max();
  int32_t winner = -1;
  for (const Candidate& x : candidates) {
    if (x.weight == 0) continue;
    const uint64_t time = ops::race_time(race.noise(x.id), x.weight);
    if (time > first || (time == first && x.id > winner)) continue;
    first = time;
    winner = x.id;
  }
  return winner;
}

TEST(RaceArithmetic, ExponentialsAreThoseOfTheLogarithm) {
  std::mt19937_64 gen(1);
  std::vector<uint64_t> noises = {0, 1, 2, 3, ~uint64_t{0}, ~uint64_t{0} - 1, uint64_t{1} << 63};
  for (int i = 0; i < 64; ++i) {
    for (const int64_t d : {-2, -1, 0, 1, 2}) noises.push_back((uint64_t{1} << i) + uint64_t(d));
    for (int j = 0; j < 500; ++j) noises.push_back(gen() >> i);     // near 0
    for (int j = 0; j < 500; ++j) noises.push_back(~(gen() >> i));  // near 1
  }
  for (uint64_t i = 0; i < 64; ++i) {  // the ends of the intervals
    for (const uint64_t d : {0, 1, 2}) noises.push_back(~(i << 58) - d);
    for (const uint64_t d : {0, 1, 2}) noises.push_back((i << 58) + d);
  }
  long double last = 0.0L;
  std::ranges::sort(noises);
  for (const uint64_t noise : noises) {
    const long double v = std::ldexp(static_cast<long double>(noise | 1), -64);
    const long double want = -std::log1p(-v);
    const long double got = ops::race_exponential(noise);
    ASSERT_LE(std::abs(got - want), want * 0x1p-47L + 0x1p-62L) << noise;
    ASSERT_GE(got, v * (1.0L - 0x1p-52L)) << noise;
    ASSERT_GE(got * (1.0L + 0x1p-46L) + 0x1p-61L, last) << noise;
    last = got;
  }
}

TEST(RaceArithmetic, TimesAreInTheOrderOfTheirRatios) {
  std::mt19937_64 gen(2);
  for (int i = 0; i < 10000; ++i) {
    const uint64_t a = gen(), b = gen();
    const Weight v = (gen() >> (20 + gen() % 44)) + 1, w = (gen() >> (20 + gen() % 44)) + 1;
    const double x = ops::race_exponential(a) / static_cast<double>(v);
    const double y = ops::race_exponential(b) / static_cast<double>(w);
    ASSERT_EQ(ops::race_time(a, v) < ops::race_time(b, w), x < y);
  }
}

TEST(RaceNoise, IsPhiloxOfSeedSamplePositionAndToken) {
  std::mt19937_64 gen(3);
  for (int i = 0; i < 1000; ++i) {
    const uint64_t seed = gen(), position = gen() >> (1 + gen() % 60);
    const auto sample = static_cast<uint32_t>(gen() % 1000);
    const auto token = static_cast<uint32_t>(gen() % 500000);
    const auto words = [&](uint32_t low) {
      return philox4x32({static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32),
                         4 * sample, (token / 128 * 32 + token % 32) | low},
                        {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
    };
    const size_t word = token / 32 % 4;
    const uint64_t want = uint64_t{words(0)[word]} << 32 | words(0x80000000)[word];
    const Race race(seed, sample, static_cast<int64_t>(position));
    ASSERT_EQ(race.noise(static_cast<int32_t>(token)), want);
  }
}

TEST(RaceNoise, IsTheSameForEachInstructionSet) {
  std::mt19937 gen(4);
  for (const NoiseFill fill : noise_fills()) {
    for (int i = 0; i < 300; ++i) {
      ops::RaceStream stream;
      for (uint32_t* word : {&stream.seed_low, &stream.seed_high, &stream.position_low,
                             &stream.position_high, &stream.stream}) {
        *word = static_cast<uint32_t>(gen());
      }
      const uint64_t flip = gen() % 4000 * ops::kRaceCounters;
      uint64_t counters[ops::kRaceCounters];
      for (uint64_t& c : counters) c = gen() % 4096;
      NoiseTile tile;
      fill(NoisePlan(stream), flip, counters, 0, tile);
      uint32_t least = 0xffffffff;
      for (uint32_t c = 0; c < ops::kRaceCounters; ++c) {
        const auto want = ops::race_words(stream, static_cast<uint32_t>(counters[c] ^ flip));
        for (uint32_t j = 0; j < 4; ++j) {
          ASSERT_EQ(tile.word(c, j), want.of[j]);
          least = std::min(least, want.of[j]);
        }
      }
      EXPECT_TRUE(fill(NoisePlan(stream), flip, counters, least, tile));
      EXPECT_FALSE(fill(NoisePlan(stream), flip, counters, least - 1, tile));
    }
  }
}

TEST(Race, CandidatesRaceByTheDefinition) {
  std::mt19937_64 gen(5);
  for (int i = 0; i < 3000; ++i) {
    const Race race(gen(), static_cast<uint32_t>(gen() % 3), static_cast<int64_t>(gen() % 9999));
    std::vector<Candidate> c;
    const size_t count = 1 + gen() % (i % 10 == 0 ? 5000 : 70);
    const uint64_t spread = gen() % 44;
    for (size_t j = 0; j < count; ++j) {
      const Weight w = gen() >> (20 + gen() % (spread + 1));
      c.push_back({static_cast<int32_t>(j * 31), 0.0f, gen() % 5 == 0 ? 0 : w});
    }
    const int32_t want = plain_winner(race, c);
    ASSERT_EQ(race.winner(c), want);
    std::shuffle(c.begin(), c.end(), gen);
    ASSERT_EQ(race.winner(c), want) << "the order of candidates matters";
    // Neither those that lost matter, nor a common factor.
    std::erase_if(c, [&](const Candidate& x) { return x.id != want && gen() % 2 == 0; });
    for (Candidate& x : c) x.weight *= 8;
    ASSERT_EQ(race.winner(c), want);
  }
  EXPECT_EQ(Race(1, 0, 0).winner({}), -1);
  EXPECT_EQ(Race(1, 0, 0).winner(candidates_of({0, 0})), -1);
}

// Flat rows and steep ones, rows in which most or all weights round to zero, gaps, NaNs, any
// length.
TEST(Race, RowsRaceByTheDefinition) {
  std::mt19937 gen(6);
  int zeros = 0;
  for (int i = 0; i < 3000; ++i) {
    const size_t vocab = i % 20 == 0 ? 5000 + gen() % 30000 : 1 + gen() % 700;
    const float spread = std::ldexp(1.0f, static_cast<int>(gen() % 12) - 4);
    std::normal_distribution<float> normal(0.0f, spread);
    std::vector<float> logits(vocab);
    for (float& l : logits) l = normal(gen);
    if (i % 3 == 0) {
      for (float& l : logits) l = gen() % 4 == 0 ? l : -std::numeric_limits<float>::infinity();
      logits[gen() % vocab] = 0.5f;
    }
    if (i % 7 == 0) logits[gen() % vocab] = std::nanf("");
    LogitScratch s(static_cast<int64_t>(vocab));
    const float maximum = find_maxima(logits, s), scale = 0.2f + static_cast<float>(i % 9);
    if (std::isinf(maximum)) continue;
    std::vector<Candidate> c;
    for (size_t j = 0; j < vocab; ++j) {
      c.push_back(
          {static_cast<int32_t>(j), logits[j], whole(exp_fraction((logits[j] - maximum) * scale))});
      zeros += c.back().weight == 0;
    }
    const Race race(gen(), 0, i);
    ASSERT_EQ(race.winner(logits, maximum, scale, s), plain_winner(race, c)) << i;
  }
  EXPECT_GT(zeros, 100000);
}

// Right shares pass but for one seed in a million, and seeds are fixed; shares that are wrong by 1
// % fail. From common tokens to some of which a draw in a million shows one.
TEST(Race, TokensWinWithTheirShares) {
  constexpr int kDraws = 3'000'000;
  std::vector<Weight> weights;
  for (int i = 0; i < 30; ++i) weights.push_back((Weight{1} << 44) >> i / 2);
  for (int i = 0; i < 34; ++i) weights.push_back((Weight{1} << 44) * 3 / 1'000'000);
  const std::vector<Candidate> c = candidates_of(weights);
  const std::vector<double> shares = shares_of(c);
  std::vector<int> seen(c.size());
  for (int i = 0; i < kDraws; ++i) ++seen[static_cast<size_t>(Race(7, 0, i).winner(c))];
  EXPECT_LT(chi_square(seen, shares, kDraws), chi_square_limit(static_cast<double>(c.size()) - 1));
  std::vector<double> wrong = shares;
  for (size_t i = 0; i < wrong.size(); ++i) wrong[i] *= i / 2 % 2 == 0 ? 1.01 : 0.99;
  EXPECT_GT(chi_square(seen, wrong, kDraws), chi_square_limit(static_cast<double>(c.size()) - 1));
}

// As two tables of winners, each of which has an error rate of one in a million: positions next to
// each other, samples, seeds; and two sets of tokens at the same position.
TEST(Race, DrawsAreIndependent) {
  constexpr int kDraws = 400'000;
  const std::vector<Candidate> c = candidates_of({8, 5, 3, 2, 1});
  std::vector<Candidate> others = c;
  for (Candidate& x : others) x.id += 32;  // other words of the same counters
  const std::vector<double> shares = shares_of(c);
  std::vector<double> joint;
  for (const double a : shares) {
    for (const double b : shares) joint.push_back(a * b);
  }
  const auto expect_independent = [&](const auto& first, const auto& second) {
    std::vector<int> seen(joint.size());
    for (int i = 0; i < kDraws; ++i) ++seen[static_cast<size_t>(first(i) * 5 + second(i))];
    EXPECT_LT(chi_square(seen, joint, kDraws), chi_square_limit(24));
  };
  const auto at = [&](uint64_t seed, uint32_t sample, int64_t position) {
    return Race(seed, sample, position).winner(c);
  };
  expect_independent([&](int i) { return at(1, 0, 2 * i); },
                     [&](int i) { return at(1, 0, 2 * i + 1); });
  expect_independent([&](int i) { return at(1, 0, i); }, [&](int i) { return at(1, 1, i); });
  expect_independent([&](int i) { return at(1, 0, i); }, [&](int i) { return at(2, 0, i); });
  expect_independent([&](int i) { return at(1, 0, i); },
                     [&](int i) { return Race(1, 0, i).winner(others) - 32; });
}

// The promise for drafters: how often two distributions that race with the same noise agree.
TEST(Race, DraftsAgreeAsOftenAsTheFormulaSays) {
  constexpr int kDraws = 400'000;
  std::mt19937 gen(8);
  std::vector<Weight> target, draft;
  for (int i = 0; i < 50; ++i) {
    const double x = std::exponential_distribution<double>(1.0)(gen);
    target.push_back(static_cast<Weight>(1e6 * x));
    draft.push_back(
        static_cast<Weight>(1e6 * x * std::exp(std::normal_distribution<double>(0.0, 0.7)(gen))));
  }
  const std::vector<Candidate> p = candidates_of(target), q = candidates_of(draft);
  const std::vector<double> ps = shares_of(p), qs = shares_of(q);
  double formula = 0.0, distance = 0.0;
  for (size_t x = 0; x < ps.size(); ++x) {
    double sum = 0.0;
    for (size_t y = 0; y < ps.size(); ++y) sum += std::max(ps[y] / ps[x], qs[y] / qs[x]);
    formula += 1.0 / sum;
    distance += 0.5 * std::abs(ps[x] - qs[x]);
  }
  EXPECT_GE(formula, (1 - distance) / (1 + distance));
  int equal = 0;
  for (int i = 0; i < kDraws; ++i) equal += Race(9, 0, i).winner(p) == Race(9, 0, i).winner(q);
  const double deviation = std::sqrt(formula * (1 - formula) / kDraws);
  EXPECT_NEAR(static_cast<double>(equal) / kDraws, formula, 4.9 * deviation);
}

}  // namespace
}  // namespace freshet

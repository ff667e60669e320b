#include "sampling/sampler.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <ranges>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sampling/plain_sampler_test.h"

namespace freshet {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

std::vector<float> random_logits(size_t n, uint32_t seed, float spread) {
  std::mt19937 gen(seed);
  std::normal_distribution<float> normal(0.0f, spread);
  std::vector<float> x(n);
  for (float& v : x) v = normal(gen);
  return x;
}

// The plain reading of the definition, in double precision, with full sorts: what Hugging Face's
// logits warpers do one after the other on scores set to -inf.
class Reference {
 public:
  explicit Reference(const std::vector<float>& logits, double temperature) {
    for (const float l : logits) scores_.push_back(static_cast<double>(l) / temperature);
  }
  std::vector<double> probabilities() const {
    const double top = *std::max_element(scores_.begin(), scores_.end());
    std::vector<double> p;
    for (const double s : scores_) p.push_back(std::exp(s - top));
    const double sum = std::accumulate(p.begin(), p.end(), 0.0);
    for (double& x : p) x /= sum;
    return p;
  }
  void min_p(double min_p) {
    const auto p = probabilities();
    const double top = *std::max_element(p.begin(), p.end());
    drop([&](size_t i) { return p[i] < min_p * top; });
  }
  void top_k(size_t k) {
    const auto order = sorted([&](size_t i) { return -scores_[i]; });
    for (size_t r = k; r < order.size(); ++r) scores_[order[r]] = -kInf;
  }
  void top_p(double top_p) {
    const auto p = probabilities();
    keep_mass(p, sorted([&](size_t i) { return -scores_[i]; }), top_p);
  }
  void typical(double mass) {
    const auto p = probabilities();
    double entropy = 0.0;
    for (const double x : p) entropy -= x > 0.0 ? x * std::log(x) : 0.0;
    keep_mass(p, sorted([&](size_t i) { return std::abs(-std::log(p[i]) - entropy); }), mass);
  }

 private:
  template <class Key>
  std::vector<size_t> sorted(const Key& key) const {
    std::vector<size_t> order(scores_.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return key(a) < key(b); });
    return order;
  }
  template <class Test>
  void drop(const Test& test) {
    for (size_t i = 0; i < scores_.size(); ++i) {
      if (test(i)) scores_[i] = -kInf;
    }
  }
  void keep_mass(const std::vector<double>& p, const std::vector<size_t>& order, double mass) {
    double before = 0.0;
    for (const size_t i : order) {
      if (before >= mass) scores_[i] = -kInf;
      before += p[i];
    }
  }
  std::vector<double> scores_;
};

Sampler make(const SamplingParams& p, size_t vocab, uint64_t seed = 1, uint32_t index = 0,
             const std::vector<int32_t>& prompt = {}, std::vector<int32_t> stop = {}) {
  EXPECT_FALSE(find_error(p, static_cast<int64_t>(vocab)));
  return Sampler(p, static_cast<int64_t>(vocab), seed, index, prompt, 1000, std::move(stop));
}

std::vector<double> probabilities(std::span<const Candidate> candidates, size_t vocab) {
  double sum = 0.0;
  for (const Candidate& c : candidates) sum += static_cast<double>(c.weight);
  std::vector<double> p(vocab, 0.0);
  for (const Candidate& c : candidates)
    p[static_cast<size_t>(c.id)] = static_cast<double>(c.weight) / sum;
  return p;
}

void expect_equal(std::span<const Candidate> got, const std::vector<double>& want) {
  const std::vector<double> p = probabilities(got, want.size());
  size_t kept = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    ASSERT_EQ(p[i] > 0.0, want[i] > 0.0) << "token " << i << " has probability " << want[i];
    ASSERT_NEAR(p[i], want[i], 1e-6 + 1e-5 * want[i]) << "token " << i;
    kept += want[i] > 0.0;
  }
  ASSERT_EQ(got.size(), kept);
}

TEST(Sampler, FiltersKeepWhatTheDefinitionKeeps) {
  int cases = 0;
  for (const size_t vocab : {7u, 128u, 1000u, 5003u}) {
    for (const float spread : {0.5f, 3.0f}) {
      for (const auto& [k, top_p, min_p, typical, temperature] :
           std::vector<std::tuple<int, float, float, float, float>>{
               {0, 1.0f, 0.0f, 1.0f, 1.0f},
               {5, 1.0f, 0.0f, 1.0f, 0.7f},
               {900, 1.0f, 0.0f, 1.0f, 1.0f},
               {0, 0.9f, 0.0f, 1.0f, 1.3f},
               {0, 0.3f, 0.0f, 1.0f, 0.7f},
               {0, 1.0f, 0.05f, 1.0f, 1.0f},
               {40, 0.95f, 0.02f, 1.0f, 0.8f},
               {0, 1.0f, 0.0f, 0.6f, 1.0f},
               {50, 0.9f, 0.0f, 0.5f, 1.0f},
               {0, 0.999f, 0.0f, 1.0f, 2.0f}}) {
        SCOPED_TRACE(fmt::format("vocab {} spread {} k {} p {} min {} typical {} t {}", vocab,
                                 spread, k, top_p, min_p, typical, temperature));
        SamplingParams params;
        params.top_k = k;
        params.top_p = top_p;
        params.min_p = min_p;
        params.typical_p = typical;
        params.temperature = temperature;
        auto logits = random_logits(vocab, static_cast<uint32_t>(++cases), spread);
        Reference reference(logits, static_cast<double>(temperature));
        if (min_p > 0) reference.min_p(static_cast<double>(min_p));
        if (k > 0) reference.top_k(static_cast<size_t>(k));
        if (top_p < 1) reference.top_p(static_cast<double>(top_p));
        if (typical < 1) reference.typical(static_cast<double>(typical));
        auto sampler = make(params, vocab);
        SamplerScratch scratch(static_cast<int64_t>(vocab));
        expect_equal(sampler.distribution(logits, scratch), reference.probabilities());
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(Sampler, OfEqualTokensTheFirstAreKept) {
  for (const float step : {0.5f, 100.0f}) {  // of the latter all are equal
    for (const auto& [top_p, typical] : {std::pair{0.77f, 1.0f}, {1.0f, 0.61f}, {0.9f, 0.37f}}) {
      SCOPED_TRACE(fmt::format("step {} p {} typical {}", step, top_p, typical));
      auto logits = random_logits(3001, 11, 2.0f);
      for (float& l : logits) l = std::round(l / step) * step;
      Reference reference(logits, 1.0);
      if (top_p < 1) reference.top_p(static_cast<double>(top_p));
      if (typical < 1) reference.typical(static_cast<double>(typical));
      SamplingParams params;
      params.top_p = top_p;
      params.typical_p = typical;
      auto sampler = make(params, logits.size());
      SamplerScratch scratch(std::ssize(logits));
      expect_equal(sampler.distribution(logits, scratch), reference.probabilities());
    }
  }
}

// The value that a chi-square variable with `df` degrees of freedom exceeds with probability 1e-6
// (Wilson and Hilferty's approximation).
double chi_square_limit(double df) {
  const double z = 4.7534;
  return df * std::pow(1.0 - 2.0 / (9.0 * df) + z * std::sqrt(2.0 / (9.0 * df)), 3.0);
}

// A right sampler would fail this for one choice of seed in a million; the seeds are fixed.
void expect_draws_follow(const SamplingParams& params, bool by_position) {
  constexpr size_t kVocab = 300;
  constexpr int kDraws = 200000;
  const auto logits = random_logits(kVocab, 7, 1.5f);
  SamplerScratch scratch(kVocab);
  auto copy = logits;
  std::vector<double> expected =
      probabilities(make(params, kVocab).distribution(copy, scratch), kVocab);
  for (double& e : expected) e *= kDraws;
  std::vector<int> seen(kVocab, 0);
  auto one = make(params, kVocab, 99);
  for (int i = 0; i < kDraws; ++i) {
    copy = logits;
    int32_t id;
    if (by_position) {
      id = one.sample(copy, i, scratch);
    } else {
      id = make(params, kVocab, static_cast<uint64_t>(i)).sample(copy, 5, scratch);
    }
    ++seen[static_cast<size_t>(id)];
  }
  double chi = 0.0, rest_expected = 0.0, rest_seen = 0.0;
  int bins = 0;
  for (size_t i = 0; i < kVocab; ++i) {
    if (expected[i] < 20.0) {
      rest_expected += expected[i];
      rest_seen += seen[i];
      if (expected[i] == 0.0) {
        ASSERT_EQ(seen[i], 0) << "token " << i << " was filtered out";
      }
      continue;
    }
    const double d = seen[i] - expected[i];
    chi += d * d / expected[i];
    ++bins;
  }
  if (rest_expected >= 20.0) {
    chi += (rest_seen - rest_expected) * (rest_seen - rest_expected) / rest_expected;
    ++bins;
  }
  EXPECT_LT(chi, chi_square_limit(bins - 1)) << bins << " bins";
  EXPECT_GT(chi, 0.0);
}

TEST(Sampler, DrawsFollowTheDistributionOverPositions) {
  expect_draws_follow({}, true);
  SamplingParams p;
  p.top_k = 20;
  p.temperature = 0.8f;
  expect_draws_follow(p, true);
  SamplingParams q;
  q.top_p = 0.8f;
  expect_draws_follow(q, true);
}

TEST(Sampler, DrawsFollowTheDistributionOverSeeds) {
  expect_draws_follow({}, false);
}

// Every parameter, alone and with others, on rows with many ties and on rows with none.
TEST(Sampler, WordsForADeviceAskForTheSameToken) {
  int drawn = 0;
  for (const uint32_t seed : std::views::iota(0u, 400u)) {
    std::mt19937 gen(seed);
    const auto chance = [&](double p) { return std::bernoulli_distribution(p)(gen); };
    const size_t vocab = seed % 3 == 0 ? 5 : 700;
    SamplingParams p;
    p.temperature = chance(0.1) ? 0.0f : 0.5f + static_cast<float>(seed % 7) * 0.25f;
    if (chance(0.4)) p.top_k = 1 + static_cast<int>(gen() % 60);
    if (chance(0.4)) p.top_p = 0.05f + 0.9f * static_cast<float>(gen() % 100) / 100.0f;
    if (chance(0.3)) p.min_p = 0.02f * static_cast<float>(gen() % 20);
    if (chance(0.3)) p.repetition_penalty = 1.3f;
    if (chance(0.2)) p.frequency_penalty = 0.4f;
    if (chance(0.2)) p.presence_penalty = -0.7f;
    if (chance(0.3)) p.logit_bias = {{3, 2.5f}, {1, -9.0f}, {3, 0.25f}};
    p.min_tokens = chance(0.3) ? 3 + static_cast<int>(seed % 2) : 0;
    if (chance(0.2)) p.allowed_token_ids = {0, 2, 3, static_cast<int32_t>(vocab) - 1};
    if (chance(0.2)) p.bad_words = p.bad_words_ids = {{3}, {1}};
    if (chance(0.2)) p.begin_suppress_tokens = {0};
    auto sampler = make(p, vocab, seed, 2, {0, 1, 1, 4}, {2, 4});
    for (const int32_t id : {1, 3}) sampler.accept(id);
    auto before = sampler;
    sampler.accept(3);
    std::vector<float> logits = random_logits(vocab, seed, 2.0f);
    if (chance(0.5)) {
      for (float& v : logits) v = std::round(v);
    }
    std::vector<uint32_t> mask;
    if (chance(0.3)) {
      for (size_t w = 0; w < (vocab + 31) / 32; ++w) mask.push_back(static_cast<uint32_t>(gen()));
    }
    SamplerScratch scratch(static_cast<int64_t>(vocab));
    for (int64_t position = 0; position < 20; ++position) {
      std::vector<int32_t> words(ops::kSampleRowWords);
      ops::SampleRow row;
      ASSERT_TRUE(sampler.describe(position, mask, 0, row, words));
      std::memcpy(words.data(), &row, sizeof row);
      auto copy = logits;
      const int32_t want = sampler.sample(copy, position, scratch, mask);
      ASSERT_EQ(PlainSampler(words, 0).sample(logits), want) << "seed " << seed;
      drawn += want >= 0;
      // The same if the last token is not known yet.
      words.resize(ops::kSampleRowWords);
      ASSERT_TRUE(before.describe(position, mask, 1, row, words));
      std::memcpy(words.data(), &row, sizeof row);
      const std::vector<int32_t> tokens = {3};
      ASSERT_EQ(PlainSampler(words, 0, tokens).sample(logits), want) << "seed " << seed;
    }
  }
  EXPECT_GT(drawn, 7000);
}

// Rows of drafts: tokens that are assumed, but not accepted yet.
TEST(Sampler, DescribesRowsBehindAssumedTokens) {
  for (const float temperature : {0.0f, 0.9f}) {
    SamplingParams p;
    p.temperature = temperature;
    p.min_tokens = 3;
    const std::vector<int32_t> stops = {4};
    Sampler sampler(p, 100, 1, 0, {}, 20, stops);
    std::vector<int32_t> words;
    ops::SampleRow row;
    for (int unseen = 0; unseen < 6; ++unseen) {
      ASSERT_TRUE(sampler.describe(40 + unseen, {}, unseen, row, words));
      EXPECT_EQ(row.barred.count, unseen < 3 ? 1 : 0);
      EXPECT_EQ(row.last, -1);
    }
    p.frequency_penalty = 0.5f;
    Sampler penalised(p, 100, 1, 0, {}, 20, stops);
    EXPECT_TRUE(penalised.describe(40, {}, 0, row, words));
    EXPECT_EQ(row.last, -1);
    EXPECT_TRUE(penalised.describe(40, {}, 1, row, words));
    EXPECT_EQ(row.last, 0);
    EXPECT_FALSE(penalised.describe(40, {}, 2, row, words));
    EXPECT_EQ(row.how, ops::SampleRow::kNotHere);
  }
}

TEST(Sampler, GreedyTakesTheLowestOfEquals) {
  SamplingParams p;
  p.temperature = 0.0f;
  for (const size_t vocab : {5u, 128u, 129u, 1000u}) {
    auto sampler = make(p, vocab);
    SamplerScratch scratch(static_cast<int64_t>(vocab));
    for (size_t first = 0; first < vocab; first += 3) {
      std::vector<float> logits(vocab, -1.0f);
      logits[first] = 2.5f;
      logits[vocab - 1] = 2.5f;
      EXPECT_EQ(sampler.sample(logits, 0, scratch), static_cast<int32_t>(first));
    }
  }
}

TEST(Sampler, TopOneIsGreedy) {
  SamplingParams p;
  p.top_k = 1;
  const std::vector<float> tied = {0.0f, 4.0f, 1.0f, 4.0f, 4.0f};
  SamplerScratch scratch(5);
  for (int position = 0; position < 100; ++position) {
    auto logits = tied;
    EXPECT_EQ(make(p, 5).sample(logits, position, scratch), 1);
  }
}

TEST(Sampler, PenaltiesAreThoseOfTheDefinition) {
  SamplingParams p;
  p.temperature = 0.0f;
  p.repetition_penalty = 2.0f;
  p.frequency_penalty = 0.5f;
  p.presence_penalty = 0.25f;
  p.logit_bias = {{4, 1.5f}};
  p.logprobs = 0;
  auto sampler = make(p, 6, 1, 0, {0, 1, 1});
  for (const int32_t id : {1, 2, 2}) sampler.accept(id);
  std::vector<float> logits = {3.0f, -1.0f, 4.0f, 2.0f, 0.5f, 1.0f};
  SamplerScratch scratch(6);
  std::vector<TokenLogprob> logprobs;
  const int32_t id = sampler.sample(logits, 0, scratch, {}, &logprobs);
  // Token 0: prompt only. 1: prompt and once put out. 2: twice put out.
  EXPECT_THAT(logits, testing::ElementsAre(1.5f, -2.0f - 0.5f - 0.25f, 2.0f - 1.0f - 0.25f, 2.0f,
                                           2.0f, 1.0f));
  EXPECT_EQ(id, 3);
}

TEST(Sampler, LogprobsAreOfTheRawLogits) {
  constexpr size_t kVocab = 777;
  const auto raw = random_logits(kVocab, 3, 2.0f);
  const auto p = Reference(raw, 1.0).probabilities();
  SamplingParams params;
  params.temperature = 0.5f;
  params.logprobs = 5;
  params.logit_bias = {{700, 30.0f}};  // chosen for certain, by what the raw logits do not know
  params.logit_bias.emplace_back(700, 5.0f);
  auto sampler = make(params, kVocab);
  SamplerScratch scratch(kVocab);
  auto logits = raw;
  std::vector<TokenLogprob> got;
  ASSERT_EQ(sampler.sample(logits, 0, scratch, {}, &got), 700);
  std::vector<int32_t> order(kVocab);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int a, int b) { return raw[a] > raw[b]; });
  ASSERT_EQ(got.size(), 6u);
  EXPECT_EQ(got[0].id, 700);
  EXPECT_NEAR(got[0].logprob, std::log(p[700]), 1e-5);
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(got[i + 1].id, order[i]);
    EXPECT_NEAR(got[i + 1].logprob, std::log(p[static_cast<size_t>(order[i])]), 1e-5);
  }
}

TEST(Sampler, MaskLeavesOnlyWhatItAllows) {
  constexpr size_t kVocab = 100;
  SamplingParams p;
  SamplerScratch scratch(kVocab);
  std::vector<uint32_t> mask(4, 0);
  EXPECT_EQ(
      [&] {
        auto l = random_logits(kVocab, 1, 1.0f);
        return make(p, kVocab).sample(l, 0, scratch, mask);
      }(),
      -1);
  mask[2] = 1u << 7;  // token 71
  mask[3] = 1u << 2;  // token 98
  std::map<int32_t, int> seen;
  for (int i = 0; i < 200; ++i) {
    auto logits = random_logits(kVocab, 1, 1.0f);
    ++seen[make(p, kVocab).sample(logits, i, scratch, mask)];
  }
  EXPECT_EQ(seen.size(), 2u);
  EXPECT_TRUE(seen.count(71) && seen.count(98));
}

std::vector<int32_t> banned(const SamplingParams& p, std::vector<int32_t> prompt,
                            std::vector<int32_t> output) {
  const TokenBans bans(p, 50, prompt);
  std::vector<int32_t> ids;
  bans.list(output, ids);
  std::ranges::sort(ids);
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}

TEST(TokenBans, AWordsEndDoesNotFollowItsBeginning) {
  using testing::ElementsAre;
  using testing::IsEmpty;
  SamplingParams p;
  p.bad_words = {{7}, {1, 2, 3}, {2, 9}};
  EXPECT_THAT(banned(p, {1, 2}, {}), ElementsAre(7));
  EXPECT_THAT(banned(p, {1}, {2}), ElementsAre(7, 9));
  EXPECT_THAT(banned(p, {}, {4, 1, 2}), ElementsAre(3, 7, 9));
  EXPECT_THAT(banned(p, {}, {1, 2, 4}), ElementsAre(7));
  // transformers' words may begin in the prompt.
  std::swap(p.bad_words, p.bad_words_ids);
  EXPECT_THAT(banned(p, {1}, {2}), ElementsAre(3, 7, 9));
  EXPECT_THAT(banned(p, {1, 2}, {}), ElementsAre(3, 7, 9));
  EXPECT_THAT(banned(p, {}, {}), ElementsAre(7));
  p = {};
  p.begin_suppress_tokens = {5, 6};
  EXPECT_THAT(banned(p, {3}, {}), ElementsAre(5, 6));
  EXPECT_THAT(banned(p, {3}, {1}), IsEmpty());
}

TEST(TokenBans, NgramsOfPromptAndOutputAreNotRepeated) {
  using testing::ElementsAre;
  using testing::IsEmpty;
  SamplingParams p;
  p.no_repeat_ngram_size = 2;
  EXPECT_THAT(banned(p, {1, 2, 1}, {3, 1}), ElementsAre(2, 3));
  EXPECT_THAT(banned(p, {1, 2}, {}), IsEmpty());
  EXPECT_THAT(banned(p, {}, {}), IsEmpty());
  p.no_repeat_ngram_size = 1;
  EXPECT_THAT(banned(p, {4}, {2, 2}), ElementsAre(2, 4));
  p.no_repeat_ngram_size = 3;
  EXPECT_THAT(banned(p, {1, 2, 3, 60}, {1, 2}), ElementsAre(3));
  EXPECT_THAT(banned(p, {1, 2}, {60, 1, 2}), IsEmpty());  // not in the vocabulary
}

TEST(Sampler, TakesOnlyWhatIsAllowedAndNotBanned) {
  SamplingParams p;
  p.temperature = 0.0f;
  p.allowed_token_ids = {1, 2, 3};
  p.bad_words = {{3, 3}, {2}};
  auto sampler = make(p, 5);
  SamplerScratch scratch(5);
  std::vector<int32_t> ids;
  for (int i = 0; i < 4; ++i) {
    std::vector<float> logits = {5.0f, 1.0f, 3.0f, 2.0f, 9.0f};
    ids.push_back(sampler.sample(logits, i, scratch));
    sampler.accept(ids.back());
  }
  EXPECT_THAT(ids, testing::ElementsAre(3, 1, 3, 1));
  std::vector<int32_t> words;
  ops::SampleRow row;
  EXPECT_FALSE(sampler.describe(4, {}, 0, row, words));  // a word of two tokens
}

TEST(Sampler, NoStopTokenBeforeTheMinimum) {
  SamplingParams p;
  p.temperature = 0.0f;
  p.min_tokens = 2;
  auto sampler = make(p, 4, 1, 0, {}, {2});
  SamplerScratch scratch(4);
  std::vector<int32_t> ids;
  for (int i = 0; i < 3; ++i) {
    std::vector<float> logits = {0.0f, 1.0f, 9.0f, 0.5f};
    ids.push_back(sampler.sample(logits, i, scratch));
    sampler.accept(ids.back());
  }
  EXPECT_THAT(ids, testing::ElementsAre(1, 1, 2));
}

TEST(Sampler, StreamsDifferAndRepeat) {
  constexpr size_t kVocab = 1000;
  SamplerScratch scratch(kVocab);
  const auto run = [&](uint64_t seed, uint32_t index) {
    std::vector<int32_t> ids;
    auto sampler = make({}, kVocab, seed, index);
    for (int i = 0; i < 20; ++i) {
      auto logits = random_logits(kVocab, 5, 1.0f);
      ids.push_back(sampler.sample(logits, i, scratch));
    }
    return ids;
  };
  EXPECT_EQ(run(1, 0), run(1, 0));
  EXPECT_NE(run(1, 0), run(1, 1));
  EXPECT_NE(run(1, 0), run(2, 0));
}

TEST(Sampler, SurvivesLogitsThatAreNoNumbers) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  SamplerScratch scratch(4);
  for (const float temperature : {0.0f, 1.0f}) {
    SamplingParams p;
    p.temperature = temperature;
    std::vector<float> none = {nan, -inf, nan, -inf};
    EXPECT_EQ(make(p, 4).sample(none, 0, scratch), -1);
    std::vector<float> one = {nan, -inf, -5.0f, -inf};
    EXPECT_EQ(make(p, 4).sample(one, 0, scratch), 2);
    std::vector<float> infinite = {nan, 1.0f, inf, inf};
    EXPECT_EQ(make(p, 4).sample(infinite, 0, scratch), 2);
    p.top_p = 0.5f;
    p.min_p = 0.1f;
    one[2] = -5.0f;
    EXPECT_EQ(make(p, 4).sample(one, 0, scratch), 2);
  }
}

TEST(Exponentials, AreAccurate) {
  std::vector<float> x;
  for (float v = 0.0f; v > -87.0f; v -= 0.0137f) x.push_back(v);
  LogitScratch s(static_cast<int64_t>(x.size()));
  exponentials(x, 0.0f, 1.0f, s);
  for (size_t i = 0; i < x.size(); ++i) {
    const double want = std::exp(static_cast<double>(x[i]));
    ASSERT_NEAR(static_cast<double>(s.weight[i]), want, want * 4e-7) << x[i];
  }
}

// Whatever registers the loop is compiled for.
TEST(Exponentials, SumsAreThoseOfWholeSharesOneByOne) {
  for (const size_t n : {1, 127, 128, 129, 1000}) {
    std::vector<float> x = random_logits(n, static_cast<uint32_t>(n), 9.0f);
    for (size_t i = 5; i < n; i += 50) x[i] = i % 100 < 50 ? NAN : -INFINITY;
    LogitScratch s(static_cast<int64_t>(n));
    const float maximum = find_maxima(x, s);
    uint64_t want = 0;
    const Weight total = exponentials(x, maximum, 0.7f, s);
    for (size_t i = 0; i < n; ++i) {
      EXPECT_EQ(s.weight[i], exp_fraction((x[i] - maximum) * 0.7f)) << i;
      want += static_cast<uint64_t>(std::nearbyint(std::ldexp(s.weight[i], 44)));
    }
    EXPECT_EQ(total, want) << n;
    EXPECT_EQ(exponential_sums(x, maximum, 0.7f, s), want) << n;
  }
}

TEST(FindError, NamesWhatIsWrong) {
  const auto error = [](auto change) {
    SamplingParams p;
    change(p);
    return find_error(p, 100).value_or(RequestError{});
  };
  const auto field = [&](auto change) {
    const RequestError e = error(change);
    EXPECT_THAT(e.message, testing::HasSubstr(e.field));
    return e.field;
  };
  EXPECT_EQ(field([](auto&) {}), "");
  EXPECT_EQ(field([](auto& p) { p.temperature = -1.0f; }), "temperature");
  EXPECT_EQ(field([](auto& p) { p.temperature = NAN; }), "temperature");
  EXPECT_EQ(field([](auto& p) { p.top_p = 0.0f; }), "top_p");
  EXPECT_EQ(field([](auto& p) { p.top_k = -2; }), "top_k");
  EXPECT_EQ(field([](auto& p) { p.min_p = 1.5f; }), "min_p");
  EXPECT_EQ(field([](auto& p) { p.repetition_penalty = 0.0f; }), "repetition_penalty");
  EXPECT_EQ(field([](auto& p) { p.max_tokens = 0; }), "max_tokens");
  EXPECT_EQ(field([](auto& p) { p.n = 2000000; }), "n");
  EXPECT_EQ(field([](auto& p) { p.stop = {""}; }), "stop");
  EXPECT_EQ(field([](auto& p) { p.beam_width = p.min_tokens = 1; }), "min_tokens");
  EXPECT_EQ(field([](auto& p) { p.allowed_token_ids = {100}; }), "allowed_token_ids");
  EXPECT_EQ(field([](auto& p) { p.bad_words = {{}}; }), "bad_words");
  EXPECT_EQ(field([](auto& p) { p.bad_words = {{1, -1}}; }), "bad_words");
  EXPECT_EQ(field([](auto& p) { p.bad_words_ids = {{100}}; }), "bad_words_ids");
  EXPECT_EQ(field([](auto& p) { p.begin_suppress_tokens = {100}; }), "begin_suppress_tokens");
  EXPECT_EQ(field([](auto& p) { p.no_repeat_ngram_size = -1; }), "no_repeat_ngram_size");
  const RequestError bias = error([](auto& p) { p.logit_bias = {{100, 1.0f}}; });
  EXPECT_EQ(bias.field, "logit_bias");
  EXPECT_THAT(bias.message, testing::HasSubstr("100"));
  const RequestError stop = error([](auto& p) { p.stop_token_ids = {-1}; });
  EXPECT_EQ(stop.field, "stop_token_ids");
  EXPECT_THAT(stop.message, testing::HasSubstr("-1"));
}

}  // namespace
}  // namespace freshet

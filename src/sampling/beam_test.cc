#include "sampling/beam.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace freshet {
namespace {

// A language of first order: the logits after token t are row t; row kVocab starts.
constexpr int kVocab = 5;
constexpr int32_t kStop = 0;
using Language = std::vector<std::vector<float>>;

Language make_language(uint32_t seed) {
  std::mt19937 gen(seed);
  std::normal_distribution<float> normal(0.0f, 1.5f);
  Language rows(kVocab + 1, std::vector<float>(kVocab));
  for (auto& row : rows)
    for (float& v : row) v = normal(gen);
  return rows;
}

double logprob(const std::vector<float>& row, int32_t id) {
  double sum = 0.0;
  for (const float v : row) sum += std::exp(static_cast<double>(v));
  return static_cast<double>(row[static_cast<size_t>(id)]) - std::log(sum);
}

std::vector<BeamHypothesis> search(const Language& language, BeamOptions options, int max_tokens) {
  BeamSearch beams(options, kVocab);
  std::vector<std::vector<int32_t>> ids(1);
  for (int t = 0; t < max_tokens && !beams.done(); ++t) {
    std::vector<float> logits;
    for (const auto& beam : ids) {
      const auto& row = language[beam.empty() ? kVocab : static_cast<size_t>(beam.back())];
      logits.insert(logits.end(), row.begin(), row.end());
    }
    std::vector<std::vector<int32_t>> next;
    for (const auto& step : beams.advance(logits)) {
      next.push_back(ids[static_cast<size_t>(step.parent)]);
      next.back().push_back(step.id);
    }
    ids = std::move(next);
  }
  return beams.finish();
}

// Every text of the language: those that end by kStop, and those of max_tokens.
void all_texts(const Language& language, int max_tokens, double penalty, std::vector<int32_t>& ids,
               double sum, std::vector<BeamHypothesis>& out) {
  const bool stopped = !ids.empty() && ids.back() == kStop;
  if (stopped || std::ssize(ids) == max_tokens) {
    out.push_back({ids, sum / std::pow(static_cast<double>(ids.size()), penalty), stopped});
    return;
  }
  const auto& row = language[ids.empty() ? kVocab : static_cast<size_t>(ids.back())];
  for (int32_t id = 0; id < kVocab; ++id) {
    ids.push_back(id);
    all_texts(language, max_tokens, penalty, ids, sum + logprob(row, id), out);
    ids.pop_back();
  }
}

TEST(BeamSearch, WideEnoughItIsExhaustive) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    for (const float penalty : {0.0f, 0.7f, 1.0f, 2.0f}) {
      const Language language = make_language(seed);
      std::vector<BeamHypothesis> want;
      std::vector<int32_t> ids;
      all_texts(language, 4, static_cast<double>(penalty), ids, 0.0, want);
      const auto got =
          search(language, {.width = 700, .length_penalty = penalty, .stop_ids = {kStop}}, 4);
      ASSERT_EQ(got.size(), want.size());
      std::map<std::vector<int32_t>, BeamHypothesis> by_ids;
      for (const auto& h : want) by_ids[h.ids] = h;
      for (size_t i = 0; i < got.size(); ++i) {
        ASSERT_TRUE(by_ids.count(got[i].ids));
        EXPECT_NEAR(got[i].score, by_ids[got[i].ids].score, 1e-5);
        EXPECT_EQ(got[i].stopped, by_ids[got[i].ids].stopped);
        if (i > 0) {
          EXPECT_LE(got[i].score, got[i - 1].score);
        }
        by_ids.erase(got[i].ids);
      }
    }
  }
}

TEST(BeamSearch, WidthOneIsGreedy) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    const Language language = make_language(seed);
    std::vector<int32_t> greedy;
    for (int32_t last = kVocab; std::ssize(greedy) < 6 && last != kStop; greedy.push_back(last)) {
      const auto& row = language[static_cast<size_t>(last)];
      last = static_cast<int32_t>(std::max_element(row.begin(), row.end()) - row.begin());
    }
    const auto got = search(language, {.width = 1, .early_stopping = true, .stop_ids = {kStop}}, 6);
    ASSERT_EQ(got.size(), 1u);
    EXPECT_EQ(got[0].ids, greedy);
  }
}

// A row of logits whose log-softmax is log(p).
std::vector<float> row_of(std::vector<double> p) {
  std::vector<float> row;
  for (const double x : p) row.push_back(static_cast<float>(std::log(x)));
  return row;
}

TEST(BeamSearch, FindsWhatGreedyMisses) {
  // Greedy begins with 1 (0.6) and ends at best with 0.6 * 0.3; beginning with 2 gives 0.4 * 0.9.
  Language language(kVocab + 1, row_of({0.96, 0.01, 0.01, 0.01, 0.01}));
  language[kVocab] = row_of({0.0001, 0.5997, 0.4, 0.0001, 0.0001});
  language[1] = row_of({0.3, 0.0001, 0.2999, 0.2, 0.2});
  language[2] = row_of({0.9, 0.025, 0.025, 0.025, 0.025});
  const auto got = search(language, {.width = 2, .length_penalty = 0.0f, .stop_ids = {kStop}}, 2);
  ASSERT_EQ(got.size(), 2u);
  EXPECT_THAT(got[0].ids, testing::ElementsAre(2, kStop));
  EXPECT_NEAR(got[0].score, std::log(0.36), 1e-4);
  EXPECT_TRUE(got[0].stopped);
}

TEST(BeamSearch, ALateStopTokenDoesNotTakeABeam) {
  // The stop token ranks third of the continuations: with two beams it is passed over.
  Language language(kVocab + 1, row_of({0.2, 0.4, 0.3, 0.05, 0.05}));
  BeamSearch beams({.width = 2, .stop_ids = {kStop}}, kVocab);
  const auto steps = beams.advance(language[kVocab]);
  ASSERT_EQ(steps.size(), 2u);
  EXPECT_EQ(steps[0].id, 1);
  EXPECT_EQ(steps[1].id, 2);
  for (const auto& h : beams.finish()) EXPECT_FALSE(h.stopped);
}

TEST(BeamSearch, EarlyStoppingEndsWithTheFirstFullSet) {
  Language language(kVocab + 1, row_of({0.5, 0.3, 0.1, 0.05, 0.05}));
  BeamSearch early(
      {.width = 1, .length_penalty = 3.0f, .early_stopping = true, .stop_ids = {kStop}}, kVocab);
  early.advance(language[kVocab]);
  EXPECT_TRUE(early.done());
}

TEST(BeamSearch, EndsWhenNothingCanFollow) {
  BeamSearch beams({.width = 3, .stop_ids = {}}, kVocab);
  const std::vector<float> none(kVocab, -INFINITY);
  EXPECT_TRUE(beams.advance(none).empty());
  EXPECT_TRUE(beams.done());
  EXPECT_TRUE(beams.finish().empty());
}

TEST(BeamSearch, TextsEndWhereEverythingIsForbidden) {
  SamplingParams params;
  params.no_repeat_ngram_size = 1;
  for (const bool renormalize : {false, true}) {
    BeamSearch beams({.width = 2,
                      .stop_ids = {},
                      .bans = TokenBans(params, kVocab, {}),
                      .renormalize = renormalize},
                     kVocab);
    const std::vector<float> row(kVocab, 0.5f);
    while (!beams.done()) {
      std::vector<float> logits;
      for (int beam = 0; beam < beams.live(); ++beam)
        logits.insert(logits.end(), row.begin(), row.end());
      beams.advance(logits);
    }
    const std::vector<BeamHypothesis> found = beams.finish();
    ASSERT_EQ(found.size(), 2u);
    for (const BeamHypothesis& h : found) EXPECT_EQ(h.ids.size(), static_cast<size_t>(kVocab));
  }
}

TEST(BeamSearch, LogitsWithoutANumberLeaveNoText) {
  BeamSearch beams({.width = 1, .stop_ids = {}}, kVocab);
  beams.advance(std::vector<float>(kVocab, 0.5f));
  EXPECT_TRUE(beams.advance(std::vector<float>(kVocab, NAN)).empty());
  EXPECT_TRUE(beams.finish().empty());
}

}  // namespace
}  // namespace freshet

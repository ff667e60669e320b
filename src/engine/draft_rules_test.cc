// Lawful rules leave the distribution of texts as it is: chi-square tests of whole texts of a small
// vocabulary, and a test of the number of rejections. A right program fails one of these with a
// probability below 1e-5; the seeds are fixed. The same tests find a bias of 1 %.
#include "engine/outputs/draft_rules.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <random>

#include <gtest/gtest.h>

#include "speculative/draft_sampler.h"

namespace freshet::engine {
namespace {

constexpr int kVocab = 4;
constexpr int kDrafts = 3;
constexpr int kTokens = 4;  // of a text
constexpr int kTexts = 300000;

using Row = std::array<float, kVocab>;
using Shares = std::array<double, kVocab>;
using Text = std::vector<int32_t>;

// Logits of the token behind each token.
constexpr Row kTarget[kVocab] = {{0.3f, 1.1f, -0.6f, 0.2f},
                                 {1.4f, -0.3f, 0.5f, -1.2f},
                                 {0, 0, 0.9f, -0.4f},
                                 {-0.8f, 0.7f, 0, 1}};
constexpr Row kDrafter[kVocab] = {
    {1.2f, 0.1f, 0.4f, -0.9f}, {0, 0.8f, 0.1f, 0.3f}, {0.9f, -0.7f, 0, 0.5f}, {0.6f, 0.6f, -1, 0}};
const Text kPrompt = {2, 1};

Shares softmax(const Row& logits, double temperature) {
  Shares p{};
  double sum = 0.0;
  for (size_t i = 0; i < kVocab; ++i)
    sum += p[i] = std::exp(static_cast<double>(logits[i]) / temperature);
  for (double& x : p) x /= sum;
  return p;
}

// What the next token is drawn from, by the definition of the penalties.
Shares target_shares(const SamplingParams& params, const Text& text) {
  Row logits = kTarget[text.back()];
  for (int32_t id = 0; id < kVocab; ++id) {
    const auto seen = std::count(text.begin() + std::ssize(kPrompt), text.end(), id);
    float& l = logits[static_cast<size_t>(id)];
    l -= params.frequency_penalty * static_cast<float>(seen);
    if (seen > 0) l -= params.presence_penalty;
  }
  return softmax(logits, static_cast<double>(params.temperature));
}

struct Setting {
  Acceptance method = Acceptance::kRejection;
  SamplingParams params;
  double bias = 0.0;  // the share of decisions that keep the draft, whatever the rule says
};

struct Seen {
  std::map<Text, double> texts;  // of kTokens tokens, prompt left out
  Rejections rejections;
  double kept = 0.0;  // drafts in the first step of a text, on average
};

class Writer {
 public:
  Writer(const Setting& setting, Seen& seen)
      : setting_(setting), options_{.method = setting.method}, seen_(seen) {
    options_.count_rejections = setting.method == Acceptance::kRejection;
  }

  void write(uint64_t seed) {
    Text text = kPrompt;
    Sampler sampler(setting_.params, kVocab, seed, 0, kPrompt, 16, {});
    speculative::DraftRequest r{.params = &setting_.params, .seed = seed};
    speculative::DraftSampler drafter(r, kVocab, false);
    rules_.emplace(options_, setting_.params, sampler.greedy());
    r.wants_distributions = rules_->wants_distributions();
    for (bool first = true; std::ssize(text) < std::ssize(kPrompt) + kTokens; first = false) {
      propose(text, r, drafter);
      const int kept = step(text, r, sampler);
      if (first) seen_.kept += static_cast<double>(kept) / kTexts;
    }
    text.resize(kPrompt.size() + kTokens);
    ++seen_.texts[Text(text.begin() + std::ssize(kPrompt), text.end())];
  }

 private:
  void propose(const Text& text, speculative::DraftRequest& r, speculative::DraftSampler& drafter) {
    r.tokens = text;
    r.draft.clear();
    r.drawn_from.clear();
    for (int i = 0; i < kDrafts; ++i) {
      Row logits = kDrafter[r.draft.empty() ? text.back() : r.draft.back()];
      r.draft.push_back(drafter.draw(r, logits, {}, scratch_.sampler, row_));
    }
  }

  bool forced() { return unit_(random_) < setting_.bias; }

  BlockRuling walk(const std::vector<DraftRow>& rows, const Sampler& sampler) {
    BlockRuling all{.kept = kDrafts};
    if (!rules_->walks_block()) return {};
    if (forced()) return all;
    BlockWalk walk;
    Sampler path = sampler;
    for (const DraftRow& row : rows) {
      if (!walk.step(row, &row == &rows.back(), path, {}, scratch_)) break;
      path.accept(row.draft);
    }
    return walk.ruling();
  }

  // Appends the tokens of a step; returns how many of them are drafts.
  int step(Text& text, const speculative::DraftRequest& r, Sampler& sampler) {
    std::vector<DraftRow> rows;
    const auto first = std::ssize(text);
    for (int i = 0; i < kDrafts; ++i) {
      const auto at = static_cast<size_t>(i);
      rows.push_back({first, i, r.draft[at], r.drawn_from[at],
                      kTarget[i == 0 ? text.back() : r.draft[at - 1]]});
    }
    const BlockRuling block = walk(rows, sampler);
    for (const DraftRow& row : rows) {
      const bool counts = rules_->counts_rejections();
      const double odds = counts ? rules_->rejection_odds(row, sampler, {}, scratch_) : 0.0;
      Ruling ruling = rules_->judge(row, block, sampler, {}, scratch_);
      if (!rules_->walks_block() && forced()) ruling = {Ruling::Token::kDraft};
      const bool kept = ruling.token == Ruling::Token::kDraft;
      if (counts) seen_.rejections.add(odds, kept);
      text.push_back(kept ? row.draft : ruling.other);
      sampler.accept(text.back());
      if (!kept) return row.index;
    }
    Row logits = kTarget[text.back()];
    text.push_back(sampler.sample(logits, std::ssize(text), scratch_.sampler));
    sampler.accept(text.back());
    return kDrafts;
  }

  const Setting& setting_;
  speculative::AcceptanceOptions options_;
  Seen& seen_;
  std::optional<DraftRules> rules_;
  VerifyScratch scratch_{kVocab};
  std::vector<float> row_;
  std::mt19937_64 random_{5};
  std::uniform_real_distribution<double> unit_;
};

Seen write_texts(const Setting& setting) {
  Seen seen;
  Writer writer(setting, seen);
  for (uint64_t seed = 1; seed <= kTexts; ++seed) writer.write(seed);
  return seen;
}

// How unlikely the first `length` tokens of the texts are, as the chi-square statistic over its
// bound: a right program exceeds 1 with probability 1e-6 (Wilson and Hilferty's approximation).
double chi_square(const Seen& seen, const SamplingParams& params, size_t length) {
  std::map<Text, double> counts;
  for (const auto& [text, count] : seen.texts)
    counts[Text(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(length))] += count;
  double chi = 0.0, cells = 0.0, rare_want = 0.0, rare_seen = 0.0;
  const auto add = [&](double want, double got) {
    chi += (got - want) * (got - want) / want;
    ++cells;
  };
  const auto descend = [&](auto& self, Text text, double share) -> void {
    if (text.size() == kPrompt.size() + length) {
      const double want = share * kTexts;
      const double got = counts[Text(text.begin() + std::ssize(kPrompt), text.end())];
      if (want >= 20.0) return add(want, got);
      rare_want += want;
      rare_seen += got;
      return;
    }
    const Shares p = target_shares(params, text);
    for (int32_t id = 0; id < kVocab; ++id) {
      Text longer = text;
      longer.push_back(id);
      self(self, longer, share * p[static_cast<size_t>(id)]);
    }
  };
  descend(descend, kPrompt, 1.0);
  if (rare_want >= 20.0) add(rare_want, rare_seen);
  const double df = cells - 1.0;
  return chi / (df * std::pow(1.0 - 2.0 / (9.0 * df) + 4.7534 * std::sqrt(2.0 / (9.0 * df)), 3.0));
}

double z_of(const Rejections& r) {
  return (static_cast<double>(r.seen) - r.expected) / std::sqrt(r.variance);
}

SamplingParams plain_params() {
  SamplingParams p;
  p.temperature = 0.9f;
  return p;
}
SamplingParams penalised_params() {
  SamplingParams p = plain_params();
  p.frequency_penalty = 0.6f;
  p.presence_penalty = 0.4f;
  return p;
}

class LawOfRules : public ::testing::TestWithParam<std::pair<Acceptance, bool>> {
 protected:
  static Setting setting() {
    const auto [method, penalties] = GetParam();
    return {.method = method, .params = penalties ? penalised_params() : plain_params()};
  }
};
INSTANTIATE_TEST_SUITE_P(All, LawOfRules,
                         ::testing::Values(std::pair{Acceptance::kRejection, false},
                                           std::pair{Acceptance::kRejection, true},
                                           std::pair{Acceptance::kBlock, false},
                                           std::pair{Acceptance::kBlock, true}));

TEST_P(LawOfRules, TextsHaveTheTargetsDistribution) {
  const Seen seen = write_texts(setting());
  for (const size_t length : {1, 2, 3, 4})
    EXPECT_LT(chi_square(seen, setting().params, length), 1.0) << length << " tokens";
  if (GetParam().first != Acceptance::kRejection) return;
  EXPECT_GT(seen.rejections.seen, kTexts / 2);
  EXPECT_LT(std::abs(z_of(seen.rejections)), 4.9);  // 1e-6
}

TEST_P(LawOfRules, ABiasOfOnePercentIsFound) {
  Setting biased = setting();
  biased.bias = 0.01;
  const Seen seen = write_texts(biased);
  EXPECT_GT(chi_square(seen, biased.params, 2), 1.0);
  if (GetParam().first == Acceptance::kRejection) {
    EXPECT_LT(z_of(seen.rejections), -4.9);
  }
}

// The number of drafts that a step keeps, worked out over all paths: by rejection each draft is
// kept with probability min(1, p / q), by blocks with that of the running product.
TEST(DraftRules, BlocksKeepMoreDrafts) {
  const SamplingParams params = penalised_params();
  double single = 0.0, block = 0.0;
  const auto descend = [&](auto& self, Text text, double drafted, double kept, double product) {
    if (text.size() == kPrompt.size() + kDrafts) return;
    const Shares p = target_shares(params, text);
    const Shares q = softmax(kDrafter[text.back()], static_cast<double>(params.temperature));
    for (size_t id = 0; id < kVocab; ++id) {
      const double ratio = p[id] / q[id], share = drafted * q[id];
      const double alone = kept * std::min(1.0, ratio), running = std::min(1.0, product * ratio);
      single += share * alone;
      block += share * running;
      Text longer = text;
      longer.push_back(static_cast<int32_t>(id));
      self(self, longer, share, alone, running);
    }
  };
  descend(descend, kPrompt, 1.0, 1.0, 1.0);
  const double error = 5.0 * kDrafts / 2.0 / std::sqrt(kTexts);  // five standard deviations at most
  EXPECT_GT(block, single + 2 * error);
  EXPECT_NEAR(write_texts({.method = Acceptance::kRejection, .params = params}).kept, single,
              error);
  EXPECT_NEAR(write_texts({.method = Acceptance::kBlock, .params = params}).kept, block, error);
}

}  // namespace
}  // namespace freshet::engine

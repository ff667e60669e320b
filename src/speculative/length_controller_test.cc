// The controller in a simulated world, whose steps take known times and whose drafts are right with
// known probability: it must come near the best fixed length, and never fall behind plain steps.
#include "speculative/length_controller.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "base/philox.h"

namespace freshet::speculative {
namespace {

constexpr int kMost = 15;

struct World {
  double round = 0.1;   // drafting, for a round of one sequence
  double row = 0.03;    // a step: 1 + row * (rows - 1) ...
  double knee = 16.0;   // ... and steeper behind this number of rows
  double alpha = 0.7;   // acceptance
  double going = 0.0;   // > 0: the acceptance behind a draft that was right
  double noise = 0.0;   // of times, as a factor
  double engine = 1.0;  // what steps with drafts take more in an engine than when measured
  double ahead = 1.0;   // what plain steps take if another is started behind each of them
  int text = 0;         // > 0: steps of a text, after which others begin with their prompts
  int sequences = 1;
  int prompt = 100;
  double more = 0.0;  // what the loop takes besides, because there are drafts
  double cold = 1.0;  // a plain step behind one with drafts takes more by this factor

  double step(int64_t rows) const {
    const auto m = static_cast<double>(rows);
    return 1.0 + row * (m - 1.0) + 0.05 * std::max(0.0, m - knee);
  }
  double drafting(int n) const { return round * (0.9 + 0.1 * n); }
  // Tokens per second of a fixed length.
  double rate(int length) const {
    double tokens = 1.0, survives = 1.0, time = step(int64_t{sequences} * (length + 1));
    for (int i = 0; i < length; ++i) {
      tokens += survives *= alpha;
      time += drafting(sequences);
    }
    return tokens * sequences / time;
  }
  double best_rate() const {
    double best = 0.0;
    for (int k = 0; k <= kMost; ++k) best = std::max(best, rate(k));
    return best;
  }
  StepCosts costs(double error = 1.0) const {
    std::vector<StepCosts::Point> points;
    for (const int64_t rows : {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128})
      points.push_back({rows, error * step(rows)});
    return StepCosts(points);
  }
};

// Steps of `world`; sequences neither begin nor end.
class Simulation {
 public:
  Simulation(DraftLengths& lengths, uint64_t seed) : lengths_(lengths), seed_(seed) {}

  struct Result {
    double seconds = 0.0;
    int64_t tokens = 0, drafted = 0;
    double rate() const { return static_cast<double>(tokens) / seconds; }
  };

  Result run(const World& world, int steps) {
    Result result;
    while (std::ssize(texts_) < world.sequences)
      texts_.emplace_back(static_cast<size_t>(world.prompt), 0);
    goes_on_.resize(texts_.size());
    for (int i = 0; i < steps; ++i) {
      step(world, result);
      if (world.text > 0 && i % world.text == world.text - 1) new_texts(world);
    }
    return result;
  }

 private:
  double random() { return philox_uniform(seed_, draws_++, 7); }

  void step(const World& w, Result& result) {
    std::vector<DraftRequest> requests;
    for (size_t i = 0; i < texts_.size(); ++i)
      requests.push_back({.sequence = i + 1, .tokens = texts_[i], .limit = 1000});
    // Behind a step whose tokens are not known yet nothing is drafted, and nobody asks.
    const bool ahead = std::exchange(ahead_, false);
    if (ahead) {
      for (DraftRequest& r : requests) r.limit = 0;
    } else {
      lengths_.choose(requests);
    }
    int rounds = 0;
    double drafting = 0.0;
    for (DraftRequest& r : requests) {
      // A draft is right where it is 0, and behind a wrong one nothing matters.
      for (int d = 0; d < r.limit; ++d) {
        const bool goes_on = w.going > 0.0 && (d > 0 || goes_on_[r.sequence - 1]);
        r.draft.push_back(random() < (goes_on ? w.going : w.alpha) ? 0 : 1);
      }
      watched_ = !r.draft.empty() && r.draft.front() == 0;
      rounds = std::max(rounds, r.limit);
    }
    for (int d = 0; d < rounds; ++d) {
      drafting += w.drafting(static_cast<int>(
          std::ranges::count_if(requests, [&](const auto& r) { return r.limit > d; })));
    }
    if (!ahead) lengths_.drafted(requests, drafting);
    StepDone done;
    for (size_t i = 0; i < requests.size(); ++i) {
      const std::vector<int32_t>& draft = requests[i].draft;
      done.shape.add(1 + std::ssize(draft), std::ssize(texts_[i]));
      done.drafted += std::ssize(draft);
      const auto right = std::ranges::find(draft, 1) - draft.begin();
      done.tokens += right + 1;
      goes_on_[i] = draft.empty() ? watched_ : right == std::ssize(draft);
      texts_[i].insert(texts_[i].end(), static_cast<size_t>(right) + 1, 0);
    }
    done.seconds = w.step(done.shape.rows) * (1.0 + w.noise * random());
    if (done.drafted > 0) done.seconds *= w.engine;
    if (std::exchange(drafted_, done.drafted > 0) && done.drafted == 0) done.seconds *= w.cold;
    ahead_ = w.ahead < 1.0 && done.drafted == 0 && lengths_.resting();
    if (ahead) done.seconds *= w.ahead;
    done.more_seconds = w.more;
    lengths_.stepped(done);
    result.seconds += done.seconds + drafting + w.more;
    result.tokens += done.tokens;
    result.drafted += done.drafted;
  }

  void new_texts(const World& w) {
    StepDone done;
    for (std::vector<int32_t>& text : texts_) {
      text.assign(static_cast<size_t>(w.prompt), 0);
      done.shape.add(w.prompt, w.prompt);
    }
    done.prompt_tokens = done.shape.rows;
    done.tokens = std::ssize(texts_);
    done.seconds = w.step(done.shape.rows);
    lengths_.stepped(done);
  }

  DraftLengths& lengths_;
  uint64_t seed_, draws_ = 0;
  std::vector<std::vector<int32_t>> texts_;
  std::vector<bool> goes_on_;
  bool ahead_ = false;    // the step in front left the device busy
  bool drafted_ = false;  // the last step had drafts
  bool watched_ = false;  // the first draft of the last sequence was right
};

TEST(LengthController, ComesNearTheBestFixedLength) {
  for (const double alpha : {0.2, 0.5, 0.7, 0.9}) {
    for (const double round : {0.02, 0.1, 0.3}) {
      for (const int sequences : {1, 8, 64}) {
        World world{.round = round, .alpha = alpha, .sequences = sequences};
        constexpr int kSeeds = 4;  // chance alone moves a rate by some percent
        double rate = 0.0;
        for (int seed = 0; seed < kSeeds; ++seed) {
          LengthController lengths(world.costs(), {.max_drafts = kMost});
          Simulation simulation(lengths, static_cast<uint64_t>(3 + seed));
          simulation.run(world, 100);
          rate += simulation.run(world, 1500).rate() / kSeeds;
        }
        EXPECT_GT(rate, 0.92 * world.best_rate())
            << "acceptance " << alpha << ", a round " << round << ", sequences " << sequences
            << ", plain " << world.rate(0);
        EXPECT_GT(rate, 0.985 * world.rate(0));
      }
    }
  }
}

// From the first step on: what is tried in the beginning costs little, too.
TEST(LengthController, IsHardlySlowerThanPlainSteps) {
  for (const double alpha : {0.0, 0.1, 0.2}) {
    for (const int sequences : {1, 16, 64}) {
      World world{.round = 0.15, .row = 0.1, .alpha = alpha, .sequences = sequences};
      LengthController lengths(world.costs(), {.max_drafts = kMost});
      Simulation simulation(lengths, 5);
      const auto result = simulation.run(world, 1000);
      EXPECT_GT(result.rate(), 0.98 * world.rate(0)) << alpha << " " << sequences;
      EXPECT_GT(result.drafted, 0);
    }
  }
}

TEST(LengthController, ComesBackWhenDraftsPayAgain) {
  World world{.round = 0.1, .alpha = 0.05};
  LengthController lengths(world.costs(), {.max_drafts = kMost});
  Simulation simulation(lengths, 7);
  const auto off = simulation.run(world, 1500);
  EXPECT_LT(off.drafted, 150);
  world.alpha = 0.85;
  simulation.run(world, 1200);
  EXPECT_GT(simulation.run(world, 500).rate(), 0.9 * world.best_rate());
  world.alpha = 0.05;
  simulation.run(world, 100);
  EXPECT_GT(simulation.run(world, 500).rate(), 0.97 * world.rate(0));
}

// A drafter without costs is asked in any case: its drafts are judged by the tokens that come.
TEST(LengthController, FreeDraftsAreWatchedWithoutRunningThem) {
  World world{.round = 1e-5, .row = 0.5, .alpha = 0.1};
  LengthController lengths(world.costs(), {.max_drafts = kMost});
  Simulation simulation(lengths, 9);
  const auto off = simulation.run(world, 1000);
  EXPECT_GT(off.rate(), 0.985 * world.rate(0));
  world.alpha = 0.95;
  simulation.run(world, 100);
  EXPECT_GT(simulation.run(world, 500).rate(), 0.95 * world.best_rate());
}

// Drafts that are copied from a text: none where a copy begins, for the first one is often wrong,
// and about 10 while it goes on. That gives 2.0 times the speed of plain steps, and 10 at any time
// 1.5.
TEST(LengthController, CopiesAreLongerWhileTheyGoOn) {
  World world{.round = 1e-5, .row = 0.4, .knee = 100.0, .alpha = 0.3, .going = 0.98};
  LengthController lengths(world.costs(), {.max_drafts = kMost});
  Simulation simulation(lengths, 15);
  simulation.run(world, 300);
  EXPECT_GT(simulation.run(world, 2000).rate(), 1.8);
}

// Also with a table that is wrong by a factor, as under load, and with noise.
// Drafts that beat single plain steps, but not those of a device that runs ahead; and drafts that
// beat both.
TEST(LengthController, IsHardlySlowerThanPlainStepsThatRunAhead) {
  for (const int sequences : {1, 32}) {
    for (const double alpha : {0.1, 0.5, 0.9}) {
      for (const double ahead : {0.5, 0.7, 0.95}) {
        World world{.round = 0.02, .row = 0.001, .knee = 1000, .alpha = alpha};
        world.ahead = ahead;
        world.sequences = sequences;
        LengthController lengths(world.costs(), {.max_drafts = 3, .runs_ahead = true});
        Simulation simulation(lengths, 9);
        simulation.run(world, 300);
        const double rate = simulation.run(world, 6000).rate();
        double best = world.rate(0) / ahead;
        for (int k = 1; k <= 3; ++k) best = std::max(best, world.rate(k));
        EXPECT_GT(rate, 0.9 * best) << sequences << " " << alpha << " " << ahead;
        EXPECT_GT(rate, 0.97 * world.rate(0) / ahead) << sequences << " " << alpha << " " << ahead;
      }
    }
  }
}

TEST(LengthController, KnowsItsGain) {
  for (const double error : {0.5, 1.0, 1.7}) {
    for (const double alpha : {0.5, 0.8}) {
      World world{.round = 0.08, .alpha = alpha, .noise = 0.3};
      LengthController lengths(world.costs(error), {.max_drafts = kMost});
      Simulation simulation(lengths, 11);
      const auto result = simulation.run(world, 3000);
      EngineStats::Speculation stats;
      lengths.publish(stats);
      const double gain = result.rate() / (world.rate(0) / 1.15);
      EXPECT_NEAR(stats.gain(), gain, 0.06 * gain) << error << " " << alpha;
      EXPECT_NEAR(stats.predicted_gain(), gain, 0.1 * gain) << error << " " << alpha;
      EXPECT_GT(stats.control_steps, 10);
      EXPECT_LT(stats.control_steps, 60);
    }
  }
}

// A single plain step among drafts takes longer than plain steps in a row: the gain is that over
// the latter, and drafts that beat single ones alone are not made.
TEST(LengthController, ComparesWithPlainStepsInARow) {
  for (const double engine : {1.0, 1.6}) {
    World world{.round = 0.08, .alpha = 0.7, .engine = engine};
    world.cold = 1.6;
    LengthController lengths(world.costs(), {.max_drafts = kMost});
    Simulation simulation(lengths, 29);
    const auto result = simulation.run(world, 3000);
    EngineStats::Speculation stats;
    lengths.publish(stats);
    const double gain = result.rate() / world.rate(0);
    EXPECT_NEAR(stats.gain(), gain, 0.06 * gain) << engine;
    EXPECT_NEAR(stats.predicted_gain(), gain, 0.06 * gain) << engine;
  }
  World world{.round = 0.3, .alpha = 0.5, .engine = 1.3};
  world.cold = 1.6;
  LengthController lengths(world.costs(), {.max_drafts = kMost});
  Simulation simulation(lengths, 31);
  simulation.run(world, 500);
  EXPECT_GT(simulation.run(world, 3000).rate(), 0.98 * world.rate(0));
}

// The loop's own time counts, in what was measured and in what is expected.
TEST(LengthController, CountsWhatTheLoopTakesForDrafts) {
  World world{.round = 0.08, .alpha = 0.8};
  world.more = 0.2;
  LengthController lengths(world.costs(), {.max_drafts = kMost});
  Simulation simulation(lengths, 23);
  const auto result = simulation.run(world, 3000);
  EngineStats::Speculation stats;
  lengths.publish(stats);
  const double gain = result.rate() / world.rate(0);
  EXPECT_NEAR(stats.gain(), gain, 0.04 * gain);
  EXPECT_NEAR(stats.predicted_gain(), gain, 0.04 * gain);
}

// With texts that are shorter than the distance of two control steps, too.
TEST(LengthController, KnowsItsGainOnShortTexts) {
  World world{.round = 0.08, .alpha = 0.7, .noise = 0.1, .engine = 1.25, .text = 25};
  LengthController lengths(world.costs(), {.max_drafts = kMost});
  Simulation simulation(lengths, 17);
  const auto result = simulation.run(world, 800);
  EngineStats::Speculation stats;
  lengths.publish(stats);
  const double gain = result.rate() / (world.rate(0) / 1.05);
  EXPECT_NEAR(stats.gain(), gain, 0.05 * gain);
  EXPECT_NEAR(stats.predicted_gain(), gain, 0.07 * gain);
  EXPECT_GT(stats.control_steps, 5);
}

TEST(LengthController, AFixedLengthStays) {
  World world{.round = 0.5, .alpha = 0.0};
  LengthController lengths(world.costs(), {.max_drafts = 4, .fixed = true});
  Simulation simulation(lengths, 13);
  EXPECT_EQ(simulation.run(world, 200).drafted, 200 * 4);
  EngineStats::Speculation stats;
  lengths.publish(stats);
  EXPECT_NEAR(stats.gain(), world.rate(4) / world.rate(0), 0.03);
  EXPECT_FALSE(lengths.resting());
}

TEST(StepCosts, FollowsTheMeasuredTimes) {
  StepCosts costs({{1, 1.0}, {4, 1.3}, {16, 2.5}}, 0.001, 0.0002);
  const auto at = [&](int64_t rows, int64_t context) {
    StepShape shape;
    shape.add(rows, context);
    return costs.seconds(shape);
  };
  EXPECT_DOUBLE_EQ(at(1, 0), 1.0);
  EXPECT_DOUBLE_EQ(at(2, 0), 1.1);
  EXPECT_DOUBLE_EQ(at(28, 0), 3.7);  // as between the last two
  EXPECT_DOUBLE_EQ(at(4, 1000), 1.3 + 1.0 + 0.8);
  // A machine at half its speed, where steps of 4 rows are slower still.
  for (int i = 0; i < 400; ++i) {
    const int64_t rows = i % 2 == 0 ? 1 : 4;
    StepShape shape;
    shape.add(rows, 0);
    costs.correct(shape, rows == 1 ? 2.0 : 3.2);
  }
  EXPECT_NEAR(at(1, 0), 2.0, 0.05);
  EXPECT_NEAR(at(4, 0), 3.2, 0.08);
  EXPECT_GT(at(16, 0), 4.0);
}

}  // namespace
}  // namespace freshet::speculative

#include "sampling/race.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "sampling/race_noise.h"

namespace freshet {
namespace {

constexpr uint32_t kMostHigh = 0xffffffff;

// The counters of tile 0.
struct TileCounters {
  uint64_t of[ops::kRaceCounters];
  constexpr TileCounters() : of{} {
    for (uint64_t c = 0; c < ops::kRaceCounters; ++c) of[c] = c;
  }
};
constexpr TileCounters kTileCounters;

// The best time so far.
class Leader {
 public:
  explicit Leader(const ops::RaceStream& stream) : stream_(stream) {}

  int32_t id() const { return id_; }
  // A token of weight `w` loses if the first 32 bits of its noise are above this. Its E is at least
  // these bits * 2^-32, less a rounding error far below the allowance here.
  uint32_t limit(double w) const {
    const double most = best_ * w * (0x1p32 * (1.0 + 0x1p-20));
    return most < 0x1p32 - 1.0 ? static_cast<uint32_t>(most) : kMostHigh;
  }
  void enter(int32_t id, uint32_t high, Weight w) {
    const auto token = static_cast<uint32_t>(id);
    const uint32_t low = ops::race_words(stream_, ops::race_counter(token) | ops::kRaceLowBits)
                             .of[ops::race_word(token)];
    const uint64_t time = ops::race_time(uint64_t{high} << 32 | low, w);
    if (time > time_ || (time == time_ && id > id_)) return;
    time_ = time;
    id_ = id;
    std::memcpy(&best_, &time, sizeof best_);
  }

 private:
  const ops::RaceStream& stream_;
  uint64_t time_ = std::numeric_limits<uint64_t>::max();
  double best_ = std::numeric_limits<double>::infinity();
  int32_t id_ = -1;
};

}  // namespace

Race::Race(uint64_t seed, uint32_t sample, int64_t position)
    : stream_{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32),
              static_cast<uint32_t>(position),
              static_cast<uint32_t>(static_cast<uint64_t>(position) >> 32), sample * 4} {}

uint64_t Race::noise(int32_t token) const {
  return ops::race_noise(stream_, static_cast<uint32_t>(token));
}

int32_t Race::winner(std::span<const Candidate> candidates) const {
  static const auto fill = noise_fills().front();
  const NoisePlan plan(stream_);
  Leader leader(stream_);
  NoiseTile tile;
  uint64_t counters[ops::kRaceCounters] = {};
  std::array<const Candidate*, ops::kRaceCounters> entered{};
  size_t count = 0;
  const auto run = [&] {
    fill(plan, 0, counters, 0, tile);
    for (size_t i = 0; i < count; ++i) {
      const Candidate& x = *entered[i];
      const uint32_t high =
          tile.word(static_cast<uint32_t>(i), ops::race_word(static_cast<uint32_t>(x.id)));
      if (high <= leader.limit(static_cast<double>(x.weight))) leader.enter(x.id, high, x.weight);
    }
    count = 0;
  };
  for (const Candidate& x : candidates) {
    entered[count] = &x;
    counters[count] = ops::race_counter(static_cast<uint32_t>(x.id));
    count += x.weight > 0 ? 1 : 0;
    if (count == entered.size()) run();
  }
  if (count > 0) run();
  return leader.id();
}

// Most blocks are ruled out by their noise and their maximum: no weight in them is above that of
// the maximum, but for a rounding error.
int32_t Race::winner(std::span<const float> logits, float maximum, float scale,
                     LogitScratch& s) const {
  static_assert(kLogitBlock == ops::kRaceTile);
  static const auto fill = noise_fills().front();
  const auto weight_at = [&](size_t i) {
    return whole(exp_fraction((logits[i] - maximum) * scale));
  };
  const NoisePlan plan(stream_);
  Leader leader(stream_);
  // The best token first: others need not be fast to lose, then.
  const int32_t best = argmax(logits, s);
  leader.enter(best, static_cast<uint32_t>(noise(best) >> 32),
               weight_at(static_cast<size_t>(best)));
  exponentials_of_blocks(maximum, scale, s);
  NoiseTile tile;
  for (size_t b = 0; b < s.block_max.size(); ++b) {
    if (s.weight[b] < 0x1p-46f) continue;  // all round to zero
    const double most = static_cast<double>(whole(s.weight[b])) * (1.0 + 0x1p-20) + 1.0;
    uint32_t limit = leader.limit(most);
    if (!fill(plan, b * ops::kRaceCounters, kTileCounters.of, limit, tile)) continue;
    const size_t first = b * kLogitBlock, end = std::min(logits.size(), first + kLogitBlock);
    for (size_t i = first; i < end; ++i) {
      const auto token = static_cast<uint32_t>(i);
      const uint32_t high = tile.word(token % ops::kRaceCounters, ops::race_word(token));
      if (high > limit) continue;
      const Weight w = weight_at(i);
      if (w == 0 || high > leader.limit(static_cast<double>(w))) continue;
      leader.enter(static_cast<int32_t>(i), high, w);
      limit = leader.limit(most);
    }
  }
  return leader.id();
}

}  // namespace freshet

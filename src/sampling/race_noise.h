// The first halves of the noise of a race (ops/race.h) for many tokens at once, compiled for each
// instruction set. Pure functions with equal results.
#pragma once

#include <cstdint>
#include <span>

#include "ops/race.h"

namespace freshet {

// What Philox computes for all counters of a stream alike. Only the last of the four words of a
// counter differs, so half of the first three rounds is the same for all.
struct NoisePlan {
  explicit NoisePlan(const ops::RaceStream& s);

  uint64_t first, second, third0, third1, third2;
  uint64_t key0[10], key1[10];
};

// The words of 32 counters: [0] has the first one in the low half and the second one in the high
// half, [1] the third and the fourth.
struct NoiseTile {
  alignas(64) uint64_t of[2][ops::kRaceCounters];

  uint32_t word(uint32_t counter, uint32_t word) const {
    return static_cast<uint32_t>(of[word / 2][counter] >> word % 2 * 32);
  }
};

// Computes a tile from `counters`, each xor `flip`. Returns whether one of its words is at most
// `limit`.
using NoiseFill = bool (*)(const NoisePlan& plan, uint64_t flip,
                           const uint64_t (&counters)[ops::kRaceCounters], uint32_t limit,
                           NoiseTile& tile);
// Those that run on this machine, fastest first.
std::span<const NoiseFill> noise_fills();

}  // namespace freshet

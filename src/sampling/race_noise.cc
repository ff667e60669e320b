#include "sampling/race_noise.h"

#include <cstring>
#include <vector>

#include "base/wide.h"

namespace freshet {
namespace {

constexpr uint64_t kLow32 = 0xffffffff;
constexpr uint64_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;

// Registers of 64-bit lanes.
struct Noise2 {
  using Words = uint64_t __attribute__((vector_size(16)));
  using Halves = uint32_t __attribute__((vector_size(16)));
};
struct Noise4 {
  using Words = uint64_t __attribute__((vector_size(32)));
  using Halves = uint32_t __attribute__((vector_size(32)));
};
struct Noise8 {
  using Words = uint64_t __attribute__((vector_size(64)));
  using Halves = uint32_t __attribute__((vector_size(64)));
};

// The high halves of a state's lanes hold anything.
template <class L>
FRESHET_INLINE_BODY bool noise_body(const NoisePlan& plan, uint64_t flip,
                                    const uint64_t (&counters)[ops::kRaceCounters], uint32_t limit,
                                    NoiseTile& tile) {
  using W = typename L::Words;
  using H = typename L::Halves;
  constexpr int kWide = sizeof(W) / sizeof(uint64_t), kCount = 2;
  const W m0 = W{} + kMultiplier0, m1 = W{} + kMultiplier1;
  const W first = W{} + (plan.first ^ flip);
  H least = H{} + 0xffffffffu;
  for (int at = 0; at < ops::kRaceCounters; at += kWide * kCount) {
    W c0[kCount], c1[kCount], c2[kCount], c3[kCount];
#pragma GCC unroll 8
    for (int j = 0; j < kCount; ++j) {
      std::memcpy(&c2[j], &counters[at + j * kWide], sizeof c2[j]);
      W q1, r0;
      multiply_low_halves(c2[j] ^ first, m1, q1);
      multiply_low_halves(q1 >> 32 ^ plan.second, m0, r0);
      c0[j] = q1 ^ plan.third0;
      c1[j] = W{} + plan.third1;
      c2[j] = r0 >> 32 ^ plan.third2;
      c3[j] = r0;
    }
#pragma GCC unroll 8
    for (int round = 3; round < 10; ++round) {
#pragma GCC unroll 8
      for (int j = 0; j < kCount; ++j) {
        W p0, p1;
        multiply_low_halves(c0[j], m0, p0);
        multiply_low_halves(c2[j], m1, p1);
        c0[j] = p1 >> 32 ^ c1[j] ^ plan.key0[round];
        c2[j] = p0 >> 32 ^ c3[j] ^ plan.key1[round];
        c1[j] = p1;
        c3[j] = p0;
      }
    }
#pragma GCC unroll 8
    for (int j = 0; j < kCount; ++j) {
      const W pair0 = (c0[j] & kLow32) | c1[j] << 32, pair1 = (c2[j] & kLow32) | c3[j] << 32;
      std::memcpy(tile.of[0] + at + j * kWide, &pair0, sizeof pair0);
      std::memcpy(tile.of[1] + at + j * kWide, &pair1, sizeof pair1);
      const H half0 = H(pair0), half1 = H(pair1);
      const H less = half0 < half1 ? half0 : half1;
      least = less < least ? less : least;
    }
  }
  const auto hits = least <= limit;
  uint64_t lanes[kWide], any = 0;
  std::memcpy(lanes, &hits, sizeof lanes);
  for (const uint64_t lane : lanes) any |= lane;
  return any != 0;
}

bool noise_plain(const NoisePlan& plan, uint64_t flip,
                 const uint64_t (&counters)[ops::kRaceCounters], uint32_t limit, NoiseTile& tile) {
  return noise_body<Noise2>(plan, flip, counters, limit, tile);
}
FRESHET_TARGET_AVX2 bool noise_avx2(const NoisePlan& plan, uint64_t flip,
                                    const uint64_t (&counters)[ops::kRaceCounters], uint32_t limit,
                                    NoiseTile& tile) {
  return noise_body<Noise4>(plan, flip, counters, limit, tile);
}
FRESHET_TARGET_AVX512 bool noise_avx512(const NoisePlan& plan, uint64_t flip,
                                        const uint64_t (&counters)[ops::kRaceCounters],
                                        uint32_t limit, NoiseTile& tile) {
  return noise_body<Noise8>(plan, flip, counters, limit, tile);
}

}  // namespace

NoisePlan::NoisePlan(const ops::RaceStream& s) {
  for (uint32_t r = 0; r < 10; ++r) {
    key0[r] = uint32_t{s.seed_low + r * 0x9E3779B9};
    key1[r] = uint32_t{s.seed_high + r * 0xBB67AE85};
  }
  const uint64_t p0 = uint64_t{kMultiplier0} * s.position_low;
  const uint64_t p1 = uint64_t{kMultiplier1} * s.stream;
  first = p0 >> 32 ^ key1[0];
  const uint64_t q0 = kMultiplier0 * (p1 >> 32 ^ s.position_high ^ key0[0]);
  second = (p1 & kLow32) ^ key0[1];
  const uint64_t r1 = kMultiplier1 * (q0 >> 32 ^ (p0 & kLow32) ^ key1[1]);
  third0 = r1 >> 32 ^ key0[2];
  third1 = r1 & kLow32;
  third2 = (q0 & kLow32) ^ key1[2];
}

std::span<const NoiseFill> noise_fills() {
  static const std::vector<NoiseFill> fills = [] {
    std::vector<NoiseFill> those;
    if (cpu_has_avx512()) those.push_back(noise_avx512);
    if (cpu_has_avx2()) those.push_back(noise_avx2);
    those.push_back(noise_plain);
    return those;
  }();
  return fills;
}

}  // namespace freshet

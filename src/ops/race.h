// The arithmetic of the exponential race (the Gumbel-max trick in another form) by which tokens are
// drawn (docs/sampling.md): the same functions on the host and in GPU kernels, in integers and one
// correctly rounded division, so that all machines draw the same tokens.
//
// A token of weight w gets the time E / w with E = -ln(1 - v), and the token with the lowest time
// is drawn. v is 64 bits of Philox noise in [0, 1), a function of (seed, sample, position, token
// id) alone. Its first 32 bits, for four tokens of a tile at once, are enough to rule out nearly
// all tokens, since E > v; the other 32 come from a second counter.
//
// Pure functions; plain types only, because the CUDA plug-in compiles this, too.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/host_device.h"
#include "base/philox.h"

namespace freshet::ops {

// Which noise: one position of one sample.
struct RaceStream {
  uint32_t seed_low = 0, seed_high = 0, position_low = 0, position_high = 0, stream = 0;
};

// Tokens come in tiles of 128. Counter 32 t + c gives the noise of tokens c, c + 32, c + 64 and
// c + 96 of tile t, so that neighbouring tokens are in neighbouring lanes.
constexpr int kRaceTile = 128;
constexpr int kRaceCounters = kRaceTile / 4;          // of a tile
constexpr uint32_t kRaceLowBits = uint32_t{1} << 31;  // in a counter: the low halves of the noise

FRESHET_HOST_DEVICE constexpr uint32_t race_counter(uint32_t token) {
  return token / kRaceTile * kRaceCounters + token % kRaceCounters;
}
FRESHET_HOST_DEVICE constexpr uint32_t race_word(uint32_t token) {
  return token / kRaceCounters % 4;
}

struct RaceWords {
  uint32_t of[4];
};
FRESHET_HOST_DEVICE constexpr RaceWords race_words(const RaceStream& s, uint32_t counter) {
  RaceWords words = {{s.position_low, s.position_high, s.stream, counter}};
  philox_rounds(words.of, s.seed_low, s.seed_high);
  return words;
}
FRESHET_HOST_DEVICE constexpr uint64_t race_noise(const RaceStream& s, uint32_t token) {
  const uint32_t counter = race_counter(token), word = race_word(token);
  return uint64_t{race_words(s, counter).of[word]} << 32 |
         race_words(s, counter | kRaceLowBits).of[word];
}

// -ln(1 - v) with v = (noise | 1) * 2^-64: positive and at least v - 2^-62; the error is below
// 2^-47 of the result plus 2^-62.
//
// 1 - v = 2^-n y with y in [1/2, 1). y is multiplied by c = 64 / (33 + i), the reciprocal of the
// upper end of its interval (one of 32), which leaves 1 - z with z < 1/33; ln(1 - z) is a series.
// Near v = 0 nothing but the series remains.
FRESHET_HOST_DEVICE inline double race_exponential(uint64_t noise) {
  static const uint64_t kReciprocal[32] = {
      // c * 2^63
      0xf83e0f83e0f83e0f, 0xf0f0f0f0f0f0f0f0, 0xea0ea0ea0ea0ea0e, 0xe38e38e38e38e38e,
      0xdd67c8a60dd67c8a, 0xd79435e50d79435e, 0xd20d20d20d20d20d, 0xcccccccccccccccc,
      0xc7ce0c7ce0c7ce0c, 0xc30c30c30c30c30c, 0xbe82fa0be82fa0be, 0xba2e8ba2e8ba2e8b,
      0xb60b60b60b60b60b, 0xb21642c8590b2164, 0xae4c415c9882b931, 0xaaaaaaaaaaaaaaaa,
      0xa72f05397829cbc1, 0xa3d70a3d70a3d70a, 0xa0a0a0a0a0a0a0a0, 0x9d89d89d89d89d89,
      0x9a90e7d95bc609a9, 0x97b425ed097b425e, 0x94f2094f2094f209, 0x9249249249249249,
      0x8fb823ee08fb823e, 0x8d3dcb08d3dcb08d, 0x8ad8f2fba9386822, 0x8888888888888888,
      0x864b8a7de6d1d608, 0x8421084210842108, 0x8208208208208208, 0x8000000000000000};
  static const uint64_t kLog[32] = {
      // ln c * 2^58
      0x02a645c4d0cf0ae6, 0x0287b3fe5f24789a, 0x026a0515b3b190b8, 0x024d2c42269b724f,
      0x02311dc81e4794cc, 0x0215cedc5a0a9f48, 0x01fb358af7a48843, 0x01e148a1a2726cd9,
      0x01c7ff9c74554c92, 0x01af5295248cdd06, 0x01973a3431356add, 0x017fafa3bd8151bf,
      0x0168ac83e9c6a142, 0x01522ae0738a3d7d, 0x013c25277333183b, 0x01269621134db928,
      0x011178e8227e47be, 0x00fcc8e3659d9bcc, 0x00e881bf932af3db, 0x00d49f69e456cf1b,
      0x00c11e0b2a8d1e0e, 0x00adfa035aa1ed90, 0x009b2fe580ac80b1, 0x0088bc74113f23df,
      0x00769c9d8e111a89, 0x0064cd7975652623, 0x00534c457481fab1, 0x00421662d678e81a,
      0x00312954293f6686, 0x002082bb13ce8889, 0x0010205658935847, 0x0000000000000000};
  constexpr uint64_t kLog2 = 0x02c5c85fdf473de7;                            // ln 2 * 2^58
  constexpr uint64_t kInverse[] = {0x1555555555555555, 0x1745d1745d1745d1,  // 2^64 / 12, ...
                                   0x1999999999999999, 0x1c71c71c71c71c71, 0x2000000000000000,
                                   0x2492492492492492, 0x2aaaaaaaaaaaaaaa, 0x3333333333333333,
                                   0x4000000000000000, 0x5555555555555555, 0x8000000000000000};
  const uint64_t rest = ~(noise | 1) + 1;  // 1 - v, in units of 2^-64
  const int n = leading_zeros(rest);
  const uint64_t y = rest << n;
  const uint32_t i = static_cast<uint32_t>(y >> 58) & 31;
  const uint64_t z = ((uint64_t{1} << 63) - high_product(y, kReciprocal[i])) << 1;
  uint64_t sum = 0;
  for (const uint64_t inverse : kInverse) sum = high_product(sum, z) + inverse;
  sum = z + high_product(high_product(sum, z), z);
  if (n == 0 && i == 31) return static_cast<double>(sum) * 0x1p-64;
  return static_cast<double>(static_cast<uint64_t>(n) * kLog2 + kLog[i] + (sum >> 6)) * 0x1p-58;
}

// The time of a token as an integer in the order of times. REQUIRES: weight > 0.
FRESHET_HOST_DEVICE inline uint64_t race_time(uint64_t noise, uint64_t weight) {
  const double time = race_exponential(noise) / static_cast<double>(weight);
  uint64_t bits;
  memcpy(&bits, &time, sizeof bits);
  return bits;
}

}  // namespace freshet::ops

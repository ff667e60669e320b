// Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3" (SC 2011). A pure function of (key, counter): a draw depends only on the request's seed
// and the token's position, never on other requests. Tested against Random123's vectors.
#pragma once

#include <array>
#include <cstdint>

#include "base/host_device.h"

namespace freshet {

// The ten rounds, in place, for GPU kernels too.
FRESHET_HOST_DEVICE constexpr void philox_rounds(uint32_t (&counter)[4], uint32_t key0,
                                                 uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53} * counter[0];
    const uint64_t p1 = uint64_t{0xCD9E8D57} * counter[2];
    counter[0] = static_cast<uint32_t>(p1 >> 32) ^ counter[1] ^ key0;
    counter[2] = static_cast<uint32_t>(p0 >> 32) ^ counter[3] ^ key1;
    counter[1] = static_cast<uint32_t>(p1);
    counter[3] = static_cast<uint32_t>(p0);
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
}

constexpr std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter,
                                             std::array<uint32_t, 2> key) {
  uint32_t words[] = {counter[0], counter[1], counter[2], counter[3]};
  philox_rounds(words, key[0], key[1]);
  return {words[0], words[1], words[2], words[3]};
}

// 64 random bits for draw `stream` at `position` of the request with `seed`.
constexpr uint64_t philox_bits(uint64_t seed, uint64_t position, uint32_t stream) {
  const auto r = philox4x32(
      {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), stream, 0},
      {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  return uint64_t{r[0]} << 32 | r[1];
}

// The first 53 of these bits, as a double in [0, 1).
constexpr double philox_uniform(uint64_t seed, uint64_t position, uint32_t stream) {
  return static_cast<double>(philox_bits(seed, position, stream) >> 11) * 0x1.0p-53;
}

}  // namespace freshet

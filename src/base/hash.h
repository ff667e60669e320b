// A fast hash of bytes, to detect that files differ: a change is missed with a probability of
// 2^-64. Not secure against somebody who looks for collisions. The same on all machines with one
// byte order.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>

namespace freshet {

inline uint64_t hash_mix(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

// Four independent lanes of multiplications, to run at memory speed.
inline uint64_t hash_bytes(std::span<const uint8_t> bytes, uint64_t seed = 0) {
  constexpr uint64_t kOdd[4] = {0x9e3779b97f4a7c15, 0xbf58476d1ce4e5b9, 0x94d049bb133111eb,
                                0xd6e8feb86659fd93};
  uint64_t lanes[4];
  for (int i = 0; i < 4; ++i) lanes[i] = seed ^ kOdd[i];
  const auto word_at = [&bytes](size_t at) {
    uint64_t word = 0;
    const size_t left = at < bytes.size() ? bytes.size() - at : 0;
    std::memcpy(&word, bytes.data() + (left > 0 ? at : 0), left < 8 ? left : 8);
    return word;
  };
  for (size_t at = 0; at < bytes.size(); at += 32) {
    for (size_t i = 0; i < 4; ++i) {
      // The addition keeps a word that cancels its lane from erasing the lane's state.
      lanes[i] = hash_mix(lanes[i] ^ word_at(at + 8 * i), kOdd[i]) + kOdd[3 - i];
    }
  }
  uint64_t hash = hash_mix(bytes.size() + kOdd[0], seed ^ kOdd[1]);
  for (int i = 0; i < 4; ++i) hash = hash_mix(hash ^ lanes[i], kOdd[i]) + lanes[i];
  return hash;
}

}  // namespace freshet

#include "kv_cache/block_key.h"

#include <bit>
#include <cstring>
#include <vector>

#include "base/status.h"
#include "kv_cache/prefix_tree.h"

namespace freshet::kv_cache {
namespace {

struct SipState {
  uint64_t a, b, c, d;
  void round() {
    a += b;
    b = std::rotl(b, 13) ^ a;
    a = std::rotl(a, 32);
    c += d;
    d = std::rotl(d, 16) ^ c;
    a += d;
    d = std::rotl(d, 21) ^ a;
    c += b;
    b = std::rotl(b, 17) ^ c;
    c = std::rotl(c, 32);
  }
  void absorb(uint64_t word) {
    d ^= word;
    round();
    round();
    a ^= word;
  }
  uint64_t squeeze() {
    for (int i = 0; i < 4; ++i) round();
    return a ^ b ^ c ^ d;
  }
};

}  // namespace

BlockKey siphash128(const BlockSecret& secret, std::span<const uint8_t> bytes) {
  SipState s{secret[0] ^ 0x736F6D6570736575, secret[1] ^ 0x646F72616E646F6D ^ 0xEE,
             secret[0] ^ 0x6C7967656E657261, secret[1] ^ 0x7465646279746573};
  size_t at = 0;
  for (; at + 8 <= bytes.size(); at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, bytes.data() + at, 8);
    s.absorb(word);
  }
  uint64_t last = static_cast<uint64_t>(bytes.size()) << 56;
  for (size_t i = at; i < bytes.size(); ++i) last |= uint64_t{bytes[i]} << (8 * (i - at));
  s.absorb(last);
  s.c ^= 0xEE;
  BlockKey key;
  key.low = s.squeeze();
  s.b ^= 0xDD;
  key.high = s.squeeze();
  return key;
}

// The first byte tells roots and blocks apart.
BlockKey BlockKeys::root(std::string_view salt) const {
  std::vector<uint8_t> text{'r'};
  text.insert(text.end(), salt.begin(), salt.end());
  return siphash128(secret_, text);
}

BlockKey BlockKeys::next(const BlockKey& parent, std::span<const int32_t> tokens) const {
  FRESHET_CHECK(!tokens.empty() && tokens.size() <= kBlockTokens);
  std::array<uint8_t, 1 + sizeof parent + kBlockTokens * sizeof(int32_t)> text;
  text[0] = 'b';
  std::memcpy(&text[1], &parent, sizeof parent);
  std::memcpy(&text[1 + sizeof parent], tokens.data(), tokens.size_bytes());
  return siphash128(secret_, std::span(text).first(1 + sizeof parent + tokens.size_bytes()));
}

}  // namespace freshet::kv_cache

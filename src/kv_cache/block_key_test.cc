#include "kv_cache/block_key.h"

#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

namespace freshet::kv_cache {
namespace {

std::string hex_of(const BlockKey& key) {
  uint8_t bytes[16];
  std::memcpy(bytes, &key.low, 8);
  std::memcpy(bytes + 8, &key.high, 8);
  std::string text;
  for (const uint8_t b : bytes) text += fmt::format("{:02x}", b);
  return text;
}

// The vectors that the authors of SipHash publish for 128 bits: key 00..0f, input 00, 01, 02 ...
TEST(BlockKey, IsSipHashWith128Bits) {
  const BlockSecret secret = {0x0706050403020100, 0x0F0E0D0C0B0A0908};
  std::vector<uint8_t> input(64);
  std::iota(input.begin(), input.end(), uint8_t{0});
  const auto of = [&](size_t n) { return hex_of(siphash128(secret, std::span(input).first(n))); };
  EXPECT_EQ(of(0), "a3817f04ba25a8e66df67214c7550293");
  EXPECT_EQ(of(1), "da87c1d86b99af44347659119b22fc45");
}

TEST(BlockKey, DependsOnSaltPrefixAndLength) {
  const BlockKeys keys({1, 2});
  std::vector<int32_t> tokens(16);
  std::iota(tokens.begin(), tokens.end(), 0);
  const BlockKey first = keys.next(keys.root(""), tokens);
  EXPECT_EQ(first, keys.next(keys.root(""), tokens));
  EXPECT_NE(first, keys.next(keys.root("tenant"), tokens));
  EXPECT_NE(first, keys.next(first, tokens));
  EXPECT_NE(first, keys.next(keys.root(""), std::span(tokens).first(15)));
  EXPECT_NE(first, BlockKeys({1, 3}).next(keys.root(""), tokens));
}

}  // namespace
}  // namespace freshet::kv_cache

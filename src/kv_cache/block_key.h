// Keys of cached blocks that hold outside of one process: what a block's bits depend on.
//
// The key of a block is a hash of all tokens up to its end and of the salt, as a chain: the key of
// a prefix and the tokens of the next block give the next key. The hash is SipHash-2-4 with 128
// bits (Aumasson and Bernstein 2012) under a secret key, so that clients cannot make two prefixes
// collide, and keys tell nobody who lacks the secret which texts were cached. What else the bits
// depend on (model, types, kernels) is the identity of a store, not a part of keys. Pure functions.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace freshet::kv_cache {

struct BlockKey {
  uint64_t low = 0;
  uint64_t high = 0;
  auto operator<=>(const BlockKey&) const = default;
};

// For hash tables: the key is a hash already.
struct BlockKeyHash {
  size_t operator()(const BlockKey& key) const { return static_cast<size_t>(key.low); }
};

using BlockSecret = std::array<uint64_t, 2>;

BlockKey siphash128(const BlockSecret& secret, std::span<const uint8_t> bytes);

class BlockKeys {
 public:
  explicit BlockKeys(const BlockSecret& secret) : secret_(secret) {}
  BlockKey root(std::string_view salt) const;  // of the empty prefix
  // The prefix `parent` and these tokens after it: a full block, or the part of one.
  BlockKey next(const BlockKey& parent, std::span<const int32_t> tokens) const;

 private:
  BlockSecret secret_;
};

}  // namespace freshet::kv_cache

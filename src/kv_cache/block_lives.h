// Lifetimes of cached blocks: measured for a sample of them, reported when they are evicted.
//
// A block is born when a sequence takes it, used whenever a later sequence finds it in the cache,
// and evicted when its room is needed. Blocks that are freed without an eviction are not reported.
// Times are microseconds of a clock that the caller keeps. Not synchronised.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace freshet::kv_cache {

struct BlockLife {
  int64_t lifetime = 0;       // birth to eviction
  int64_t idle = 0;           // last use, or birth, to eviction
  std::vector<int64_t> gaps;  // between the last uses
};

class BlockLives {
 public:
  // `share` in [0, 1] of the blocks are timed, evenly spread; 0: none.
  explicit BlockLives(double share) : share_(share) {}

  void set_time(int64_t now) { now_ = now; }
  void born(int group, int32_t block);
  void used(int group, int32_t block);
  void evicted(int group, int32_t block);
  // The blocks that were evicted since the last call.
  std::vector<BlockLife> take() { return std::exchange(ended_, {}); }

 private:
  static constexpr size_t kUses = 4;  // that are kept
  struct Life {
    int64_t birth = 0;
    std::vector<int64_t> uses;  // the last ones, oldest first
  };
  static uint64_t key(int group, int32_t block) {
    return static_cast<uint64_t>(group) << 32 | static_cast<uint32_t>(block);
  }

  const double share_;
  double due_ = 0.0;  // fraction of the next block to be timed
  int64_t now_ = 0;
  std::unordered_map<uint64_t, Life> lives_;  // of timed blocks
  std::vector<BlockLife> ended_;
};

}  // namespace freshet::kv_cache

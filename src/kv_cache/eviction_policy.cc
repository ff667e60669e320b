#include "kv_cache/eviction_policy.h"

#include <set>
#include <utility>
#include <vector>

#include "kv_cache/block_pool.h"

namespace freshet::kv_cache {
namespace {

class Lru final : public EvictionPolicy {
 public:
  explicit Lru(int32_t blocks) : released_at_(static_cast<size_t>(blocks), 0) {}

  void released(int32_t block) override { released_at_[static_cast<size_t>(block)] = ++clock_; }
  void add(int32_t block) override { order_.insert(key(block)); }
  void remove(int32_t block) override { order_.erase(key(block)); }
  bool contains(int32_t block) const override { return order_.contains(key(block)); }
  int32_t first() const override { return order_.empty() ? kNoBlock : order_.begin()->second; }

 private:
  std::pair<uint64_t, int32_t> key(int32_t block) const {
    return {released_at_[static_cast<size_t>(block)], block};
  }

  std::vector<uint64_t> released_at_;  // [blocks]
  std::set<std::pair<uint64_t, int32_t>> order_;
  uint64_t clock_ = 0;
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_lru_policy(int32_t blocks) {
  return std::make_unique<Lru>(blocks);
}

}  // namespace freshet::kv_cache

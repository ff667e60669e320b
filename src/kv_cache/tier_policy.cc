#include "kv_cache/tier_policy.h"

#include <algorithm>
#include <list>
#include <unordered_map>

namespace freshet::kv_cache {
namespace {

using KeyList = std::list<BlockKey>;
using MayGo = std::function<bool(const BlockKey&)>;

// The oldest key (at the end) that may go.
KeyList::iterator oldest_that_may_go(KeyList& list, const MayGo& may_go) {
  for (auto it = list.end(); it != list.begin();) {
    if (may_go(*--it)) return it;
  }
  return list.end();
}

class TierLru final : public TierPolicy {
 public:
  void added(const BlockKey& key) override {
    order_.push_front(key);
    at_[key] = order_.begin();
  }
  void used(const BlockKey& key) override { order_.splice(order_.begin(), order_, at_.at(key)); }
  void erased(const BlockKey& key) override {
    const auto found = at_.find(key);
    order_.erase(found->second);
    at_.erase(found);
  }
  bool evict(const BlockKey&, const MayGo& may_go, BlockKey& key) override {
    const auto it = oldest_that_may_go(order_, may_go);
    if (it == order_.end()) return false;
    key = *it;
    erased(key);
    return true;
  }

 private:
  KeyList order_;  // most recently used first
  std::unordered_map<BlockKey, KeyList::iterator, BlockKeyHash> at_;
};

class TierArc final : public TierPolicy {
 public:
  explicit TierArc(size_t capacity) : capacity_(std::max<size_t>(capacity, 1)) {}

  void added(const BlockKey& key) override {
    const auto found = at_.find(key);
    const bool again = found != at_.end();  // a ghost: it was evicted too early
    if (again) {
      adapt(found->second.list);
      lists_[found->second.list].erase(found->second.at);
    }
    put(again ? kOften : kOnce, key);
    trim();
  }
  void used(const BlockKey& key) override {
    const Place place = at_.at(key);
    lists_[place.list].erase(place.at);
    put(kOften, key);
  }
  void erased(const BlockKey& key) override {
    const auto found = at_.find(key);
    lists_[found->second.list].erase(found->second.at);
    at_.erase(found);
  }
  bool evict(const BlockKey& incoming, const MayGo& may_go, BlockKey& key) override {
    const auto ghost = at_.find(incoming);
    const bool often = ghost != at_.end() && ghost->second.list == kOftenGhost;
    const size_t once = lists_[kOnce].size();
    const bool first = once > 0 && (once > target_ || (often && once == target_));
    for (const int list : {first ? kOnce : kOften, first ? kOften : kOnce}) {
      const auto it = oldest_that_may_go(lists_[list], may_go);
      if (it == lists_[list].end()) continue;
      key = *it;
      lists_[list].erase(it);
      put(list == kOnce ? kOnceGhost : kOftenGhost, key);
      return true;
    }
    return false;
  }

 private:
  enum List { kOnce, kOften, kOnceGhost, kOftenGhost };
  struct Place {
    int list;
    KeyList::iterator at;
  };
  void put(int list, const BlockKey& key) {
    lists_[list].push_front(key);
    at_[key] = {list, lists_[list].begin()};
  }
  void adapt(int ghosts) {
    const size_t once = std::max<size_t>(lists_[kOnceGhost].size(), 1);
    const size_t often = std::max<size_t>(lists_[kOftenGhost].size(), 1);
    if (ghosts == kOnceGhost) {
      target_ = std::min(capacity_, target_ + std::max<size_t>(often / once, 1));
    } else {
      target_ -= std::min(target_, std::max<size_t>(once / often, 1));
    }
  }
  void trim() {
    const auto forget = [this](int list) {
      at_.erase(lists_[list].back());
      lists_[list].pop_back();
    };
    while (!lists_[kOnceGhost].empty() &&
           lists_[kOnce].size() + lists_[kOnceGhost].size() > capacity_)
      forget(kOnceGhost);
    while (!lists_[kOftenGhost].empty() && at_.size() > 2 * capacity_) forget(kOftenGhost);
  }

  const size_t capacity_;
  size_t target_ = 0;  // wanted size of kOnce
  KeyList lists_[4];   // most recently used first
  std::unordered_map<BlockKey, Place, BlockKeyHash> at_;
};

}  // namespace

Result<std::unique_ptr<TierPolicy>> make_tier_policy(std::string_view name, size_t capacity) {
  if (name == "lru") return std::unique_ptr<TierPolicy>(std::make_unique<TierLru>());
  if (name == "arc") return std::unique_ptr<TierPolicy>(std::make_unique<TierArc>(capacity));
  return invalid_argument("eviction_policy '{}': must be lru or arc", name);
}

}  // namespace freshet::kv_cache

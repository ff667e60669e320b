#include "kv_cache/block_lives.h"

namespace freshet::kv_cache {

void BlockLives::born(int group, int32_t block) {
  if (share_ <= 0.0) return;
  lives_.erase(key(group, block));  // of an earlier one in the same place
  due_ += share_;
  if (due_ < 1.0) return;
  due_ -= 1.0;
  lives_[key(group, block)].birth = now_;
}

void BlockLives::used(int group, int32_t block) {
  const auto found = lives_.find(key(group, block));
  if (found == lives_.end()) return;
  std::vector<int64_t>& uses = found->second.uses;
  if (uses.size() == kUses) uses.erase(uses.begin());
  uses.push_back(now_);
}

void BlockLives::evicted(int group, int32_t block) {
  const auto found = lives_.find(key(group, block));
  if (found == lives_.end()) return;
  const Life& life = found->second;
  BlockLife& end = ended_.emplace_back();
  end.lifetime = now_ - life.birth;
  end.idle = now_ - (life.uses.empty() ? life.birth : life.uses.back());
  for (size_t i = 1; i < life.uses.size(); ++i) end.gaps.push_back(life.uses[i] - life.uses[i - 1]);
  lives_.erase(found);
}

}  // namespace freshet::kv_cache

#include "grammar/cache.h"

#include <utility>

namespace freshet::grammar {

Result<std::shared_ptr<const Grammar>> GrammarCache::get(const json::Value& description) {
  std::string key = json::write(description);
  {
    const std::lock_guard lock(mutex_);
    if (const auto it = by_key_.find(key); it != by_key_.end()) {
      entries_.splice(entries_.begin(), entries_, it->second);
      return it->second->grammar;
    }
  }
  FRESHET_ASSIGN_OR_RETURN(std::shared_ptr<const Grammar> fresh,
                           Grammar::from_description(trie_, description));
  const size_t bytes = fresh->bytes() + 2 * key.size();
  const std::lock_guard lock(mutex_);
  if (const auto it = by_key_.find(key); it != by_key_.end()) return it->second->grammar;
  entries_.push_front({key, fresh, bytes});
  by_key_.emplace(std::move(key), entries_.begin());
  bytes_ += bytes;
  while (bytes_ > max_bytes_ && entries_.size() > 1) {
    bytes_ -= entries_.back().bytes;
    by_key_.erase(entries_.back().key);
    entries_.pop_back();
  }
  return fresh;
}

}  // namespace freshet::grammar

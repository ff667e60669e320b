#include "scheduler/offload.h"

#include <algorithm>
#include <utility>

namespace freshet::scheduler {

using kv_cache::BlockKey;
using kv_cache::BlockTable;
using kv_cache::BlockUnit;
using kv_cache::kBlockTokens;
using kv_cache::kNoBlock;

// The key of the prefix that ends with this full block. Keys are made when they are needed first.
const BlockKey& Offload::key(Sequence& s, int32_t block) {
  std::vector<BlockKey>& keys = s.tier.keys;
  while (std::ssize(keys) <= block) {
    const auto at = keys.size() * kBlockTokens;
    const BlockKey parent = keys.empty() ? store_.root(s.request->salt) : keys.back();
    keys.push_back(extend(parent, s, at, kBlockTokens));
  }
  return keys[static_cast<size_t>(block)];
}

BlockKey Offload::tail_key(Sequence& s, int32_t tokens) {
  const int32_t full = tokens / kBlockTokens;
  const BlockKey parent = full == 0 ? store_.root(s.request->salt) : key(s, full - 1);
  const auto at = static_cast<size_t>(full) * kBlockTokens;
  return extend(parent, s, at, static_cast<size_t>(tokens) - at);
}

// The key of the prefix `parent` and the tokens [from, from + count) after it, with what they show.
BlockKey Offload::extend(BlockKey parent, const Sequence& s, size_t from, size_t count) const {
  for (const PictureMark& mark :
       marks_of(s.pictures, static_cast<int32_t>(from), static_cast<int32_t>(count)))
    parent = store_.next(parent, mark);
  return store_.next(parent, std::span(s.tokens).subspan(from, count));
}

bool Offload::has_all(const BlockKey& key) {
  for (int g = 0; g < cache_.groups(); ++g) {
    if (!store_.has(key, g)) return false;
  }
  return true;
}

// ---- loading ---------------------------------------------------------------------------------

// The longest prefix for which every group has the blocks that the next query reads: cached, or
// in the store.
Offload::Found Offload::longest(Sequence& s, std::span<const int32_t> tokens) {
  Found found;
  const auto size = static_cast<int32_t>(tokens.size());
  found.cached = cache_.cached(s.request->salt, tokens) / kBlockTokens;
  const int32_t full = size / kBlockTokens;
  const int groups = cache_.groups();
  // run[g]: blocks in a row that end before `length` and are in the store.
  std::vector<int32_t> run(static_cast<size_t>(groups), 0);
  found.blocks = found.cached;
  bool complete = true;  // groups with full attention have all blocks so far
  for (int32_t length = found.cached + 1; length <= full && complete; ++length) {
    const BlockKey k = key(s, length - 1);
    bool good = true;
    for (int g = 0; g < groups; ++g) {
      int32_t& r = run[static_cast<size_t>(g)];
      r = store_.has(k, g) ? r + 1 : 0;
      complete = complete && (cache_.window(g) != 0 || r == length - found.cached);
      const int32_t from = std::max(found.cached, cache_.first_read(g, length * kBlockTokens));
      good = good && r >= length - from;
    }
    if (complete && good) found.blocks = length;
  }
  found.tokens = found.blocks * kBlockTokens;
  // A last block in part is there only if a sequence with these very tokens lost it. With a window
  // it reads no more of the blocks before it than they do.
  if (found.blocks == full && size > found.tokens) {
    found.tail = tail_key(s, size);
    if (has_all(found.tail)) {
      found.tokens = size;
      ++found.blocks;
    }
  }
  return found;
}

bool Offload::find(Sequence& s, std::span<const int32_t> tokens) {
  s.tier.looked = true;
  const Found found = longest(s, tokens);
  if (found.blocks == found.cached) return false;
  Load load;
  load.sequence = &s;
  load.first = found.cached;
  load.tokens = found.tokens;
  for (int32_t i = found.cached; i < found.blocks; ++i) {
    const bool part = i == found.tokens / kBlockTokens;
    const BlockKey k = part ? found.tail : key(s, i);
    for (int g = 0; g < cache_.groups(); ++g) {
      if (i < cache_.first_read(g, found.tokens)) continue;
      load.units.push_back({k, g, kNoBlock, part ? found.tokens % kBlockTokens : kBlockTokens});
      load.blocks.push_back(i);
    }
  }
  const int32_t gained = found.tokens - found.cached * kBlockTokens;
  if (!store_.pays(load.units, gained, false)) return false;
  std::vector<kv_cache::BlockCopy> copies;
  const auto cached = static_cast<size_t>(found.cached) * kBlockTokens;
  cache_.begin(s.tier.loaded, s.request->salt, tokens.first(cached), copies);
  FRESHET_CHECK(copies.empty() && s.tier.loaded.registered == found.cached);
  found_ = std::move(load);
  return true;
}

bool Offload::order(Sequence& s, bool fits) {
  FRESHET_CHECK(found_.sequence == &s);
  Load load = std::exchange(found_, {});
  if (!fits || !cache_.reserve_load(s.tier.loaded, load.tokens)) {
    cache_.release(s.tier.loaded);
    s.tier.looked = false;  // once there is room
    return false;
  }
  for (size_t i = 0; i < load.units.size(); ++i) {
    BlockUnit& unit = load.units[i];
    unit.block =
        s.tier.loaded.ids[static_cast<size_t>(unit.group)][static_cast<size_t>(load.blocks[i])];
  }
  store_.touch(std::span(s.tier.keys).first(static_cast<size_t>(load.tokens / kBlockTokens)));
  pending_.push_back(std::move(load));
  return true;
}

void Offload::issue() {
  for (Load& load : pending_) {
    std::vector<BlockUnit> units = load.units;
    const uint64_t ticket = store_.load(std::move(units));
    if (load.sequence != nullptr) load.sequence->tier.ticket = ticket;
    loads_.emplace(ticket, std::move(load));
  }
  pending_.clear();
}

// The tokens that the table holds after a load of which some units may have failed.
int32_t Offload::usable_end(const Load& load, const std::vector<bool>& ok) const {
  const auto failed = std::ranges::find(ok, false);
  if (failed == ok.end()) return load.tokens;
  for (int g = 0; g < cache_.groups(); ++g) {
    // A shorter prefix would need other blocks of the window.
    if (cache_.window(g) != 0) return load.first * kBlockTokens;
  }
  return load.blocks[static_cast<size_t>(failed - ok.begin())] * kBlockTokens;
}

void Offload::end(Load& load, const std::vector<bool>& ok) {
  if (load.sequence == nullptr) {
    // What was loaded is not registered, because the tokens are gone with the sequence.
    cache_.release(load.orphan);
    return;
  }
  Sequence& s = *load.sequence;
  TierState& tier = s.tier;
  tier.ticket = 0;
  tier.loaded_tokens = usable_end(load, ok);
  if (tier.loaded_tokens <= load.first * kBlockTokens) {
    cache_.truncate(tier.loaded, load.first);
    cache_.release(tier.loaded);
    tier.loaded_tokens = 0;
    return;
  }
  cache_.truncate(tier.loaded, (tier.loaded_tokens + kBlockTokens - 1) / kBlockTokens);
  cache_.computed(tier.loaded, s.cached_as(), tier.loaded_tokens);
  tier.from_store = tier.loaded_tokens - load.first * kBlockTokens;
  ready_.push_back(&s);
}

std::vector<Sequence*> Offload::take_loaded() {
  std::vector<Sequence*> ended;
  for (const kv_cache::LoadResult& result : store_.take_loaded()) {
    const auto found = loads_.find(result.ticket);
    if (found == loads_.end()) continue;
    Load load = std::move(found->second);
    loads_.erase(found);
    end(load, result.ok);
    if (load.sequence != nullptr) ended.push_back(load.sequence);
  }
  return ended;
}

void Offload::forget(Sequence& s) {
  std::erase(ready_, &s);
  for (size_t i = 0; i < pending_.size(); ++i) {
    if (pending_[i].sequence != &s) continue;
    pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(i));
    break;
  }
  if (const auto found = loads_.find(s.tier.ticket); found != loads_.end()) {
    found->second.sequence = nullptr;
    found->second.orphan = std::exchange(s.tier.loaded, {});
  }
  s.tier.ticket = 0;
  cache_.release(s.tier.loaded);
}

bool Offload::take(Sequence& s, int32_t cached) {
  if (s.tier.loaded.empty()) return false;
  if (cached > s.tier.loaded_tokens) {
    forget(s);
    return false;
  }
  s.blocks = std::exchange(s.tier.loaded, {});
  return true;
}

void Offload::put_back(Sequence& s) {
  s.tier.loaded = std::exchange(s.blocks, {});
}

bool Offload::drop_one(const Sequence& for_whom) {
  for (size_t i = ready_.size(); i-- > 0;) {
    if (ready_[i] == &for_whom) continue;
    forget(*ready_[i]);
    return true;
  }
  return false;
}

// ---- saving ----------------------------------------------------------------------------------

void Offload::save(Sequence& s) {
  if (s.blocks.evicts()) return;  // tokens alone do not tell what its blocks hold
  int32_t end = s.blocks.registered;
  if (prompt_only_) end = std::min(end, s.prompt_tokens / kBlockTokens);
  if (s.tier.saved >= end) return;
  for (int32_t i = s.tier.saved; i < end; ++i) {
    const BlockKey k = key(s, i);
    for (int g = 0; g < cache_.groups(); ++g) {
      const int32_t block = s.blocks.ids[static_cast<size_t>(g)][static_cast<size_t>(i)];
      if (block != kNoBlock) store_.store({k, g, block, kBlockTokens}, false);
    }
  }
  s.tier.saved = end;
  store_.touch(std::span(s.tier.keys).first(static_cast<size_t>(end)));
}

void Offload::swap_out(Sequence& s) {
  // Without a node in the tree nothing is shared, and tokens alone do not tell what a block holds.
  if (s.computed == 0 || s.blocks.empty() || s.blocks.node == kv_cache::kNoNode) return;
  const int32_t computed = s.sharable(s.computed);
  const int32_t full = std::min(computed / kBlockTokens, s.blocks.registered);
  std::vector<BlockUnit> units;
  const auto add = [&](const BlockKey& k, int32_t i, int32_t tokens) {
    for (int g = 0; g < cache_.groups(); ++g) {
      const int32_t block = s.blocks.ids[static_cast<size_t>(g)][static_cast<size_t>(i)];
      if (block != kNoBlock && !store_.has(k, g)) units.push_back({k, g, block, tokens});
    }
  };
  for (int32_t i = 0; i < full; ++i) add(key(s, i), i, kBlockTokens);
  // Beside what may not be shared the last block is of no use.
  const int32_t tail = computed < s.computed ? 0 : computed % kBlockTokens;
  if (tail > 0 && full == computed / kBlockTokens) add(tail_key(s, computed), full, tail);
  if (units.empty() || !store_.pays(units, computed, true)) return;
  for (const BlockUnit& unit : units) {
    if (!store_.store(unit, true)) break;
  }
}

void Offload::list_tables(std::vector<const BlockTable*>& tables) const {
  for (const auto& [ticket, load] : loads_) tables.push_back(&load.orphan);
}

}  // namespace freshet::scheduler

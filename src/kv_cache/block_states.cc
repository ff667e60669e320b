// The group of states in BlockCache: working slots, checkpoints and slots for drafts.
#include <algorithm>
#include <utility>

#include "kv_cache/block_cache.h"

namespace freshet::kv_cache {

// Whether the tree is the only other holder of a table's slot.
bool BlockCache::only_the_tree_shares(int32_t slot) const {
  const Cached& c = cached_[static_cast<size_t>(state_group_)];
  return pool(state_group_).refs(slot) == 2 && c.node[static_cast<size_t>(slot)] != kNoNode;
}

// A working slot of the table's own, which begins as a copy of the one that it shares; and a slot
// for the state in front of each draft. Without a free slot the checkpoint itself becomes the
// working slot. REQUIRES: as reserve() has checked.
void BlockCache::reserve_state(BlockTable& table, int32_t end, std::vector<BlockCopy>& copies,
                               int32_t drafts) {
  const int g = state_group_;
  FRESHET_CHECK(table.saves.empty(), "reserve() before settle()");
  std::vector<int32_t>& ids = table.ids[static_cast<size_t>(g)];
  if (ids.empty()) {
    ids.push_back(take(g));
  } else if (pool(g).refs(ids.front()) > 1) {
    int32_t& id = ids.front();
    if (only_the_tree_shares(id) && available(g) <= drafts) {
      const NodeId node = cached_of(g).node[static_cast<size_t>(id)];
      take_from_tree(node, g);
      prune(node);
    } else {
      const int32_t to = take(g);
      copies.push_back({g, id, to});
      unref(g, id);
      id = to;
    }
  }
  table.state_end = end;
  for (int32_t i = 0; i < drafts; ++i) table.saves.push_back({end - drafts + i, take(g)});
}

bool BlockCache::keep_state(BlockTable& table, int32_t tokens, bool rolls) {
  if (!options_.share_prefixes) return false;
  FRESHET_CHECK(tokens > 0 && tokens % kBlockTokens == 0, "a checkpoint behind {} tokens", tokens);
  const auto at = std::ranges::lower_bound(table.saves, tokens, {}, &SavedState::tokens);
  if (at != table.saves.end() && at->tokens == tokens) {
    at->keep = true;
    at->rolls = at->rolls || rolls;
    return true;
  }
  if (rolls) drop_rolled(table);
  if (available(state_group_) == 0) return false;
  table.saves.insert(at, {tokens, take(state_group_), true, rolls});
  return true;
}

// Frees the table's rolling checkpoint, unless another sequence has begun with it.
void BlockCache::drop_rolled(BlockTable& table) {
  const NodeId node = std::exchange(table.rolled, kNoNode);
  const int g = state_group_;
  if (node == kNoNode) return;
  const int32_t slot = table.rolled_slot;
  // The node is in front of the sequence's own, so it is the same one as before.
  if (tree_.block(node, g) != slot || pool(g).refs(slot) != 1) return;
  take_from_tree(node, g);
}

// The node of the table's first `depth` blocks.
NodeId BlockCache::ancestor(const BlockTable& table, int32_t depth) const {
  NodeId node = table.node;
  for (int32_t d = table.registered; d > depth; --d) node = tree_.parent(node);
  return node;
}

void BlockCache::settle(BlockTable& table, int32_t tokens) {
  if (table.saves.empty()) return;
  const int g = state_group_;
  int32_t& working = table.ids[static_cast<size_t>(g)].front();
  for (const SavedState& saved : table.saves) {
    if (saved.tokens == tokens && table.state_end != tokens) {  // the drafts behind were rejected
      ref(g, saved.slot);
      unref(g, std::exchange(working, saved.slot));
      table.state_end = tokens;
    }
    const int32_t depth = saved.tokens / kBlockTokens;
    if (saved.keep && saved.tokens <= tokens && depth <= table.registered) {
      const NodeId node = ancestor(table, depth);
      if (tree_.block(node, g) == kNoBlock) {
        if (saved.rolls) drop_rolled(table);
        give_to_tree(node, g, saved.slot);
        if (saved.rolls) {
          table.rolled = node;
          table.rolled_slot = saved.slot;
        }
      }
    }
    unref(g, saved.slot);
  }
  FRESHET_CHECK(table.state_end == tokens, "no state behind {} tokens", tokens);
  table.saves.clear();
}

}  // namespace freshet::kv_cache

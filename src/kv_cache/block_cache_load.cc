// What loads from a BlockStore need of the cache, and taking a prefix out of it.
#include <algorithm>

#include "kv_cache/block_cache.h"

namespace freshet::kv_cache {

bool BlockCache::reserve_load(BlockTable& table, int32_t end) {
  const int32_t blocks = (end + kBlockTokens - 1) / kBlockTokens;
  slide(table, end);
  for (int g = 0; g < groups(); ++g) {
    const int32_t first = std::max(table.blocks(g), window_start(g, end));
    if (std::max(0, blocks - first) > available(g)) return false;
  }
  for (int g = 0; g < groups(); ++g) {
    std::vector<int32_t>& ids = table.ids[static_cast<size_t>(g)];
    const int32_t start = window_start(g, end);
    while (table.blocks(g) < blocks) ids.push_back(table.blocks(g) < start ? kNoBlock : take(g));
    table.first[static_cast<size_t>(g)] = std::max(table.first[static_cast<size_t>(g)], start);
  }
  return true;
}

void BlockCache::truncate(BlockTable& table, int32_t blocks) {
  FRESHET_CHECK(blocks >= table.registered, "registered blocks stay");
  for (int g = 0; g < groups(); ++g) {
    std::vector<int32_t>& ids = table.ids[static_cast<size_t>(g)];
    while (table.blocks(g) > blocks) {
      if (ids.back() != kNoBlock) unref(g, ids.back());
      ids.pop_back();
    }
  }
}

int32_t BlockCache::forget(std::string_view salt, std::span<const int32_t> tokens) {
  const Path path = find(salt, tokens);
  int32_t erased = 0;
  for (auto node = path.nodes.rbegin(); node != path.nodes.rend(); ++node) {
    if (!tree_.is_leaf(*node)) break;  // another text goes on from here
    int chosen = -1;
    for (int g = 0; g < groups(); ++g) {
      const int32_t block = tree_.block(*node, g);
      if (block == kNoBlock) continue;
      if (pool(g).refs(block) > 1) return erased;  // a sequence holds it
      if (chosen < 0 || evicts_leaves_only(g)) chosen = g;
    }
    if (chosen < 0) continue;
    for (int g = 0; g < groups(); ++g) {
      if (const int32_t block = tree_.block(*node, g); block != kNoBlock && g != chosen)
        take_from_tree(*node, g);
    }
    evict(chosen, tree_.block(*node, chosen));
    erased += kBlockTokens;
  }
  return erased;
}

}  // namespace freshet::kv_cache

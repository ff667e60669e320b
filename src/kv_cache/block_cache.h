// Which blocks a sequence holds: allocation, sharing of prefixes, copy on write, sliding windows
// and eviction. Integers only; the bytes are kv_storage.h's.
//
// Layers with one attention window form a group, and each group has a pool of block ids. A
// sequence's BlockTable lists its ids a group: entry i holds tokens [i * kBlockTokens, (i + 1) *
// kBlockTokens). Full blocks enter a radix tree (prefix_tree.h) as they are computed, and the tree
// holds a reference of its own; a block that only the tree holds is idle: kept for whoever comes
// with the same prefix, evicted least recently used when a pool runs dry. A group with a window
// drops blocks that no query can reach any more; such a prefix is found again only where the
// window's blocks are still there. Where a prefix ends inside a cached block, that block is copied
// and used in part: copying is cheaper than computing even one token.
//
// The caller performs BlockCopy lists in order, before the step that reads the blocks. Law: every
// reference belongs to a table or to the tree; check() verifies it. Not synchronised.
#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "kv_cache/block_lives.h"
#include "kv_cache/block_pool.h"
#include "kv_cache/prefix_tree.h"

namespace freshet::kv_cache {

struct GroupConfig {
  int window = 0;      // 0: full attention
  int32_t blocks = 0;  // size of the pool
};

struct BlockCopy {
  int group = 0;
  int32_t from = 0;
  int32_t to = 0;
};

// What one sequence holds. Moved and copied only by BlockCache.
struct BlockTable {
  std::vector<std::vector<int32_t>> ids;  // [groups][blocks]; kNoBlock: slid out of the window
  std::vector<int32_t> first;             // [groups] entries below are kNoBlock
  NodeId node = kNoNode;                  // where the sequence stands in the tree
  int32_t registered = 0;                 // its depth, in blocks

  int32_t blocks(int group) const {
    return static_cast<int32_t>(ids[static_cast<size_t>(group)].size());
  }
  bool empty() const { return ids.empty(); }
};

class BlockCache {
 public:
  struct Options {
    std::vector<GroupConfig> groups;
    bool share_prefixes = true;
    uint64_t hash_seed = 0;
    double timed_share = 0.0;  // of blocks, whose lives() are kept
  };
  explicit BlockCache(Options options);

  int groups() const { return static_cast<int>(pools_.size()); }
  int window(int group) const { return options_.groups[static_cast<size_t>(group)].window; }
  const BlockPool& pool(int group) const { return pools_[static_cast<size_t>(group)]; }
  int32_t idle(int group) const { return lru_[static_cast<size_t>(group)].idle; }
  // Blocks that can be had: free ones and idle ones.
  int32_t available(int group) const { return pool(group).free() + idle(group); }

  // Makes `table` (empty) hold the longest cached prefix of `tokens`; returns its length in tokens.
  // With share_prefixes off that is 0.
  int32_t begin(BlockTable& table, std::string_view salt, std::span<const int32_t> tokens,
                std::vector<BlockCopy>& copies);
  // For lives(): the `cached` tokens that begin() found for the table are used after all.
  void used(const BlockTable& table, int32_t cached);
  // How much of `tokens` begin() would find now, had it room for a copy.
  int32_t cached(std::string_view salt, std::span<const int32_t> tokens) const;
  // Makes room for tokens [computed, end). All or nothing; false: not enough blocks.
  bool reserve(BlockTable& table, int32_t computed, int32_t end, std::vector<BlockCopy>& copies);
  // The largest `end` in [computed, want] that reserve() would grant.
  int32_t fit(const BlockTable& table, int32_t computed, int32_t want) const;
  // Blocks of the group that a sequence with `table` would still have to take to get to `end`
  // tokens in steps of `chunk`.
  int32_t still_needs(const BlockTable& table, int group, int32_t end, int32_t chunk) const;
  // The most blocks that a sequence in a group with `window` can hold at once.
  static int32_t most_blocks(int window, int32_t end, int32_t chunk);

  // The first `computed` of `tokens` are in the cache now: offers full blocks to the tree and drops
  // what slid out of windows.
  void computed(BlockTable& table, std::span<const int32_t> tokens, int32_t computed);
  // A second table over the blocks of the first `computed` tokens.
  BlockTable fork(const BlockTable& table, int32_t computed);
  void release(BlockTable& table);  // leaves it empty
  BlockLives& lives() { return lives_; }
  void drop_idle();  // forgets every prefix that no sequence holds

  // Whether all references are those of `tables` and of the tree.
  Status check(std::span<const BlockTable* const> tables) const;

 private:
  // Idle blocks of a group. `order` has those that may be evicted now: where attention is full only
  // leaves of the tree, since a prefix is useless without its beginning.
  struct Lru {
    std::set<std::pair<uint64_t, int32_t>> order;  // (tick, block)
    std::vector<uint64_t> tick;                    // [blocks]
    std::vector<NodeId> node;                      // [blocks] kNoNode: not in the tree
    int32_t idle = 0;
  };
  struct Path {
    std::vector<NodeId> nodes;  // one a full block
    PrefixTree::Partial partial;
  };

  BlockPool& pool_of(int group) { return pools_[static_cast<size_t>(group)]; }
  Lru& lru(int group) { return lru_[static_cast<size_t>(group)]; }
  bool evicts_leaves_only(int group) const { return window(group) == 0; }
  void ref(int group, int32_t block);
  void unref(int group, int32_t block);
  void list(int group, int32_t block);    // in order, if it may be evicted
  void unlist(int group, int32_t block);  // out of order
  int32_t take(int group);                // evicts if it must; REQUIRES: available(group) > 0
  void evict(int group, int32_t block);
  void give_to_tree(NodeId node, int group, int32_t block);
  void take_from_tree(NodeId node, int group);
  void prune(NodeId node);
  void move_cursor(BlockTable& table, NodeId to);

  Path find(std::string_view salt, std::span<const int32_t> tokens) const;
  int32_t usable(const Path& path) const;
  int32_t window_start(int group,
                       int32_t computed) const;  // first block that a next query may read
  bool copies_on_write(const BlockTable& table, int group, int32_t computed) const;
  void offer(BlockTable& table, std::span<const int32_t> block_tokens);
  void slide(BlockTable& table, int32_t computed);

  Options options_;
  std::vector<BlockPool> pools_;
  std::vector<Lru> lru_;
  PrefixTree tree_;
  BlockLives lives_;
  uint64_t clock_ = 0;
};

}  // namespace freshet::kv_cache

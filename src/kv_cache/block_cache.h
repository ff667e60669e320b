// The blocks of each sequence: allocation, prefix sharing, copy on write, sliding windows and
// eviction. Integers only; kv_storage.h has the bytes.
//
// Layers with the same attention window form a group, and each group has a pool of block ids. A
// sequence's BlockTable lists its ids for each group: entry i holds tokens [i * kBlockTokens, (i +
// 1) * kBlockTokens). Full blocks enter a radix tree (prefix_tree.h) as they are computed, and the
// tree holds a reference of its own. A block that only the tree holds is idle: it is kept for later
// sequences with the same prefix, and evicted when its pool runs out (eviction_policy.h). A group
// with a window drops blocks that no later query can reach; such a prefix is found again only while
// the blocks of its window are still there. If a prefix ends inside a cached block, that block is
// copied and used in part, because a copy is cheaper than computing even one token.
//
// The group of states (kv_storage.h) has one block for each sequence, its working slot, which every
// step overwrites. A step may keep the state at some positions in further slots (keep_state). They
// become checkpoints: blocks of the tree's nodes, evicted on their own. With such a group a prefix
// ends at the deepest node that has a checkpoint and all other blocks; its working slot begins as a
// copy of the checkpoint, made by copy on write. Rows of drafts have a slot each, from which
// settle() takes the state behind the last accepted draft.
//
// The caller performs the BlockCopy lists in order, before the step that reads the blocks. Every
// reference belongs to a table or to the tree; check() verifies this. Not synchronised.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "kv_cache/block_lives.h"
#include "kv_cache/block_pool.h"
#include "kv_cache/eviction_policy.h"
#include "kv_cache/kv_storage.h"
#include "kv_cache/prefix_tree.h"

namespace freshet::kv_cache {

struct GroupConfig {
  int window = 0;      // 0: full attention
  int32_t blocks = 0;  // size of the pool
  KvKind kind = KvKind::kTokens;
};

struct BlockCopy {
  int group = 0;
  int32_t from = 0;
  int32_t to = 0;
};

// A copy of the state that the next step makes when it has computed `tokens` tokens.
struct SavedState {
  int32_t tokens = 0;
  int32_t slot = kNoBlock;
  bool keep = false;   // for the tree; otherwise only for drafts that may be rejected
  bool rolls = false;  // in the tree it takes the place of the last one that rolled
};

// The blocks of one sequence. Only BlockCache changes or copies it.
struct BlockTable {
  std::vector<std::vector<int32_t>> ids;  // [groups][blocks]; kNoBlock: outside the window
  std::vector<int32_t> first;             // [groups] entries below are kNoBlock
  NodeId node = kNoNode;                  // the sequence's node in the tree
  int32_t registered = 0;                 // depth of `node`, in blocks
  // With a group of states:
  std::vector<SavedState> saves;  // between reserve() and settle(), ascending
  int32_t state_end = 0;          // tokens behind which the step leaves the working slot
  int32_t junction = 0;           // tokens of the prefix that the tree knows, if it lacks the state
  NodeId rolled = kNoNode;        // the node with the last rolling checkpoint ...
  int32_t rolled_slot = kNoBlock;  // ... and its slot
  // [groups] tokens whose slots were evicted: token p is in slot p - evicted, if it is newer than
  // the last eviction. The blocks of such a table never enter the tree.
  std::vector<int32_t> evicted;
  // Empty, or [groups][blocks]: whole blocks, which hold the evicted tokens in 4 bits.
  std::vector<std::vector<int32_t>> coarse;

  bool evicts() const { return !evicted.empty(); }
  int32_t coarse_slots(int group) const {
    return coarse.empty() ? 0 : evicted[static_cast<size_t>(group)];
  }
  // The slots that the first `tokens` tokens take.
  int32_t slots(int group, int32_t tokens) const {
    return evicted.empty() ? tokens : tokens - evicted[static_cast<size_t>(group)];
  }

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
    double timed_share = 0.0;  // share of blocks whose lifetimes lives() measures
    std::unique_ptr<EvictionPolicy> (*eviction)(int32_t blocks) = make_lru_policy;
  };
  explicit BlockCache(Options options);

  int groups() const { return static_cast<int>(pools_.size()); }
  int window(int group) const { return options_.groups[static_cast<size_t>(group)].window; }
  KvKind kind(int group) const { return options_.groups[static_cast<size_t>(group)].kind; }
  int state_group() const { return state_group_; }  // -1: none
  const BlockPool& pool(int group) const { return pools_[static_cast<size_t>(group)]; }
  int32_t idle(int group) const { return cached_[static_cast<size_t>(group)].idle; }
  // Blocks that can be taken: free and idle ones.
  int32_t available(int group) const { return pool(group).free() + idle(group); }

  // Gives the empty `table` the longest cached prefix of `tokens`, and returns its length in
  // tokens: 0 without share_prefixes.
  int32_t begin(BlockTable& table, std::string_view salt, std::span<const int32_t> tokens,
                std::vector<BlockCopy>& copies);
  // For lives(): the sequence starts with the `cached` tokens that begin() found.
  void used(const BlockTable& table, int32_t cached);
  // How many of `tokens` begin() would find now, given room for a copy.
  int32_t cached(std::string_view salt, std::span<const int32_t> tokens) const;
  // Allocates blocks for tokens [computed, end), and slots for the states in front of the last
  // `drafts` of them. All or nothing; false: not enough blocks.
  bool reserve(BlockTable& table, int32_t computed, int32_t end, std::vector<BlockCopy>& copies,
               int32_t drafts = 0);
  // The step for which reserve() was called last keeps the state behind `tokens` tokens, a multiple
  // of kBlockTokens, for the tree. `rolls`: it replaces the table's last checkpoint that rolled.
  // Returns false if there is no slot; nothing depends on it.
  bool keep_state(BlockTable& table, int32_t tokens, bool rolls);
  // After computed(), once it is known that the sequence goes on behind `tokens` tokens: the state
  // there becomes the working one, kept states become checkpoints, and other slots are given back.
  void settle(BlockTable& table, int32_t tokens);
  // The largest `end` in [computed, want] that reserve() would grant.
  int32_t fit(const BlockTable& table, int32_t computed, int32_t want) const;
  // Blocks of the group that a sequence with `table` still needs to reach `end` tokens in steps of
  // `chunk`.
  int32_t still_needs(const BlockTable& table, int group, int32_t end, int32_t chunk) const;
  // The most blocks that a sequence in a group of tokens with `window` can hold at once.
  static int32_t most_blocks(int window, int32_t end, int32_t chunk);
  // The same in any group, without slots for drafts and checkpoints.
  static int32_t most_blocks(const KvGroup& group, int32_t end, int32_t chunk);
  int32_t most_blocks_in(int group, int32_t end, int32_t chunk) const;

  // The first `computed` of `tokens` are in the cache now: adds full blocks to the tree, of the
  // first `shared` tokens, and drops blocks outside of windows.
  void computed(BlockTable& table, std::span<const int32_t> tokens, int32_t computed,
                int32_t shared = std::numeric_limits<int32_t>::max());
  // A second table over the blocks of the first `computed` tokens.
  BlockTable fork(const BlockTable& table, int32_t computed);
  // Leaves the first kept[g] of the slots of `computed` tokens in fresh blocks, for groups that
  // have more; 0: all. The caller copies slots of the old blocks, `before`, to the new ones: their
  // contents last until the next blocks are written. False: not enough blocks; nothing changed.
  // parts: empty, or [groups]: the other slots stay as coarse tokens, this many coarse blocks in a
  // block of table.coarse. Its last block is replaced if it isn't full and others hold it, too.
  bool compact(BlockTable& table, int32_t computed, std::span<const int32_t> kept,
               std::vector<std::vector<int32_t>>& before, std::span<const int32_t> parts = {});
  void release(BlockTable& table);  // leaves it empty
  // For loads (block_store.h). Allocates what follows the table's whole blocks, up to `end` tokens,
  // as far as the query after them reads it. All or nothing. REQUIRES: a table of whole blocks.
  bool reserve_load(BlockTable& table, int32_t end);
  void truncate(BlockTable& table, int32_t blocks);  // drops the entries from `blocks` on
  // The first block that the query after `computed` tokens reads.
  int32_t first_read(int group, int32_t computed) const { return window_start(group, computed); }
  BlockLives& lives() { return lives_; }
  // Evicts the idle blocks at the end of a cached prefix; returns how many tokens they held.
  int32_t forget(std::string_view salt, std::span<const int32_t> tokens);
  void drop_idle();  // evicts every prefix that no sequence holds

  // An error unless all references belong to `tables` and the tree.
  Status check(std::span<const BlockTable* const> tables) const;

 private:
  // Cached blocks of a group.
  struct Cached {
    std::unique_ptr<EvictionPolicy> evictable;  // the idle blocks that may be evicted now
    std::vector<NodeId> node;                   // [blocks] kNoNode: not in the tree
    int32_t idle = 0;
  };
  struct Path {
    std::vector<NodeId> nodes;  // one per full block
    PrefixTree::Partial partial;
  };

  BlockPool& pool_of(int group) { return pools_[static_cast<size_t>(group)]; }
  Cached& cached_of(int group) { return cached_[static_cast<size_t>(group)]; }
  bool is_state(int group) const { return group == state_group_; }
  bool evicts_leaves_only(int group) const { return window(group) == 0 && !is_state(group); }
  void ref(int group, int32_t block);
  void unref(int group, int32_t block);
  void list(int group, int32_t block);    // may be evicted now, if it is idle
  void unlist(int group, int32_t block);  // may not be evicted now
  int32_t take(int group);  // evicts a block if none is free; REQUIRES: available(group) > 0
  void evict(int group, int32_t block);
  void give_to_tree(NodeId node, int group, int32_t block);
  void take_from_tree(NodeId node, int group);
  void prune(NodeId node);
  void move_cursor(BlockTable& table, NodeId to);

  Path find(std::string_view salt, std::span<const int32_t> tokens) const;
  int32_t usable(const Path& path) const;
  int32_t window_start(int group,
                       int32_t computed) const;  // first block that the next query may read
  bool copies_on_write(const BlockTable& table, int group, int32_t computed) const;
  int32_t needs(const BlockTable& table, int group, int32_t computed, int32_t end) const;
  bool only_the_tree_shares(int32_t slot) const;
  int32_t coarse_needs(const BlockTable& table, int group, int32_t slots, int32_t parts) const;
  void grow_coarse(BlockTable& table, int group, int32_t before, int32_t parts);
  void reserve_state(BlockTable& table, int32_t end, std::vector<BlockCopy>& copies,
                     int32_t drafts);
  void drop_rolled(BlockTable& table);
  NodeId ancestor(const BlockTable& table, int32_t depth) const;
  void offer(BlockTable& table, std::span<const int32_t> block_tokens);
  void slide(BlockTable& table, int32_t computed);

  Options options_;
  int state_group_ = -1;
  std::vector<BlockPool> pools_;
  std::vector<Cached> cached_;
  PrefixTree tree_;
  BlockLives lives_;
};

}  // namespace freshet::kv_cache

// The scheduler's dealings with the tiers below the cache (kv_cache/block_store.h).
//
// Saving: blocks are offered to the store when they are full and computed, and when a sequence
// loses its blocks, the last one in part as well. Loading: before a sequence starts, the longest
// prefix that the store has beyond the cached one is loaded into blocks of the cache, if that takes
// less time than computing it. The sequence holds these blocks (TierState::loaded) and takes them
// over when it starts. A load that was ordered cannot be stopped: if its sequence ends before, its
// blocks are kept here until it has ended. Loads are handed to the store by issue(), after the
// evictions and copies of the step: a block of theirs may be the source of one. Integers only. Not
// synchronised.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "kv_cache/block_cache.h"
#include "kv_cache/block_store.h"
#include "scheduler/sequence.h"

namespace freshet::scheduler {

class Offload {
 public:
  // Both must outlive it. prompt_only: output tokens are saved only when blocks are lost.
  Offload(kv_cache::BlockStore& store, kv_cache::BlockCache& cache, bool prompt_only)
      : store_(store), cache_(cache), prompt_only_(prompt_only) {}

  // Looks for a prefix of `tokens` to load. If there is one: s.tier.loaded gets the cached part of
  // it, and the rest is known for order(). Otherwise s.tier.looked is set.
  bool find(Sequence& s, std::span<const int32_t> tokens);
  // Allocates the blocks that find() chose and orders the load. False: no room, or it does not fit;
  // then nothing is held.
  bool order(Sequence& s, bool fits);
  void issue();
  // The sequences whose loads have ended since the last call; s.tier.loaded is what they got.
  std::vector<Sequence*> take_loaded();
  // The sequence ends or starts: it holds no loaded blocks any more.
  void forget(Sequence& s);
  // The sequence starts with its loaded blocks, unless `cached` tokens are more.
  bool take(Sequence& s, int32_t cached);
  void put_back(Sequence& s);  // undoes take()
  // Releases the loaded blocks of a waiting sequence other than `for_whom`. Full ones stay cached.
  bool drop_one(const Sequence& for_whom);

  void save(Sequence& s);
  void swap_out(Sequence& s);

  // All blocks that sequences and ended sequences hold for loads.
  void list_tables(std::vector<const kv_cache::BlockTable*>& tables) const;
  bool busy() const { return !loads_.empty() || !pending_.empty(); }

 private:
  struct Load {
    Sequence* sequence = nullptr;  // nullptr: it has ended
    kv_cache::BlockTable orphan;   // its blocks then
    std::vector<kv_cache::BlockUnit> units;
    std::vector<int32_t> blocks;  // [units] index in the table
    int32_t first = 0;            // blocks that were cached
    int32_t tokens = 0;           // with all units
  };
  struct Found {
    int32_t cached = 0;  // blocks
    int32_t blocks = 0;  // that can be used, the last one maybe in part
    int32_t tokens = 0;
    kv_cache::BlockKey tail;  // of a last block in part
  };

  const kv_cache::BlockKey& key(Sequence& s, int32_t block);
  kv_cache::BlockKey tail_key(Sequence& s, int32_t tokens);
  kv_cache::BlockKey extend(kv_cache::BlockKey parent, const Sequence& s, size_t from,
                            size_t count) const;
  bool has_all(const kv_cache::BlockKey& key);
  Found longest(Sequence& s, std::span<const int32_t> tokens);
  int32_t usable_end(const Load& load, const std::vector<bool>& ok) const;
  void end(Load& load, const std::vector<bool>& ok);

  kv_cache::BlockStore& store_;
  kv_cache::BlockCache& cache_;
  const bool prompt_only_;
  Load found_;                                // by find(), for order()
  std::vector<Load> pending_;                 // ordered, not issued
  std::unordered_map<uint64_t, Load> loads_;  // by ticket
  std::vector<Sequence*> ready_;              // waiting sequences that hold loaded blocks
};

}  // namespace freshet::scheduler

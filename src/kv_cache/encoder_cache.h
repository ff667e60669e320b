// The blocks of encoders' outputs: allocation, and sharing by content.
//
// An output is written once and read by every sequence of the requests that hold it. Its key is a
// text that says all that its bits depend on: whose input it is (the salt) and what the input is.
// Outputs whose key is "" are not shared. An output that nobody holds is idle: it is kept for later
// requests with the same key, and evicted, least recently used first, when its blocks are needed.
// Integers only; kv_storage.h has the bytes. Every reference belongs to a holder or to an output
// that is kept; check() verifies this. Not synchronised.
#pragma once

#include <cstdint>
#include <list>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "kv_cache/block_pool.h"

namespace freshet::kv_cache {

class EncoderCache {
 public:
  // `share`: keep outputs for later requests.
  EncoderCache(int32_t blocks, bool share) : pool_(blocks), share_(share) {}

  int32_t size() const { return pool_.size(); }
  // Blocks that can be taken: free ones, and those of idle outputs.
  int32_t available() const { return pool_.free() + idle_blocks_; }

  struct Taken {
    std::vector<int32_t> blocks;  // with one reference each
    bool found = false;           // they hold the output already
  };
  bool has(const std::string& key) const { return outputs_.contains(key); }
  // Whether take() would succeed.
  bool fits(const std::string& key, int32_t blocks) const;
  // Blocks for an output of this size; nullopt if there are too few.
  std::optional<Taken> take(const std::string& key, int32_t blocks);
  // The output is in `blocks`, which were taken for it, before the next one is taken: keeps it.
  void keep(const std::string& key, std::span<const int32_t> blocks);
  // Gives back what was taken for `key`, and empties the list.
  void release(const std::string& key, std::vector<int32_t>& blocks);
  int64_t evictions() const { return evictions_; }  // of outputs

  // An error unless `held` counts the references of all holders: [blocks].
  Status check(std::span<const int32_t> held) const;

 private:
  struct Output {
    std::vector<int32_t> blocks;  // with one reference each
    bool idle = false;
    std::list<std::string>::iterator place;  // in idle_, if idle
  };
  void evict_oldest();

  BlockPool pool_;
  const bool share_;
  std::unordered_map<std::string, Output> outputs_;
  std::list<std::string> idle_;  // keys, oldest use first
  int32_t idle_blocks_ = 0;
  int64_t evictions_ = 0;
};

}  // namespace freshet::kv_cache

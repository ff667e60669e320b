// The memory of the paged cache: one buffer for each layer of the cache, divided into blocks.
//
// A layer of the cache belongs to a branch of the model that stores keys and values; most models
// have one such branch in each of their layers. Layers are grouped by attention window: a group's
// layers share block ids, and each group has its own pool (kv_cache/block_pool.h), because a
// sliding window needs few blocks for a sequence of any length. KvStorage owns the memory and knows
// no sequences.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "ops/attention.h"
#include "tensor/buffer.h"

namespace freshet {

struct KvGroup {
  int window = 0;           // 0: full attention
  std::vector<int> layers;  // of the cache, ascending
  int chunk = 0;            // > 0: a token sees no token of another chunk of this many positions
  bool two_way = false;     // a token also sees those behind it (within `window`, if there is one)
};

// The layout of a model's cache: a shape for each layer of the cache, and the groups.
struct KvCacheSpec {
  std::vector<ops::KvShape> layers;  // [layers]
  std::vector<KvGroup> groups;
  size_t block_bytes(int group) const;  // of one block in all layers of the group
};

class KvStorage {
 public:
  // blocks[g]: number of blocks of group g. memory: where to allocate, nullptr for the host.
  static Result<KvStorage> allocate(const KvCacheSpec& spec, const std::vector<int32_t>& blocks,
                                    Memory* memory = nullptr);

  ops::KvView layer(int layer) const;
  int group_of(int layer) const { return group_of_[static_cast<size_t>(layer)]; }
  const KvCacheSpec& spec() const { return spec_; }
  int32_t blocks(int group) const { return blocks_[static_cast<size_t>(group)]; }
  size_t bytes() const;
  // Copies the contents of block `from` to block `to` in every layer of the group (copy on write).
  void copy_block(int group, int32_t from, int32_t to);

 private:
  KvCacheSpec spec_;
  std::vector<int32_t> blocks_;
  std::vector<int> group_of_;
  std::vector<Buffer> buffers_;  // [layers]
};

}  // namespace freshet

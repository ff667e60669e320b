#include "kv_cache/kv_storage.h"

#include <cstring>

namespace freshet {

size_t KvCacheSpec::block_bytes(int group) const {
  size_t bytes = 0;
  for (const int layer : groups[static_cast<size_t>(group)].layers) {
    bytes += layers[static_cast<size_t>(layer)].block_bytes();
  }
  return bytes;
}

KvCacheSpec group_by_layer(const KvCacheSpec& spec) {
  KvCacheSpec by_layer;
  by_layer.layers = spec.layers;
  for (size_t g = 0; g < spec.groups.size(); ++g) {
    KvGroup group = spec.groups[g];
    if (!spec.may_evict(static_cast<int>(g))) {
      by_layer.groups.push_back(group);
      continue;
    }
    for (const int layer : spec.groups[g].layers) {
      group.layers = {layer};
      by_layer.groups.push_back(group);
    }
  }
  return by_layer;
}

Result<KvStorage> KvStorage::allocate(const KvCacheSpec& spec, const std::vector<int32_t>& blocks,
                                      Memory* memory) {
  FRESHET_CHECK(blocks.size() == spec.groups.size(), "{} pools for {} groups", blocks.size(),
                spec.groups.size());
  KvStorage storage;
  storage.spec_ = spec;
  storage.blocks_ = blocks;
  storage.group_of_.assign(spec.layers.size(), -1);
  storage.buffers_.resize(spec.layers.size());
  for (size_t g = 0; g < spec.groups.size(); ++g) {
    FRESHET_CHECK(blocks[g] > 0, "group {} has no blocks", g);
    for (const int layer : spec.groups[g].layers) {
      const auto i = static_cast<size_t>(layer);
      FRESHET_CHECK(i < spec.layers.size() && storage.group_of_[i] < 0, "layer {} in two groups",
                    layer);
      storage.group_of_[i] = static_cast<int>(g);
      const size_t bytes = spec.layers[i].block_bytes() * static_cast<size_t>(blocks[g]);
      FRESHET_ASSIGN_OR_RETURN(storage.buffers_[i], Buffer::allocate(bytes, memory));
    }
  }
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    FRESHET_CHECK(storage.group_of_[i] >= 0, "layer {} is in no cache group", i);
  }
  return storage;
}

ops::KvView KvStorage::layer(int layer) const {
  const auto i = static_cast<size_t>(layer);
  // The view of a const owner is writable: a step writes blocks, but never changes the layout.
  return {spec_.layers[i], const_cast<uint8_t*>(buffers_[i].data()),
          blocks_[static_cast<size_t>(group_of_[i])]};
}

size_t KvStorage::bytes() const {
  size_t total = 0;
  for (const Buffer& buffer : buffers_) total += buffer.size();
  return total;
}

void KvStorage::copy_block(int group, int32_t from, int32_t to) {
  for (const int layer : spec_.groups[static_cast<size_t>(group)].layers) {
    const auto i = static_cast<size_t>(layer);
    const size_t bytes = spec_.layers[i].block_bytes();
    uint8_t* data = buffers_[i].data();
    uint8_t* copy = data + bytes * static_cast<size_t>(to);
    const uint8_t* source = data + bytes * static_cast<size_t>(from);
    if (Memory* memory = buffers_[i].memory()) {
      memory->copy(copy, source, bytes);
    } else {
      std::memcpy(copy, source, bytes);
    }
  }
}

}  // namespace freshet

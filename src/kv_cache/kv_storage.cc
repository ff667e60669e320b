#include "kv_cache/kv_storage.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string_view>

#include <fmt/ranges.h>

namespace freshet {

size_t KvCacheSpec::block_bytes(int group) const {
  size_t bytes = 0;
  for (const int layer : groups[static_cast<size_t>(group)].layers) {
    bytes += layers[static_cast<size_t>(layer)].block_bytes();
  }
  return bytes;
}

namespace {

// Whether every query of the group sees all tokens before it alike, and `allowed` holds for all
// layers.
bool sees_all(const KvCacheSpec& spec, int group, bool (*allowed)(const ops::KvShape&)) {
  const KvGroup& g = spec.groups[static_cast<size_t>(group)];
  if (g.kind != KvKind::kTokens || g.cross > 0 || g.window > 0 || g.chunk > 0 || g.two_way)
    return false;
  if (g.spans != SpanUse::kNone) return false;  // tokens of a picture see later ones
  return std::ranges::all_of(g.layers, [&](int layer) {
    const ops::KvShape& shape = spec.layers[static_cast<size_t>(layer)].shape;
    return !shape.biased && allowed(shape);
  });
}

}  // namespace

bool KvCacheSpec::may_evict(int group) const {
  return sees_all(*this, group, [](const ops::KvShape&) { return true; });
}

int32_t KvCacheSpec::coarse_parts(int group) const {
  int32_t parts = std::numeric_limits<int32_t>::max();
  for (const int layer : groups[static_cast<size_t>(group)].layers)
    parts = std::min(parts, ops::coarse_parts(layers[static_cast<size_t>(layer)].shape));
  return parts;
}

bool KvCacheSpec::may_select(int group) const {
  return sees_all(*this, group, [](const ops::KvShape& s) { return !s.value_is_key_prefix; });
}

KvCacheSpec with_bounds(const KvCacheSpec& spec) {
  KvCacheSpec bounded = spec;
  for (size_t g = 0; g < spec.groups.size(); ++g) {
    if (!spec.may_select(static_cast<int>(g))) continue;
    for (const int layer : spec.groups[g].layers)
      bounded.layers[static_cast<size_t>(layer)].shape.bounded = true;
  }
  return bounded;
}

KvCacheSpec with_sums(const KvCacheSpec& spec) {
  KvCacheSpec summed = spec;
  for (size_t g = 0; g < spec.groups.size(); ++g) {
    if (!spec.may_select(static_cast<int>(g))) continue;
    for (const int layer : spec.groups[g].layers) {
      ops::KvShape& shape = summed.layers[static_cast<size_t>(layer)].shape;
      shape.summed = !ops::has_int4(shape.type);
    }
  }
  return summed;
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

std::string KvCacheSpec::type_names(int group) const {
  std::vector<std::string_view> names;
  for (const int layer : groups[static_cast<size_t>(group)].layers) {
    if (layers[static_cast<size_t>(layer)].state_bytes > 0) continue;
    const std::string_view name = ops::name_of(layers[static_cast<size_t>(layer)].shape.type);
    if (std::ranges::find(names, name) == names.end()) names.push_back(name);
  }
  return fmt::format("{}", fmt::join(names, " and "));
}

ops::KvType KvTypes::of(int model_layer) const {
  return std::ranges::find(wide_layers, model_layer) != wide_layers.end() ? wide : type;
}

std::string KvTypes::describe() const {
  std::string text(ops::name_of(type));
  if (!wide_layers.empty() && wide != type) {
    text += fmt::format(" ({} in {} layer{})", ops::name_of(wide), wide_layers.size(),
                        wide_layers.size() == 1 ? "" : "s");
  }
  return text;
}

int KvCacheSpec::state_group() const {
  for (size_t g = 0; g < groups.size(); ++g) {
    if (groups[g].kind == KvKind::kState) return static_cast<int>(g);
  }
  return -1;
}

size_t KvCacheSpec::bytes_per_token() const {
  size_t bytes = 0;
  for (size_t g = 0; g < groups.size(); ++g) {
    if (groups[g].kind == KvKind::kTokens)
      bytes += block_bytes(static_cast<int>(g)) / ops::kBlockTokens;
  }
  return bytes;
}

size_t KvCacheSpec::state_bytes() const {
  size_t bytes = 0;
  for (const KvLayer& layer : layers) bytes += layer.state_bytes;
  return bytes;
}

std::vector<int32_t> KvCacheSpec::pools(int64_t sequences, int64_t blocks) const {
  std::vector<int32_t> pools;
  for (const KvGroup& group : groups) {
    const int64_t count = group.kind == KvKind::kState ? sequences : blocks;
    pools.push_back(static_cast<int32_t>(std::min<int64_t>(count, INT32_MAX)));
  }
  return pools;
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
  size_t shared = 0;  // the most that a layer takes
  for (size_t g = 0; g < spec.groups.size(); ++g) {
    FRESHET_CHECK(blocks[g] > 0, "group {} has no blocks", g);
    for (const int layer : spec.groups[g].layers) {
      const auto i = static_cast<size_t>(layer);
      FRESHET_CHECK(i < spec.layers.size() && storage.group_of_[i] < 0, "layer {} in two groups",
                    layer);
      storage.group_of_[i] = static_cast<int>(g);
      const size_t bytes = spec.layers[i].block_bytes() * static_cast<size_t>(blocks[g]);
      shared = std::max(shared, bytes);
      if (spec.takes_turns) continue;
      FRESHET_ASSIGN_OR_RETURN(storage.buffers_[i], Buffer::allocate(bytes, memory));
    }
  }
  if (spec.takes_turns) {
    FRESHET_ASSIGN_OR_RETURN(storage.buffers_[0], Buffer::allocate(shared, memory));
  }
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    FRESHET_CHECK(storage.group_of_[i] >= 0, "layer {} is in no cache group", i);
  }
  return storage;
}

// A const owner's data are writable: a step writes blocks, but never changes the layout.
uint8_t* KvStorage::data(size_t layer) const {
  return const_cast<uint8_t*>(buffers_[spec_.takes_turns ? 0 : layer].data());
}

ops::KvView KvStorage::layer(int layer) const {
  const auto i = static_cast<size_t>(layer);
  return {spec_.layers[i].shape, data(i), blocks_[static_cast<size_t>(group_of_[i])]};
}

ops::StateView KvStorage::states(int layer) const {
  const auto i = static_cast<size_t>(layer);
  FRESHET_CHECK(spec_.layers[i].state_bytes > 0, "layer {} of the cache has no state", layer);
  return {data(i), spec_.layers[i].state_bytes, blocks_[static_cast<size_t>(group_of_[i])]};
}

size_t KvStorage::bytes() const {
  size_t total = 0;
  for (const Buffer& buffer : buffers_) total += buffer.size();
  return total;
}

bool KvStorage::in_host_memory() const {
  return std::ranges::all_of(buffers_, [](const Buffer& b) { return b.memory() == nullptr; });
}

void KvStorage::copy_block(int group, int32_t from, int32_t to) {
  FRESHET_CHECK(!spec_.takes_turns, "a copy of a block that layers share");
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

// The memory of the paged cache: one buffer for each layer of the cache, divided into blocks.
//
// A layer of the cache belongs to a branch of the model that remembers earlier tokens; most models
// have one such branch in each of their layers. Layers whose blocks live and die together form a
// group, and each group has its own pool of block ids (kv_cache/block_pool.h). A group has a kind:
//
// - tokens: keys and values, kBlockTokens of them in a block. Layers are grouped by attention
//   window, because a sliding window needs few blocks for a sequence of any length.
// - state: a block is a slot, the whole state of one sequence in the group's layers (state-space
//   and linear-attention layers, convolutions). Its size does not depend on the sequence's length.
//   A model has at most one such group.
// - cross: keys and values of an encoder's output, written once for a sequence.
//
// KvStorage owns the memory and knows no sequences.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "ops/attention.h"
#include "ops/state.h"
#include "tensor/buffer.h"

namespace freshet {

enum class KvKind : uint8_t { kTokens, kState, kCross };

// How a token's stretch of the sequence (ForwardBatch::spans), such as a picture, changes what it
// sees.
enum class SpanUse : uint8_t {
  kNone,
  kAlso,  // all of its stretch, too
  kOnly,  // its stretch and nothing else
};

struct KvGroup {
  int window = 0;           // tokens: 0 is full attention
  std::vector<int> layers;  // of the cache, ascending
  int chunk = 0;            // > 0: a token sees no token of another chunk of this many positions
  bool two_way = false;     // a token also sees those behind it (within `window`, if there is one)
  // > 0: the layers hold an encoder's output, at most this many positions, written once for each
  // sequence; every token sees all of it.
  int cross = 0;
  KvKind kind = KvKind::kTokens;
  SpanUse spans = SpanUse::kNone;
};

// The types of a model's cache: one for all layers but those that keep a wider one.
struct KvTypes {
  ops::KvType type = ops::KvType::kF16;
  ops::KvType wide = ops::KvType::kF16;
  std::vector<int> wide_layers;  // of the model, not of the cache

  KvTypes() = default;
  KvTypes(ops::KvType same) : type(same) {}  // NOLINT: a type stands for itself in all layers
  ops::KvType of(int model_layer) const;
  // "int4", or "int4 (f16 in 2 layers)".
  std::string describe() const;
};

// A layer of the cache: keys and values, or a state of `state_bytes` for each sequence.
struct KvLayer {
  ops::KvShape shape;
  size_t state_bytes = 0;  // a multiple of 64; 0: keys and values
  size_t block_bytes() const { return state_bytes > 0 ? state_bytes : shape.block_bytes(); }
};

// The layout of a model's cache: its layers and their groups.
struct KvCacheSpec {
  std::vector<KvLayer> layers;  // [layers]
  std::vector<KvGroup> groups;
  // The layers take turns with one memory: what a layer stores is read in the same step, before
  // the next layer stores. All groups have equally many blocks.
  bool takes_turns = false;
  size_t block_bytes(int group) const;  // of one block in all layers of the group
  // The types of a group's layers in the order of the layers: "int4", "f16 and int4".
  std::string type_names(int group) const;
  int state_group() const;  // -1: none
  // Of all layers with keys and values of tokens, for one of them; and of a sequence's state.
  size_t bytes_per_token() const;
  size_t state_bytes() const;
  // For callers that give each of `sequences` equal runs of blocks: pools in which `blocks` blocks
  // of tokens are there, and a state for each sequence.
  std::vector<int32_t> pools(int64_t sequences, int64_t blocks) const;
  // Whether keys of live sequences may be evicted from the group. Where distances decide what a
  // query sees, a key has to stay in the slot of its position; 4-bit codes cannot be moved.
  bool may_evict(int group) const;
  // How many coarse blocks (ops::CoarseTokens) a block of the group holds in each of its layers;
  // below 2 nothing is gained by them.
  int32_t coarse_parts(int group) const;
  // Whether queries may read a selection of the group's blocks. Latent attention may not: its one
  // head of keys is short to read already.
  bool may_select(int group) const;
};

// Bounds the keys of the groups whose blocks may be selected.
KvCacheSpec with_bounds(const KvCacheSpec& spec);
// Sums the values of the groups of which single tokens may be selected: those that may also be
// moved.
KvCacheSpec with_sums(const KvCacheSpec& spec);

// Gives each layer with full attention a group of its own.
KvCacheSpec group_by_layer(const KvCacheSpec& spec);

class KvStorage {
 public:
  // blocks[g]: number of blocks of group g. memory: where to allocate, nullptr for the host.
  static Result<KvStorage> allocate(const KvCacheSpec& spec, const std::vector<int32_t>& blocks,
                                    Memory* memory = nullptr);

  ops::KvView layer(int layer) const;
  ops::StateView states(int layer) const;  // of a layer of the state group
  int group_of(int layer) const { return group_of_[static_cast<size_t>(layer)]; }
  const KvCacheSpec& spec() const { return spec_; }
  int32_t blocks(int group) const { return blocks_[static_cast<size_t>(group)]; }
  size_t bytes() const;
  bool in_host_memory() const;  // of every layer
  // Copies the contents of block `from` to block `to` in every layer of the group (copy on write).
  void copy_block(int group, int32_t from, int32_t to);

 private:
  KvCacheSpec spec_;
  std::vector<int32_t> blocks_;
  std::vector<int> group_of_;
  uint8_t* data(size_t layer) const;
  std::vector<Buffer> buffers_;  // [layers]; the first one alone if the layers take turns
};

}  // namespace freshet

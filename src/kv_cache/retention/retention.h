// KV compression of a live sequence: which of its keys and values are kept when the others are
// evicted (SnapKV, H2O, StreamingLLM ...). This isn't the LRU eviction of idle blocks, which
// block_cache.h and eviction_policy.h do.
//
// An eviction happens at a position that depends on the sequence alone (RetentionRules), never on
// the other sequences, so results stay independent of batches, chunks and preemptions. At an
// eviction a policy selects the slots to keep, for each layer and KV head; all heads of a layer
// keep the same number. Scores are sums of softmax weights in whole units (ops::kScoreUnits), so
// the order of additions doesn't matter. Ties go to the lower slot. Policies are immutable and
// thread-safe; there is one per retention/<name>.cc, and retention/table.cc has the table.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "base/thread_pool.h"

namespace freshet::kv_cache {

// When evictions happen, and which queries are scored before one.
struct RetentionRules {
  // Tokens between evictions. They begin at the end of the prompt; 0: there is none after that.
  int32_t interval = 0;
  bool in_prompt = false;    // instead at every multiple of `interval`, in the prompt as well
  int32_t window = 0;        // the last queries before an eviction are scored
  bool accumulates = false;  // and all queries after the prompt; kept keys keep their sums
  bool recodes = false;      // what isn't kept stays in 4 bits (ops::CoarseTokens)
  bool reads_keys = false;   // keep() may call StoredKeys::read
};

// A layer of one sequence at an eviction.
struct StoredKeys {
  int kv_heads = 0;
  int32_t slots = 0;
  int key_dim = 0;
  const int64_t* sums = nullptr;  // [kv_heads, stride] of the scored queries
  int64_t stride = 0;
  // Reads the keys of a head: [slots, key_dim].
  FunctionRef<void(int head, float* keys)> read;

  std::span<const int64_t> scores(int head) const {
    return {sums + head * stride, static_cast<size_t>(slots)};
  }
};

// What the JSON object may say. A policy reads the fields that its row in the table names.
struct RetentionConfig {
  std::string_view policy;  // of the table
  int32_t budget = 0;       // slots kept of each layer, on average over the layers
  int32_t sinks = 0;        // first tokens that are always kept
  int32_t window = 0;       // last tokens that are always kept, whose queries are scored
  int32_t interval = 0;
  int32_t kernel = 0;   // slots whose scores are pooled
  int32_t recent = 0;   // h2o, mikv: newest tokens kept; 0: half of the budget
  double beta = 0.0;    // pyramidkv: steepness
  double decay = 0.0;   // pyramidkv: each layer keeps this share of the layer before; 0: linear
  double lambda = 0.0;  // rkv: weight of importance against redundancy
};

class RetentionPolicy {
 public:
  explicit RetentionPolicy(const RetentionConfig& config) : config_(config) {}
  virtual ~RetentionPolicy() = default;

  const RetentionConfig& config() const { return config_; }
  virtual RetentionRules rules() const = 0;
  // Slots kept of layer `layer` of the `layers` that evict.
  virtual int32_t budget(int layer, int layers) const;
  virtual bool differs_by_layer() const { return false; }
  // Fills `kept`, fewer than keys.slots, with the slots to keep, ascending.
  virtual void keep(const StoredKeys& keys, int head, std::span<int32_t> kept) const = 0;

 protected:
  // The first `first` and the last `last` slots, and those with the highest scores between them.
  static void keep_best(std::span<const int64_t> scores, int32_t first, int32_t last,
                        std::span<int32_t> kept);

 private:
  RetentionConfig config_;
};

using Retention = std::shared_ptr<const RetentionPolicy>;

// From a JSON object such as {"policy": "snapkv", "budget": 1024}. {"policy": "none"} gives
// nullptr. Errors name the key.
Result<Retention> make_retention(std::string_view json);

// The rows of the table.
struct RetentionKind {
  std::string_view name;
  std::string_view keys;  // besides "policy" and "budget", separated by spaces
  RetentionConfig defaults;
  Retention (*make)(const RetentionConfig& config);
};
extern const RetentionKind kStreaming, kSnapKv, kPyramidKv, kH2o, kTova, kRkv, kKeyDiff, kMikv;

// The sums of scores of a sequence: [layers of the cache][queries, kv_heads, stride]. Layers that
// do not evict are empty. There is one query, whose sums are those of all, but where a step runs
// drafts: which of them count is known later (Scheduler::commit), so each query has its own.
struct KeyScores {
  struct Layer {
    std::vector<int64_t> sums;
    int64_t stride = 0;
    // Makes room for the sums of `slots` slots. rows: queries times KV heads.
    void widen(int rows, int64_t slots);
  };
  std::vector<Layer> layers;
  int32_t queries = 1;

  // Adds the sums of the first `count` queries of `drafted`. REQUIRES: queries is 1.
  void add(const KeyScores& drafted, int32_t count);
};

}  // namespace freshet::kv_cache

// A small model beside the target: its own cache of keys and values, and batches of its own.
//
// A sequence of the drafter is a table of blocks and the ids whose keys and values they hold.
// Blocks are shared by prefix, as the target's are, and evicted when they run out. Ids that may be
// taken back (drafts) are run, but confirm() alone offers them to other sequences. Used by one
// thread. Nothing is allocated after the vectors have grown to the largest step.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kv_cache/block_cache.h"
#include "kv_cache/kv_storage.h"
#include "layers/model.h"
#include "runtime/loaded_model.h"

namespace freshet::speculative {

struct DraftRunnerLimits {
  int max_model_len = 0;  // positions of a sequence
  int max_tokens = 0;     // of a step
  int max_rows = 0;       // of logits in a step
  int64_t cache_tokens = 0;
  ops::KvType kv_type = ops::KvType::kF16;
};

// A sequence's part of the drafter's cache. Only DraftRunner changes it.
struct DraftSequence {
  kv_cache::BlockTable blocks;
  std::vector<int32_t> ids;  // in the cache: position i holds ids[i]
  int32_t confirmed = 0;     // of them, those that will never be taken back
  std::string salt;
};

class DraftRunner {
 public:
  static Result<std::unique_ptr<DraftRunner>> create(std::unique_ptr<runtime::LoadedModel> model,
                                                     const DraftRunnerLimits& limits);

  // Host memory for inputs and results, beside the model's workspace.
  static size_t buffer_bytes(const ModelSpec& spec, int64_t tokens, int64_t rows);

  // Ids to run behind those of a sequence: at most max_tokens, and at most max_rows sequences that
  // want a token. Results are valid until the next run().
  struct Work {
    DraftSequence* sequence = nullptr;
    std::span<const int32_t> ids;
    // For draft heads: [ids] rows of features, of the width that FeatureSpec says or, with
    // own_states, of states. A head with FeatureSpec::Use::kStored stores those of works that have
    // some, and runs the others, whose ids see one another; not both in one call.
    const float* features = nullptr;
    bool wants_token = false;   // of the last id ...
    int wanted = 1;             // ... or of this many last ids, which counts as as many sequences
    bool wants_logits = false;  // rather than the token alone
    bool failed = false;        // result: the cache had no room
    int32_t token = -1;         // result: the argmax of the last row; -1 unless wanted
    std::span<const int32_t> tokens;  // result: the same of each of the wanted rows
    std::span<float> logits;          // result: of the wanted rows; empty unless wanted
    std::span<const float> state;     // result, for draft heads: of the last row
  };
  void run(std::span<Work> work, bool own_states);

  // Drafts of several rounds, each of which runs the argmax of the one before. On a device the host
  // does not wait between rounds, so only the tokens of the last one are awaited. `rounds`: how
  // many tokens each work wants; the first round is as in run(). Returns the tokens by round and
  // work as columns of the model's logits, fewer of a work whose cache had no room. The ids of
  // later rounds are not known to the sequence (-1). REQUIRES: chains(work), and every work wants
  // one token.
  bool chains(std::span<const Work> work, std::span<const int> rounds) const;
  std::vector<std::vector<int32_t>> chain(std::span<Work> work, std::span<const int> rounds);
  // The id that a column of the logits is in the model's own input; empty: the same.
  Status set_id_map(std::span<const int32_t> ids);

  // The longest prefix of `ids` that the cache knows. REQUIRES: the sequence is empty.
  void begin(DraftSequence& s, std::span<const int32_t> ids);
  // Takes back all ids behind the first `count`. REQUIRES: count >= s.confirmed.
  void cut(DraftSequence& s, int32_t count);
  // The first `count` ids stay, and may be shared.
  void confirm(DraftSequence& s, int32_t count);
  void release(DraftSequence& s);
  // A second sequence with the same ids, whose blocks they share until one of them writes.
  DraftSequence fork(const DraftSequence& s);

  const ModelSpec& spec() const { return model_->spec(); }
  int max_tokens() const { return limits_.max_tokens; }
  int max_rows() const { return limits_.max_rows; }
  int max_model_len() const { return limits_.max_model_len; }

 private:
  DraftRunner(std::unique_ptr<runtime::LoadedModel> model, const DraftRunnerLimits& limits,
              KvStorage cache, std::unique_ptr<kv_cache::BlockCache> blocks);
  Status allocate();
  // rows: how many rows of logits the run has given before.
  void run_batch(std::span<Work* const> work, bool own_states, size_t& rows);
  // Makes batch_ of these works, in order_.
  void make_batch(std::span<Work* const> work, bool own_states);
  bool stores_features() const;
  void add(Work& work, size_t row);
  bool reserve(Work& work);

  std::unique_ptr<runtime::LoadedModel> model_;
  DraftRunnerLimits limits_;
  KvStorage cache_;
  std::unique_ptr<kv_cache::BlockCache> blocks_;
  ForwardBatch batch_;
  Buffer logits_, states_, features_, best_;
  Buffer kept_, id_map_;            // in a device's memory: states of a round's rows, set_id_map()
  std::vector<float> last_states_;  // [max_rows, hidden]
  std::vector<Work*> step_, order_;
  std::vector<int32_t> first_rows_;  // of a chain's first round: behind each work's last row
  std::vector<kv_cache::BlockCopy> copies_;
};

// Bytes of a drafter's cache for each token.
size_t cache_bytes_per_token(const ModelSpec& spec, ops::KvType type);

}  // namespace freshet::speculative

// Runs a step of the scheduler on a model: block copies, the ragged batch, the results.
//
// Owns the cache's memory and the buffers for logits, sampled tokens and states. Items of a step
// are known by their index in Step::items; their order in the batch is the runner's: single tokens
// come first, because devices have a kernel for them. Used by the step thread only, but that row(),
// sampled() and state() may be called from several threads. run() allocates nothing once its
// vectors have grown to the largest step.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/thread_pool.h"
#include "layers/batch.h"
#include "layers/model.h"
#include "runtime/picture_prompt.h"
#include "scheduler/scheduler.h"
#include "tensor/buffer.h"

namespace freshet::engine {

class ModelRunner {
 public:
  // `model` must outlive the runner and have reserved what such steps need. host_memory: where
  // results are written; nullptr for the heap.
  // `boundaries`: how many inner states each token has (Model::capture()). `states_ahead`: whether
  // a step may be started while the states and boundaries of the one in front are still read.
  static Result<ModelRunner> create(Model& model, KvStorage cache, int max_tokens,
                                    int max_logit_rows, int boundaries, bool states_ahead,
                                    Memory* host_memory = nullptr);

  // The sampling descriptor (ops/sample.h) of an item's row of logits; its lists are appended to
  // the words. Asked for the last row of each item that has logits, and the row of each draft.
  using Describe =
      FunctionRef<ops::SampleRow(size_t item, int32_t row, std::vector<int32_t>& words)>;

  // What the encoder reads for an item that says `encodes`; valid until the step is finished.
  using Encode = FunctionRef<EncoderInput(size_t item)>;

  // The pictures of the item's sequence; their rows must be valid until the step is finished.
  struct Pictures {
    const runtime::PicturePrompt* prompt = nullptr;  // nullptr: it has none
    std::span<const VisionRows* const> rows;         // those that the item reads
  };
  using Show = FunctionRef<Pictures(size_t item)>;

  // `states`: whether the states after the final norm are wanted too. If the model samples tokens,
  // a step may be started before the one in front is finished; its sequences' expected tokens are
  // then taken from there. At most two steps are in flight.
  void start(const scheduler::Step& step, const scheduler::Scheduler& scheduler, bool states,
             Describe describe, Encode encode, Show show);
  // Does an eviction of a step that is scheduled, before it is started. No step may be in flight.
  void evict(const scheduler::Eviction& eviction, const kv_cache::RetentionPolicy& policy);
  bool evicts() const { return model_->key_ops() != nullptr; }
  bool on_device() const { return evicts() && model_->key_ops()->device() != nullptr; }
  // Whether the step started last scores keys.
  bool scores() const { return !turns_[started_].batch.scored.empty(); }
  // Waits for the first step in flight; row(), sampled() and state() give its results.
  void finish();
  bool overlaps() const { return model_->samples(); }
  // Whether the model samples the token of this row, of the step started last.
  bool will_sample(size_t item, int32_t row) const;
  // Row `row` of the `logits` rows of step.items[item], of the step finished last. Valid until the
  // next is started.
  std::span<float> row(size_t item, int32_t row);
  // The sampled token, if the model sampled it: the logits are not there then. Or kSeeLogits.
  int32_t sampled(size_t item, int32_t row) const;
  // The state of token `i` of step.items[item], if the step was started with states; the states of
  // the tokens behind it follow.
  std::span<const float> state(size_t item, int32_t i) const;
  // The same for the residual stream at a captured boundary.
  const float* boundary(size_t which, size_t item, int32_t i) const;
  int64_t vocab() const { return vocab_; }
  const KvStorage& cache() const { return cache_; }

 private:
  // A step in flight.
  struct Turn {
    ForwardBatch batch;
    std::vector<size_t> order;         // items of the step, as they lie in the batch
    std::vector<int64_t> first_row;    // [items] of their rows of logits
    std::vector<int64_t> first_token;  // [items] of their tokens
    // Those that the step adds to, even if their sequences end meanwhile.
    std::vector<std::shared_ptr<kv_cache::KeyScores>> scores;
    StepResults results;
  };

  ModelRunner(Model& model, KvStorage cache, Buffer logits, Buffer sampled, Buffer states,
              std::vector<Buffer> boundaries, bool states_twice);
  void clear(Turn& turn, const scheduler::Step& step);
  void add(Turn& turn, size_t item, const scheduler::StepItem& part,
           const scheduler::Sequence& sequence, const Pictures& pictures);
  void score(Turn& turn, const scheduler::StepItem& part, const scheduler::Sequence& sequence);
  void describe_rows(Turn& turn, const scheduler::Step& step, Describe describe);
  void fill_tables(Turn& turn, const scheduler::Step& step, const scheduler::Scheduler& scheduler);
  void fill_coarse_table(Turn& turn, size_t group, const scheduler::Step& step,
                         const scheduler::Scheduler& scheduler);
  void fill_encoder_table(Turn& turn, size_t group, const scheduler::Step& step,
                          const scheduler::Scheduler& scheduler);
  size_t row_at(const Turn& turn, size_t item, int32_t row) const {
    return static_cast<size_t>(turn.first_row[item] + row);
  }

  Model* model_;
  KvStorage cache_;
  Buffer logits_;   // [max_logit_rows, vocab]
  Buffer sampled_;  // [2, max_logit_rows]
  // [max_tokens, hidden], or twice as much, pinned, one for each turn. On the heap its pages are
  // taken when first used.
  Buffer states_;
  float* state_data_[2];                  // of each turn
  std::vector<Buffer> boundaries_;        // the same for each captured boundary
  std::vector<float*> boundary_data_[2];  // of each turn
  int64_t vocab_;
  int64_t axes_;  // of positions
  Turn turns_[2];
  int started_ = 0, finished_ = 0;  // indices of the turns last started and finished
  // Of the step started last, and of the one before: the row that gives each sequence's next token.
  std::unordered_map<scheduler::SequenceId, int32_t> row_of_;
  std::unordered_map<scheduler::SequenceId, int32_t> row_before_;
};

}  // namespace freshet::engine

// Runs a step of the scheduler on a model: block copies, the ragged batch, the logits.
//
// Owns the cache's memory and the rows of logits. Used by the step thread only; run() allocates
// nothing once its vectors have grown to the largest step.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "layers/batch.h"
#include "layers/model.h"
#include "scheduler/scheduler.h"
#include "tensor/buffer.h"

namespace freshet::engine {

class ModelRunner {
 public:
  // `model` must outlive the runner and have reserved what such steps need. host_memory: where
  // results come to; nullptr for the heap.
  static Result<ModelRunner> create(Model& model, KvStorage cache, int max_tokens,
                                    int max_logit_rows, Memory* host_memory = nullptr);

  // What is to become of an item's last row of logits; lists go to the words (ops/sample.h).
  using Describe = FunctionRef<ops::SampleRow(const scheduler::StepItem&, std::vector<int32_t>&)>;

  // `hidden`: whether the states after the final norm are wanted too. Where the model draws tokens,
  // a step may be started before the one in front is finished; its sequences' expected tokens are
  // then taken from there. At most two steps are on their way.
  void start(const scheduler::Step& step, const scheduler::Scheduler& scheduler, bool hidden,
             Describe describe);
  // Waits for the first of them; what follows here is of it.
  void finish();
  bool overlaps() const { return model_->samples(); }
  // Of the step started last: whether the model names the token of its item's last row.
  bool names(size_t item, int32_t k) const;
  // Row `k` of the `logits` rows of step.items[item], of the step finished last. Valid until the
  // next is started.
  std::span<float> row(size_t item, int32_t k);
  // Its token, if the model named one: then the row itself is not there. Or kSeeLogits.
  int32_t named(size_t item, int32_t k) const;
  // The state of token `i` of step.items[item], if the step was asked for states.
  std::span<const float> state(size_t item, int32_t i) const;
  int64_t vocab() const { return vocab_; }
  const KvStorage& cache() const { return cache_; }

 private:
  // A step on its way.
  struct Turn {
    ForwardBatch batch;
    std::vector<int64_t> first_row;  // [items]
    StepResults results;
  };

  ModelRunner(Model& model, KvStorage cache, Buffer logits, Buffer best, Buffer states);
  void add(Turn& turn, const scheduler::StepItem& item, const scheduler::Sequence& sequence);
  void describe_rows(Turn& turn, const scheduler::Step& step, Describe describe);

  Model* model_;
  KvStorage cache_;
  Buffer logits_;  // [max_logit_rows, vocab]
  Buffer best_;    // [2, max_logit_rows]
  Buffer states_;  // [max_tokens, hidden]; its pages are taken when first used
  int64_t vocab_;
  Turn turns_[2];
  int started_ = 0, finished_ = 0;  // the turns of the steps last started and finished
  // Of the step started last: the row that names each sequence's next token.
  std::unordered_map<scheduler::SequenceId, int32_t> row_of_;
  std::unordered_map<scheduler::SequenceId, int32_t> row_before_;
};

}  // namespace freshet::engine

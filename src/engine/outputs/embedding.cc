// Vectors made from the states after the final norm: embeddings and scores (layers/pooled_head.h).
//
// States are added in order of position, each once, even if a preemption made the model compute
// some of them again. A prompt of a model that reads both ways is computed whole, in one step.
#include <algorithm>

#include "engine/live_request.h"
#include "engine/model_runner.h"
#include "engine/outputs/kinds.h"
#include "layers/pooled_head.h"

namespace freshet::engine {
namespace {

PoolKind pool_of(Pooling pooling) {
  switch (pooling) {
    case Pooling::kFirst:
      return PoolKind::kFirst;
    case Pooling::kMean:
      return PoolKind::kMean;
    case Pooling::kMax:
      return PoolKind::kMax;
    default:
      return PoolKind::kLast;
  }
}

// nullptr: the request names a pooling, and nothing follows it.
const PooledHead* head_of(Pooling pooling, const PooledHeads& heads) {
  if (pooling == Pooling::kClassify) return &heads.classifier.value();
  return pooling == Pooling::kModel ? &heads.embedding : nullptr;
}

class Embedding final : public RequestOutput {
 public:
  Embedding(LiveRequest& request, const OutputServices& services)
      : RequestOutput(request, services),
        head_(head_of(request.request.pooling, services.heads)),
        pool_(head_ != nullptr ? head_->pool : pool_of(request.request.pooling)) {}

  void announce(scheduler::NewRequest& order) const override {
    order.max_tokens = 0;
    order.logits = false;
    order.whole = services_.whole_prompts;
    order.compute_all = order.whole || pool_.needs_all();
  }
  bool wants_states(const scheduler::StepItem& item, const scheduler::Sequence& s) const override {
    return pool_.needs_all() || item.first + item.count == s.size();
  }
  void list_rows(size_t index, const scheduler::StepItem& item, const scheduler::Sequence& s,
                 std::vector<RowTask>& tasks) override;
  int32_t verify(const RowTask& task, ModelRunner& runner, VerifyScratch& scratch) override;
  void commit(const RowTask& task) override;
  void cancel(FinishReason reason, const Status& status, std::vector<Delta>& deltas) override {
    cancel_all(reason, status, deltas);
  }

 private:
  int32_t size() const { return static_cast<int32_t>(live_.request.prompt.size()); }

  const PooledHead* const head_;
  PoolState pool_;
  // Of the step in flight: its tokens [first_, end_) of the sequence.
  int32_t first_ = 0, end_ = 0;
  scheduler::SequenceId sequence_ = 0;
  int32_t positions_ = 0;  // whose states were added
  std::vector<float> result_;
};

void Embedding::list_rows(size_t index, const scheduler::StepItem& item,
                          const scheduler::Sequence& s, std::vector<RowTask>& tasks) {
  if (!wants_states(item, s)) return;
  first_ = item.first;
  end_ = item.first + item.count;
  sequence_ = s.id;
  tasks.push_back({.request = live_.id,
                   .output = this,
                   .item = index,
                   .position = pool_.needs_all() ? std::max(first_, positions_) : end_ - 1});
}

int32_t Embedding::verify(const RowTask& task, ModelRunner& runner, VerifyScratch& /*scratch*/) {
  for (int32_t p = task.position; p < end_; ++p) pool_.add(runner.state(task.item, p - first_));
  positions_ = std::max(positions_, end_);
  if (end_ < size()) return 0;
  result_ = pool_.result();
  if (head_ != nullptr) result_ = head_->run(std::move(result_));
  return 0;
}

void Embedding::commit(const RowTask& /*task*/) {
  if (end_ < size()) return;
  close();
  services_.scheduler.finish(sequence_);
  if (live_.request.on_embedding) live_.request.on_embedding(result_);
}

}  // namespace

std::unique_ptr<RequestOutput> make_embedding(LiveRequest& request,
                                              const OutputServices& services) {
  return std::make_unique<Embedding>(request, services);
}

}  // namespace freshet::engine

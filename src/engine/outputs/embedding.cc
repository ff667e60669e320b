// An embedding: the states after the final norm, of the prompt's last token or the mean of all.
//
// States are added in order of position, each once, even if a preemption made the model compute
// some of them again.
#include <algorithm>

#include "engine/live_request.h"
#include "engine/model_runner.h"
#include "engine/outputs/kinds.h"

namespace freshet::engine {
namespace {

class Embedding final : public RequestOutput {
 public:
  using RequestOutput::RequestOutput;

  void announce(scheduler::NewRequest& order) const override {
    order.max_tokens = 0;
    order.compute_all = mean();
  }
  bool wants_states(const scheduler::StepItem& item, const scheduler::Sequence& s) const override {
    return mean() || item.first + item.count == s.size();
  }
  void list_rows(size_t index, const scheduler::StepItem& item, const scheduler::Sequence& s,
                 std::vector<RowTask>& tasks) override;
  int32_t verify(const RowTask& task, ModelRunner& runner, VerifyScratch& scratch) override;
  void commit(const RowTask& task) override;
  void cancel(FinishReason reason, const Status& status, std::vector<Delta>& deltas) override {
    cancel_all(reason, status, deltas);
  }

 private:
  bool mean() const { return live_.request.pooling == Pooling::kMean; }

  // Of the step in flight: its tokens [first_, end_) of the sequence.
  int32_t first_ = 0, end_ = 0;
  scheduler::SequenceId sequence_ = 0;
  int32_t positions_ = 0;    // whose states were added
  std::vector<double> sum_;  // [hidden]
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
                   .position = mean() ? std::max(first_, positions_) : end_ - 1});
}

int32_t Embedding::verify(const RowTask& task, ModelRunner& runner, VerifyScratch& /*scratch*/) {
  for (int32_t p = task.position; p < end_; ++p) {
    const auto state = runner.state(task.item, p - first_);
    sum_.resize(state.size(), 0.0);
    for (size_t k = 0; k < state.size(); ++k) sum_[k] += static_cast<double>(state[k]);
  }
  positions_ = std::max(positions_, end_);
  return 0;
}

void Embedding::commit(const RowTask& /*task*/) {
  const auto size = static_cast<int32_t>(live_.request.prompt.size());
  if (end_ < size) return;
  const double count = mean() ? size : 1;
  std::vector<float> pooled;
  pooled.reserve(sum_.size());
  for (const double v : sum_) pooled.push_back(static_cast<float>(v / count));
  close();
  services_.scheduler.finish(sequence_);
  if (live_.request.on_embedding) live_.request.on_embedding(pooled);
}

}  // namespace

std::unique_ptr<RequestOutput> make_embedding(LiveRequest& request,
                                              const OutputServices& services) {
  return std::make_unique<Embedding>(request, services);
}

}  // namespace freshet::engine

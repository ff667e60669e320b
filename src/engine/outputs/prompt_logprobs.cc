// Log-probabilities of a prompt's tokens, beside whatever else the request asks for. The row of a
// token gives that of the next one. They are complete, and delivered, with the row of the last
// token but one.
#include <algorithm>

#include "engine/live_request.h"
#include "engine/model_runner.h"
#include "engine/outputs/kinds.h"

namespace freshet::engine {
namespace {

class PromptLogprobs final : public RequestOutput {
 public:
  using RequestOutput::RequestOutput;

  void announce(scheduler::NewRequest& order) const override { order.logits_from = 0; }
  void start(scheduler::SequenceId first) override;
  void list_rows(size_t index, const scheduler::StepItem& item, const scheduler::Sequence& s,
                 std::vector<RowTask>& tasks) override;
  int32_t verify(const RowTask& task, ModelRunner& runner, VerifyScratch& scratch) override;
  void commit(const RowTask& task) override;

 private:
  int32_t prompt_size() const { return static_cast<int32_t>(live_.request.prompt.size()); }
  void deliver();

  std::vector<std::vector<TokenLogprob>> logprobs_;  // [prompt], of each token but the first
};

void PromptLogprobs::start(scheduler::SequenceId /*first*/) {
  logprobs_.resize(live_.request.prompt.size());
  if (prompt_size() == 1) deliver();
}

void PromptLogprobs::list_rows(size_t index, const scheduler::StepItem& item,
                               const scheduler::Sequence& /*s*/, std::vector<RowTask>& tasks) {
  const int32_t first = item.first + item.count - item.logits;
  for (int32_t row = 0; row < item.logits && first + row + 1 < prompt_size(); ++row) {
    tasks.push_back({.request = live_.id,
                     .output = this,
                     .item = index,
                     .row = row,
                     .rows = 1,
                     .position = first + row + 1});
  }
}

int32_t PromptLogprobs::verify(const RowTask& task, ModelRunner& runner, VerifyScratch& scratch) {
  const auto at = static_cast<size_t>(task.position);
  raw_logprobs(runner.row(task.item, task.row), live_.request.prompt[at],
               live_.request.params.prompt_logprobs, scratch.sampler, logprobs_[at]);
  return 0;
}

void PromptLogprobs::commit(const RowTask& task) {
  if (task.position + 1 == prompt_size()) deliver();
}

void PromptLogprobs::deliver() {
  if (live_.request.on_prompt_logprobs) live_.request.on_prompt_logprobs(logprobs_);
  logprobs_ = {};
}

}  // namespace

std::unique_ptr<RequestOutput> make_prompt_logprobs(LiveRequest& request,
                                                    const OutputServices& services) {
  return std::make_unique<PromptLogprobs>(request, services);
}

}  // namespace freshet::engine

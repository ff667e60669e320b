// Beam search: the beams of a request, each a sequence, move on in lockstep. Each row of logits is
// kept until all live beams have theirs; then the search says which beams live on.
#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "engine/live_request.h"
#include "engine/model_runner.h"
#include "engine/outputs/kinds.h"
#include "engine/text_assembler.h"
#include "sampling/beam.h"

namespace freshet::engine {
namespace {

class Beams final : public RequestOutput {
 public:
  using RequestOutput::RequestOutput;

  void announce(scheduler::NewRequest& order) const override {
    order.samples = std::max(params().n, params().beam_width);
  }
  void start(scheduler::SequenceId first) override;
  void list_rows(size_t index, const scheduler::StepItem& item, const scheduler::Sequence& s,
                 std::vector<RowTask>& tasks) override;
  int32_t verify(const RowTask& task, ModelRunner& runner, VerifyScratch& scratch) override;
  void commit(const RowTask& task) override;
  void cancel(FinishReason reason, const Status& status, std::vector<Delta>& deltas) override {
    cancel_all(reason, status, deltas);
  }

 private:
  const SamplingParams& params() const { return live_.request.params; }
  void go_on(std::span<const BeamSearch::Step> steps);
  void end();
  Delta text_of(const BeamHypothesis& hypothesis, int index);

  std::optional<BeamSearch> search_;              // absent before start()
  std::vector<scheduler::SequenceId> sequences_;  // in the order of the search
  std::vector<float> logits_;                     // [live, vocab]
  std::vector<bool> ready_;                       // [live]: its row is there
  int length_ = 0;                                // tokens so far
};

void Beams::start(scheduler::SequenceId first) {
  const SamplingParams& p = params();
  search_.emplace(
      BeamOptions{p.beam_width, p.length_penalty, p.early_stopping, live_.end_ids,
                  TokenBans(p, services_.vocab, live_.request.prompt), p.renormalize_logits},
      services_.vocab);
  sequences_ = {first};
  ready_ = {false};
}

void Beams::list_rows(size_t index, const scheduler::StepItem& item, const scheduler::Sequence& s,
                      std::vector<RowTask>& tasks) {
  if (!s.awaits_token()) return;
  const auto beam = std::ranges::find(sequences_, s.id) - sequences_.begin();
  logits_.resize(sequences_.size() * static_cast<size_t>(services_.vocab));
  tasks.push_back({.request = live_.id,
                   .output = this,
                   .item = index,
                   .row = item.logits - 1,
                   .rows = 1,
                   .member = static_cast<int32_t>(beam),
                   .position = s.size()});
}

// A beam chooses one token, whichever of them is kept.
int32_t Beams::verify(const RowTask& task, ModelRunner& runner, VerifyScratch& /*scratch*/) {
  const std::span<const float> row = runner.row(task.item, task.row);
  std::ranges::copy(row, logits_.begin() + task.member * std::ssize(row));
  return 1;
}

void Beams::commit(const RowTask& task) {
  ready_[static_cast<size_t>(task.member)] = true;
  if (std::ranges::find(ready_, false) != ready_.end()) return;
  const auto steps = search_->advance(logits_);
  ++length_;
  if (steps.empty() || search_->done() || length_ == live_.max_tokens) {
    end();
  } else {
    go_on(steps);
  }
}

void Beams::go_on(std::span<const BeamSearch::Step> steps) {
  scheduler::Scheduler& scheduler = services_.scheduler;
  const std::vector<scheduler::SequenceId> parents = std::exchange(sequences_, {});
  std::vector<bool> used(parents.size(), false);
  for (const BeamSearch::Step& s : steps) used[static_cast<size_t>(s.parent)] = true;
  for (size_t i = 0; i < parents.size(); ++i) {  // first, so that forks find running slots
    if (!used[i]) scheduler.finish(parents[i]);
  }
  used.assign(parents.size(), false);
  for (const BeamSearch::Step& s : steps) {
    const auto parent = static_cast<size_t>(s.parent);
    sequences_.push_back(used[parent] ? scheduler.fork(parents[parent]) : parents[parent]);
    used[parent] = true;
  }
  for (size_t i = 0; i < steps.size(); ++i) scheduler.commit(sequences_[i], {&steps[i].id, 1});
  ready_.assign(steps.size(), false);
}

Delta Beams::text_of(const BeamHypothesis& hypothesis, int index) {
  const SamplingParams& p = params();
  Delta delta;
  delta.index = index;
  delta.finish = hypothesis.stopped ? FinishReason::kStop : FinishReason::kLength;
  TextAssembler text(services_.tokenizer, p.skip_special_tokens, p.stop,
                     p.include_stop_str_in_output);
  for (const int32_t id : hypothesis.ids) {
    delta.ids.push_back(id);
    if (std::ranges::binary_search(live_.end_ids, id) && !p.include_stop_str_in_output) break;
    delta.text += text.push(id, true);
    if (text.stopped_by() == nullptr) continue;
    delta.finish = FinishReason::kStop;
    delta.stop_reason = *text.stopped_by();
    break;
  }
  delta.text += text.finish();
  live_.usage.completion_tokens += static_cast<int>(delta.ids.size());
  services_.counted.generated_tokens += std::ssize(delta.ids);
  return delta;
}

void Beams::end() {
  const auto n = static_cast<size_t>(params().n);
  std::vector<BeamHypothesis> best = search_->finish();
  best.resize(std::min(best.size(), n));
  std::vector<Delta> deltas;
  for (const BeamHypothesis& hypothesis : best)
    deltas.push_back(text_of(hypothesis, static_cast<int>(deltas.size())));
  while (deltas.size() < n) {
    Delta& delta = deltas.emplace_back();
    delta.index = static_cast<int>(deltas.size()) - 1;
    delta.finish = FinishReason::kError;
    delta.error = internal_error(
        "no token can be chosen: every token is forbidden, or its logit is minus infinity or NaN");
  }
  close();
  services_.scheduler.cancel(live_.id);
  if (!live_.request.on_delta) return;
  for (const Delta& delta : deltas) live_.request.on_delta(delta);
}

}  // namespace

std::unique_ptr<RequestOutput> make_beams(LiveRequest& request, const OutputServices& services) {
  return std::make_unique<Beams>(request, services);
}

}  // namespace freshet::engine

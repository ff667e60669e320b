// A request's part in the steps: the interface of all kinds of request.
//
// A request has one or more outputs: sampled texts, beams or an embedding, and perhaps
// log-probabilities of its prompt (kinds.h). The step loop calls each output in this order and
// never asks which kind it is:
//
// clang-format off
//   announce()       once, before the scheduler gets the request
//   start()          once, when the request's first step is scheduled
//   asks_drafts()    draft: for which draws tokens are proposed
//   check_draft()    draft: drops proposed tokens that cannot be accepted
//   list_masks()     run: the grammar masks of the step
//   fill_mask()      run: computes a mask, before the model starts
//   descriptor()     run: the sampling descriptor of a row
//   wants_states()   run: whether the output reads states after the final norm
//   list_rows()      run: the rows of results that the output will read
//   may_run_ahead()  run: whether the next step may start before tokens are known
//   expect()         run: called for every row task if all of the step may run ahead
//   verify()         rows become accepted tokens
//   commit()         tokens go to the scheduler and to the client
//   cancel()         instead of the rest, if the request ends early
// clang-format on
//
// fill_mask() and verify() are called from the thread pool, concurrently for different samples and
// row tasks, while nothing else touches the output or the scheduler. All other methods run on the
// step thread.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "freshet/engine.h"
#include "layers/pooled_head.h"
#include "ops/sample.h"
#include "sampling/sampler.h"
#include "scheduler/scheduler.h"
#include "speculative/acceptance.h"
#include "speculative/drafter.h"

namespace freshet::engine {

class ModelRunner;
class RequestOutput;
struct LiveRequest;

// What all outputs of a step loop share. Outlives them.
struct OutputServices {
  scheduler::Scheduler& scheduler;
  const Tokenizer* tokenizer;  // nullptr: the model came without a vocabulary
  int64_t vocab = 0;
  EngineStats& counted;  // of which the outputs count the tokens
  const speculative::AcceptanceOptions& acceptance;
  const PooledHeads& heads;
  bool whole_prompts = false;  // the model reads both ways: prompts are computed in one step
};

// Rows of one item of a step that an output reads together. For sampled tokens, row `row + i` gives
// the token at `position + i`: one row, and one more for each draft.
struct RowTask {
  uint64_t request = 0;
  RequestOutput* output = nullptr;
  size_t item = 0;       // index into Step::items
  int32_t row = 0;       // the first one, among the item's rows of logits
  int32_t rows = 0;      // 0: the output reads states only
  int32_t member = 0;    // which sample or beam of the request
  int32_t position = 0;  // of the first token that the task is about
  int32_t tokens = 0;    // set from verify()'s result
};

// A sample whose mask is to be filled.
struct MaskTask {
  RequestOutput* output = nullptr;
  int32_t member = 0;
};

// Work space of one thread.
struct VerifyScratch {
  explicit VerifyScratch(int64_t vocab) : sampler(vocab), row(static_cast<size_t>(vocab)) {}
  SamplerScratch sampler;
  std::vector<float> row;
};

class RequestOutput {
 public:
  RequestOutput(LiveRequest& request, const OutputServices& services)
      : live_(request), services_(services) {}
  virtual ~RequestOutput() = default;
  RequestOutput(const RequestOutput&) = delete;
  RequestOutput& operator=(const RequestOutput&) = delete;

  // Tells the scheduler what the request needs: sequences, tokens, rows of logits.
  virtual void announce(scheduler::NewRequest& order) const = 0;
  // Memory that only a running request needs is taken here: many requests may wait.
  virtual void start(scheduler::SequenceId /*first*/) {}

  // Whether tokens may be proposed for the sequence. Fills in how it draws its tokens.
  virtual bool asks_drafts(const scheduler::Sequence& /*s*/,
                           speculative::DraftRequest& /*draft*/) const {
    return false;
  }
  // Cuts off what cannot be accepted, and may add tokens of which it is sure.
  virtual void check_draft(speculative::DraftRequest& /*draft*/) {}

  virtual void list_masks(const scheduler::StepItem& /*item*/, const scheduler::Sequence& /*s*/,
                          std::vector<MaskTask>& /*tasks*/) {}
  virtual void fill_mask(int32_t /*member*/) {}
  // The sampling descriptor (ops/sample.h) of row `row` of the item; its lists are appended to
  // `words`. The default leaves the row to the host.
  virtual ops::SampleRow descriptor(const scheduler::StepItem& /*item*/,
                                    const scheduler::Sequence& /*s*/, int32_t /*row*/,
                                    std::vector<int32_t>& /*words*/) const {
    return {};
  }
  // Whether the output reads states after the final norm.
  virtual bool wants_states(const scheduler::StepItem& /*item*/,
                            const scheduler::Sequence& /*s*/) const {
    return false;
  }

  // Appends the row tasks of the step's item number `index`, whose tokens count as computed.
  virtual void list_rows(size_t index, const scheduler::StepItem& item,
                         const scheduler::Sequence& s, std::vector<RowTask>& tasks) = 0;
  // Whether the next step may be scheduled before the task's token is known. If this holds for all
  // tasks of a step, each gets expect().
  virtual bool may_run_ahead(const RowTask& /*task*/, const ModelRunner& /*runner*/) const {
    return false;
  }
  virtual void expect(const RowTask& /*task*/) {}

  // Reads the rows and keeps what they decide until commit(). Returns how many tokens were chosen.
  virtual int32_t verify(const RowTask& task, ModelRunner& runner, VerifyScratch& scratch) = 0;
  // Called for all tasks of a step in order, after all were verified. Sets LiveRequest::over (by
  // close()) when the request has all it asked for.
  virtual void commit(const RowTask& task) = 0;

  // The request ends early: appends a last Delta for each open sample.
  virtual void cancel(FinishReason /*reason*/, const Status& /*status*/,
                      std::vector<Delta>& /*deltas*/) {}

 protected:
  // The request has ended. REQUIRES: the scheduler still knows it.
  void close();
  // A last Delta for each of the n samples, none of which has shown any text.
  void cancel_all(FinishReason reason, const Status& status, std::vector<Delta>& deltas) const;

  LiveRequest& live_;
  const OutputServices& services_;
};

// The outputs that the request asks for: the one place that chooses the kind.
std::vector<std::unique_ptr<RequestOutput>> make_outputs(LiveRequest& request,
                                                         const OutputServices& services);

}  // namespace freshet::engine

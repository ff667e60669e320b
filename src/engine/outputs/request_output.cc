#include "engine/outputs/request_output.h"

#include "engine/live_request.h"
#include "engine/outputs/kinds.h"

namespace freshet::engine {

void RequestOutput::close() {
  record_usage(live_, services_.scheduler);
  live_.over = true;
}

void RequestOutput::cancel_all(FinishReason reason, const Status& status,
                               std::vector<Delta>& deltas) const {
  for (int i = 0; i < live_.request.params.n; ++i) {
    Delta& delta = deltas.emplace_back();
    delta.index = i;
    delta.finish = reason;
    delta.error = status;
  }
}

// A prompt's log-probabilities come before the first token.
std::vector<std::unique_ptr<RequestOutput>> make_outputs(LiveRequest& live,
                                                         const OutputServices& services) {
  const Request& r = live.request;
  std::vector<std::unique_ptr<RequestOutput>> outputs;
  if (r.params.prompt_logprobs >= 0) outputs.push_back(make_prompt_logprobs(live, services));
  if (r.pooling != Pooling::kNone) {
    outputs.push_back(make_embedding(live, services));
  } else if (r.params.beam_width > 0) {
    outputs.push_back(make_beams(live, services));
  } else {
    outputs.push_back(make_sampled(live, services));
  }
  return outputs;
}

}  // namespace freshet::engine

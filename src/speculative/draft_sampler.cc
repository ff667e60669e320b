#include "speculative/draft_sampler.h"

#include <algorithm>
#include <limits>

namespace freshet::speculative {

DraftSampler::DraftSampler(const DraftRequest& request, int64_t vocab, bool greedy)
    : vocab_(vocab) {
  const SamplingParams& asked = *request.params;
  if (greedy || asked.temperature <= 0.0f) return;
  SamplingParams p;
  p.temperature = asked.temperature;
  p.top_k = asked.top_k;
  p.top_p = asked.top_p;
  p.min_p = asked.min_p;
  p.typical_p = asked.typical_p;
  sampler_.emplace(p, vocab, request.seed, request.sample, std::span<const int32_t>{}, 1,
                   std::vector<int32_t>{});
}

int32_t DraftSampler::draw(std::span<float> logits, std::span<const int32_t> ids, int64_t position,
                           SamplerScratch& scratch, std::vector<float>& row) {
  if (ids.empty() && std::ssize(logits) == vocab_) {
    return sampler_->sample(logits, position, scratch);
  }
  row.assign(static_cast<size_t>(vocab_), -std::numeric_limits<float>::infinity());
  const size_t columns = std::min(logits.size(), ids.empty() ? row.size() : ids.size());
  for (size_t i = 0; i < columns; ++i)
    row[ids.empty() ? i : static_cast<size_t>(ids[i])] = logits[i];
  return sampler_->sample(row, position, scratch);
}

}  // namespace freshet::speculative

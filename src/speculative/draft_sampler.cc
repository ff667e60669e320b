#include "speculative/draft_sampler.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "speculative/acceptance.h"

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

int32_t DraftSampler::draw(DraftRequest& request, std::span<float> logits,
                           std::span<const int32_t> ids, SamplerScratch& scratch,
                           std::vector<float>& row) {
  if (ids.empty() && std::ssize(logits) == vocab_) return draw_from(request, logits, scratch);
  row.assign(static_cast<size_t>(vocab_), -std::numeric_limits<float>::infinity());
  const size_t columns = std::min(logits.size(), ids.empty() ? row.size() : ids.size());
  for (size_t i = 0; i < columns; ++i) {
    const int32_t id = ids.empty() ? static_cast<int32_t>(i) : ids[i];
    if (id >= 0) row[static_cast<size_t>(id)] = logits[i];
  }
  return draw_from(request, row, scratch);
}

int32_t DraftSampler::draw_from(DraftRequest& r, std::span<float> row, SamplerScratch& scratch) {
  const auto first = std::ssize(r.tokens);
  if (!r.wants_distributions) return sampler_->sample(row, first + std::ssize(r.draft), scratch);
  const std::span<const Candidate> possible = sampler_->distribution(row, scratch);
  std::vector<Candidate> d(possible.begin(), possible.end());
  std::erase_if(d, [](const Candidate& c) { return c.weight == 0; });
  order_by_id(d);
  const uint64_t bits =
      draft_bits(*sampler_, first, static_cast<int>(r.draft.size()), Sampler::Purpose::kDraft);
  const int32_t token = draw_token(d, bits);
  r.drawn_from.resize(r.draft.size());
  if (token >= 0) r.drawn_from.push_back(std::move(d));
  return token;
}

}  // namespace freshet::speculative

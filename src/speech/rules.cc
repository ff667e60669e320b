#include "speech/rules.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace freshet::speech {
namespace {

constexpr float kForbidden = -std::numeric_limits<float>::infinity();

void forbid(float* logits, int64_t from, int64_t end) {
  if (from < end) std::fill(logits + from, logits + end, kForbidden);
}

// log(sum of exp) over [from, end).
double log_sum(const float* logits, int64_t from, int64_t end) {
  float most = kForbidden;
  for (int64_t i = from; i < end; ++i) most = std::max(most, logits[i]);
  if (most == kForbidden) return static_cast<double>(most);
  double sum = 0.0;
  for (int64_t i = from; i < end; ++i) sum += std::exp(static_cast<double>(logits[i] - most));
  return static_cast<double>(most) + std::log(sum);
}

}  // namespace

std::vector<int32_t> WhisperRules::lead() const {
  std::vector<int32_t> lead;
  if (!tokens_.languages.empty()) {
    lead.push_back(options_.language);
    lead.push_back(options_.task);
  }
  if (!options_.timestamps) lead.push_back(tokens_.no_timestamps);
  return lead;
}

double WhisperRules::no_speech() const {
  const std::lock_guard lock(mutex_);
  return no_speech_;
}

void WhisperRules::keep(size_t at, const float* logits, int64_t vocab) {
  latest_.at = at;
  latest_.logits.assign(logits, logits + vocab);
  latest_.log_sum = log_sum(logits, 0, vocab);
}

double WhisperRules::mean_logprob(std::span<const int32_t> ids) const {
  const std::lock_guard lock(mutex_);
  if (ids.size() <= lead_.size()) return 0.0;
  double sum = logprobs_;
  if (!latest_.logits.empty() && latest_.at + 1 == ids.size())
    sum += static_cast<double>(latest_.logits[ids.back()]) - latest_.log_sum;
  const size_t ended = ids.back() == tokens_.end ? 1 : 0;
  return sum / static_cast<double>(ids.size() - lead_.size() - ended + 1);
}

void WhisperRules::apply(const std::vector<int32_t>& output, float* logits, int64_t vocab) {
  const size_t at = output.size();
  if (at == 0 && tokens_.no_speech >= 0 && tokens_.no_speech < vocab) {
    const double share =
        std::exp(static_cast<double>(logits[tokens_.no_speech]) - log_sum(logits, 0, vocab));
    const std::lock_guard lock(mutex_);
    no_speech_ = share;
  }
  if (at < lead_.size()) {
    std::vector<std::pair<int32_t, float>> kept;
    if (lead_[at] >= 0) {
      kept.emplace_back(lead_[at], 0.0f);
    } else {
      for (const auto& [code, id] : tokens_.languages) kept.emplace_back(id, logits[id]);
    }
    forbid(logits, 0, vocab);
    for (const auto& [id, logit] : kept) logits[id] = logit;
    return;
  }
  if (at == lead_.size()) {
    for (const int32_t id : tokens_.suppressed_at_begin) logits[id] = kForbidden;
  }
  for (const int32_t id : tokens_.suppressed) logits[id] = kForbidden;
  if (options_.timestamps)
    limit_timestamps(output.data() + lead_.size(), at - lead_.size(), logits, vocab);
  const std::lock_guard lock(mutex_);
  if (!latest_.logits.empty() && latest_.at + 1 == at)
    logprobs_ += static_cast<double>(latest_.logits[output.back()]) - latest_.log_sum;
  keep(at, logits, vocab);
}

// Timestamps come in pairs, except before the end, and never go back. A text begins with one.
void WhisperRules::limit_timestamps(const int32_t* said, size_t count, float* logits,
                                    int64_t vocab) const {
  const int32_t first = tokens_.first_timestamp();
  logits[tokens_.no_timestamps] = kForbidden;
  const bool last_is = count >= 1 && said[count - 1] >= first;
  const bool before_is = count < 2 || said[count - 2] >= first;
  if (last_is && before_is) forbid(logits, first, vocab);
  if (last_is && !before_is) forbid(logits, 0, tokens_.end);
  for (size_t i = count; i-- > 0;) {
    if (said[i] < first) continue;
    forbid(logits, first, std::min<int64_t>(vocab, said[i] + (last_is && !before_is ? 0 : 1)));
    break;
  }
  if (count == 0) {
    forbid(logits, 0, first);
    if (tokens_.max_initial_timestamp >= 0)
      forbid(logits, int64_t{first} + tokens_.max_initial_timestamp + 1, vocab);
  }
  // If all timestamps together are likelier than any text, one of them it is.
  const float text = *std::max_element(logits, logits + first);
  if (log_sum(logits, first, vocab) > static_cast<double>(text)) forbid(logits, 0, first);
}

}  // namespace freshet::speech

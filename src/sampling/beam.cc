#include "sampling/beam.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "base/status.h"

namespace freshet {

BeamSearch::BeamSearch(BeamOptions options, int64_t vocab)
    : options_(std::move(options)), vocab_(vocab), beams_(1), scratch_(vocab) {
  FRESHET_CHECK(options_.width > 0);
}

bool BeamSearch::is_stop(int32_t id) const {
  return std::find(options_.stop_ids.begin(), options_.stop_ids.end(), id) !=
         options_.stop_ids.end();
}

double BeamSearch::score(double logprob, size_t length) const {
  return logprob / std::pow(static_cast<double>(std::max<size_t>(length, 1)),
                            static_cast<double>(options_.length_penalty));
}

std::vector<BeamSearch::Continuation> BeamSearch::best_continuations(
    std::span<const float> logits) {
  const auto wanted = static_cast<size_t>(options_.width) * 2;
  std::vector<Continuation> all;
  for (size_t b = 0; b < beams_.size(); ++b) {
    auto row = logits.subspan(b * static_cast<size_t>(vocab_), static_cast<size_t>(vocab_));
    banned_.clear();
    options_.bans.list(beams_[b].ids, banned_);
    std::ranges::sort(banned_);
    banned_.erase(std::unique(banned_.begin(), banned_.end()), banned_.end());
    if (options_.renormalize && !banned_.empty()) {
      row_.assign(row.begin(), row.end());
      for (const int32_t id : banned_)
        row_[static_cast<size_t>(id)] = -std::numeric_limits<float>::infinity();
      row = row_;
    }
    const float maximum = find_maxima(row, scratch_);
    if (maximum == -std::numeric_limits<float>::infinity()) continue;
    const double log_sum = log_sum_exp(row, maximum, scratch_);
    const int64_t most = static_cast<int64_t>(wanted) + std::ssize(banned_);
    gather_best(row, std::min(most, vocab_), scratch_);
    for (const Candidate& c : scratch_.candidates) {
      if (std::ranges::binary_search(banned_, c.id)) continue;
      all.push_back(
          {beams_[b].logprob + static_cast<double>(c.logit) - log_sum, static_cast<int>(b), c.id});
    }
  }
  std::stable_sort(all.begin(), all.end(), [](const Continuation& x, const Continuation& y) {
    return x.logprob > y.logprob;
  });
  if (all.size() > wanted) all.resize(wanted);
  return all;
}

void BeamSearch::add_finished(std::vector<int32_t> ids, double logprob, bool stopped) {
  const double s = score(logprob, ids.size());
  const auto at = std::find_if(finished_.begin(), finished_.end(),
                               [&](const BeamHypothesis& h) { return h.score < s; });
  finished_.insert(at, {std::move(ids), s, stopped});
  if (finished_.size() > static_cast<size_t>(options_.width)) finished_.pop_back();
}

std::span<const BeamSearch::Step> BeamSearch::advance(std::span<const float> logits) {
  FRESHET_CHECK(!done_ && std::ssize(logits) == live() * vocab_);
  const std::vector<Continuation> best = best_continuations(logits);
  const auto width = static_cast<size_t>(options_.width);
  std::vector<Beam> next;
  steps_.clear();
  for (size_t rank = 0; rank < best.size() && next.size() < width; ++rank) {
    const Continuation& c = best[rank];
    const bool stop = is_stop(c.id);
    if (stop && rank >= width) continue;
    std::vector<int32_t> ids = beams_[static_cast<size_t>(c.parent)].ids;
    ids.push_back(c.id);
    if (stop) {
      add_finished(std::move(ids), c.logprob, true);
    } else {
      next.push_back({std::move(ids), c.logprob});
      steps_.push_back({c.parent, c.id});
    }
  }
  const size_t length = beams_.front().ids.size() + 1;
  // Where everything is forbidden the text ends; logits without a number are a fault.
  if (best.empty() && std::ranges::any_of(logits, [](float x) { return std::isfinite(x); })) {
    for (Beam& b : beams_) {
      if (!b.ids.empty()) add_finished(std::move(b.ids), b.logprob, false);
    }
  }
  beams_ = std::move(next);
  if (finished_.size() >= width && !best.empty())
    done_ =
        options_.early_stopping || finished_.back().score >= score(best.front().logprob, length);
  if (beams_.empty()) done_ = true;
  return steps_;
}

std::vector<BeamHypothesis> BeamSearch::finish() {
  // If the search was done, live beams cannot win any more.
  if (!done_) {
    for (Beam& b : beams_) {
      if (!b.ids.empty()) add_finished(std::move(b.ids), b.logprob, false);
    }
  }
  done_ = true;
  beams_.clear();
  return std::exchange(finished_, {});
}

}  // namespace freshet

// How a draft model draws: as the sequence itself does, over the drafter's own logits.
//
// The sampler's noise depends on the request's seed, the sample, the position and the token alone,
// so a drafter that draws with it agrees with the target more often than by an independent draw.
// For rejection sampling it draws independently, and tells from which distribution. Penalties and
// grammars are left out. One per sequence; not synchronised.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "sampling/sampler.h"
#include "speculative/drafter.h"

namespace freshet::speculative {

class DraftSampler {
 public:
  DraftSampler() = default;
  // `greedy`: the argmax, whatever the request asks for.
  DraftSampler(const DraftRequest& request, int64_t vocab, bool greedy);

  // Whether it needs logits rather than their argmax.
  bool draws() const { return sampler_.has_value(); }
  // The token behind the request's last draft; the caller appends it. `ids`: the target's ids of
  // the logits' columns; empty: they are the columns. Changes `logits`. -1: none is possible.
  int32_t draw(DraftRequest& request, std::span<float> logits, std::span<const int32_t> ids,
               SamplerScratch& scratch, std::vector<float>& row);

 private:
  int32_t draw_from(DraftRequest& request, std::span<float> row, SamplerScratch& scratch);

  int64_t vocab_ = 0;
  std::optional<Sampler> sampler_;
};

}  // namespace freshet::speculative

// Rules by which drafts are accepted, as pure functions of the model's distribution p, the
// drafter's distribution q, the draft and random bits.
//
// A distribution is a list of candidates in ascending order of id, with whole weights, as
// Sampler::distribution() gives it (after order_by_id()). q of a deterministic draft is that one
// token. Rejection sampling works on whole numbers of 128 bits: its only error is the scaling of 64
// random bits, at most 2^-64. Block verification works in double precision, in order of ids; its
// error is below 2^-40 per token. "Lawful" rules are those that leave the distribution of the
// tokens as it is: match, rejection and block. All functions are thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "freshet/engine.h"
#include "sampling/sampler.h"

namespace freshet::speculative {

// How a server accepts drafts.
struct AcceptanceOptions {
  Acceptance method = Acceptance::kMatch;
  // kSynthetic: the share of steps in which the first i + 1 drafts are all accepted.
  std::vector<double> rates;
  // kTypical: a draft is kept if p(draft) > min(threshold, alpha * exp(-entropy of p)).
  double posterior_threshold = 0.09;
  double posterior_alpha = 0.3;
  bool count_rejections = false;  // EngineOptions::count_rejections
};

// vLLM's names ("standard" is "rejection").
std::optional<Acceptance> acceptance_by_name(std::string_view name);

using Distribution = std::span<const Candidate>;

// Whether the token has a positive weight.
bool may_be(Distribution d, int32_t id);
// Sorts by id.
void order_by_id(std::span<Candidate> candidates);
// The random bits for draft `index` of a step whose first draft stands at `first`. A rule may look
// at drafts that it drops, so their noise is never used again: the next step has other bits for the
// same position.
uint64_t draft_bits(const Sampler& sampler, int64_t first, int index, Sampler::Purpose purpose);
// A token of `d`. -1: no weight is positive.
int32_t draw_token(Distribution d, uint64_t bits);

// ---- rejection sampling ----------------------------------------------------------------------

// Whether the draft, drawn from q, is kept: with probability min(1, p(draft) / q(draft)).
bool keeps_draft(Distribution p, Distribution q, int32_t draft, uint64_t bits);
// Otherwise, a token drawn in proportion to max(0, p - q). -1: p is nowhere above q.
int32_t draw_residual(Distribution p, Distribution q, uint64_t bits);
// The probability that a draft is rejected: half the sum of |p - q|.
double total_variation(Distribution p, Distribution q);

// ---- block verification ----------------------------------------------------------------------

// P_i = min(1, P_{i-1} * p(draft) / q(draft)); P_0 is 1. i drafts are kept with the block's last
// u_i below h_i = R_i / (R_i + 1 - P_i), where R_i is the sum of max(0, P_i * p - q) over the next
// position, and h_i = P_i behind the last draft.
double block_product(double before, Distribution p, Distribution q, int32_t draft);
double block_residual(double product, Distribution p, Distribution q);
bool keeps_block(double product, double residual, uint64_t bits);
// The token behind i kept drafts, drawn in proportion to max(0, P_i * p - q).
int32_t draw_block_residual(double product, Distribution p, Distribution q, uint64_t bits);

// ---- rules that change the distribution ------------------------------------------------------

bool is_typical(Distribution p, int32_t draft, const AcceptanceOptions& options);
// How many of `drafts` drafts are kept, whatever they are.
int synthetic_drafts(std::span<const double> rates, int drafts, uint64_t bits);

}  // namespace freshet::speculative

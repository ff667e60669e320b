#include "engine/outputs/draft_rules.h"

#include <algorithm>

namespace freshet::engine {
namespace {

using speculative::Distribution;
using Purpose = Sampler::Purpose;

// What the row's token is drawn from, in order of id; empty if no token is possible. Valid until
// the scratch is used again.
Distribution target_of(const DraftRow& row, Sampler& sampler, TokenMask mask,
                       VerifyScratch& scratch) {
  std::ranges::copy(row.logits, scratch.row.begin());  // the row itself stays as it is
  sampler.distribution(scratch.row, scratch.sampler, mask);
  std::vector<Candidate>& candidates = scratch.sampler.row.candidates;
  speculative::order_by_id(candidates);
  return candidates;
}

// What the draft was drawn from.
class DraftedFrom {
 public:
  explicit DraftedFrom(const DraftRow& row)
      : point_{row.draft, 0.0f, 1},
        all_(row.drawn_from.empty() ? Distribution(&point_, 1) : row.drawn_from) {}
  DraftedFrom(const DraftedFrom&) = delete;
  DraftedFrom& operator=(const DraftedFrom&) = delete;
  Distribution operator*() const { return all_; }

 private:
  const Candidate point_;
  const Distribution all_;
};

uint64_t bits_of(const DraftRow& row, int32_t index, const Sampler& sampler, Purpose purpose) {
  return speculative::draft_bits(sampler, row.first, index, purpose);
}

}  // namespace

DraftRules::DraftRules(const speculative::AcceptanceOptions& server, const SamplingParams& params,
                       bool greedy)
    : server_(&server), method_(params.rejection_sample_method.value_or(server.method)) {
  if (greedy && method_ != Acceptance::kSynthetic) method_ = Acceptance::kMatch;
}

bool DraftRules::wants_distributions() const {
  return method_ == Acceptance::kRejection || method_ == Acceptance::kBlock;
}

bool DraftRules::reads_logits(bool drawn) const {
  switch (method_) {
    case Acceptance::kMatch:
    case Acceptance::kSynthetic:
      return false;
    case Acceptance::kRejection:
      return drawn || server_->count_rejections;
    case Acceptance::kBlock:
    case Acceptance::kTypical:
      return true;
  }
  return true;
}

bool DraftRules::counts_rejections() const {
  return method_ == Acceptance::kRejection && server_->count_rejections;
}

double DraftRules::rejection_odds(const DraftRow& row, Sampler& sampler, TokenMask mask,
                                  VerifyScratch& scratch) const {
  const Distribution p = target_of(row, sampler, mask, scratch);
  return p.empty() ? 1.0 : speculative::total_variation(p, *DraftedFrom(row));
}

BlockRuling DraftRules::decide_ahead(int64_t first, int32_t drafts, const Sampler& sampler) const {
  if (method_ != Acceptance::kSynthetic) return {};
  const uint64_t bits = speculative::draft_bits(sampler, first, 0, Purpose::kAccept);
  return {.kept = speculative::synthetic_drafts(server_->rates, drafts, bits)};
}

Ruling DraftRules::judge(const DraftRow& row, const BlockRuling& block, Sampler& sampler,
                         TokenMask mask, VerifyScratch& scratch) const {
  using enum Ruling::Token;
  if (method_ == Acceptance::kMatch) return {kOwn};
  if (method_ == Acceptance::kSynthetic) return {row.index < block.kept ? kDraft : kOwnLast};
  // For a draft without randomness, keeping it where it equals the row's own token is rejection
  // sampling, and the token is the one without speculation.
  if (method_ == Acceptance::kRejection && row.drawn_from.empty()) return {kOwn};
  if (method_ == Acceptance::kBlock && row.index < block.kept) return {kDraft};
  const Distribution p = target_of(row, sampler, mask, scratch);
  if (p.empty()) return {kOwn};  // there is none
  if (method_ == Acceptance::kTypical)
    return {speculative::is_typical(p, row.draft, *server_) ? kDraft : kOwn};

  const DraftedFrom q(row);
  const uint64_t resampling = bits_of(row, row.index, sampler, Purpose::kResample);
  if (method_ == Acceptance::kBlock)
    return {kOther, speculative::draw_block_residual(block.product, p, *q, resampling)};
  const uint64_t accepting = bits_of(row, row.index, sampler, Purpose::kAccept);
  if (speculative::keeps_draft(p, *q, row.draft, accepting)) return {kDraft};
  return {kOther, speculative::draw_residual(p, *q, resampling)};
}

// The longest path that its random number allows is kept.
void BlockWalk::consider(const DraftRow& row, int32_t kept, double residual,
                         const Sampler& sampler) {
  const uint64_t bits = bits_of(row, kept - 1, sampler, Purpose::kAccept);
  if (speculative::keeps_block(product_, residual, bits)) best_ = {kept, product_};
}

bool BlockWalk::step(const DraftRow& row, bool last, Sampler& sampler, TokenMask mask,
                     VerifyScratch& scratch) {
  const Distribution p = target_of(row, sampler, mask, scratch);
  const DraftedFrom q(row);
  // Where the text ends, nothing follows that could be below the drafter's share.
  if (row.index > 0) {
    const double residual = p.empty() ? product_ : speculative::block_residual(product_, p, *q);
    consider(row, row.index, residual, sampler);
  }
  if (p.empty()) return false;
  product_ = speculative::block_product(product_, p, *q, row.draft);
  if (last) consider(row, row.index + 1, product_, sampler);
  return product_ > 0.0;
}

void Rejections::add(double odds, bool kept) {
  seen += kept ? 0 : 1;
  expected += odds;
  variance += odds * (1.0 - odds);
}

}  // namespace freshet::engine

#include "speculative/combined.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <utility>

namespace freshet::speculative {
namespace {

constexpr double kRowShare = 0.03;    // of a plain step's time, where steps were not measured
constexpr size_t kUnreadTokens = 32;  // more of them make the model's time no measure of a round

double clock_now() {
  const auto t = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(t).count();
}

}  // namespace

CombinedDrafter::CombinedDrafter(std::vector<std::unique_ptr<Drafter>> lookups,
                                 std::unique_ptr<Drafter> model)
    : lookups_(std::move(lookups)),
      model_(std::move(model)),
      rates_(lookups_.size() + (model_ ? 1 : 0)),
      found_(lookups_.size()) {}

void CombinedDrafter::observe(std::span<const TargetRows> rows) {
  if (model_) model_->observe(rows);
}

void CombinedDrafter::forget(uint64_t sequence) {
  for (const auto& lookup : lookups_) lookup->forget(sequence);
  if (model_) model_->forget(sequence);
  sequences_.erase(sequence);
}

CombinedDrafter::Sequence& CombinedDrafter::sequence_of(uint64_t id) {
  Sequence& s = sequences_[id];
  s.proposals.resize(rates_.size());
  return s;
}

// Compares the last proposals with the tokens that came.
void CombinedDrafter::learn(Sequence& s, std::span<const int32_t> tokens) {
  for (size_t d = 0; d < rates_.size(); ++d) {
    Proposal& p = s.proposals[d];
    if (p.draft.empty()) continue;
    const auto came = tokens.subspan(std::min(p.at, tokens.size()));
    const auto right = static_cast<int>(std::ranges::mismatch(p.draft, came).in1 - p.draft.begin());
    const bool wrong = right < std::ssize(p.draft) && right < std::ssize(came);
    rates_[d].add(p.own, right, right + (wrong ? 1 : 0));
    p.draft.clear();
  }
}

// ---- gains -----------------------------------------------------------------------------------

void CombinedDrafter::measure_plain(std::span<const DraftRequest> requests) {
  plain_ = StepShape();
  for (const DraftRequest& r : requests) plain_.add(1, std::ssize(r.tokens));
  plain_seconds_ = costs_ != nullptr ? costs_->seconds(plain_) : 0.0;
}

double CombinedDrafter::gain(size_t drafter, const Sequence& s, const DraftRequest& r,
                             int length) const {
  std::array<double, AcceptanceRates::kPositions> survival;
  const auto known = std::span(survival).first(
      static_cast<size_t>(std::clamp(length, 0, AcceptanceRates::kPositions)));
  rates_[drafter].survival(s.proposals[drafter].own, known);
  double tokens = 0.0;
  for (const double survives : known) tokens += survives;
  const auto sequences = static_cast<double>(plain_.sequences);
  if (plain_seconds_ <= 0.0) return tokens - kRowShare * length;
  StepShape shape = plain_;
  shape.add_rows(length, std::ssize(r.tokens));
  double seconds = costs_->seconds(shape) - plain_seconds_;
  if (drafter == lookups_.size() && drafting_.known())
    seconds += length * drafting_.round(static_cast<int>(plain_.sequences)) / sequences;
  return tokens - seconds * sequences / plain_seconds_;
}

// ---- proposals -------------------------------------------------------------------------------

void CombinedDrafter::look_up(std::span<DraftRequest> requests) {
  for (size_t d = 0; d < lookups_.size(); ++d) {
    found_[d].assign(requests.begin(), requests.end());
    for (DraftRequest& f : found_[d]) {
      f.limit = std::max(f.limit, f.lookup_limit);
      f.tree = false;
    }
    lookups_[d]->propose(found_[d]);
  }
}

// Asks the model for the requests that have no draft yet, as one batch.
void CombinedDrafter::ask_model(std::span<DraftRequest> requests) {
  asked_.clear();
  owner_.clear();
  size_t most_unread = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    if (requests[i].looked_up || requests[i].limit <= 0) continue;
    size_t& read = sequence_of(requests[i].sequence).read_by_model;
    most_unread = std::max(most_unread, requests[i].tokens.size() - read);
    read = requests[i].tokens.size();
    asked_.push_back(std::move(requests[i]));
    owner_.push_back(i);
  }
  if (asked_.empty()) return;
  const double from = clock_now();
  model_->propose(asked_);
  const double seconds = clock_now() - from;
  int rounds = 0, rows = 0;
  for (size_t k = 0; k < asked_.size(); ++k) {
    DraftRequest& r = requests[owner_[k]] = std::move(asked_[k]);
    rounds = std::max(rounds, r.depth());
    rows += r.depth();
    Proposal& p = sequence_of(r.sequence).proposals.back();
    p.draft = r.draft;
    p.at = r.tokens.size();
  }
  if (rows > 0 && most_unread <= kUnreadTokens) drafting_.add(rounds, rows, 0, seconds);
}

void CombinedDrafter::propose(std::span<DraftRequest> requests) {
  measure_plain(requests);
  look_up(requests);
  for (size_t i = 0; i < requests.size(); ++i) {
    DraftRequest& r = requests[i];
    Sequence& s = sequence_of(r.sequence);
    learn(s, r.tokens);
    size_t best = lookups_.size();
    double most = model_ && r.limit > 0 ? gain(best, s, r, r.limit) : 0.0;
    for (size_t d = 0; d < lookups_.size(); ++d) {
      const std::vector<int32_t>& draft = found_[d][i].draft;
      s.proposals[d].draft = draft;
      s.proposals[d].at = r.tokens.size();
      if (draft.empty()) continue;
      const double expected = gain(d, s, r, static_cast<int>(std::ssize(draft)));
      // Where nothing else drafts, the controller decides whether a draft pays.
      if (expected <= most && (best < lookups_.size() || (model_ && r.limit > 0))) continue;
      best = d;
      most = expected;
    }
    if (best == lookups_.size()) continue;
    r.draft = std::move(found_[best][i].draft);
    if (!model_) continue;
    r.looked_up = true;
    r.limit = std::max(r.limit, r.lookup_limit);
  }
  if (model_) ask_model(requests);
}

}  // namespace freshet::speculative

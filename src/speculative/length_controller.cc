#include "speculative/length_controller.h"

#include <algorithm>
#include <cmath>

namespace freshet::speculative {
namespace {

constexpr double kUnknownRound = 0.12;  // of a plain step's time
constexpr double kFreeRound = 0.003;    // below this share of it a round costs nothing
constexpr double kTurnOn = 1.03;        // a gain that is worth turning on for
constexpr double kStayOn = 0.985;       // one that is near enough to 1 to stay on
constexpr double kProbeShare = 0.005;   // of the time
constexpr int kProbeDrafts = 2;
constexpr double kProbeRefund = 0.7;   // of a plain token's time, for a draft that was right
constexpr double kPilotDrafts = 10.0;  // until this many were tried, few sequences draft
constexpr int kPilots = 2;
constexpr double kControlInterval = 160.0;
constexpr double kControlWeight = 4.0;   // of such a step among those that correct a table
constexpr int kControlSteps = 3;         // of a control: plain steps in a row
constexpr double kFirstControls = 10.0;  // control steps until the interval is reached
constexpr double kRecent = 0.97;         // memory of recent gains, for each step with drafts
constexpr double kTrusted = 12.0;        // steps with drafts before their gain corrects plans
constexpr double kForgetGain = 0.995;    // for each step without
constexpr double kForgetOwn = 0.02;      // the same for a sequence's own rates
constexpr double kLongStep = 1.5;        // longer than expected by this factor: others run as well
constexpr double kLeastSurvival = 0.01;
constexpr int64_t kMissedTokens = 32;  // fewer are part of a round
constexpr int kLongRun = 8;
constexpr double kRecentTrees = 0.8;  // memory of the rows of trees

// How many tokens from `first` on the path has right.
int right_tokens(std::span<const int32_t> path, std::span<const int32_t> tokens, size_t first) {
  const auto came = tokens.subspan(std::min(first, tokens.size()));
  return static_cast<int>(std::ranges::mismatch(path, came).in1 - path.begin());
}

}  // namespace

LengthController::LengthController(StepCosts costs, const LengthOptions& options)
    : costs_(std::move(costs)),
      drafting_(kUnknownRound * costs_.seconds({.rows = 1, .sequences = 1})),
      options_(options) {}

double LengthController::Plan::gain() const {
  const auto sequences = static_cast<double>(lengths.size());
  return seconds > 0.0 ? tokens / sequences * plain_seconds / seconds : 1.0;
}

// ---- what is known ---------------------------------------------------------------------------

size_t LengthController::run_class(int run) {
  return run == 0 ? 0 : run < kLongRun ? 1 : 2;
}

void LengthController::add_rates(Sequence& s, int right, int drafted) {
  if (s.copied) return copy_rates_[s.run_then].add(s.copy_own, right, drafted);
  rates_.add(s.own, right, drafted, s.probe);
}

void LengthController::survival_of(const DraftRequest& r, std::span<double> out) const {
  const auto at = sequences_.find(r.sequence);
  const Sequence unknown;
  const Sequence& s = at == sequences_.end() ? unknown : at->second;
  if (r.looked_up || free_) return copy_rates_[run_class(s.run)].survival(s.copy_own, out);
  rates_.survival(s.own, out);
}

// Compares the sequence's last draft with the tokens that came.
void LengthController::learn(const DraftRequest& r) {
  Sequence& s = sequences_[r.sequence];
  if (s.paths.empty() || s.copied) s.own.forget(kForgetOwn);
  if (s.paths.empty()) {
    s.run = 0;
    return;
  }
  int right = 0, drafted = 0;
  for (const std::vector<int32_t>& path : s.paths) {
    right = std::max(right, right_tokens(path, r.tokens, s.draft_at));
    drafted = std::max(drafted, static_cast<int>(path.size()));
  }
  const bool known = right == drafted || s.draft_at + static_cast<size_t>(right) < r.tokens.size();
  if (!known) return;
  add_rates(s, right, drafted);
  s.run = s.copied && right == drafted ? s.run + right : 0;
  // A draft that was right has earned its time.
  if (s.probe) budget_ += kProbeRefund * right * plain_token_;
  s.paths.clear();
  s.probe = false;
}

bool LengthController::drafts_free(size_t sequences) const {
  const auto n = static_cast<int64_t>(sequences);
  return drafting_.known() && drafting_.round(static_cast<int>(sequences)) <
                                  kFreeRound * costs_.seconds({.rows = n, .sequences = n});
}

StepShape LengthController::plain_shape(std::span<const DraftRequest> requests) const {
  StepShape shape;
  for (const DraftRequest& r : requests) shape.add(1, std::ssize(r.tokens));
  return shape;
}

int64_t LengthController::missed_tokens(const DraftRequest& r) const {
  const auto at = sequences_.find(r.sequence);
  const int64_t missed =
      std::ssize(r.tokens) - (at == sequences_.end() ? 0 : at->second.drafter_at);
  return missed > kMissedTokens ? missed : 0;
}

// What the steps gave, compared with what was expected of them.
double LengthController::correction() const {
  if (measured_steps_ < kTrusted || expected_.ratio() <= 0.0) return 1.0;
  return std::clamp(measured_.ratio() / expected_.ratio(), 0.5, 1.25);
}

// ---- plans -----------------------------------------------------------------------------------

LengthController::Plan LengthController::best_plan(std::span<const DraftRequest> requests,
                                                   const std::vector<int>& most, double least,
                                                   bool drafting) const {
  std::vector<Slot> slots;
  std::array<double, AcceptanceRates::kPositions> survival;
  int deepest = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    const auto depth = static_cast<size_t>(std::clamp(most[i], 0, AcceptanceRates::kPositions));
    survival_of(requests[i], std::span(survival).first(depth));
    for (size_t d = 0; d < depth && survival[d] >= kLeastSurvival; ++d) {
      slots.push_back({survival[d], static_cast<int>(i), static_cast<int>(d)});
      deepest = std::max(deepest, static_cast<int>(d) + 1);
    }
  }
  std::ranges::stable_sort(slots, std::greater(), &Slot::survival);
  Plan plan;
  plan.lengths.assign(requests.size(), 0);
  StepShape shape = plain_shape(requests);
  plan.plain_seconds = plan.seconds = costs_.seconds(shape);
  plan.tokens = static_cast<double>(requests.size());
  // Rows of prompts make a step longer, and rows of drafts dearer.
  shape.rows += prompt_tokens_;
  const double prompts = costs_.seconds(shape) - plan.plain_seconds;
  std::vector<int> width(static_cast<size_t>(deepest), 0);
  double tokens = plan.tokens, drafts = 0.0, best = least * tokens / plan.seconds;
  const int64_t rows = shape.rows, row_context = shape.row_context;
  double more_rows = 0.0, more_context = 0.0;
  size_t taken = 0;
  for (size_t j = 0; j < slots.size(); ++j) {
    const auto& [s, request, depth] = slots[j];
    const DraftRequest& r = requests[static_cast<size_t>(request)];
    tokens += s;
    more_rows += r.tree ? tree_rows_ : 1.0;
    more_context += (r.tree ? tree_rows_ : 1.0) * static_cast<double>(r.tokens.size());
    const auto decoding = static_cast<double>(requests.size()) + more_rows;
    if (options_.max_rows > 0 && decoding > static_cast<double>(options_.max_rows)) break;
    shape.rows = rows + std::llround(more_rows);
    shape.row_context = row_context + std::llround(more_context);
    if (drafting) {
      int& n = width[static_cast<size_t>(depth)];
      drafts += drafting_.round(n + 1) - (n > 0 ? drafting_.round(n) : 0.0);
      ++n;
      const double steps = std::clamp(static_cast<double>(r.limit) / 2.0, 1.0, 64.0);
      if (depth == 0)
        drafts += drafting_.missed_token() * static_cast<double>(missed_tokens(r)) / steps;
    }
    const double seconds = costs_.seconds(shape) - prompts + drafts;
    if (tokens / seconds <= best) continue;
    best = tokens / seconds;
    plan.tokens = tokens;
    plan.seconds = seconds;
    taken = j + 1;
  }
  for (size_t j = 0; j < taken; ++j) ++plan.lengths[static_cast<size_t>(slots[j].request)];
  return plan;
}

// What lengths are expected to give, whoever chose them.
LengthController::Plan LengthController::plan_of(std::span<const DraftRequest> requests,
                                                 const std::vector<int>& lengths,
                                                 double draft_seconds) const {
  Plan plan;
  plan.lengths = lengths;
  StepShape shape = plain_shape(requests);
  plan.plain_seconds = costs_.seconds(shape);
  plan.tokens = static_cast<double>(requests.size());
  std::array<double, AcceptanceRates::kPositions> survival;
  for (size_t i = 0; i < requests.size(); ++i) {
    if (lengths[i] == 0) continue;
    shape.add_rows(requests[i].rows(), std::ssize(requests[i].tokens));
    const auto known = std::span(survival).first(
        static_cast<size_t>(std::min(lengths[i], AcceptanceRates::kPositions)));
    survival_of(requests[i], known);
    for (const double s : known) plan.tokens += s;
  }
  plan.seconds = costs_.seconds(shape) + draft_seconds;
  return plan;
}

// ---- before a step ---------------------------------------------------------------------------

bool LengthController::control_due(double gain) {
  // The first ones soon: until then, a plain step's time follows from that of longer ones.
  const double share = std::min(1.0, static_cast<double>(1 + controls_) / kFirstControls);
  if (static_cast<double>(since_plain_) < share * kControlInterval * std::max(1.0, gain))
    return false;
  ++controls_;
  control_left_ = kControlSteps - 1;
  return true;
}

// Whether the step is one of those that follow the first of a control.
bool LengthController::in_control() {
  if (control_left_ == 0) return false;
  --control_left_;
  return true;
}

// One sequence drafts, if single drafts have not used up their share of the time.
void LengthController::probe(std::span<const DraftRequest> requests, std::vector<int>& lengths) {
  if (budget_ < 0.0) return;
  // That which the drafter knows best.
  size_t at = 0;
  for (size_t i = 1; i < requests.size(); ++i) {
    if (missed_tokens(requests[i]) < missed_tokens(requests[at])) at = i;
  }
  lengths[at] = std::min({requests[at].limit, options_.max_drafts, kProbeDrafts});
  probing_ = lengths[at] > 0;
}

void LengthController::keep_pilots(std::span<const DraftRequest> requests,
                                   std::vector<int>& lengths) const {
  std::vector<size_t> order(requests.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::ranges::stable_sort(order, {}, [&](size_t i) { return missed_tokens(requests[i]); });
  for (size_t k = kPilots; k < order.size(); ++k) lengths[order[k]] = 0;
}

void LengthController::choose_paid(std::span<DraftRequest> requests, std::vector<int>& lengths) {
  const double least = on_ ? kStayOn : kTurnOn;
  if (options_.runs_ahead && !options_.lookups && plain_steps_.take(requests.size()))
    return lengths.assign(requests.size(), 0);
  if (in_control()) return lengths.assign(requests.size(), 0);
  const Plan best = best_plan(requests, lengths, least, true);
  const double share = plain_steps_.share(requests.size(), best.plain_seconds);
  const double gain = best.gain() * correction() * share;
  on_ = best.drafts() && gain > least;
  lengths.assign(requests.size(), 0);
  if (!on_) return probe(requests, lengths);
  if (control_due(gain)) return;
  lengths = best.lengths;
  if (rates_.known() < kPilotDrafts) keep_pilots(requests, lengths);
}

void LengthController::choose(std::span<DraftRequest> requests) {
  probing_ = false;
  for (const DraftRequest& r : requests) learn(r);
  std::vector<int> lengths;
  for (DraftRequest& r : requests) {
    lengths.push_back(std::min(r.limit, options_.max_drafts));
    if (options_.lookups) r.lookup_limit = lengths.back();
  }
  if (!options_.fixed && !drafts_free(requests.size())) choose_paid(requests, lengths);
  for (size_t i = 0; i < requests.size(); ++i) requests[i].limit = lengths[i];
}

// Drafts that were looked up cost nothing yet: as many of them as pay are verified.
void LengthController::trim_lookups(std::span<DraftRequest> requests, std::vector<int>& lengths) {
  if (std::ranges::none_of(requests, &DraftRequest::looked_up)) return;
  const Plan best = best_plan(requests, lengths, 1.0, false);
  for (size_t i = 0; i < requests.size(); ++i) {
    if (!requests[i].looked_up || lengths[i] == best.lengths[i]) continue;
    lengths[i] = best.lengths[i];
    requests[i].shorten(lengths[i]);
  }
}

void LengthController::drafted(std::span<DraftRequest> requests, double seconds) {
  free_ = drafts_free(requests.size());
  int rounds = 0, rows = 0;
  int64_t missed = 0;
  std::vector<int> lengths;
  for (DraftRequest& r : requests) {
    const int size = r.depth();
    lengths.push_back(size);
    if (r.limit <= 0) continue;
    Sequence& s = sequences_[r.sequence];
    if (!r.looked_up) {
      rounds = std::max(rounds, size);
      rows += size;
      missed += missed_tokens(r);
      s.drafter_at = static_cast<int32_t>(r.tokens.size());
    }
    if (!s.paths.empty()) {  // right so far, as far as tokens came
      const auto right = static_cast<int>(r.tokens.size() - s.draft_at);
      add_rates(s, right, right);
      if (s.copied) s.run += right;
    }
    s.copied = r.looked_up || free_;
    s.run_then = run_class(s.run);
    s.paths = r.branches;
    if (!r.draft.empty()) s.paths.insert(s.paths.begin(), r.draft);
    if (r.tree && size > 0)
      tree_rows_ = kRecentTrees * tree_rows_ + (1.0 - kRecentTrees) * r.rows() / size;
    s.draft_at = r.tokens.size();
    s.probe = probing_ && !r.looked_up;
  }
  draft_seconds_ = seconds;
  if (seconds > 0.0 && (rows > 0 || !options_.lookups))
    drafting_.add(rounds, rows, missed, seconds);
  if (!options_.fixed && rows > 0 && drafts_free(requests.size())) {
    const Plan best = best_plan(requests, lengths, 1.0, false);
    const double gain = best.gain() * correction();
    on_ = best.drafts() && gain > 1.0;
    lengths = best.lengths;
    if (!on_ || in_control() || control_due(gain)) lengths.assign(requests.size(), 0);
    for (size_t i = 0; i < requests.size(); ++i) requests[i].shorten(lengths[i]);
  } else if (!options_.fixed) {
    trim_lookups(requests, lengths);
  }
  // The drafter's time is known by now; what is expected of it is what it usually takes.
  double usual = 0.0;
  for (int d = 0; d < rounds; ++d) {
    usual += drafting_.round(static_cast<int>(std::ranges::count_if(
        requests, [&](const auto& r) { return !r.looked_up && r.depth() > d; })));
  }
  plan_ = plan_of(requests, lengths, usual);
  planned_ = true;
}

bool LengthController::resting() const {
  if (plain_steps_.more()) return true;
  return !options_.fixed && !options_.lookups && !on_ && budget_ < 0.0 && !drafts_free(1);
}

// ---- after a step ----------------------------------------------------------------------------

void LengthController::stepped(const StepDone& step) {
  prompt_tokens_ = step.prompt_tokens;
  if (step.drafted == 0 && step.prompt_tokens == 0 && step.tokens > 0)
    plain_token_ = step.seconds / static_cast<double>(step.tokens);
  const bool planned = std::exchange(planned_, false);
  const double drafting = std::exchange(draft_seconds_, 0.0);
  // A prompt's step tells nothing about plain ones: short texts need control steps as well.
  if (step.prompt_tokens == 0) since_plain_ = step.drafted > 0 ? since_plain_ + 1 : 0;
  StepShape plain = step.shape;
  plain.rows -= step.drafted;
  plain.row_context -=
      step.drafted * step.shape.row_context / std::max<int64_t>(1, step.shape.rows);
  if (probing_) {
    // Neither this step nor the one in front ran ahead.
    const double usual = costs_.seconds(plain);
    const auto size = static_cast<size_t>(step.shape.sequences);
    const double lost = usual * (1.0 - plain_steps_.share(size, usual));
    budget_ -= drafting + costs_.seconds(step.shape) - usual + 2.0 * lost;
  } else if (!on_) {
    budget_ = std::min(budget_ + kProbeShare * step.seconds, step.seconds);
  }
  const bool ahead = step.drafted == 0 && resting();
  plain_steps_.done(step, ahead);
  if (step.prompt_tokens > 0 || step.shape.sequences == 0) return;
  // A plain step behind one with drafts takes longer than those behind it: caches are cold, threads
  // asleep. What it takes says nothing about decoding without drafts.
  const bool cold = std::exchange(after_drafts_, step.drafted > 0) && step.drafted == 0;
  const double weight = on_ && step.drafted == 0 ? kControlWeight : 1.0;
  if (!cold && (!ahead || !options_.runs_ahead)) costs_.correct(step.shape, step.seconds, weight);
  if (!planned) return;
  const double usual = costs_.seconds(step.shape);
  const double itself = std::clamp(step.seconds, usual / kLongStep, usual * kLongStep);
  const double took = itself + drafting + step.more_seconds;
  const auto sequences = static_cast<double>(step.shape.sequences);
  const double would = costs_.seconds(plain) * static_cast<double>(step.tokens) / sequences;
  const double share =
      plain_steps_.share(static_cast<size_t>(step.shape.sequences), costs_.seconds(plain));
  const double expected =
      plan_.plain_seconds * plan_.tokens / static_cast<double>(plan_.lengths.size());
  if (step.drafted == 0) {
    const double of_plain = ahead ? 1.0 : share;
    all_measured_.add(itself * of_plain, took, 1.0);
    all_expected_.add(plan_.plain_seconds * of_plain, plan_.seconds, 1.0);
    measured_steps_ *= kForgetGain;
    return;
  }
  all_measured_.add(would * share, took, 1.0);
  // As plans are judged: corrected by what the steps before this one gave.
  all_expected_.add(expected * share * correction(), plan_.seconds, 1.0);
  measured_.add(would, took, kRecent);
  expected_.add(expected, plan_.seconds, kRecent);
  measured_steps_ = measured_steps_ * kRecent + 1.0;
}

void LengthController::publish(EngineStats::Speculation& s) const {
  s.plain_seconds = all_measured_.plain;
  s.step_seconds = all_measured_.taken;
  s.predicted_plain_seconds = all_expected_.plain;
  s.predicted_step_seconds = all_expected_.taken;
  s.control_steps = controls_;
  for (size_t i = 0; i < s.kRows.size(); ++i)
    s.seconds_by_rows[i] = costs_.seconds({.rows = s.kRows[i], .sequences = 1});
  s.round_seconds = drafting_.known() ? drafting_.round(1) : 0.0;
}

}  // namespace freshet::speculative

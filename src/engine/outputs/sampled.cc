// Sampled texts: the n samples of a request, each a sequence with its own sampler, grammar matcher
// and text. They share one sequence until their first token.
#include <algorithm>
#include <bit>
#include <optional>
#include <string>
#include <utility>

#include "engine/live_request.h"
#include "engine/model_runner.h"
#include "engine/outputs/draft_rules.h"
#include "engine/outputs/kinds.h"
#include "engine/text_assembler.h"
#include "grammar/late_matcher.h"

namespace freshet::engine {
namespace {

// What a step decided for a sample, from verify() to commit().
struct Accepted {
  enum class End : uint8_t {
    kNone,
    kSentence,  // the grammar allows nothing more
    kNoToken,   // every logit is minus infinity or not a number
  };
  std::vector<int32_t> tokens;
  std::vector<std::vector<TokenLogprob>> logprobs;  // one list a token, if wanted
  End end = End::kNone;                             // after `tokens`
  int drafts = 0;                                   // how many of the tokens were drafted
  Rejections rejections;

  void clear();
};

void Accepted::clear() {
  tokens.clear();
  logprobs.clear();
  end = End::kNone;
  drafts = 0;
  rejections = {};
}

struct Sample {
  int index = 0;
  scheduler::SequenceId sequence = 0;  // 0: not forked yet
  Sampler sampler;
  TextAssembler text;
  std::optional<grammar::LateMatcher> matcher;
  std::vector<uint32_t> mask;  // tokens that may come next; empty: all
  bool complete = false;       // nothing may come next, and no token says so
  bool expected = false;       // the scheduler counts on the token of the step in flight
  bool ended = false;
  int outputs = 0;  // tokens that were committed
  // What the drafts of the next step were drawn from; fewer entries, or empty ones: no randomness.
  std::vector<std::vector<Candidate>> drawn_from;

  std::span<const Candidate> drawn(size_t draft) const {
    if (draft >= drawn_from.size()) return {};
    return drawn_from[draft];
  }
  Accepted accepted;
};

// The token of a mask that allows one token only; -1: it allows none or several.
int32_t only_token(std::span<const uint32_t> mask) {
  int32_t found = -1;
  for (size_t w = 0; w < mask.size(); ++w) {
    if (mask[w] == 0) continue;
    if (found >= 0 || !std::has_single_bit(mask[w])) return -1;
    found = static_cast<int32_t>(w * 32) + std::countr_zero(mask[w]);
  }
  return found;
}

// The token of a row, and whether it is the row's draft.
struct RowToken {
  int32_t token = -1;
  bool kept = false;
};

class Sampled final : public RequestOutput {
 public:
  using RequestOutput::RequestOutput;

  void announce(scheduler::NewRequest& order) const override { order.samples = params().n; }
  void start(scheduler::SequenceId first) override;
  bool asks_drafts(const scheduler::Sequence& s, speculative::DraftRequest& draft) const override;
  void check_draft(speculative::DraftRequest& draft) override;
  void list_masks(const scheduler::StepItem& item, const scheduler::Sequence& s,
                  std::vector<MaskTask>& tasks) override;
  void fill_mask(int32_t member) override { fill_mask(at(member)); }
  ops::SampleRow descriptor(const scheduler::StepItem& item, const scheduler::Sequence& s,
                            int32_t row, std::vector<int32_t>& words) const override;
  void list_rows(size_t index, const scheduler::StepItem& item, const scheduler::Sequence& s,
                 std::vector<RowTask>& tasks) override;
  bool may_run_ahead(const RowTask& task, const ModelRunner& runner) const override;
  void expect(const RowTask& task) override;
  int32_t verify(const RowTask& task, ModelRunner& runner, VerifyScratch& scratch) override;
  void commit(const RowTask& task) override;
  void cancel(FinishReason reason, const Status& status, std::vector<Delta>& deltas) override;

 private:
  const SamplingParams& params() const { return live_.request.params; }
  Sample& at(int32_t member) { return samples_[static_cast<size_t>(member)]; }
  const Sample& at(int32_t member) const { return samples_[static_cast<size_t>(member)]; }
  // Until the samples fork, the prompt's last row is for all of them.
  bool shares_rows() const { return !forked_ && samples_.size() > 1; }
  bool reads(const Sample& sample, const scheduler::Sequence& s) const {
    return !forked_ || sample.sequence == s.id;
  }
  bool ends_text(int32_t id) const { return std::ranges::binary_search(live_.end_ids, id); }

  void take_distributions(Sample& sample, speculative::DraftRequest& draft) const;
  void fill_mask(Sample& sample) const;
  void check_path(Sample& sample, int32_t limit, std::vector<int32_t>& path) const;
  DraftRow draft_row(const Sample& sample, const RowTask& task, int32_t i,
                     ModelRunner& runner) const;
  BlockRuling look_ahead(Sample& sample, const RowTask& task, ModelRunner& runner,
                         VerifyScratch& scratch);
  // A row of the step: index of its item, and of the row among the item's rows of logits.
  struct RowAt {
    size_t item = 0;
    int32_t row = 0;
  };
  int32_t draw(Sample& sample, RowAt at, int64_t position, ModelRunner& runner,
               VerifyScratch& scratch);
  RowToken choose(Sample& sample, const RowTask& task, int32_t i, const BlockRuling& block,
                  ModelRunner& runner, VerifyScratch& scratch);
  RowToken decide(Sample& sample, const RowTask& task, const DraftRow& row,
                  const BlockRuling& block, ModelRunner& runner, VerifyScratch& scratch);
  std::optional<RowAt> next_row(const RowTask& task, std::span<const int32_t> accepted) const;
  bool accept(Sample& sample, int32_t token);
  void fork_samples();
  static size_t longest_path(const RowTask& task, const scheduler::Sequence& s);
  void count_drafts(const RowTask& task, const Sample& sample);
  Delta take_accepted(Sample& sample);
  void add_token(Sample& sample, int32_t token, Delta& delta);

  std::optional<DraftRules> rules_;  // from start() on
  std::vector<Sample> samples_;      // empty before start()
  bool forked_ = false;              // each sample has its own sequence
};

void Sampled::start(scheduler::SequenceId first) {
  const SamplingParams& p = params();
  samples_.reserve(static_cast<size_t>(p.n));
  for (int i = 0; i < p.n; ++i) {
    samples_.push_back(
        Sample{.index = i,
               .sampler = Sampler(p, services_.vocab, live_.seed, static_cast<uint32_t>(i),
                                  live_.request.prompt, live_.max_tokens, live_.end_ids),
               .text = TextAssembler(services_.tokenizer, p.skip_special_tokens, p.stop,
                                     p.include_stop_str_in_output)});
    if (p.grammar) samples_.back().matcher.emplace(p.grammar, p.thought, p.in_thought);
  }
  samples_.front().sequence = first;
  rules_.emplace(services_.acceptance, p, samples_.front().sampler.greedy());
}

// ---- draft -----------------------------------------------------------------------------------

bool Sampled::asks_drafts(const scheduler::Sequence& s, speculative::DraftRequest& draft) const {
  if (!forked_) return false;
  const auto sample = std::ranges::find_if(samples_, [&](const Sample& x) { return reads(x, s); });
  if (sample == samples_.end() || sample->ended) return false;
  draft.params = &params();
  draft.seed = live_.seed;
  draft.sample = static_cast<uint32_t>(sample->index);
  draft.tree = rules_->allows_trees();
  draft.wants_distributions = rules_->wants_distributions();
  return true;
}

// Only of the main path: branches come with no distributions.
void Sampled::take_distributions(Sample& sample, speculative::DraftRequest& r) const {
  sample.drawn_from.clear();
  if (!rules_->wants_distributions()) return;
  sample.drawn_from = std::move(r.drawn_from);
  sample.drawn_from.resize(std::min(sample.drawn_from.size(), r.draft.size()));
  for (size_t i = 0; i < sample.drawn_from.size(); ++i) {
    const int32_t id = r.draft[i];
    const bool known = id >= 0 && id < services_.vocab;
    if (!known || !speculative::may_be(sample.drawn_from[i], id)) sample.drawn_from[i].clear();
  }
}

void Sampled::check_draft(speculative::DraftRequest& r) {
  const auto sample =
      std::ranges::find_if(samples_, [&](const Sample& x) { return x.sequence == r.sequence; });
  take_distributions(*sample, r);
  check_path(*sample, r.limit, r.draft);
  for (std::vector<int32_t>& branch : r.branches) check_path(*sample, r.limit, branch);
}

// A path is cut off behind its first token that cannot be right: an id out of range, one that the
// grammar forbids, or what follows the end of the text. Where the grammar allows a single token,
// that token is the draft. A draft that was drawn stays although it cannot be right, because only
// its rejection gives the token the right distribution.
void Sampled::check_path(Sample& sample, int32_t most, std::vector<int32_t>& path) const {
  const auto known = [&](int32_t id) { return id >= 0 && id < services_.vocab; };
  if (!sample.matcher) {
    const auto end =
        std::ranges::find_if(path, [&](int32_t id) { return !known(id) || ends_text(id); });
    const bool keeps = end != path.end() && known(*end);
    path.erase(keeps ? end + 1 : end, path.end());
    return;
  }
  const auto limit = static_cast<size_t>(std::min(most, grammar::LateMatcher::kMostRollback));
  std::vector<uint32_t> mask((static_cast<size_t>(services_.vocab) + 31) / 32);
  size_t at = 0;
  for (; at < limit; ++at) {
    if (!sample.matcher->fill_mask(mask)) {  // a thought: any token may come
      if (at == path.size() || !known(path[at]) || ends_text(path[at])) break;
      sample.matcher->accept(path[at]);
      continue;
    }
    const int32_t forced = sample.matcher->can_end() ? -1 : only_token(mask);
    if (forced >= 0 && (at == path.size() || path[at] != forced)) {
      path.resize(at);
      path.push_back(forced);
      sample.drawn_from.resize(std::min(sample.drawn_from.size(), at));
    }
    if (at == path.size()) break;
    const int32_t id = path[at];
    if (!known(id) || (mask[static_cast<size_t>(id) / 32] >> (id % 32) & 1) == 0) break;
    sample.matcher->accept(id);
  }
  sample.matcher->rollback(static_cast<int>(at));
  const bool drawn = at < std::min(limit, path.size()) && !sample.drawn(at).empty();
  path.resize(drawn ? at + 1 : at);
}

// ---- run -------------------------------------------------------------------------------------

void Sampled::list_masks(const scheduler::StepItem& item, const scheduler::Sequence& s,
                         std::vector<MaskTask>& tasks) {
  if (!params().grammar || item.first + item.count < s.size()) return;
  for (const Sample& sample : samples_) {
    if (reads(sample, s)) tasks.push_back({this, sample.index});
  }
}

// A function of the sample's own tokens.
void Sampled::fill_mask(Sample& sample) const {
  sample.mask.resize((static_cast<size_t>(services_.vocab) + 31) / 32);
  if (!sample.matcher->fill_mask(sample.mask)) sample.mask.clear();
  const auto none = [&] {
    return std::ranges::all_of(sample.mask, [](uint32_t w) { return w == 0; });
  };
  sample.complete = false;
  if (!sample.matcher->can_end()) return;
  sample.complete = live_.end_ids.empty() && none();
  for (const int32_t id : live_.end_ids) {
    sample.mask[static_cast<size_t>(id) / 32] |= uint32_t{1} << (id % 32);
  }
}

// The rows of drafts are described too, except where a grammar decides: its mask is known when the
// drafts before it are accepted.
ops::SampleRow Sampled::descriptor(const scheduler::StepItem& item, const scheduler::Sequence& s,
                                   int32_t row, std::vector<int32_t>& words) const {
  const int32_t drafts = row - (item.logits - 1 - item.draft);  // before the row's token
  if (drafts < 0 || item.first + item.count < s.size() || shares_rows()) return {};
  const auto sample = std::ranges::find_if(samples_, [&](const Sample& x) { return reads(x, s); });
  if (sample == samples_.end() || sample->complete) return {};
  if (sample->matcher && drafts > 0) return {};
  const auto index = static_cast<size_t>(drafts);
  if (drafts < item.draft && rules_->reads_logits(!sample->drawn(index).empty())) return {};
  ops::SampleRow descriptor;
  sample->sampler.describe(s.size() + drafts, sample->mask, drafts + (s.expects() ? 1 : 0),
                           descriptor, words);
  return descriptor;
}

void Sampled::list_rows(size_t index, const scheduler::StepItem& item, const scheduler::Sequence& s,
                        std::vector<RowTask>& tasks) {
  if (!s.awaits_token()) return;
  for (const Sample& sample : samples_) {
    if (!reads(sample, s)) continue;
    tasks.push_back({.request = live_.id,
                     .output = this,
                     .item = index,
                     .row = item.logits - 1 - item.draft,
                     .rows = 1 + item.draft,
                     .member = sample.index,
                     .position = s.size()});
  }
}

bool Sampled::may_run_ahead(const RowTask& task, const ModelRunner& runner) const {
  const Sample& sample = at(task.member);
  return task.rows == 1 && !shares_rows() && !sample.matcher &&
         services_.scheduler.sequence(sample.sequence).branches.empty() &&
         runner.will_sample(task.item, task.row);
}

void Sampled::expect(const RowTask& task) {
  Sample& sample = at(task.member);
  sample.expected = sample.outputs + 1 < live_.max_tokens;
  if (sample.expected) services_.scheduler.expect(sample.sequence);
}

// ---- verify ----------------------------------------------------------------------------------

DraftRow Sampled::draft_row(const Sample& sample, const RowTask& task, int32_t i,
                            ModelRunner& runner) const {
  const auto index = static_cast<size_t>(i);
  DraftRow row{.first = task.position, .index = i};
  row.draft = services_.scheduler.sequence(sample.sequence).draft[index];
  row.drawn_from = sample.drawn(index);
  if (runner.sampled(task.item, task.row + i) == StepResults::kSeeLogits)
    row.logits = runner.row(task.item, task.row + i);
  return row;
}

// Block verification sees the whole path of drafts before any of them is kept.
BlockRuling Sampled::look_ahead(Sample& sample, const RowTask& task, ModelRunner& runner,
                                VerifyScratch& scratch) {
  const int32_t drafts = task.rows - 1;
  if (!rules_->walks_block() || drafts == 0)
    return rules_->decide_ahead(task.position, drafts, sample.sampler);
  BlockWalk walk;
  Sampler path = sample.sampler;
  int matched = 0;
  for (int32_t i = 0; i < drafts; ++i) {
    const DraftRow row = draft_row(sample, task, i, runner);
    const bool last = i + 1 == drafts;
    if (!walk.step(row, last, path, sample.mask, scratch) || last) break;
    path.accept(row.draft);
    if (!sample.matcher) continue;
    sample.matcher->accept(row.draft);
    ++matched;
    fill_mask(sample);
  }
  if (matched > 0) {
    sample.matcher->rollback(matched);
    fill_mask(sample);
  }
  return walk.ruling();
}

// The row's own token: what the sample would have without drafts.
int32_t Sampled::draw(Sample& sample, RowAt at, int64_t position, ModelRunner& runner,
                      VerifyScratch& scratch) {
  const int32_t sampled = runner.sampled(at.item, at.row);
  if (sampled != StepResults::kSeeLogits) return sampled;
  std::span<float> row = runner.row(at.item, at.row);
  if (shares_rows()) {  // sample() changes its row
    std::ranges::copy(row, scratch.row.begin());
    row = scratch.row;
  }
  std::vector<TokenLogprob> logprobs;
  const bool wanted = params().logprobs >= 0;
  const int32_t token = sample.sampler.sample(row, position, scratch.sampler, sample.mask,
                                              wanted ? &logprobs : nullptr);
  if (token >= 0 && wanted) sample.accepted.logprobs.push_back(std::move(logprobs));
  return token;
}

RowToken Sampled::choose(Sample& sample, const RowTask& task, int32_t i, const BlockRuling& block,
                         ModelRunner& runner, VerifyScratch& scratch) {
  if (i + 1 == task.rows) {
    return {draw(sample, {task.item, task.row + i}, task.position + i, runner, scratch), false};
  }
  const DraftRow row = draft_row(sample, task, i, runner);
  if (!rules_->counts_rejections()) return decide(sample, task, row, block, runner, scratch);
  const double odds = rules_->rejection_odds(row, sample.sampler, sample.mask, scratch);
  const RowToken decided = decide(sample, task, row, block, runner, scratch);
  sample.accepted.rejections.add(odds, decided.kept);
  return decided;
}

RowToken Sampled::decide(Sample& sample, const RowTask& task, const DraftRow& row,
                         const BlockRuling& block, ModelRunner& runner, VerifyScratch& scratch) {
  using enum Ruling::Token;
  const Ruling ruling = rules_->judge(row, block, sample.sampler, sample.mask, scratch);
  if (ruling.token == kOwn || ruling.token == kOwnLast) {
    const RowAt at{task.item, task.row + row.index};
    const int32_t token = draw(sample, at, task.position + row.index, runner, scratch);
    return {token, ruling.token == kOwn && token == row.draft};
  }
  const int32_t token = ruling.token == kDraft ? row.draft : ruling.other;
  if (params().logprobs >= 0 && token >= 0) {
    raw_logprobs(row.logits, token, params().logprobs, scratch.sampler,
                 sample.accepted.logprobs.emplace_back());
  }
  return {token, ruling.token == kDraft};
}

// Makes the token part of what follows. False: it ends the output.
bool Sampled::accept(Sample& sample, int32_t token) {
  sample.accepted.tokens.push_back(token);
  sample.sampler.accept(token);
  if (ends_text(token)) return false;
  if (sample.matcher) sample.matcher->accept(token);
  return sample.outputs + std::ssize(sample.accepted.tokens) < live_.max_tokens;
}

// The row that gives the token behind the accepted ones: of the first path that begins with them.
std::optional<Sampled::RowAt> Sampled::next_row(const RowTask& task,
                                                std::span<const int32_t> accepted) const {
  const auto& s = services_.scheduler.sequence(at(task.member).sequence);
  const auto begins = [&](std::span<const int32_t> path) {
    return path.size() >= accepted.size() &&
           std::ranges::equal(accepted, path.first(accepted.size()));
  };
  const auto depth = static_cast<int32_t>(accepted.size());
  if (depth < task.rows && begins(s.draft)) return RowAt{task.item, task.row + depth};
  for (const scheduler::Branch& b : s.branches) {
    if (b.item >= 0 && begins(b.draft))
      return RowAt{static_cast<size_t>(b.item), depth - 1 - b.shared};
  }
  return std::nullopt;
}

// Each row gives the token of its position, given the tokens before it: so a row counts as long as
// the drafts before it are kept. By the rule "match", the only one for trees, it is the sample's
// own token, a draft is kept where it is equal, and drafts never change a result.
int32_t Sampled::verify(const RowTask& task, ModelRunner& runner, VerifyScratch& scratch) {
  Sample& sample = at(task.member);
  Accepted& accepted = sample.accepted;
  accepted.clear();
  const bool tree =
      !shares_rows() && !services_.scheduler.sequence(sample.sequence).branches.empty();
  const BlockRuling block = look_ahead(sample, task, runner, scratch);
  RowAt row{task.item, task.row};  // of a tree
  for (int32_t i = 0;; ++i) {
    if (i > 0 && sample.matcher) fill_mask(sample);
    if (sample.complete) {
      accepted.end = Accepted::End::kSentence;
      break;
    }
    RowToken chosen = tree ? RowToken{draw(sample, row, task.position + i, runner, scratch), false}
                           : choose(sample, task, i, block, runner, scratch);
    if (chosen.token < 0) {  // before min_tokens the end may be all that the grammar allows
      const bool sentence = sample.matcher && sample.matcher->can_end();
      accepted.end = sentence ? Accepted::End::kSentence : Accepted::End::kNoToken;
      break;
    }
    const bool goes_on = accept(sample, chosen.token);
    if (tree) {
      const std::optional<RowAt> next = next_row(task, accepted.tokens);
      chosen.kept = next.has_value();
      row = next.value_or(row);
    }
    accepted.drafts += chosen.kept ? 1 : 0;
    if (!goes_on || !chosen.kept) break;
  }
  return static_cast<int32_t>(accepted.tokens.size());
}

// ---- commit ----------------------------------------------------------------------------------

void Sampled::fork_samples() {
  forked_ = true;
  for (Sample& sample : samples_) {
    if (sample.sequence == 0) sample.sequence = services_.scheduler.fork(samples_.front().sequence);
  }
}

// Adds an accepted token to the sample's text; sets delta.finish if it ends the output.
void Sampled::add_token(Sample& sample, int32_t token, Delta& delta) {
  const SamplingParams& p = params();
  ++sample.outputs;
  ++services_.counted.generated_tokens;
  ++live_.usage.completion_tokens;
  delta.ids.push_back(token);
  const bool ends = ends_text(token);
  if (!ends || p.include_stop_str_in_output)
    delta.text += sample.text.push(token, sample.outputs >= p.min_tokens);
  if (ends) {
    delta.finish = FinishReason::kStop;
    if (std::ranges::find(p.stop_token_ids, token) != p.stop_token_ids.end()) {
      delta.stop_reason = std::to_string(token);
    }
  } else if (const std::string* stop = sample.text.stopped_by()) {
    delta.finish = FinishReason::kStop;
    delta.stop_reason = *stop;
  } else if (sample.outputs == live_.max_tokens) {
    delta.finish = FinishReason::kLength;
  }
}

// Tokens behind a stop string are dropped.
Delta Sampled::take_accepted(Sample& sample) {
  Accepted& accepted = sample.accepted;
  Delta delta;
  delta.index = sample.index;
  for (size_t i = 0; i < accepted.tokens.size(); ++i) {
    if (delta.finish != FinishReason::kNone) return delta;
    add_token(sample, accepted.tokens[i], delta);
    if (params().logprobs >= 0) delta.logprobs.push_back(std::move(accepted.logprobs[i]));
  }
  if (delta.finish != FinishReason::kNone || accepted.end == Accepted::End::kNone) return delta;
  if (accepted.end == Accepted::End::kSentence) {
    delta.finish = FinishReason::kStop;
  } else {
    delta.finish = FinishReason::kError;
    delta.error = internal_error(
        "no token can be chosen: every token is forbidden, or its logit is minus infinity or NaN");
  }
  return delta;
}

size_t Sampled::longest_path(const RowTask& task, const scheduler::Sequence& s) {
  auto longest = static_cast<size_t>(task.rows) - 1;
  for (const scheduler::Branch& b : s.branches) {
    if (b.item >= 0) longest = std::max(longest, b.draft.size());
  }
  return longest;
}

// Counts the drafts of a step, and those that were kept.
void Sampled::count_drafts(const RowTask& task, const Sample& sample) {
  const scheduler::Sequence& s = services_.scheduler.sequence(sample.sequence);
  auto drafted = static_cast<size_t>(task.rows) - 1;
  for (const scheduler::Branch& b : s.branches) {
    if (b.item >= 0) drafted += b.draft.size() - static_cast<size_t>(b.shared);
  }
  if (drafted == 0) return;
  const auto kept = static_cast<size_t>(sample.accepted.drafts);
  EngineStats::Speculation& all = services_.counted.speculation;
  ++all.drafts;
  all.draft_tokens += static_cast<int64_t>(drafted);
  all.accepted_tokens += static_cast<int64_t>(kept);
  const size_t longest = longest_path(task, s);
  if (all.accepted_per_position.size() < longest) all.accepted_per_position.resize(longest);
  for (size_t i = 0; i < kept; ++i) ++all.accepted_per_position[i];
  live_.usage.speculation.add(static_cast<int>(drafted), static_cast<int>(kept));
  all.rejections += sample.accepted.rejections.seen;
  all.expected_rejections += sample.accepted.rejections.expected;
  all.rejection_variance += sample.accepted.rejections.variance;
}

void Sampled::commit(const RowTask& task) {
  Sample& sample = at(task.member);
  if (!forked_) fork_samples();
  count_drafts(task, sample);
  Delta delta = take_accepted(sample);
  if (delta.finish != FinishReason::kNone) {
    delta.text += sample.text.finish();
    sample.ended = true;
    const bool last = std::ranges::all_of(samples_, [](const Sample& s) { return s.ended; });
    if (last) close();
    services_.scheduler.finish(sample.sequence);
  } else if (std::exchange(sample.expected, false)) {
    services_.scheduler.known(sample.sequence, sample.accepted.tokens.front());
  } else {
    services_.scheduler.commit(sample.sequence, sample.accepted.tokens);
  }
  if (live_.request.on_delta) live_.request.on_delta(delta);
}

void Sampled::cancel(FinishReason reason, const Status& status, std::vector<Delta>& deltas) {
  if (samples_.empty()) return cancel_all(reason, status, deltas);
  for (Sample& sample : samples_) {
    if (sample.ended) continue;
    Delta& delta = deltas.emplace_back();
    delta.index = sample.index;
    delta.finish = reason;
    delta.error = status;
    delta.text = sample.text.finish();
  }
}

}  // namespace

std::unique_ptr<RequestOutput> make_sampled(LiveRequest& request, const OutputServices& services) {
  return std::make_unique<Sampled>(request, services);
}

}  // namespace freshet::engine

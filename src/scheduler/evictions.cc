// KV compression of live sequences: evicts keys and values that a policy does not keep (SnapKV,
// H2O, StreamingLLM ...; kv_cache/retention/). Unrelated to the LRU eviction of idle blocks
// (kv_cache/block_cache.h).
#include <algorithm>
#include <utility>

#include "scheduler/scheduler.h"

namespace freshet::scheduler {
namespace {

// More than kBlockTokens coarse tokens take less than they did; the first ones take a block more.
// Returns how many blocks a sequence has then, at most, until it has `end` tokens.
int32_t blocks_to_recode(const kv_cache::EvictionSchedule& schedule, int group, int32_t end) {
  const int32_t budget = schedule.budgets[static_cast<size_t>(group)];
  if (!schedule.rules.recodes || budget == 0 || end <= budget) return 0;
  const int32_t fine = std::min(end - 1, budget + schedule.rules.interval);
  return (fine + kv_cache::kBlockTokens - 1) / kv_cache::kBlockTokens + 1;
}

}  // namespace

// Called when the sequence has no computed tokens.
void Scheduler::restart_evictions(Sequence& s) {
  s.scores.reset();
  s.draft_scores.reset();
  s.evict_at = s.scored_from = kv_cache::kNeverEvicts;
  const kv_cache::EvictionSchedule* const eviction = s.request->eviction.get();
  if (eviction == nullptr) return;
  s.evict_at = eviction->next(s.prompt_tokens, 0, {});
  if (s.evict_at > int64_t{s.prompt_tokens} + s.max_tokens) s.evict_at = kv_cache::kNeverEvicts;
  s.scored_from = eviction->scored_from(s.prompt_tokens, s.evict_at);
}

// Before the sequence adds to its scores. Those that an eviction of this step leaves, which are
// nobody else's, aren't there yet.
void Scheduler::own_scores(Sequence& s) {
  const auto shares = [&](SequenceId id) { return id != s.id && at(id).scores == s.scores; };
  if (s.scores == nullptr) {
    s.scores = std::make_shared<kv_cache::KeyScores>();
  } else if (std::ranges::any_of(s.request->sequences, shares)) {
    s.scores = std::make_shared<kv_cache::KeyScores>(*s.scores);
  }
}

// The item's queries from Sequence::scored_from on will be scored.
void Scheduler::plan_scores(Sequence& s, const StepItem& item) {
  const int32_t end = item.first + item.count;
  if (end <= s.scored_from) return;
  if (item.draft == 0) {
    own_scores(s);
    return;
  }
  s.draft_scored_from = std::max(item.first, s.scored_from);
  s.draft_scores = std::make_shared<kv_cache::KeyScores>();
  s.draft_scores->queries = end - s.draft_scored_from;
}

// Of a step with drafts, the scores of the tokens that stay count.
void Scheduler::take_draft_scores(Sequence& s) {
  const auto drafted = std::exchange(s.draft_scores, nullptr);
  if (drafted == nullptr || s.computed <= s.draft_scored_from) return;
  own_scores(s);
  s.scores->add(*drafted, s.computed - s.draft_scored_from);
}

// Evictions that are due come before everything else of a step, because the next query must not see
// the evicted keys.
void Scheduler::evict_due(Step& step) {
  const std::vector<Sequence*> order(running_.begin(), running_.end());
  for (Sequence* s : order) {
    if (s->state == State::kRunning && s->computed == s->evict_at) evict(*s, step);
  }
}

// Samples of the same request over the same keys.
std::vector<Sequence*> Scheduler::twins(const Sequence& s) {
  std::vector<Sequence*> found;
  for (const SequenceId id : s.request->sequences) {
    Sequence& other = at(id);
    if (&other != &s && other.state == State::kRunning && other.computed == s.computed &&
        other.evict_at == s.evict_at && other.scores == s.scores &&
        other.blocks.ids == s.blocks.ids && other.blocks.coarse == s.blocks.coarse)
      found.push_back(&other);
  }
  return found;
}

// Takes blocks from a sequence with a worse rank, or from another of the same request that waits
// for this one, or a pinned prefix. False: there is none.
bool Scheduler::make_room_to_evict(const Sequence& s, const std::vector<Sequence*>& twins,
                                   Step& step) {
  for (auto it = running_.rbegin(); it != running_.rend() && s.rank < (*it)->rank; ++it) {
    if (std::ranges::find(twins, *it) != twins.end()) continue;
    preempt(**it, step);
    return true;
  }
  for (const SequenceId id : s.request->sequences) {
    Sequence& other = at(id);
    if (&other == &s || other.state != State::kRunning || !other.awaits_token()) continue;
    if (std::ranges::find(twins, &other) != twins.end()) continue;
    preempt(other, step);
    return true;
  }
  return unpin_oldest();
}

void Scheduler::evict(Sequence& s, Step& step) {
  const kv_cache::EvictionSchedule& schedule = *s.request->eviction;
  Eviction e;
  e.request = s.request->id;
  e.kept = schedule.budgets;
  e.scores = s.scores;
  for (int g = 0; g < cache_.groups(); ++g) {
    e.slots.push_back(s.blocks.slots(g, s.computed));
    e.coarse_slots.push_back(s.blocks.coarse_slots(g));
  }
  e.coarse_before = s.blocks.coarse;
  e.coarse_before.resize(schedule.parts.size());
  const std::vector<Sequence*> same = twins(s);
  for (Sequence* twin : same) cache_.release(twin->blocks);
  while (!cache_.compact(s.blocks, s.computed, e.kept, e.before, schedule.parts)) {
    if (make_room_to_evict(s, same, step)) continue;
    for (Sequence* twin : same) preempt(*twin, step);  // they run again from the beginning
    preempt(s, step);
    return;
  }
  e.after = s.blocks.ids;
  e.coarse_after = s.blocks.coarse;
  const auto leave = [&](Sequence& to) {
    to.scores.reset();
    if (!schedule.rules.accumulates || e.scores == nullptr) return;
    to.scores = std::make_shared<kv_cache::KeyScores>();
    e.left.push_back(to.scores);
  };
  leave(s);
  s.evict_at = schedule.next(s.prompt_tokens, s.computed, s.blocks.evicted);
  s.scored_from = schedule.scored_from(s.prompt_tokens, s.evict_at);
  for (Sequence* twin : same) {
    twin->blocks = cache_.fork(s.blocks, s.computed);
    twin->evict_at = s.evict_at;
    twin->scored_from = s.scored_from;
    leave(*twin);
  }
  ++stats_.evictions;
  step.evictions.push_back(std::move(e));
}

// How far the sequence's slots reach, as a number of tokens, until it has `end` tokens.
int32_t Scheduler::slots_end(const Sequence& s, int group, int32_t end) const {
  const kv_cache::EvictionSchedule* const eviction = s.request->eviction.get();
  if (eviction == nullptr || (s.evict_at == kv_cache::kNeverEvicts && !s.blocks.evicts()))
    return end;
  const int32_t evicted = s.blocks.evicts() ? s.blocks.evicted[static_cast<size_t>(group)] : 0;
  const int64_t most =
      int64_t{evicted} + eviction->most_slots(group, s.prompt_tokens, end, evicted > 0);
  const auto reach = static_cast<int32_t>(std::min<int64_t>(end, most));
  if (evicted > 0) return reach;
  return std::max(reach, blocks_to_recode(*eviction, group, end) * kv_cache::kBlockTokens);
}

// Whether the request could run if it were alone. Without evictions, create() has made sure.
Status Scheduler::fits_pools(const NewRequest& r) const {
  const bool recodes = r.eviction != nullptr && r.eviction->rules.recodes;
  if (options_.max_slots == 0 && !recodes) return {};
  const auto prompt = static_cast<int32_t>(r.prompt.size());
  const int32_t end = prompt + r.max_tokens;
  for (int g = 0; g < cache_.groups(); ++g) {
    if (cache_.window(g) != 0 || g == cache_.state_group()) continue;
    const int32_t slots =
        r.eviction != nullptr && !recodes ? r.eviction->most_slots(g, prompt, end, false) : end;
    int32_t needs = cache_.most_blocks(0, slots, chunk());
    if (recodes) needs = std::max(needs, blocks_to_recode(*r.eviction, g, end));
    if (needs > cache_.pool(g).size()) {
      return invalid_argument(
          "{} prompt tokens and {} new ones need {} cache blocks with this kv_eviction; there are "
          "{}",
          prompt, r.max_tokens, needs, cache_.pool(g).size());
    }
  }
  return {};
}

}  // namespace freshet::scheduler

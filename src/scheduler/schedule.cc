// Scheduler::schedule and its parts.
#include <algorithm>
#include <functional>
#include <limits>

#include "scheduler/scheduler.h"

namespace freshet::scheduler {

Step Scheduler::schedule(int64_t now) {
  account_waiting(now);
  finish_loads();
  Step step;
  step.number = ++steps_;
  expire(step);
  evict_due(step);
  renew_grant();
  make_way(step);
  const size_t preempted_for_others = step.preempted.size();

  Budget budget{options_.max_num_batched_tokens, options_.max_logit_rows, 0};
  plan_running(step, budget);
  // A sequence preempted for a better one must not come back in the same step.
  if (step.preempted.size() == preempted_for_others) admit(step, budget);
  plan_branches(step, budget);
  // Loads write to blocks that a copy of this step may still read: they are issued behind it.
  if (offload_ && step.copies.empty() && step.evictions.empty()) offload_->issue();
  if (step.items.empty()) step.wake_at = break_standstill(step) ? now_ : wake_time();
  return step;
}

// Beams that await a token hold blocks until the other beams of their request have run. If those
// find no blocks, nothing can run. Then all sequences but the best-ranked one are preempted.
// Returns whether anything changed.
bool Scheduler::break_standstill(Step& step) {
  if (!loading_.empty()) return !step.preempted.empty();  // the end of a load changes something
  Sequence* first = candidate(grant_.requests > 0);
  for (Sequence* s : running_) {
    if (!s->awaits_token() && (first == nullptr || s->rank < first->rank)) first = s;
  }
  if (first == nullptr ||
      (first->waits_for != WaitReason::kBlocks && first->waits_for != WaitReason::kSlots))
    return !step.preempted.empty();
  const bool unpinned = unpin_oldest();
  const std::vector<Sequence*> others(running_.rbegin(), running_.rend());
  for (Sequence* s : others) {
    if (s != first) preempt(*s, step);
  }
  return unpinned || !step.preempted.empty();
}

// If nothing can run: the time at which that may change without new input.
int64_t Scheduler::wake_time() const {
  int64_t wake = queue_.size() > 0 ? grant_.look_again : 0;
  if (!deadlines_.empty() && (wake == 0 || deadlines_.begin()->first < wake))
    wake = deadlines_.begin()->first;
  return wake;
}

// A batch that did not fit the last step goes on in this one; otherwise the policy decides anew.
void Scheduler::renew_grant() {
  if (queue_.size() == 0) {
    grant_ = {};
    return;
  }
  if (batch_cut_short_ && grant_.requests > 0) return;
  grant_ = policy_->grant({now_, queue_.oldest_arrival(), queue_.size(), queue_.prompt_tokens(),
                           static_cast<int32_t>(batches_.size())});
  grant_batch_ = steps_;
  grant_unused_ = true;
}

// Counts the time since the last step for what each sequence was waiting for. In the queue only the
// head has a reason of its own; the time of all others is added when they start (behind_others).
void Scheduler::account_waiting(int64_t now) {
  const int64_t dt = std::max<int64_t>(0, now - now_);
  now_ = std::max(now_, now);
  if (dt == 0) return;
  const auto add = [dt](Sequence& s) {
    if (s.waits_for != WaitReason::kNone) s.request->waited[static_cast<size_t>(s.waits_for)] += dt;
  };
  for (Sequence* s : running_) add(*s);
  for (Sequence* s : resumed_) add(*s);
  for (Sequence* s : loading_) add(*s);
  if (const auto head = sequences_.find(head_);
      head != sequences_.end() && !head->second->started) {
    add(*head->second);
  }
}

void Scheduler::expire(Step& step) {
  while (!deadlines_.empty() && deadlines_.begin()->first <= now_) {
    const RequestId id = deadlines_.begin()->second;
    step.expired.push_back(id);
    cancel(id);
  }
}

// ---- who runs on -----------------------------------------------------------------------------

void Scheduler::plan_running(Step& step, Budget& budget) {
  std::vector<Sequence*> order(running_.begin(), running_.end());
  const auto decodes = [](const Sequence& s) { return s.size() - s.computed == 1; };
  for (const Sequence* s : order) budget.decodes_left += decodes(*s) ? 1 : 0;
  for (Sequence* s : order) {
    if (s->state != State::kRunning) continue;  // preempted for a better one
    s->waits_for = WaitReason::kNone;
    if (decodes(*s)) --budget.decodes_left;
    if (s->awaits_token()) continue;
    s->waits_for = plan(*s, step, budget);
  }
  for (const StepItem& item : step.items) FRESHET_CHECK(at(item.sequence).state == State::kRunning);
}

// Adds the sequence's part of the step. Returns kNone, or why it has to wait.
WaitReason Scheduler::plan(Sequence& s, Step& step, Budget& budget) {
  const int32_t left = s.size() - s.computed;
  const bool decode = left == 1;
  // A prompt leaves one token of the budget to each decoding sequence, if possible.
  int32_t tokens = decode
                       ? budget.tokens
                       : std::max(budget.tokens - budget.decodes_left, std::min(budget.tokens, 1));
  int32_t rows =
      decode ? budget.rows : std::max(budget.rows - budget.decodes_left, std::min(budget.rows, 1));
  if (tokens == 0 || (rows == 0 && s.logits)) return WaitReason::kTokenBudget;
  if (s.whole && left > tokens) return WaitReason::kTokenBudget;

  const int32_t most = s.whole ? left : std::min(tokens, chunk());
  StepItem item{s.id, s.computed, std::min({left, most, s.evict_at - s.computed}), 0, 0};
  if (s.logits_from >= 0) {  // rows of the logits are scarcer than tokens
    const int32_t silent = std::clamp(s.logits_from - item.first, 0, item.count);
    item.count = std::min(item.count, silent + rows);
  }
  if (!s.pictures.empty() && !decode && !keep_pictures_whole(s, item, budget))
    return WaitReason::kTokenBudget;
  if (decode) {
    const auto drafts = static_cast<int32_t>(s.draft.size());
    item.draft =
        std::max(0, std::min({drafts, tokens - 1 - budget.decodes_left,
                              rows - 1 - budget.decodes_left, s.evict_at - item.first - 1}));
    item.count += item.draft;
  }
  if (!reserve(s, item, step)) return WaitReason::kBlocks;
  s.draft.resize(static_cast<size_t>(item.draft));
  if (cache_.state_group() >= 0) keep_states(s, item);

  const int32_t end = item.first + item.count;
  plan_scores(s, item);
  if (s.logits_from >= 0) item.logits = std::min(item.count, std::max(0, end - s.logits_from));
  if (end - item.draft == s.size() && s.logits) item.logits = std::max(item.logits, 1 + item.draft);
  s.planned_in = step.number;
  budget.tokens -= item.count;
  budget.rows -= item.logits;
  step.tokens += item.count;
  step.logit_rows += item.logits;
  step.items.push_back(item);
  return WaitReason::kNone;
}

// Reserves blocks for the item. If they run out: drops its drafts, then takes fewer prompt tokens,
// then preempts a sequence with a worse rank.
bool Scheduler::reserve(Sequence& s, StepItem& item, Step& step) {
  while (true) {
    if (cache_.reserve(s.blocks, item.first, item.first + item.count, step.copies, item.draft))
      return true;
    if (item.draft > 0) {
      item.count -= item.draft;
      item.draft = 0;
      continue;
    }
    if (const int32_t fit = cache_.fit(s.blocks, item.first, item.first + item.count);
        fit > item.first && !s.whole) {
      if (const int32_t end = uncut_end(s.pictures, item.first, fit); end > item.first) {
        item.count = end - item.first;
        continue;
      }
    }
    if (drop_loaded(s)) continue;
    Sequence* loser = victim(s);
    if (loser != nullptr) {
      preempt(*loser, step);
    } else if (!unpin_oldest()) {
      return false;
    }
  }
}

// Ends the part of a prompt before a picture that it would cut, if the picture's rows attend to one
// another. A picture that begins here may use what decoding sequences would have got: else a full
// machine would never run it. Returns false if the step has too few tokens left for it.
bool Scheduler::keep_pictures_whole(const Sequence& s, StepItem& item, const Budget& budget) const {
  const int32_t end = uncut_end(s.pictures, item.first, item.first + item.count);
  item.count = end - item.first;
  if (item.count > 0) return true;
  const int32_t whole = end_of_picture_at(s.pictures, item.first);
  item.count = whole - item.first;
  const int32_t rows =
      s.logits_from < 0 ? 0 : std::max(0, whole - std::max(item.first, s.logits_from));
  return item.count <= budget.tokens && rows <= budget.rows;
}

// Chooses where the step keeps states: at multiples of the interval; where the prompt parts from
// one that the cache knows; behind the last full block of the prompt, of which a repetition leaves
// a token to compute, and of what is pinned; and, of the tokens that the sequence adds, behind the
// last full block, until the next one is full.
void Scheduler::keep_states(Sequence& s, const StepItem& item) {
  using kv_cache::kBlockTokens;
  const int32_t interval = std::max(1, options_.checkpoint_interval / kBlockTokens);
  const int32_t end = item.first + item.count;
  const auto full = [](int32_t tokens) { return tokens / kBlockTokens; };
  const int32_t prompt = full(s.prompt_tokens - 1), pinned = full(s.pin_tokens),
                junction = full(s.blocks.junction);
  const int32_t last = full(end);
  for (int32_t block = full(item.first) + 1; block <= last; ++block) {
    const bool stays = block % interval == 0 || block == prompt || block == junction ||
                       (block == pinned && pinned > 0);
    const bool rolls = !stays && block == last && block > prompt;
    if (stays || rolls) cache_.keep_state(s.blocks, block * kBlockTokens, rolls);
  }
}

// Branches of draft trees get what all sequences together have left.
void Scheduler::plan_branches(Step& step, Budget& budget) {
  const size_t items = step.items.size();
  for (size_t i = 0; i < items; ++i) {
    Sequence& s = at(step.items[i].sequence);
    for (size_t b = 0; b < s.branches.size(); ++b) plan_branch(s, b, step, budget);
  }
}

// The rows of drafts that a path in front has too run again, because they write to other blocks;
// their logits are not wanted again.
void Scheduler::plan_branch(Sequence& s, size_t index, Step& step, Budget& budget) {
  Branch& branch = s.branches[index];
  const auto alike = [&](const std::vector<int32_t>& path) {
    return static_cast<int32_t>(std::ranges::mismatch(path, branch.draft).in1 - path.begin());
  };
  branch.shared = alike(s.draft);
  for (size_t b = 0; b < index; ++b) {
    if (s.branches[b].item >= 0)
      branch.shared = std::max(branch.shared, alike(s.branches[b].draft));
  }
  const int32_t drafts = std::min(
      {static_cast<int32_t>(branch.draft.size()), budget.tokens - 1, branch.shared + budget.rows});
  if (drafts <= branch.shared) return;
  const StepItem item{
      s.id, s.computed, 1 + drafts, drafts, drafts - branch.shared, static_cast<int32_t>(index)};
  branch.blocks = cache_.fork(s.blocks, item.first);
  if (!cache_.reserve(branch.blocks, item.first, item.first + item.count, step.copies)) {
    cache_.release(branch.blocks);
    return;
  }
  branch.draft.resize(static_cast<size_t>(drafts));
  branch.item = static_cast<int32_t>(step.items.size());
  budget.tokens -= item.count;
  budget.rows -= item.logits;
  step.tokens += item.count;
  step.logit_rows += item.logits;
  stats_.branch_rows += item.count;
  stats_.repeated_rows += 1 + branch.shared;
  step.items.push_back(item);
}

// The sequence to preempt for `for_whom`: the one with the worst rank that is behind it and not
// part of the step yet, or else a beam of its own request that has its row of this step already.
Sequence* Scheduler::victim(const Sequence& for_whom) const {
  for (auto it = running_.rbegin(); it != running_.rend() && for_whom.rank < (*it)->rank; ++it) {
    if ((*it)->planned_in != steps_) return *it;
  }
  for (const SequenceId id : for_whom.request->sequences) {
    Sequence& s = *sequences_.at(id);
    if (s.state == State::kRunning && s.awaits_token() && s.id != for_whom.id) return &s;
  }
  return nullptr;
}

void Scheduler::preempt(Sequence& s, Step& step) {
  const bool awaits = s.awaits_token();
  if (offload_) offload_->swap_out(s);
  s.tier.looked = false;
  s.request->prepared = false;
  stop_running(s);
  ++stats_.preemptions;
  ++s.request->preemptions;
  step.preempted.push_back(s.id);
  if (awaits) {
    s.state = State::kSuspended;
    s.waits_for = WaitReason::kNone;
  } else {
    enqueue(s);
  }
}

// ---- who comes in ----------------------------------------------------------------------------

// Next to start: a preempted sequence before a new one, unless the new one has a better priority.
Sequence* Scheduler::candidate(bool fresh_allowed) const {
  Sequence* resumed = resumed_.empty() ? nullptr : *resumed_.begin();
  Sequence* fresh = fresh_allowed ? queue_.next(now_) : nullptr;
  if (resumed == nullptr) return fresh;
  if (fresh == nullptr || !has_encoder_blocks(*fresh->request)) return resumed;
  return fresh->request->priority < resumed->request->priority && fresh->rank < resumed->rank
             ? fresh
             : resumed;
}

const Sequence* Scheduler::next_unready() const {
  Sequence* const resumed = resumed_.empty() ? nullptr : *resumed_.begin();
  for (const Sequence* s : {resumed, queue_.next(now_)}) {
    if (s != nullptr && !s->request->ready()) return s;
  }
  return nullptr;
}

void Scheduler::set_ready(RequestId request) {
  requests_.at(request)->prepared = true;
}

int32_t Scheduler::cached_prefix(const Sequence& s) const {
  return cache_.cached(s.request->salt, may_be_cached(s));
}

bool Scheduler::has_encoder_output(const Request& r) const {
  return r.encoder_tokens > 0 && (r.encoded || encoders_.has(r.encoder_key));
}

// Whether the blocks suffice for all known tokens of the sequence and of the running ones. A small
// reserve is kept for the tokens that they will generate.
bool Scheduler::fits_whole(const Sequence& s) const {
  for (int g = 0; g < cache_.groups(); ++g) {
    const auto still = [&](const Sequence& q) {
      const int32_t end = std::min(q.size() + 1, options_.max_model_len);
      return cache_.still_needs(q.blocks, g, slots_end(q, g, end), chunk());
    };
    int64_t needs = still(s);
    for (const Sequence* r : running_) needs += still(*r);
    for (const Sequence* l : loading_) {
      if (l != &s) needs += cache_.still_needs(l->tier.loaded, g, l->size(), chunk());
    }
    if (!running_.empty()) {
      needs += g == cache_.state_group() ? options_.kept_checkpoints : cache_.pool(g).size() / 100;
    }
    if (needs > cache_.available(g)) return false;
  }
  return true;
}

// An estimate of how many tokens the sequence will still add: it will be as long as one of the
// recent outputs that are longer than it is now.
int32_t Scheduler::to_come(const Sequence& s) const {
  const int32_t output = s.size() - s.prompt_tokens;
  const int32_t may = std::max(0, s.max_tokens - output);
  const auto longer = std::ranges::upper_bound(sorted_outputs_, output);
  const auto others = static_cast<uint64_t>(sorted_outputs_.end() - longer);
  if (others == 0) return std::min(may, output / 4);
  return std::min(may, longer[static_cast<int64_t>(s.id % others)] - output);
}

// Whether the blocks will probably suffice until the sequence ends, if no other starts after it.
// Sequences with better ranks take blocks at every step and release them when they end; sequences
// with worse ranks can be preempted. An estimate that is too optimistic costs preemptions.
bool Scheduler::fits_ahead(const Sequence& s) const {
  struct Part {
    int32_t to_come;
    int64_t blocks;
  };
  std::vector<Part> parts;
  for (int g = 0; g < cache_.groups(); ++g) {
    if (cache_.window(g) != 0 || g == cache_.state_group()) continue;
    int64_t room = cache_.available(g);
    parts.clear();
    const auto add = [&](const Sequence& q) {
      const int64_t holds = q.blocks.empty() ? 0 : q.blocks.blocks(g);
      const int64_t needs = cache_.still_needs(q.blocks, g, slots_end(q, g, q.size()), chunk());
      for (int i = 0; i <= q.pending_forks; ++i)
        parts.push_back({to_come(q), i == 0 ? holds + needs : 0});
      room += holds;
    };
    add(s);
    for (const Sequence* r : running_) {
      if (r->rank < s.rank) add(*r);
    }
    std::ranges::sort(parts, std::greater(), &Part::to_come);
    int64_t blocks = 0, count = 0;
    for (const Part& p : parts) {
      blocks += p.blocks;
      const int64_t grown = ++count * p.to_come / kv_cache::kBlockTokens;
      if (blocks + grown > room) return false;
    }
  }
  return true;
}

// The prefix that may come from the cache: tokens whose logits are wanted have to run.
std::span<const int32_t> Scheduler::may_be_cached(const Sequence& s) const {
  if (s.compute_all) return {};
  int32_t most = s.logits_from >= 0 ? std::min(s.logits_from, s.size() - 1) : s.size() - 1;
  // Queries that are scored have to run, and nothing behind an eviction is in the tree.
  most = s.sharable(std::min({most, s.scored_from, s.evict_at - 1}));
  return std::span(s.cached_as()).first(static_cast<size_t>(most));
}

// Why `s` could not start now, with its cached prefix; kNone if it could.
WaitReason Scheduler::obstacle(Sequence& s) {
  if (slots_taken_ + slots(s) > options_.max_num_seqs) return WaitReason::kSlots;
  std::vector<kv_cache::BlockCopy> copies;
  take_prefix(s, copies);
  bool fits = fits_whole(s);
  while (!fits && drop_loaded(s)) fits = fits_whole(s);
  give_back_prefix(s);
  return fits ? WaitReason::kNone : WaitReason::kBlocks;
}

// Preempts running sequences for a waiting one with a strictly better priority. They would keep the
// blocks of their encoders' outputs: if it lacks those, it waits for a request to end.
void Scheduler::make_way(Step& step) {
  if (running_.empty()) return;
  Sequence* next = candidate(grant_.requests > 0);
  if (next == nullptr || !next->request->ready() || !has_encoder_blocks(*next->request)) return;
  while (!running_.empty()) {
    Sequence* worst = *running_.rbegin();
    if (worst->request->priority <= next->request->priority || worst->rank < next->rank) return;
    if (obstacle(*next) == WaitReason::kNone) return;
    preempt(*worst, step);
  }
}

void Scheduler::admit(Step& step, Budget& budget) {
  if (const auto head = sequences_.find(head_);
      head != sequences_.end() && !head->second->started) {
    head->second->waits_for = WaitReason::kQueued;
  }
  head_ = 0;
  batch_cut_short_ = false;
  while (true) {
    Sequence* s = candidate(grant_.requests > 0);
    WaitReason lacks = WaitReason::kBatchPolicy;
    if (s == nullptr)
      s = queue_.next(now_);  // there may be one that the policy holds back
    else if (!s->request->ready())
      lacks = WaitReason::kEncoder;
    else if (s->started || grant_unused_ || s->prompt_tokens <= grant_.tokens)
      lacks = start_load(*s) ? WaitReason::kNone : start(*s, step, budget);
    if (s == nullptr) return;
    if (lacks == WaitReason::kNone) continue;
    s->waits_for = lacks;
    batch_cut_short_ = lacks == WaitReason::kTokenBudget && !s->started;
    if (!s->started) head_ = s->id;
    return;
  }
}

// Gives a waiting sequence a running slot, its cached prefix and its first tokens of the step.
WaitReason Scheduler::start(Sequence& s, Step& step, Budget& budget) {
  if (budget.tokens == 0 || budget.rows == 0) return WaitReason::kTokenBudget;
  if (slots_taken_ + slots(s) > options_.max_num_seqs) return WaitReason::kSlots;
  const size_t copies = step.copies.size();
  const int32_t cached = take_prefix(s, step.copies);
  const bool encoded = s.request->encoded;
  const auto give_back = [&] {
    if (!encoded) free_encoder_blocks(*s.request);
    give_back_prefix(s);
    step.copies.resize(copies);
    s.computed = 0;
  };
  bool fits = take_encoder_blocks(*s.request) && fits_whole(s);
  while (!fits && drop_loaded(s)) fits = take_encoder_blocks(*s.request) && fits_whole(s);
  if (!fits || (options_.look_ahead && !running_.empty() && !fits_ahead(s))) {
    give_back();
    return WaitReason::kBlocks;
  }
  s.computed = cached;
  const State before = s.state;
  s.state = State::kRunning;
  if (const WaitReason lacks = plan(s, step, budget); lacks != WaitReason::kNone) {
    s.state = before;
    give_back();
    return lacks;
  }
  dequeue(s);
  if (!encoded && s.request->encoder_tokens > 0) begin_encoded(*s.request, step.items.back());
  s.request->encoded = true;
  cache_.used(s.blocks, cached);
  if (offload_) offload_->forget(s);
  if (!s.started) {
    s.started = true;
    Request& r = *s.request;
    r.cached_tokens = cached;
    r.batch = grant_batch_;
    r.waited[static_cast<size_t>(WaitReason::kQueued)] = behind_others(r, now_);
    --grant_.requests;
    grant_.tokens -= s.prompt_tokens;
    grant_unused_ = false;
    count_start(s, cached);
    queue_.admitted(s, now_);
    ++batches_[r.batch];
  }
  running_.insert(&s);
  slots_taken_ += slots(s);
  return WaitReason::kNone;
}

// The request's first start: its item runs the encoder unless the cache has the output. An output
// that another item of this step makes is there, too: encoders run before all tokens of a step.
void Scheduler::begin_encoded(Request& r, StepItem& item) {
  item.encodes = !r.encoder_found;
  ++stats_.encoder_queries;
  if (r.encoder_found) {
    ++stats_.encoder_hits;
  } else {
    encoders_.keep(r.encoder_key, r.encoder_blocks);
  }
}

}  // namespace freshet::scheduler

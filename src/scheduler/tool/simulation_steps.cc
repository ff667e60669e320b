#include <algorithm>

#include "scheduler/tool/simulation.h"

namespace freshet::scheduler {

// ---- the model -------------------------------------------------------------------------------

// The tokens of a sequence, with the contents of its pictures in place of ids.
std::vector<int32_t> Simulation::what_is_read(const Sequence& s) const {
  std::vector<int32_t> tokens = s.tokens;
  for (const PictureSpan& p : clients_.at(s.request->id).pictures)
    std::fill_n(tokens.begin() + p.first, p.count, 1000 - p.name);
  return tokens;
}

int32_t Simulation::next_token(const Sequence& s, uint64_t stream,
                               std::span<const int32_t> more) const {
  uint64_t hash = 0;
  for (const int32_t t : what_is_read(s)) hash = extend(hash, t);
  for (const int32_t t : more) hash = extend(hash, t);
  return static_cast<int32_t>(mix(hash ^ (stream * 0x9E3779B9)) % kVocab);
}

// The state of a sequence is the hash of its tokens: the first number of a slot.
bool Simulation::run_state(const Sequence& s, const StepItem& item,
                           std::span<const uint64_t> hashes) {
  const int g = cache_->state_group();
  if (s.blocks.ids[static_cast<size_t>(g)].size() != 1) return fail("not one working slot");
  const int32_t working = s.blocks.ids[static_cast<size_t>(g)].front();
  const auto first = static_cast<size_t>(item.first);
  if (item.first > 0 && slots(g, working)[0] != hashes[first - 1])
    return fail(fmt::format("sequence {} reads a wrong state behind {}", s.id, item.first));
  for (const kv_cache::SavedState& saved : s.blocks.saves) {
    if (saved.tokens <= item.first || saved.tokens > item.first + item.count)
      return fail(fmt::format("sequence {} keeps a state of another step", s.id));
    if (saved.slot == working) return fail("a state is kept in the working slot");
    slots(g, saved.slot)[0] = hashes[static_cast<size_t>(saved.tokens) - 1];
    ++report_.kept_states;
  }
  slots(g, working)[0] = hashes[first + static_cast<size_t>(item.count) - 1];
  return true;
}

// No other item of the step wrote to the slots.
bool Simulation::check_state(const Sequence& s, const StepItem& item,
                             std::span<const uint64_t> hashes) {
  const int g = cache_->state_group();
  const int32_t working = s.blocks.ids[static_cast<size_t>(g)].front();
  bool good = slots(g, working)[0] ==
              hashes[static_cast<size_t>(item.first) + static_cast<size_t>(item.count) - 1];
  for (const kv_cache::SavedState& saved : s.blocks.saves)
    good = good && slots(g, saved.slot)[0] == hashes[static_cast<size_t>(saved.tokens) - 1];
  return good || fail(fmt::format("sequence {} shares a slot", s.id));
}

// A layer with one key, to which a token gives its hash. The sums are those of the tokens that were
// run before, and of no draft that was dropped.
bool Simulation::run_scores(const Sequence& s, const StepItem& item,
                            std::span<const uint64_t> hashes) {
  const auto score = [&](int32_t p) {
    return static_cast<int64_t>(hashes[static_cast<size_t>(p)] >> 16);
  };
  if (s.request->eviction == nullptr || s.scored_from == kv_cache::kNeverEvicts) return true;
  const kv_cache::RetentionRules& rules = s.request->eviction->rules;
  if (!s.blocks.evicts() || (rules.accumulates && !rules.in_prompt)) {
    int64_t expected = 0;
    for (int32_t p = s.scored_from; p < item.first; ++p) expected += score(p);
    const bool any = s.scores != nullptr && !s.scores->layers.empty();
    const int64_t sum = any ? s.scores->layers.front().sums.front() : 0;
    if (sum != expected) return fail(fmt::format("sequence {} has wrong scores", s.id));
  }
  const int32_t end = item.first + item.count;
  if (end <= s.scored_from) return true;
  kv_cache::KeyScores& scores = item.draft > 0 ? *s.draft_scores : *s.scores;
  const int32_t from = std::max(item.first, s.scored_from);
  scores.layers.resize(1);
  kv_cache::KeyScores::Layer& layer = scores.layers.front();
  layer.widen(scores.queries, 1);
  for (int32_t p = from; p < end; ++p)
    layer.sums[static_cast<size_t>(scores.queries > 1 ? (p - from) * layer.stride : 0)] += score(p);
  return true;
}

// An input of another salt is another one: outputs must not be shared across salts.
bool Simulation::check_encoded(const Sequence& s) {
  const Request& r = *s.request;
  if (std::ssize(r.encoder_blocks) * kBlockTokens < r.encoder_tokens)
    return fail(fmt::format("sequence {} lacks blocks of its encoder's output", s.id));
  for (const int32_t block : r.encoder_blocks) {
    if (encoded_[static_cast<size_t>(block)] != clients_.at(r.id).encoded)
      return fail(fmt::format("sequence {} reads another encoder's output", s.id));
  }
  return true;
}

// Writes the item's slots and verifies everything that its attention reads.
bool Simulation::run_item(const StepItem& item) {
  const Sequence& s = scheduler_->sequence(item.sequence);
  std::vector<int32_t> tokens = what_is_read(s);
  const auto known = static_cast<int32_t>(tokens.size());
  const std::vector<int32_t>& draft = s.draft_of(item);
  tokens.insert(tokens.end(), draft.begin(), draft.end());
  if (item.first != s.computed) return fail("an item does not start where the sequence stands");
  if (item.first + item.count > known + item.draft)
    return fail("an item runs tokens that do not exist");
  std::vector<uint64_t> hashes;
  uint64_t hash = 0;
  for (const int32_t t : tokens) hashes.push_back(hash = extend(hash, t));
  const int32_t end = item.first + item.count;
  if (states_ && !run_state(s, item, hashes)) return false;
  if (item.branch < 0 && !run_scores(s, item, hashes)) return false;
  if (item.encodes) {
    if (!s.request->ready()) return fail("a request starts that is not ready");
    ++report_.encoder_runs;
    for (const int32_t block : s.request->encoder_blocks)
      encoded_[static_cast<size_t>(block)] = clients_.at(s.request->id).encoded;
  }
  for (int g = 0; g < cache_->groups(); ++g) {
    if (g == cache_->state_group()) continue;
    const BlockTable& table = s.blocks_of(item);
    const std::vector<int32_t>& ids = table.ids[static_cast<size_t>(g)];
    const int32_t window = cache_->window(g);
    const int32_t from = window == 0 ? 0 : std::max(0, item.first - window + 1);
    const int32_t own = table.slots(g, item.first), evicted = item.first - own;
    for (int32_t p = from; p < end - evicted; ++p) {
      const auto block = static_cast<size_t>(p / kBlockTokens);
      if (block >= ids.size() || ids[block] == kNoBlock) {
        return fail(
            fmt::format("sequence {} has no block for position {} in group {}", s.id, p, g));
      }
      uint64_t& slot = slots(g, ids[block])[p % kBlockTokens];
      if (p >= own) slot = hashes[static_cast<size_t>(p + evicted)];
    }
  }
  return true;
}

bool Simulation::check_coarse(const Sequence& s, const StepItem& item, int group,
                              std::span<const uint64_t> coarse) {
  const BlockTable& table = s.blocks_of(item);
  if (table.coarse_slots(group) != std::ssize(coarse))
    return fail(fmt::format("sequence {} has {} coarse tokens of {}", s.id,
                            table.coarse_slots(group), coarse.size()));
  if (coarse.empty()) return true;
  const auto g = static_cast<size_t>(group);
  const std::vector<uint64_t> sums = coarse_sums(coarse, s.request->eviction->parts[g]);
  for (size_t i = 0; i < sums.size(); ++i) {
    const int32_t block = table.coarse[g][i / kBlockTokens];
    if (slots(group, block)[i % kBlockTokens] != sums[i])
      return fail(fmt::format("sequence {} reads wrong coarse tokens in block {}", s.id, block));
  }
  return true;
}

bool Simulation::check_step(const Step& step) {
  if (step.tokens > options_.max_num_batched_tokens) return fail("the token budget is exceeded");
  if (step.logit_rows > options_.max_logit_rows) return fail("too many rows of logits");
  if (scheduler_->stats().running > options_.max_num_seqs) return fail("too many sequences run");
  std::set<SequenceId> seen;
  std::set<std::pair<SequenceId, int32_t>> paths;
  std::optional<Rank> best;
  for (const StepItem& item : step.items) {
    if (item.count < 1 || !paths.emplace(item.sequence, item.branch).second)
      return fail("an empty or doubled item");
    if (seen.insert(item.sequence).second != (item.branch < 0))
      return fail("a branch without its main path in front");
    const Rank rank = scheduler_->sequence(item.sequence).rank;
    if (!best || rank < *best) best = rank;
  }
  for (const SequenceId id : step.preempted) {
    const Sequence& s = scheduler_->sequence(id);
    if (seen.contains(id)) continue;  // it was resumed in the same step
    if (s.state == State::kSuspended || step.items.empty()) continue;
    if (s.rank < *best) return fail(fmt::format("sequence {} was preempted by a worse one", id));
  }
  for (const StepItem& item : step.items) {
    const int32_t end = item.first + item.count;
    for (const PictureSpan& p : scheduler_->sequence(item.sequence).pictures) {
      if (p.both_ways && p.first < end && end < p.end()) return fail("a step cuts a picture");
    }
  }
  // Everything that attention reads now must be what was computed for these very tokens.
  for (const StepItem& item : step.items) {
    const Sequence& s = scheduler_->sequence(item.sequence);
    std::vector<int32_t> tokens = what_is_read(s);
    const std::vector<int32_t>& draft = s.draft_of(item);
    tokens.insert(tokens.end(), draft.begin(), draft.end());
    std::vector<uint64_t> hashes;
    for (const int32_t t : tokens) hashes.push_back(extend(hashes.empty() ? 0 : hashes.back(), t));
    for (int g = 0; g < cache_->groups(); ++g) {
      if (g == cache_->state_group()) continue;
      const auto [expected, coarse] = expected_slots(s, g, item, hashes);
      if (!check_coarse(s, item, g, coarse)) return false;
      const int32_t window = cache_->window(g);
      const int32_t from = window == 0 ? 0 : std::max(0, item.first - window + 1);
      for (int32_t p = from; p < std::ssize(expected); ++p) {
        const int32_t block =
            s.blocks_of(item).ids[static_cast<size_t>(g)][static_cast<size_t>(p / kBlockTokens)];
        if (slots(g, block)[p % kBlockTokens] != expected[static_cast<size_t>(p)]) {
          return fail(fmt::format("sequence {} reads a wrong key at {} in group {} (block {})",
                                  s.id, p, g, block));
        }
      }
    }
    if (states_ && !check_state(s, item, hashes)) return false;
    if (encoders_ && !check_encoded(s)) return false;
  }
  return true;
}

}  // namespace freshet::scheduler

#include "eval/evictions.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "engine/evict_keys.h"
#include "engine/retention.h"

namespace freshet::eval {
namespace {

using ops::kBlockTokens;

int32_t blocks_for(int32_t slots) {
  return (slots + kBlockTokens - 1) / kBlockTokens;
}

std::vector<int32_t> run_of(int64_t first, int32_t count) {
  std::vector<int32_t> ids(static_cast<size_t>(count));
  std::iota(ids.begin(), ids.end(), static_cast<int32_t>(first));
  return ids;
}

}  // namespace

Result<std::unique_ptr<Evictions>> Evictions::make(kv_cache::Retention policy,
                                                   const KvCacheSpec& cache, int sequences) {
  if (policy->rules().interval == 0) {
    return invalid_argument(
        "{0} evicts at the end of a prompt alone: an interval is needed, such as {0}-512-64",
        policy->config().policy);
  }
  FRESHET_ASSIGN_OR_RETURN(auto schedule, engine::eviction_schedule(*policy, cache));
  return std::unique_ptr<Evictions>(
      new Evictions(std::move(policy), cache, std::move(schedule), sequences));
}

Evictions::Evictions(kv_cache::Retention policy, KvCacheSpec cache,
                     kv_cache::EvictionSchedule schedule, int sequences)
    : policy_(std::move(policy)),
      cache_(std::move(cache)),
      schedule_(std::move(schedule)),
      states_(static_cast<size_t>(sequences)) {
  for (int s = 0; s < sequences; ++s) reset(s);
}

void Evictions::reset(int sequence) {
  State& s = states_[static_cast<size_t>(sequence)];
  s = {};
  s.evicted.assign(cache_.groups.size(), 0);
  s.coarse.resize(cache_.groups.size());
  s.evict_at = schedule_.next(prompt(), 0, {});
  s.scored_from = schedule_.scored_from(prompt(), s.evict_at);
}

int32_t Evictions::coarse_blocks(size_t group, int32_t tokens) const {
  if (!schedule_.rules.recodes) return 0;
  const int32_t each = kBlockTokens * schedule_.parts[group];
  return (tokens + each - 1) / each;
}

// Tokens are kept in the first blocks, and coarse tokens in the last ones.
void Evictions::evict_due(int sequence, int64_t length, const KvStorage& cache,
                          std::span<const int64_t> blocks, ops::Ops& ops) {
  State& s = states_[static_cast<size_t>(sequence)];
  if (length != s.evict_at) return;
  scheduler::Eviction e;
  e.kept = schedule_.budgets;
  e.scores = s.scores;
  e.before.resize(cache_.groups.size());
  e.after.resize(cache_.groups.size());
  e.coarse_before = s.coarse;
  e.coarse_slots.resize(cache_.groups.size());
  e.slots.resize(cache_.groups.size());
  for (size_t g = 0; g < cache_.groups.size(); ++g) {
    const int32_t budget = schedule_.budgets[g];
    e.slots[g] = s.evict_at - s.evicted[g];
    if (budget == 0 || e.slots[g] <= budget) continue;
    const int64_t first = sequence * blocks[g], last = first + blocks[g] - 1;
    e.before[g] = run_of(first, blocks_for(e.slots[g]));
    e.after[g] = run_of(first, blocks_for(budget));
    if (schedule_.rules.recodes) e.coarse_slots[g] = s.evicted[g];
    s.evicted[g] = s.evict_at - budget;
    while (std::ssize(s.coarse[g]) < coarse_blocks(g, s.evicted[g]))
      s.coarse[g].push_back(static_cast<int32_t>(last - std::ssize(s.coarse[g])));
  }
  e.coarse_after = s.coarse;
  s.scores.reset();
  if (schedule_.rules.accumulates && e.scores != nullptr) {
    s.scores = std::make_shared<kv_cache::KeyScores>();
    e.left = {s.scores};
  }
  engine::evict_keys(ops, cache, e, *policy_);
  s.evict_at = schedule_.next(prompt(), s.evict_at, s.evicted);
  s.scored_from = schedule_.scored_from(prompt(), s.evict_at);
}

void Evictions::describe(int sequence, int64_t length, int64_t count, ForwardBatch& batch) {
  State& s = states_[static_cast<size_t>(sequence)];
  std::vector<int32_t> slots;
  for (size_t g = 0; g < cache_.groups.size(); ++g) {
    BlockTables& t = batch.tables[g];
    t.context_len.push_back(static_cast<int32_t>(length) - s.evicted[g]);
    slots.push_back(s.evict_at - s.evicted[g]);
    t.coarse_slots.clear();
    t.coarse_ids.clear();
    if (s.coarse[g].empty()) continue;
    t.coarse_slots = {s.evicted[g]};
    t.coarse_ids = s.coarse[g];
    t.coarse_stride = std::ssize(s.coarse[g]);
    t.coarse_parts = schedule_.parts[g];
  }
  if (length <= s.scored_from) return;
  if (s.scores == nullptr) s.scores = std::make_shared<kv_cache::KeyScores>();
  engine::reserve_scores(cache_, schedule_, slots, *s.scores);
  const int64_t queries = std::min<int64_t>(count, length - s.scored_from);
  batch.scored.push_back({static_cast<int32_t>(batch.context_len.size()) - 1,
                          static_cast<int32_t>(queries), s.scores.get()});
}

double Evictions::bytes_per_token(const kv_cache::RetentionPolicy& policy, const KvCacheSpec& cache,
                                  int64_t tokens) {
  const kv_cache::RetentionRules rules = policy.rules();
  const int64_t budget = policy.config().budget, start = rules.in_prompt ? 0 : budget;
  int64_t evicted = 0;
  if (tokens > budget && rules.interval > 0)
    evicted =
        std::max<int64_t>(0, start + (tokens - start) / rules.interval * rules.interval - budget);
  double bytes = 0.0;
  for (size_t g = 0; g < cache.groups.size(); ++g) {
    const auto group = static_cast<int>(g);
    const auto each = static_cast<double>(cache.block_bytes(group)) / kBlockTokens;
    const double gone = cache.may_evict(group) ? static_cast<double>(evicted) : 0.0;
    bytes += each * (static_cast<double>(tokens) - gone);
    if (rules.recodes && gone > 0.0) bytes += each * gone / cache.coarse_parts(group);
  }
  return bytes / static_cast<double>(std::max<int64_t>(tokens, 1));
}

}  // namespace freshet::eval

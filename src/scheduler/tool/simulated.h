// Parts of the simulator: what evictions do and what slots hold after them. Pure.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <numeric>
#include <span>
#include <vector>

#include "scheduler/sequence.h"
#include "scheduler/tool/simulated_random.h"

namespace freshet::scheduler {

// nullptr: none, as in models with states. Evictions act on groups without a window, which may have
// different budgets.
inline std::shared_ptr<const kv_cache::EvictionSchedule> random_eviction(
    Random& random, const kv_cache::BlockCache& cache) {
  if (random.chance(60) || cache.state_group() >= 0) return nullptr;
  kv_cache::EvictionSchedule schedule;
  schedule.rules.interval = random.in(0, 20);
  schedule.rules.in_prompt = schedule.rules.interval > 0 && random.chance(30);
  schedule.rules.window = random.in(0, 8);
  schedule.rules.accumulates = random.chance(30);
  for (int g = 0; g < cache.groups(); ++g)
    schedule.budgets.push_back(cache.window(g) == 0 ? random.in(9, 50) : 0);
  // As all policies with coarse tokens, they have an interval. It isn't drawn by a choice of its
  // own, so that the other choices of a seed stay.
  schedule.rules.recodes = !schedule.rules.in_prompt && schedule.rules.interval % 3 == 1;
  for (const int32_t budget : schedule.budgets)
    if (schedule.rules.recodes) schedule.parts.push_back(2 + budget % 4);
  return std::make_shared<const kv_cache::EvictionSchedule>(std::move(schedule));
}

// The slots that the simulated policy keeps: those with the smallest hashes, and the last one.
inline std::vector<int32_t> kept_slots(std::span<const uint64_t> contents, int32_t count) {
  std::vector<int32_t> order(contents.size() - 1);
  std::iota(order.begin(), order.end(), 0);
  std::ranges::sort(order, {}, [&](int32_t i) { return contents[static_cast<size_t>(i)]; });
  order.resize(static_cast<size_t>(count) - 1);
  order.push_back(static_cast<int32_t>(contents.size()) - 1);
  std::ranges::sort(order);
  return order;
}

// The others.
inline std::vector<uint64_t> dropped_contents(std::span<const uint64_t> contents,
                                              std::span<const int32_t> kept) {
  std::vector<uint64_t> dropped;
  for (size_t i = 0; i < contents.size(); ++i) {
    if (!std::ranges::binary_search(kept, static_cast<int32_t>(i))) dropped.push_back(contents[i]);
  }
  return dropped;
}

// A slot of a block stands for `parts` coarse tokens, and holds the sum of their hashes. Returns
// the sums of all of them, one block after the other.
inline std::vector<uint64_t> coarse_sums(std::span<const uint64_t> tokens, int32_t parts) {
  std::vector<uint64_t> sums;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (i % static_cast<size_t>(parts) == 0) sums.push_back(0);
    sums.back() += tokens[i] * (2 * i + 1);
  }
  return sums;
}

// What the slots of a sequence hold when it computes `item`, and its coarse tokens. hashes: of its
// tokens.
struct ExpectedSlots {
  std::vector<uint64_t> fine, coarse;
};
inline ExpectedSlots expected_slots(const Sequence& s, int group, const StepItem& item,
                                    std::span<const uint64_t> hashes) {
  const auto end = static_cast<size_t>(item.first + item.count);
  const kv_cache::EvictionSchedule* const schedule = s.request->eviction.get();
  if (schedule == nullptr || schedule->budgets[static_cast<size_t>(group)] == 0)
    return {{hashes.begin(), hashes.begin() + static_cast<int64_t>(end)}, {}};
  std::vector<uint64_t> contents, coarse;
  std::vector<int32_t> evicted(schedule->budgets.size(), 0);
  int32_t at = schedule->next(s.prompt_tokens, 0, evicted);
  // Drafts may go beyond the sequence's end.
  if (at > s.prompt_tokens + s.max_tokens) at = kv_cache::kNeverEvicts;
  for (size_t p = 0; p < end; ++p) {
    if (static_cast<int32_t>(p) == at) {
      for (size_t g = 0; g < evicted.size(); ++g) {
        const int32_t budget = schedule->budgets[g];
        if (budget == 0 || at - evicted[g] <= budget) continue;
        evicted[g] = at - budget;
        if (static_cast<int>(g) != group) continue;
        std::vector<uint64_t> left;
        const std::vector<int32_t> kept = kept_slots(contents, budget);
        for (const int32_t slot : kept) left.push_back(contents[static_cast<size_t>(slot)]);
        if (schedule->rules.recodes)
          std::ranges::copy(dropped_contents(contents, kept), std::back_inserter(coarse));
        contents = std::move(left);
      }
      at = schedule->next(s.prompt_tokens, at, evicted);
    }
    contents.push_back(hashes[p]);
  }
  return {contents, coarse};
}

}  // namespace freshet::scheduler

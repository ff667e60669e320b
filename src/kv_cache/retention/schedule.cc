#include "kv_cache/retention/schedule.h"

#include <algorithm>

namespace freshet::kv_cache {

int32_t EvictionSchedule::next(int32_t prompt, int32_t computed,
                               std::span<const int32_t> evicted) const {
  int64_t fits = kNeverEvicts;  // the most tokens within every budget
  for (size_t g = 0; g < budgets.size(); ++g) {
    if (budgets[g] == 0) continue;
    fits = std::min(fits, int64_t{budgets[g]} + (evicted.empty() ? 0 : evicted[g]));
  }
  if (fits == kNeverEvicts) return kNeverEvicts;
  const int64_t from = std::max<int64_t>(computed, fits) + 1;
  const int64_t start = rules.in_prompt ? 0 : prompt;
  if (from <= start) return static_cast<int32_t>(start);
  if (rules.interval == 0) return kNeverEvicts;
  const int64_t periods = (from - start + rules.interval - 1) / rules.interval;
  return static_cast<int32_t>(std::min<int64_t>(start + periods * rules.interval, kNeverEvicts));
}

int32_t EvictionSchedule::scored_from(int32_t prompt, int32_t next) const {
  if (next == kNeverEvicts || rules.window == 0) return kNeverEvicts;
  return std::max(0, (rules.accumulates ? prompt : next) - rules.window);
}

int32_t EvictionSchedule::most_slots(int group, int32_t prompt, int32_t end, bool started) const {
  const int32_t budget = budgets[static_cast<size_t>(group)];
  if (budget == 0) return end;
  int64_t most = end;
  if (rules.interval > 0) most = int64_t{budget} + rules.interval;
  if (rules.interval == 0 && started) most = int64_t{budget} + std::max(0, end - prompt);
  if (rules.interval == 0 && !started && prompt > budget)
    most = std::max<int64_t>(prompt, int64_t{budget} + std::max(0, end - prompt));
  if (!started && !rules.in_prompt) most = std::max<int64_t>(most, prompt);
  return static_cast<int32_t>(std::min<int64_t>(most, end));
}

}  // namespace freshet::kv_cache

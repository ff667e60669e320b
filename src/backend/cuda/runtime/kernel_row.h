// Tables of GPU kernels. A row says which GPUs, formats and token counts a kernel supports, and
// which problems. Rows are sorted best first, and choose() takes the first one that fits. Plain
// C++: the plug-in launches what the tables say, and the program prints them without a GPU.
#pragma once

#include <cstdint>

#include "backend/cuda/api.h"

namespace freshet::cuda {

inline constexpr int64_t kAnyTokens = INT64_MAX;

template <class Problem>
struct KernelRow {
  const char* name;
  int capability;         // 90: compute capability 9.0 only (sm_90a); 80: 8.0 and all above
  uint64_t formats;       // bits of Code (or CacheType)
  int64_t m_min, m_max;   // tokens
  const char* condition;  // in words, what supports() requires; "" for nothing
  bool (*supports)(const DeviceLimits& limits, const Problem& problem);
};

// A problem has `format` (a bit), `tokens` and whatever supports() reads.
template <class Problem>
bool fits(const KernelRow<Problem>& row, const DeviceLimits& limits, const Problem& problem) {
  const bool runs =
      row.capability == 90 ? limits.capability == 90 : limits.capability >= row.capability;
  return runs && (row.formats >> problem.format & 1) != 0 && problem.tokens >= row.m_min &&
         problem.tokens <= row.m_max && row.supports(limits, problem);
}

// The index of the row that runs the problem: `forced` if it fits, otherwise the first that fits;
// -1 if there is none.
template <class Problem, int N>
int choose(const KernelRow<Problem> (&rows)[N], const DeviceLimits& limits, const Problem& problem,
           int forced = -1) {
  if (forced >= 0 && fits(rows[forced], limits, problem)) return forced;
  for (int i = 0; i < N; ++i) {
    if (fits(rows[i], limits, problem)) return i;
  }
  return -1;
}

}  // namespace freshet::cuda

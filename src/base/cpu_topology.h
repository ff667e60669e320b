// The processors that this process may use: its affinity mask, its control group's quota, and which
// of them share a core. Reads the system's files again on each call; thread-safe. A file that
// cannot be read counts as no limit.
#pragma once

#include <string_view>
#include <vector>

namespace freshet {

struct CpuTopology {
  std::vector<int> cpus;        // ids; first one per physical core, then their siblings
  int cores = 1;                // physical cores among them
  int limit = 1;                // processors' worth of time: cpus.size(), or less by quota
  int recommended_threads = 1;  // min(cores, limit)
};
CpuTopology usable_cpus();

// Number of processors that a quota allows, rounded up; 0: no limit. Exposed for tests.
int cpus_of_cgroup2(std::string_view cpu_max);  // "max 100000" or "150000 100000"
int cpus_of_cgroup1(std::string_view quota_us, std::string_view period_us);

}  // namespace freshet

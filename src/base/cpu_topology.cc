#include "base/cpu_topology.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>

#include <fmt/format.h>
#include <sched.h>

namespace freshet {
namespace {

std::string first_line(const std::string& path) {
  std::ifstream in(path);
  std::string line;
  std::getline(in, line);
  return line;
}

int64_t number(std::string_view text) {
  int64_t v = -1;
  std::from_chars(text.data(), text.data() + text.size(), v);
  return v;
}

int ceil_ratio(int64_t quota, int64_t period) {
  if (quota <= 0 || period <= 0) return 0;
  return static_cast<int>(std::min<int64_t>((quota + period - 1) / period, 1 << 20));
}

// Every group from ours up to the root may have a quota; the smallest applies.
int cgroup_limit() {
  std::ifstream groups("/proc/self/cgroup");
  int least = 0;
  const auto note = [&least](int limit) {
    if (limit > 0) least = least == 0 ? limit : std::min(least, limit);
  };
  for (std::string line; std::getline(groups, line);) {
    const size_t a = line.find(':');
    const size_t b = a == std::string::npos ? a : line.find(':', a + 1);
    if (b == std::string::npos) continue;
    const std::string controllers = fmt::format(",{},", line.substr(a + 1, b - a - 1));
    const bool v2 = controllers == ",,";
    if (!v2 && controllers.find(",cpu,") == std::string::npos) continue;
    const std::string root = v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu";
    for (std::string path = line.substr(b + 1);; path.resize(path.rfind('/'))) {
      if (path == "/") path.clear();
      const std::string dir = root + path;
      note(v2 ? cpus_of_cgroup2(first_line(dir + "/cpu.max"))
              : cpus_of_cgroup1(first_line(dir + "/cpu.cfs_quota_us"),
                                first_line(dir + "/cpu.cfs_period_us")));
      if (path.find('/') == std::string::npos) break;
    }
  }
  return least;
}

std::vector<int> affinity() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> cpus;
  if (::sched_getaffinity(0, sizeof set, &set) == 0) {
    for (int i = 0; i < CPU_SETSIZE; ++i) {
      if (CPU_ISSET(static_cast<size_t>(i), &set)) cpus.push_back(i);
    }
  } else {  // more processors than a cpu_set_t holds
    for (int i = 0; i < static_cast<int>(std::thread::hardware_concurrency()); ++i) {
      cpus.push_back(i);
    }
  }
  if (cpus.empty()) cpus.push_back(0);
  return cpus;
}

}  // namespace

int cpus_of_cgroup2(std::string_view cpu_max) {
  const size_t space = cpu_max.find(' ');
  if (space == std::string_view::npos) return 0;
  return ceil_ratio(number(cpu_max.substr(0, space)), number(cpu_max.substr(space + 1)));
}

int cpus_of_cgroup1(std::string_view quota_us, std::string_view period_us) {
  return ceil_ratio(number(quota_us), number(period_us));
}

CpuTopology usable_cpus() {
  CpuTopology t;
  std::set<std::pair<int64_t, int64_t>> seen;
  std::vector<int> siblings;
  for (const int cpu : affinity()) {
    const std::string dir = fmt::format("/sys/devices/system/cpu/cpu{}/topology/", cpu);
    const int64_t package = number(first_line(dir + "physical_package_id"));
    const int64_t core = number(first_line(dir + "core_id"));
    const bool fresh = core < 0 || seen.insert({package, core}).second;
    (fresh ? t.cpus : siblings).push_back(cpu);
  }
  t.cores = static_cast<int>(t.cpus.size());
  t.cpus.insert(t.cpus.end(), siblings.begin(), siblings.end());
  const int quota = cgroup_limit();
  t.limit = static_cast<int>(t.cpus.size());
  if (quota > 0) t.limit = std::min(t.limit, quota);
  t.recommended_threads = std::min(t.cores, t.limit);
  return t;
}

}  // namespace freshet

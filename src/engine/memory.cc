#include "engine/memory.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include <fmt/format.h>

namespace freshet::engine {
namespace {

std::string read_file(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::optional<uint64_t> number(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc()) return std::nullopt;
  return value;
}

// The number that follows `key` at the beginning of a line.
std::optional<uint64_t> field(std::string_view text, std::string_view key) {
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    if (line.starts_with(key)) return number(line.substr(key.size()));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return std::nullopt;
}

// The process's memory control groups from its own to the root: each may have a limit.
struct Groups {
  std::vector<std::string> folders;
  bool v2 = true;
};

Groups memory_groups() {
  Groups groups;
  std::istringstream lines(read_file("/proc/self/cgroup"));
  std::string path, line;
  while (std::getline(lines, line)) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = fmt::format(",{},", line.substr(first + 1, second - first - 1));
    if (controllers.find(",memory,") != std::string::npos) {
      path = line.substr(second + 1);
      groups.v2 = false;
      break;
    }
    if (controllers == ",,") path = line.substr(second + 1);
  }
  const std::string root = groups.v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
  while (path.size() > 1) {
    groups.folders.push_back(root + path);
    path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
  }
  groups.folders.push_back(root);
  return groups;
}

}  // namespace

size_t mem_available_of(std::string_view meminfo) {
  return static_cast<size_t>(field(meminfo, "MemAvailable:").value_or(0)) * 1024;
}

size_t left_in_group(std::string_view limit, std::string_view used, std::string_view stat) {
  const auto most = number(limit);
  // Version 1 writes "no limit" as a number near 2^63.
  if (!most || *most >= uint64_t{1} << 60) return SIZE_MAX;
  uint64_t taken = number(used).value_or(0);
  const uint64_t droppable =
      field(stat, "total_inactive_file ").value_or(field(stat, "inactive_file ").value_or(0));
  taken -= std::min(taken, droppable);
  return static_cast<size_t>(*most - std::min(*most, taken));
}

size_t available_memory() {
  const size_t system = mem_available_of(read_file("/proc/meminfo"));
  size_t left = system > 0 ? system : SIZE_MAX;
  const Groups groups = memory_groups();
  for (const std::string& folder : groups.folders) {
    const std::string stat = read_file(folder + "/memory.stat");
    const size_t here = groups.v2
                            ? left_in_group(read_file(folder + "/memory.max"),
                                            read_file(folder + "/memory.current"), stat)
                            : left_in_group(read_file(folder + "/memory.limit_in_bytes"),
                                            read_file(folder + "/memory.usage_in_bytes"), stat);
    left = std::min(left, here);
  }
  return left == SIZE_MAX ? 0 : left;
}

}  // namespace freshet::engine

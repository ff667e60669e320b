// `freshet devices`: the CPU and the GPUs that models can run on.
#include <algorithm>
#include <fstream>
#include <memory>
#include <string>

#include "backend/cpu/backend.h"
#include "backend/cuda/backend.h"
#include "base/cpu_topology.h"
#include "base/json.h"
#include "base/units.h"
#include "cli/command.h"
#include "engine/memory.h"

namespace freshet::cli {
namespace devices_command {

// The value of the first line "key : value" of a file of the system; "" if there is none.
std::string line_of(const char* path, std::string_view key) {
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with(key)) continue;
    const size_t colon = line.find(':');
    const size_t first =
        colon == std::string::npos ? colon : line.find_first_not_of(" \t", colon + 1);
    return first == std::string::npos ? "" : line.substr(first);
  }
  return {};
}

struct CpuInfo {
  std::string model;
  int cores = 0;  // physical ones that this process may use
  int threads = 0;
  std::string isa;
  size_t total_bytes = 0, available_bytes = 0;
};

CpuInfo cpu_info() {
  CpuInfo c;
  c.model = line_of("/proc/cpuinfo", "model name");
  if (c.model.empty()) c.model = "unknown model";
  const CpuTopology topology = usable_cpus();
  c.cores = topology.cores;
  c.threads = static_cast<int>(topology.cpus.size());
  c.isa = ops::name_of(cpu::detect().isa);
  const std::string total = line_of("/proc/meminfo", "MemTotal");  // "16384 kB"
  c.total_bytes = total.empty() ? 0 : std::stoull(total) << 10;
  c.available_bytes = engine::available_memory();
  return c;
}

// "550.54.15", from "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  ..."
std::string driver_version() {
  const std::string text = line_of("/proc/driver/nvidia/version", "NVRM version");
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find(' ', at), text.size());
    const std::string word = text.substr(at, end - at);
    if (word.find('.') != std::string::npos &&
        word.find_first_not_of("0123456789.") == std::string::npos)
      return word;
    at = end + 1;
  }
  return {};
}

json::Value devices_json(const CpuInfo& c, const Result<std::vector<cuda::GpuInfo>>& gpus) {
  json::Array devices;
  json::Object cpu;
  cpu["device"] = "cpu";
  cpu["name"] = c.model;
  cpu["cores"] = c.cores;
  cpu["threads"] = c.threads;
  cpu["isa"] = c.isa;
  cpu["memory_bytes"] = c.total_bytes;
  cpu["available_bytes"] = c.available_bytes;
  devices.emplace_back(std::move(cpu));
  for (size_t i = 0; gpus.ok() && i < gpus->size(); ++i) {
    const cuda::GpuInfo& g = (*gpus)[i];
    json::Object gpu;
    gpu["device"] = fmt::format("cuda:{}", i);
    gpu["name"] = g.name;
    gpu["compute_capability"] = fmt::format("{}.{}", g.capability / 10, g.capability % 10);
    gpu["memory_bytes"] = g.total_bytes;
    gpu["available_bytes"] = g.free_bytes;
    gpu["driver"] = driver_version();
    devices.emplace_back(std::move(gpu));
  }
  return devices;
}

Status devices(bool as_json, Output& out) {
  const CpuInfo c = cpu_info();
  const auto gpus = cuda::list_gpus();
  if (as_json) {
    out.write(json::write(devices_json(c, gpus), {.indent = 2}) + "\n");
    return {};
  }
  out.print("cpu     {}: {} cores, {} threads, {}, {} of memory ({} available)\n", c.model, c.cores,
            c.threads, c.isa, format_bytes(c.total_bytes), format_bytes(c.available_bytes));
  if (!gpus.ok()) {
    out.print("cuda    none: {}\n", gpus.status().message());
    return {};
  }
  if (gpus->empty()) out.write("cuda    none: the driver reports no GPU\n");
  const std::string driver = driver_version();
  for (size_t i = 0; i < gpus->size(); ++i) {
    const cuda::GpuInfo& g = (*gpus)[i];
    out.print("cuda:{}  {}: {} of memory ({} free), compute capability {}.{}{}\n", i, g.name,
              format_bytes(g.total_bytes), format_bytes(g.free_bytes), g.capability / 10,
              g.capability % 10, driver.empty() ? "" : ", driver " + driver);
  }
  return {};
}

}  // namespace devices_command

void add_devices(CLI::App& program, Context& context, Action& action) {
  CLI::App* c =
      program.add_subcommand("devices", "List the CPU and the GPUs that models can run on");
  auto as_json = std::make_shared<bool>(false);
  c->add_flag("--json", *as_json, "Print a JSON list");
  add_examples(*c, "  freshet devices\n  freshet devices --json | jq '.[].device'");
  c->callback([as_json, &context, &action] {
    action = [as_json, &context] { return devices_command::devices(*as_json, context.out); };
  });
}

}  // namespace freshet::cli

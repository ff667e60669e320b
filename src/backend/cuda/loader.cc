// Finds and opens the plug-in.
#include <charconv>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <vector>

#include <dlfcn.h>

#include "backend/cuda/backend.h"
#include "backend/cuda/device.h"
#include "backend/cuda/kernel_names.h"
#include "base/log.h"

namespace freshet::cuda {
namespace {

constexpr const char* kFile = "libfreshet_cuda.so";

// Beside the program (its bin and lib folders), then on the system's search path.
std::vector<std::string> places() {
  std::vector<std::string> all;
  std::error_code error;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", error);
  if (!error) {
    const auto folder = program.parent_path();
    for (const char* place : {"", "../lib", "../lib/freshet", "../bin", "../../bin"}) {
      const auto path = (folder / place / kFile).lexically_normal();
      if (std::filesystem::exists(path, error)) all.push_back(path.string());
    }
  }
  all.emplace_back(kFile);
  return all;
}

struct Plugin {
  std::string path;
  const Api* api = nullptr;
};

Result<Plugin> load() {
  std::string why;
  for (const std::string& place : places()) {
    // Never closed: the driver's threads outlive the engine.
    void* const library = ::dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      if (why.empty()) why = ::dlerror();
      continue;
    }
    const auto function = reinterpret_cast<ApiFunction>(::dlsym(library, "freshet_cuda"));
    const Api* api = function != nullptr ? function() : nullptr;
    if (api == nullptr || api->version != kApiVersion) {
      return unsupported("{} belongs to another version of this program: build both together",
                         place);
    }
    return Plugin{place, api};
  }
  return not_found("no CUDA plug-in ({}): build it with `make cuda`, or use --device cpu", why);
}

// The index in "cuda" (0) or "cuda:N"; -1: neither.
int index_of(std::string_view choice) {
  constexpr std::string_view kPrefix = "cuda:";
  if (choice == "cuda") return 0;
  if (!choice.starts_with(kPrefix)) return -1;
  const std::string_view digits = choice.substr(kPrefix.size());
  int index = -1;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), index);
  const bool whole = error == std::errc() && end == digits.data() + digits.size();
  return whole && index >= 0 ? index : -1;
}

}  // namespace

Result<std::unique_ptr<ops::Device>> open(int index, std::span<const std::string> force_kernels) {
  FRESHET_ASSIGN_OR_RETURN(const ForcedRows forced, forced_rows(force_kernels));
  FRESHET_ASSIGN_OR_RETURN(const Plugin plugin, load());
  return CudaDevice::open(*plugin.api, index, forced);
}

Result<PluginInfo> find_plugin() {
  FRESHET_ASSIGN_OR_RETURN(const Plugin plugin, load());
  return PluginInfo{plugin.path, plugin.api->version};
}

Result<std::vector<GpuInfo>> list_gpus() {
  FRESHET_ASSIGN_OR_RETURN(const Plugin plugin, load());
  std::vector<GpuInfo> gpus;
  const int count = plugin.api->devices();
  for (int i = 0; i < count; ++i) {
    Context* context = nullptr;
    DeviceInfo info = {};
    if (const int error = plugin.api->open(i, &context, &info); error != 0)
      return io_error("GPU {} cannot be opened: {}", i, plugin.api->error_text(error));
    (void)plugin.api->close(context);
    gpus.push_back({info.name, info.limits.capability, static_cast<size_t>(info.free_bytes),
                    static_cast<size_t>(info.total_bytes)});
  }
  return gpus;
}

Result<std::unique_ptr<ops::Device>> open(const std::string& choice, bool needs_cpu,
                                          std::span<const std::string> force_kernels) {
  if (choice == "cpu") return std::unique_ptr<ops::Device>();
  const int index = index_of(choice);
  if (index >= 0 && needs_cpu) {
    return invalid_argument("--reference and --cpu-isa are for --device cpu");
  }
  if (index >= 0) return open(index, force_kernels);
  if (choice != "auto") {
    return invalid_argument("unknown device \"{}\"; known: auto cpu cuda cuda:N", choice);
  }
  if (needs_cpu || !forced_rows(force_kernels).ok()) return std::unique_ptr<ops::Device>();
  auto device = open(0, force_kernels);
  if (device.ok() || !force_kernels.empty()) return device;
  // A missing plug-in or GPU is normal, so there is no warning.
  if (device.status().code() != StatusCode::kNotFound)
    log_warning("no GPU is used: {}", device.status().message());
  return std::unique_ptr<ops::Device>();
}

}  // namespace freshet::cuda

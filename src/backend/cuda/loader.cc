// Finds and opens the plug-in.
#include <filesystem>
#include <system_error>
#include <vector>

#include <dlfcn.h>

#include "backend/cuda/backend.h"
#include "backend/cuda/device.h"
#include "base/log.h"

namespace freshet::cuda {
namespace {

constexpr const char* kFile = "libfreshet_cuda.so";

// Beside the program, in its bin and lib, and then wherever the system looks.
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

Result<const Api*> load() {
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
    return api;
  }
  return not_found("no CUDA plug-in ({}): build it with `make cuda`, or use --device cpu", why);
}

}  // namespace

Result<std::unique_ptr<ops::Device>> open() {
  FRESHET_ASSIGN_OR_RETURN(const Api* api, load());
  return CudaDevice::open(*api);
}

Result<std::unique_ptr<ops::Device>> open(const std::string& choice, bool needs_cpu) {
  if (choice == "cpu") return std::unique_ptr<ops::Device>();
  if (choice == "cuda" && needs_cpu) {
    return invalid_argument("--reference, --force-kernel and --cpu-isa are for --device cpu");
  }
  if (choice == "cuda") return open();
  if (choice != "auto")
    return invalid_argument("unknown device \"{}\"; known: auto cpu cuda", choice);
  if (needs_cpu) return std::unique_ptr<ops::Device>();
  auto device = open();
  if (device.ok()) return device;
  // That there is no plug-in or no GPU needs no word.
  if (device.status().code() != StatusCode::kNotFound)
    log_warning("no GPU is used: {}", device.status().message());
  return std::unique_ptr<ops::Device>();
}

}  // namespace freshet::cuda

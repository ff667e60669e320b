#include "cli/version.h"

#include <fmt/format.h>

#include "backend/cpu/backend.h"
#include "backend/cuda/backend.h"

namespace freshet::cli {

// Made by cmake/commit.cmake.
extern const char kCommit[];    // "33c8395 2026-11-27", or ""
extern const char kCompiler[];  // "GNU 12.2.0"

namespace {

std::string built_isas() {
  std::string names;
  for (int i = 0; i <= static_cast<int>(ops::kAnyIsa); ++i) {
    const std::string_view name = ops::name_of(static_cast<ops::CpuIsa>(i));
    if (ops::isa_by_name(name).ok()) names += fmt::format("{}{}", names.empty() ? "" : " ", name);
  }
  return names;
}

std::string cuda_plugin() {
  const auto plugin = cuda::find_plugin();
  if (!plugin.ok()) return plugin.status().message();
  return fmt::format("plug-in {}, interface {}", plugin->path, plugin->version);
}

}  // namespace

std::string version_text() {
  return fmt::format(
      "freshet {}\n"
      "commit    {}\n"
      "compiler  {}\n"
      "CPU       built for {}; found {}\n"
      "CUDA      {}",
      FRESHET_VERSION, *kCommit == '\0' ? "unknown" : kCommit, kCompiler, built_isas(),
      ops::name_of(cpu::detect().isa), cuda_plugin());
}

}  // namespace freshet::cli

// The CUDA backend as the program sees it: a device that a plug-in provides.
//
// The program is built without CUDA and runs without it. If libfreshet_cuda.so lies beside the
// program and there is a GPU, open() makes a device of it. A process may open several devices; each
// is used by one thread at a time.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "ops/device.h"

namespace freshet::cuda {

// Loads the plug-in and opens a GPU, numbered as the driver does, from 0. `force_kernels` names
// rows of its kernel tables ("matmul=q_sm90_m1_8"); each is used wherever it fits. An error says in
// one line what is missing.
Result<std::unique_ptr<ops::Device>> open(int index = 0,
                                          std::span<const std::string> force_kernels = {});

// What `--device` asks for: "cpu" gives nullptr; "cuda" (GPU 0) and "cuda:N" give a device or an
// error; "auto" gives GPU 0 if there is one, otherwise nullptr. `needs_cpu`: the user also asked
// for CPU kernels; then "auto" gives nullptr and "cuda" an error. `force_kernels` that are not the
// GPU's have the same effect.
Result<std::unique_ptr<ops::Device>> open(const std::string& choice, bool needs_cpu = false,
                                          std::span<const std::string> force_kernels = {});

// For diagnostics: what was found. Neither function changes what open() does.
struct PluginInfo {
  std::string path;  // as loaded; a bare name was found on the system's search path
  int version = 0;   // of the interface between the program and the plug-in
};
Result<PluginInfo> find_plugin();

struct GpuInfo {
  std::string name;
  int capability = 0;  // 90 for 9.0
  size_t free_bytes = 0, total_bytes = 0;
};
// All GPUs in the driver's order. Opens each of them for a moment.
Result<std::vector<GpuInfo>> list_gpus();

}  // namespace freshet::cuda

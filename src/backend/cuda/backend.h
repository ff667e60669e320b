// The CUDA backend, seen from the program: a device that a plug-in brings.
//
// The program is built without CUDA and runs without it; where libfreshet_cuda.so lies beside the
// program (or in FRESHET_CUDA_PLUGIN) and there is a GPU, open() makes a device of it. One device a
// process.
#pragma once

#include <memory>
#include <string>

#include "base/status.h"
#include "ops/device.h"

namespace freshet::cuda {

// Loads the plug-in and opens its first GPU. An error says what is missing, in one line.
Result<std::unique_ptr<ops::Device>> open();

// What `--device` asks for: "cpu" gives nullptr; "cuda" a device or an error; "auto" a device where
// there is one. `needs_cpu`: kernels of the processor were asked for, too; then "auto" gives
// nullptr and "cuda" an error.
Result<std::unique_ptr<ops::Device>> open(const std::string& choice, bool needs_cpu = false);

}  // namespace freshet::cuda

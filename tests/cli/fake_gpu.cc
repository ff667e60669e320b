// A plug-in whose GPU opens and has memory, and does nothing: for what the program decides before
// it computes anything there. With FAKE_GPU_VERSION set it is of another build.
#include <cstdlib>
#include <cstring>

#include "backend/cuda/api.h"

namespace freshet::cuda {
namespace {

const Api kApi = {
    .version = kApiVersion,
    .error_text = [](int) { return "fake"; },
    .open =
        [](char* name, int bytes, int* capability, int64_t memory[2]) {
          std::strncpy(name, "Fake GPU", static_cast<size_t>(bytes));
          *capability = 90;
          memory[0] = memory[1] = int64_t{1} << 32;
          return 0;
        },
    .allocate =
        [](void** to, int64_t bytes) {
          *to = std::malloc(static_cast<size_t>(bytes));
          return *to == nullptr ? 1 : 0;
        },
    .release =
        [](void* memory) {
          std::free(memory);
          return 0;
        },
    .allocate_host =
        [](void** to, int64_t bytes) {
          *to = std::malloc(static_cast<size_t>(bytes));
          return *to == nullptr ? 1 : 0;
        },
    .release_host =
        [](void* memory) {
          std::free(memory);
          return 0;
        },
    .clear = [](void*, int64_t) { return 0; },
    .sync = [] { return 0; },
};

}  // namespace
}  // namespace freshet::cuda

extern "C" __attribute__((visibility("default"))) const freshet::cuda::Api* freshet_cuda() {
  static const freshet::cuda::Api other = [] {
    freshet::cuda::Api api = freshet::cuda::kApi;
    ++api.version;
    return api;
  }();
  return std::getenv("FAKE_GPU_VERSION") != nullptr ? &other : &freshet::cuda::kApi;
}

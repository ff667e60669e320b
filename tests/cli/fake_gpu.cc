// A plug-in whose GPU opens and has memory, and does nothing: for what the program decides before
// it computes anything there. FAKE_GPU_VERSION: of which build it is.
#include <cstdlib>
#include <cstring>

#include "backend/cuda/api.h"

namespace freshet::cuda {
namespace {

const Api kApi = {
    .version = FAKE_GPU_VERSION,
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
    .packed_bytes = [](Code, int64_t, int64_t) { return int64_t{0}; },  // as many as in the file
};

}  // namespace
}  // namespace freshet::cuda

extern "C" __attribute__((visibility("default"))) const freshet::cuda::Api* freshet_cuda() {
  return &freshet::cuda::kApi;
}

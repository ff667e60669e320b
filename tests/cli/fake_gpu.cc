// A plug-in with two GPUs that can be opened and have memory, but compute nothing: tests the
// decisions that the program makes before it computes. FAKE_GPU_VERSION: the API version that it
// reports. FAKE_GPU_DELAY_MS in the environment: how long opening a GPU takes.
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "backend/cuda/api.h"

namespace freshet::cuda {
namespace {

int allocate(Context*, void** to, int64_t bytes) {
  *to = std::malloc(static_cast<size_t>(bytes));
  return *to == nullptr ? 1 : 0;
}
int release(Context*, void* memory) {
  std::free(memory);
  return 0;
}

int copy(Context*, void* to, const void* from, int64_t bytes) {
  std::memcpy(to, from, static_cast<size_t>(bytes));
  return 0;
}

const Api kApi = {
    .version = FAKE_GPU_VERSION,
    .error_text = [](int) { return "fake"; },
    .devices = [] { return 2; },
    .open =
        [](int device, Context**, DeviceInfo* info) {
          if (const char* ms = std::getenv("FAKE_GPU_DELAY_MS"))
            std::this_thread::sleep_for(std::chrono::milliseconds(std::atoi(ms)));
          std::strncpy(info->name, device == 0 ? "Fake GPU" : "Another fake", sizeof info->name);
          info->limits = {90, 132};
          info->free_bytes = info->total_bytes = int64_t{1} << 32;
          return 0;
        },
    .force = [](Context*, int, int) { return 0; },
    .close = [](Context*) { return 0; },
    .memory = {.allocate = allocate,
               .release = release,
               .allocate_host = allocate,
               .release_host = release,
               .upload = copy,
               .clear = [](Context*, void*, int64_t) { return 0; },
               .upload_ahead = [](Context*, int, void*, const void*, int64_t) { return 0; },
               .upload_used = [](Context*, int) { return 0; },
               .upload_await = [](Context*, int) { return 0; }},
    .stream = {.sync = [](Context*) { return 0; }},
    .gemm = {.packed_bytes = [](Context*, Code, int64_t,
                                int64_t) { return int64_t{0}; },  // as many as in the file
             .pack = [](Context*, Code, uint8_t*, const uint8_t*, int64_t, int64_t, int64_t,
                        int64_t) { return 0; },
             .fragment_bytes = [](Context*, int64_t, int64_t) { return int64_t{0}; }},
    .attention = {.partial_bytes = [](Context*, int, int, int, int64_t) { return int64_t{0}; }},
};

}  // namespace
}  // namespace freshet::cuda

extern "C" __attribute__((visibility("default"))) const freshet::cuda::Api* freshet_cuda() {
  return &freshet::cuda::kApi;
}

// The plug-in's door: memory, graphs, and the table of functions.
#include <cstring>

#include "backend/cuda/runtime/common.cuh"
#include "backend/cuda/runtime/kernels.cuh"

namespace freshet::cuda {

cudaStream_t stream = nullptr;
int capability = 0;
int multiprocessors = 0;

namespace {

cudaEvent_t marks[2], notes[kNotes];

int code(cudaError_t error) {
  return static_cast<int>(error);
}

const char* error_text(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

int open(char* name, int name_bytes, int* compute_capability, int64_t memory[2]) {
  cudaDeviceProp properties;
  if (const cudaError_t e = cudaSetDevice(0); e != cudaSuccess) return code(e);
  if (const cudaError_t e = cudaGetDeviceProperties(&properties, 0); e != cudaSuccess) {
    return code(e);
  }
  std::strncpy(name, properties.name, static_cast<size_t>(name_bytes - 1));
  name[name_bytes - 1] = 0;
  capability = properties.major * 10 + properties.minor;
  multiprocessors = properties.multiProcessorCount;
  *compute_capability = capability;
  size_t free = 0, total = 0;
  if (const cudaError_t e = cudaMemGetInfo(&free, &total); e != cudaSuccess) return code(e);
  memory[0] = static_cast<int64_t>(free);
  memory[1] = static_cast<int64_t>(total);
  if (stream != nullptr) return 0;
  for (cudaEvent_t& mark : marks) {
    if (const cudaError_t e = cudaEventCreate(&mark); e != cudaSuccess) return code(e);
  }
  for (cudaEvent_t& note : notes) {
    const cudaError_t e = cudaEventCreateWithFlags(&note, cudaEventDisableTiming);
    if (e != cudaSuccess) return code(e);
  }
  return code(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
}

int allocate(void** to, int64_t bytes) {
  return code(cudaMalloc(to, static_cast<size_t>(bytes)));
}
int release(void* memory) {
  return code(cudaFree(memory));
}
int allocate_host(void** to, int64_t bytes) {
  return code(cudaMallocHost(to, static_cast<size_t>(bytes)));
}
int release_host(void* memory) {
  return code(cudaFreeHost(memory));
}
int move(void* to, const void* from, int64_t bytes) {
  return code(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, stream));
}
int clear(void* to, int64_t bytes) {
  return code(cudaMemsetAsync(to, 0, static_cast<size_t>(bytes), stream));
}
int sync() {
  return code(cudaStreamSynchronize(stream));
}

int note(int which) {
  return code(cudaEventRecord(notes[which], stream));
}
int await(int which) {
  return code(cudaEventSynchronize(notes[which]));
}

int graph_begin() {
  return code(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
}
int graph_end(void** graph) {
  cudaGraph_t captured = nullptr;
  if (const cudaError_t e = cudaStreamEndCapture(stream, &captured); e != cudaSuccess) {
    return code(e);
  }
  cudaGraphExec_t ready = nullptr;
  const cudaError_t e = cudaGraphInstantiate(&ready, captured, 0);
  cudaGraphDestroy(captured);
  *graph = ready;
  return code(e);
}
int graph_play(void* graph) {
  return code(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), stream));
}
int graph_release(void* graph) {
  return code(cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)));
}

int mark(int which) {
  return code(cudaEventRecord(marks[which], stream));
}
int elapsed(float* milliseconds) {
  if (const cudaError_t e = cudaEventSynchronize(marks[1]); e != cudaSuccess) return code(e);
  return code(cudaEventElapsedTime(milliseconds, marks[0], marks[1]));
}

__global__ void __launch_bounds__(512) read_kernel(const uint4* memory, int64_t n, float* sink) {
  uint32_t sum = 0;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + 3 * step < n; i += 4 * step) {
    const uint4 a = __ldcs(memory + i), b = __ldcs(memory + i + step);
    const uint4 c = __ldcs(memory + i + 2 * step), d = __ldcs(memory + i + 3 * step);
    sum += (a.x ^ a.y ^ a.z ^ a.w) + (b.x ^ b.y ^ b.z ^ b.w) + (c.x ^ c.y ^ c.z ^ c.w) +
           (d.x ^ d.y ^ d.z ^ d.w);
  }
  for (; i < n; i += step) sum += memory[i].x;
  if (sum == 0x12345678) *sink = 1.0f;  // keeps the loads
}

int read(const void* memory, int64_t bytes, float* sink) {
  read_kernel<<<132 * 4, 512, 0, stream>>>(static_cast<const uint4*>(memory), bytes / 16, sink);
  return code(cudaGetLastError());
}

}  // namespace
}  // namespace freshet::cuda

extern "C" __attribute__((visibility("default"))) const freshet::cuda::Api* freshet_cuda() {
  using namespace freshet::cuda;
  static const Api kApi = {kApiVersion,
                           error_text,
                           open,
                           allocate,
                           release,
                           allocate_host,
                           release_host,
                           move,
                           move,
                           move,
                           clear,
                           sync,
                           note,
                           await,
                           graph_begin,
                           graph_end,
                           graph_play,
                           graph_release,
                           mark,
                           elapsed,
                           packed_bytes,
                           pack,
                           embed,
                           fragment_bytes,
                           order_for,
                           encode,
                           products,
                           gated_fits,
                           gated_products,
                           expert_products,
                           experts_fused,
                           experts,
                           few_experts_fit,
                           few_experts,
                           norm,
                           rope_table,
                           heads,
                           attention_partial_bytes,
                           attention,
                           glu,
                           activation,
                           add,
                           scale,
                           softcap,
                           gather,
                           sigmoid_gate,
                           argmax,
                           samples,
                           sample,
                           take_ids,
                           route,
                           group,
                           router,
                           route_one_fits,
                           route_one,
                           combine,
                           read};
  return &kApi;
}

// Copies of cache blocks between the device and pinned memory of the host, on streams beside the
// compute stream.
//
// The kernel reads and writes the host's memory itself: pieces of a block lie far apart in the
// cache, one for each layer, and a call of the driver for each of them takes longer than its bytes.
// Few CTAs fill the bus, so most of the device is left to the step that runs beside it.
#include <memory>

#include "backend/cuda/runtime/common.cuh"
#include "backend/cuda/runtime/kernels.cuh"

namespace freshet::cuda {
namespace {

constexpr int kCtas = 24, kThreads = 512, kLoads = 4;
constexpr int64_t kPart = int64_t{kThreads} * kLoads * 16;  // bytes that a CTA moves at once

struct Lane {
  cudaStream_t stream = nullptr;
  cudaEvent_t event = nullptr;
  LaneLayerView* layers = nullptr;  // on the device
};

// Work items are parts of pieces; `parts`: of the longest piece.
__global__ void __launch_bounds__(kThreads)
    copy_units(const LaneLayerView* layers, int count, int64_t parts, bool to_device,
               const __grid_constant__ LaneUnits units) {
  const int64_t items = int64_t{units.count} * count * parts;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t piece = item / parts, at = item % parts * kPart;
    const LaneLayerView layer = layers[piece % count];
    if (at >= layer.bytes) continue;
    const LaneUnitView unit = units.units[piece / count];
    uint8_t* const device = layer.data + unit.block * layer.bytes + at;
    uint8_t* const host = unit.host + layer.offset + at;
    const auto* const from = reinterpret_cast<const uint4*>(to_device ? host : device);
    auto* const to = reinterpret_cast<uint4*>(to_device ? device : host);
    const int64_t left = (layer.bytes - at) / 16;
    uint4 held[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int64_t k = threadIdx.x + int64_t{i} * kThreads;
      if (k < left) held[i] = __ldcs(from + k);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int64_t k = threadIdx.x + int64_t{i} * kThreads;
      if (k < left) __stcs(to + k, held[i]);
    }
  }
}

int result(cudaError_t error) {
  return static_cast<int>(error);
}

}  // namespace

int lane_close(const Context&, void* lane) {
  const std::unique_ptr<Lane> owned(static_cast<Lane*>(lane));
  if (owned == nullptr) return 0;
  if (owned->stream != nullptr) {
    cudaStreamSynchronize(owned->stream);
    cudaStreamDestroy(owned->stream);
  }
  if (owned->event != nullptr) cudaEventDestroy(owned->event);
  return result(cudaFree(owned->layers));
}

int lane_open(const Context& ctx, void** lane, const LaneLayerView* layers, int32_t count) {
  auto opened = std::make_unique<Lane>();
  const size_t bytes = sizeof(LaneLayerView) * static_cast<size_t>(count);
  cudaError_t error = cudaStreamCreateWithFlags(&opened->stream, cudaStreamNonBlocking);
  if (error == cudaSuccess)
    error = cudaEventCreateWithFlags(&opened->event, cudaEventDisableTiming);
  void* table = nullptr;
  if (error == cudaSuccess) error = cudaMalloc(&table, bytes);
  opened->layers = static_cast<LaneLayerView*>(table);
  if (error == cudaSuccess) error = cudaMemcpy(table, layers, bytes, cudaMemcpyHostToDevice);
  if (error != cudaSuccess) {
    lane_close(ctx, opened.release());
    return result(error);
  }
  *lane = opened.release();
  return 0;
}

int lane_follow(const Context& ctx, void* lane) {
  const auto& l = *static_cast<Lane*>(lane);
  const cudaError_t error = cudaEventRecord(l.event, ctx.stream);
  return result(error != cudaSuccess ? error : cudaStreamWaitEvent(l.stream, l.event, 0));
}

int lane_precede(const Context& ctx, void* lane) {
  const auto& l = *static_cast<Lane*>(lane);
  const cudaError_t error = cudaEventRecord(l.event, l.stream);
  return result(error != cudaSuccess ? error : cudaStreamWaitEvent(ctx.stream, l.event, 0));
}

int lane_copy(const Context&, void* lane, int32_t first, int32_t count, const LaneUnits* units,
              int64_t longest, int32_t to_device) {
  const auto& l = *static_cast<Lane*>(lane);
  const int64_t parts = (longest + kPart - 1) / kPart;
  copy_units<<<kCtas, kThreads, 0, l.stream>>>(l.layers + first, count, parts, to_device != 0,
                                               *units);
  return result(cudaGetLastError());
}

int lane_wait(const Context&, void* lane) {
  return result(cudaStreamSynchronize(static_cast<Lane*>(lane)->stream));
}

}  // namespace freshet::cuda

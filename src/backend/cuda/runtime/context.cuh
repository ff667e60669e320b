// An open GPU: which device it is, its limits, and its streams and events.
//
// The host side treats it as an opaque pointer and passes it to every function of the table. One
// process may open several devices, or one device several times; a context is used by one thread at
// a time. Functions of the table make the context's device the thread's current one before they
// call CUDA (see plugin.cu), so launchers need not.
#pragma once

#include <map>
#include <utility>

#include <cuda_runtime.h>

#include "backend/cuda/api.h"

namespace freshet::cuda {

struct Context : DeviceLimits {
  int device = 0;
  cudaStream_t stream = nullptr;  // compute
  cudaStream_t copies = nullptr;  // uploads that run concurrently
  cudaEvent_t marks[2] = {}, notes[kNotes] = {};
  cudaEvent_t uploaded[kUploadSlots] = {}, used[kUploadSlots] = {};
  int forced[kForcedOps] = {-1, -1, -1, -1};  // forced rows of the kernel tables
  mutable char problem[256] = {};             // the problem that no kernel supports
  // Results of known_of(), by kernel and size.
  mutable std::map<std::pair<const void*, size_t>, int> known;
};

// A value that depends only on the device and a kernel, such as its occupancy with `bytes` of
// shared memory. compute() is called once per context.
template <class Compute>
int known_of(const Context& ctx, const void* kernel, size_t bytes, const Compute& compute) {
  const auto [at, fresh] = ctx.known.try_emplace({kernel, bytes}, 0);
  if (fresh) at->second = compute();
  return at->second;
}

}  // namespace freshet::cuda

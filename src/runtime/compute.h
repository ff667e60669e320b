// Where models run: a pool of threads, and the ops on it or on a device.
//
// Several models may share a Compute, on a device as well. They run by turns, on one thread. Each
// has memory of its own for its weights, its cache and its activations; they share the scratch of
// the ops, which grows to the most that any of them has reserved.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/thread_pool.h"
#include "ops/device.h"
#include "ops/ops.h"

namespace freshet::runtime {

struct ComputeOptions {
  int threads = 0;                         // as ThreadPool takes them
  std::string device = "cpu";              // cpu, cuda, auto
  std::string cpu_isa;                     // highest instruction set to use; "": any
  bool reference = false;                  // plain F32, without tuned kernels
  std::vector<std::string> force_kernels;  // as in ops::OpsOptions
  // Kernels to use instead of the processor's, in memory that stays; nullptr: its own.
  const ops::KernelTable* kernels = nullptr;
};

class Compute {
 public:
  static Result<std::shared_ptr<Compute>> open(const ComputeOptions& options);

  ThreadPool& pool() { return pool_; }
  ops::Ops& ops() { return *ops_; }
  const ops::Ops& ops() const { return *ops_; }
  bool reference() const { return reference_; }
  // For what a device leaves to the processor; without a device that is ops().
  Result<ops::Ops*> host_ops();
  ops::Device* device() const { return ops_->device(); }  // nullptr: the processor
  std::string device_name() const { return device() != nullptr ? device()->name() : "cpu"; }

  // The type of keys and values that a --kv-cache-dtype asks for. `scratch`: they live for one step
  // only, so that auto is F32.
  Result<ops::KvType> kv_type(const std::string& name, bool scratch = false) const;

 private:
  Compute(int threads, bool reference) : pool_(threads), reference_(reference) {}

  ThreadPool pool_;
  bool reference_;
  std::unique_ptr<ops::Ops> ops_;
  std::unique_ptr<ops::Ops> host_ops_;
};

}  // namespace freshet::runtime

#include "runtime/compute.h"

#include <utility>

#include "backend/cpu/backend.h"
#include "backend/cuda/backend.h"

namespace freshet::runtime {

Result<std::shared_ptr<Compute>> Compute::open(const ComputeOptions& options) {
  std::shared_ptr<Compute> compute(new Compute(options.threads, options.reference));
  const bool needs_cpu =
      options.reference || !options.cpu_isa.empty() || options.kernels != nullptr;
  FRESHET_ASSIGN_OR_RETURN(auto device,
                           cuda::open(options.device, needs_cpu, options.force_kernels));
  if (device != nullptr) {
    compute->ops_ = ops::Ops::create(compute->pool_, std::move(device));
    return compute;
  }
  ops::CpuIsa limit = ops::kAnyIsa;
  if (!options.cpu_isa.empty()) {
    FRESHET_ASSIGN_OR_RETURN(limit, ops::isa_by_name(options.cpu_isa));
  }
  ops::OpsOptions o;
  o.reference = options.reference;
  o.force_kernels = options.force_kernels;
  const ops::KernelTable& own = options.reference ? ops::reference_kernels() : cpu::kernels();
  const ops::KernelTable& kernels = options.kernels != nullptr ? *options.kernels : own;
  FRESHET_ASSIGN_OR_RETURN(compute->ops_,
                           ops::Ops::create(compute->pool_, kernels, cpu::detect(limit), o));
  return compute;
}

Result<ops::Ops*> Compute::host_ops() {
  if (device() == nullptr) return ops_.get();
  if (host_ops_ == nullptr) {
    FRESHET_ASSIGN_OR_RETURN(host_ops_, ops::Ops::create(pool_, cpu::kernels(), cpu::detect(), {}));
  }
  return host_ops_.get();
}

Result<ops::KvType> Compute::kv_type(const std::string& name, bool scratch) const {
  if (name != "auto") return ops::kv_type_by_name(name);
  const bool keeps_f32 = device() == nullptr;
  return reference_ || (scratch && keeps_f32) ? ops::KvType::kF32 : ops::KvType::kF16;
}

}  // namespace freshet::runtime

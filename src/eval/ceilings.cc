#include "eval/ceilings.h"

#include <map>

#include "backend/cpu/backend.h"
#include "backend/cpu/ceilings.h"
#include "base/thread_pool.h"

namespace freshet::eval {
namespace {

// The GEMM kernel of most of the model's weights; nullptr: not one of the processor's.
const ops::MatmulKernel* main_kernel(const Model& model) {
  std::map<std::string, int64_t> numbers;
  for (const auto& w : model.weights()) numbers[w.kernel] += w.rows * w.cols;
  const ops::MatmulKernel* main = nullptr;
  int64_t most = 0;
  for (const ops::MatmulKernel& k : cpu::kernels().matmul) {
    const auto found = numbers.find(k.name);
    if (found == numbers.end() || found->second <= most) continue;
    most = found->second;
    main = &k;
  }
  return main;
}

}  // namespace

Ceilings measure_ceilings(const Model& model, int threads) {
  ThreadPool pool(threads);
  Ceilings c;
  c.read = cpu::measure_read(pool);
  if (const ops::MatmulKernel* kernel = main_kernel(model)) {
    const cpu::Ceiling arithmetic = cpu::measure_arithmetic(pool, *kernel);
    c.operations = arithmetic.rate;
    c.operations_name = arithmetic.name;
  }
  return c;
}

Result<std::vector<Ceiling>> measure_all_ceilings(int threads, const std::string& cpu_isa) {
  ops::CpuIsa limit = ops::kAnyIsa;
  if (!cpu_isa.empty()) {
    FRESHET_ASSIGN_OR_RETURN(limit, ops::isa_by_name(cpu_isa));
  }
  ThreadPool pool(threads);
  std::vector<Ceiling> all;
  for (const cpu::Ceiling& c : cpu::measure_ceilings(pool, cpu::detect(limit)))
    all.push_back({std::string(c.name), std::string(c.unit), c.rate});
  return all;
}

}  // namespace freshet::eval

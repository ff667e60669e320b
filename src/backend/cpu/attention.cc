#include "backend/cpu/attention_row.h"
#include "backend/cpu/tables.h"

namespace freshet::cpu {

std::span<const ops::AttentionKernel> attention_kernels() {
  static const ops::AttentionKernel kRows[] = {
#if defined(__aarch64__)
      row<kAttentionNeon>("attention.neon", ops::CpuIsa::kNeon),
#else
      row<kAttentionAmx>("attention.amx", ops::CpuIsa::kAmx),
      row<kAttentionAvx512Vnni>("attention.avx512vnni", ops::CpuIsa::kAvx512Vnni),
      row<kAttentionAvx512>("attention.avx512", ops::CpuIsa::kAvx512),
      row<kAttentionAvx2>("attention.avx2", ops::CpuIsa::kAvx2),
#endif
  };
  return kRows;
}

}  // namespace freshet::cpu

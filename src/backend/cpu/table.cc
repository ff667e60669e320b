#include "backend/cpu/backend.h"
#include "backend/cpu/tables.h"

namespace freshet::cpu {

const ops::KernelTable& kernels() {
  static const ops::KernelTable table{
      .backend = "cpu",
      .matmul = matmul_kernels(),
      .encoders = act_encoders(),
      .attention = attention_kernels(),
      .vector = vector_kernels(),
      .scores = score_kernels(),
  };
  return table;
}

}  // namespace freshet::cpu

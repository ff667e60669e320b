// gemm_q_sm90_m17_64.cuh for the other formats.
#include "backend/cuda/gemm/gemm_q_sm90_m17_64.cuh"

namespace freshet::cuda {

FRESHET_MIDDLE(Q5_K)
FRESHET_MIDDLE(Q3_K)
FRESHET_MIDDLE(IQ4_XS)
FRESHET_MIDDLE(Q5_0)
FRESHET_MIDDLE(Q4_1)
FRESHET_MIDDLE(IQ4_NL)
FRESHET_MIDDLE(Q5_1)
FRESHET_MIDDLE(Q2_K)

}  // namespace freshet::cuda

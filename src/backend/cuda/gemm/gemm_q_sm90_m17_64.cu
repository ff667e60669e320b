// gemm_q_sm90_m17_64.cuh for the most common formats.
#include "backend/cuda/gemm/gemm_q_sm90_m17_64.cuh"

namespace freshet::cuda {

FRESHET_MIDDLE(Q8_0)
FRESHET_MIDDLE(Q4_0)
FRESHET_MIDDLE(Q4_K)
FRESHET_MIDDLE(Q6_K)
FRESHET_MIDDLE(MXFP4)
FRESHET_MIDDLE(Int4G128)
FRESHET_MIDDLE(Int4G32)

}  // namespace freshet::cuda

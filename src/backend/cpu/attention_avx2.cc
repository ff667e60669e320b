#include "backend/cpu/attention_tile.h"
#include "backend/cpu/vector_simd_avx2.h"

namespace freshet::cpu {

const AttentionIsa kAttentionAvx2 = TileAttention<Avx2>::isa();

}  // namespace freshet::cpu

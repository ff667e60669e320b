#include "backend/cpu/attention_tile.h"
#include "backend/cpu/vector_simd_avx512.h"

namespace freshet::cpu {

const AttentionIsa kAttentionAvx512 = TileAttention<Avx512>::isa();

}  // namespace freshet::cpu

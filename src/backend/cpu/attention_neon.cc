#include "backend/cpu/attention_tile.h"
#include "backend/cpu/vector_simd_neon.h"

namespace freshet::cpu {

const AttentionIsa kAttentionNeon = TileAttention<Neon>::isa();

}  // namespace freshet::cpu

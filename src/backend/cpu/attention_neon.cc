#include "backend/cpu/attention_coded.h"
#include "backend/cpu/attention_codes_neon.h"
#include "backend/cpu/attention_tile.h"
#include "backend/cpu/vector_simd_neon.h"

namespace freshet::cpu {

const AttentionIsa kAttentionNeon =
    both_isa<TileAttention<Neon>, CodedAttention<Neon, CodesNeon>>();

}  // namespace freshet::cpu

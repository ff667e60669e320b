#include "backend/cpu/attention_coded.h"
#include "backend/cpu/attention_codes_x86.h"
#include "backend/cpu/attention_tile.h"
#include "backend/cpu/vector_simd_avx2.h"

namespace freshet::cpu {

const AttentionIsa kAttentionAvx2 =
    both_isa<TileAttention<Avx2>, CodedAttention<Avx2, CodesAvx2>>();

}  // namespace freshet::cpu

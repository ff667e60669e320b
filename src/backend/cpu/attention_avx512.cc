#include "backend/cpu/attention_coded.h"
#include "backend/cpu/attention_codes_x86.h"
#include "backend/cpu/attention_tile.h"
#include "backend/cpu/vector_simd_avx512.h"

namespace freshet::cpu {

const AttentionIsa kAttentionAvx512 =
    both_isa<TileAttention<Avx512>, CodedAttention<Avx512, CodesAvx512>>();

}  // namespace freshet::cpu

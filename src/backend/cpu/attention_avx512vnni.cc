#include "backend/cpu/attention_coded.h"
#include "backend/cpu/attention_codes_x86.h"
#include "backend/cpu/vector_simd_avx512.h"

namespace freshet::cpu {

const AttentionIsa kAttentionAvx512Vnni = coded_isa<CodedAttention<Avx512, CodesAvx512Vnni>>();

}  // namespace freshet::cpu

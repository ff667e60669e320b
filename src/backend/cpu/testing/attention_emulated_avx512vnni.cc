// Attention on emulated tiles, for the tests.
#define FRESHET_TILES "backend/cpu/tiles_emulated.h"

#include "backend/cpu/attention_tiles.inl"

namespace freshet::cpu {

extern const AttentionIsa kAttentionEmulated;
const AttentionIsa kAttentionEmulated = TiledAttention::isa();

}  // namespace freshet::cpu

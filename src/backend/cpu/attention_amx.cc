#define FRESHET_TILES "backend/cpu/tiles_amx.h"

#include "backend/cpu/attention_tiles.inl"

namespace freshet::cpu {

const AttentionIsa kAttentionAmx = TiledAttention::isa();

}  // namespace freshet::cpu

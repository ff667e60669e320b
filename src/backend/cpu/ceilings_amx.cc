#define FRESHET_SIMD "backend/cpu/simd_avx512.h"
#define FRESHET_TILES "backend/cpu/tiles_amx.h"

#include "backend/cpu/ceilings_probe.h"
#include "backend/cpu/matmul_amx_tiles.inl"

namespace freshet::cpu {
namespace {

// Four tiles of sums, 16 x 16 x 64 bytes of depth each.
void run_bf16(int64_t turns) {
  Tiles tiles;
  tiles.configure(16, 64);
  for (int64_t i = 0; i < turns; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}
void run_int8(int64_t turns) {
  Tiles tiles;
  tiles.configure(16, 64);
  for (int64_t i = 0; i < turns; ++i) {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
}

}  // namespace

const Probe kTileBf16Probe = {"amx bf16", 4 * 16 * 16 * 32 * 2.0, run_bf16};
const Probe kTileInt8Probe = {"amx int8", 4 * 16 * 16 * 64 * 2.0, run_int8};

}  // namespace freshet::cpu

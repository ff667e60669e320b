// Arranges rows of activations for the tiles.
#pragma once

#include "backend/cpu/matmul_nest.inl"
#include FRESHET_TILES

namespace freshet::cpu {
namespace {

inline constexpr int kTileRows = 16;
inline constexpr int kTileInts = kTileRows * kPanelRows;

// The height of a call's tiles; all steps of the call use it.
FRESHET_INLINE int tile_height(const MatmulCall& c) {
  return c.tokens < kTileRows ? static_cast<int>(c.tokens) : kTileRows;
}

template <int kStretchBytes>
inline constexpr int64_t kCopyStride = kStretchBytes + kLine;

// The tokens of a step: up to two tiles of rows. A call's last tile begins early enough to be full;
// rows that are computed twice are not written twice.
struct Step {
  const uint8_t* x[2];  // where the tiles begin
  int64_t stride;
  int64_t fine;  // bytes from the coarse plane to the fine one
  int64_t t0;
  int count;
  int tiles;
  int back;    // number of rows that the first tile begins early
  int second;  // first token of the second tile

  Step() = default;
  Step(const MatmulCall& c, int64_t first, int64_t left, int most_tiles, int64_t fine_at)
      : stride(c.act_row_bytes), fine(fine_at), t0(first) {
    const int height = tile_height(c);
    count = static_cast<int>(left < most_tiles * height ? left : most_tiles * height);
    tiles = count > height ? 2 : 1;
    back = count < height && c.rows_index == nullptr ? height - count : 0;
    second = tiles == 2 ? (c.rows_index == nullptr ? count - height : height) : 0;
    x[0] = c.act + (t0 - back) * stride;
    x[1] = c.act + (t0 + second) * stride;
  }
  // Whether the step is two whole tiles of consecutive tokens.
  FRESHET_INLINE_MEMBER bool plain() const { return count == 2 * kTileRows && back == 0; }
  // The row of token t. The second tile's rows follow the first tile's.
  FRESHET_INLINE_MEMBER int row(int t) const {
    return t < kTileRows ? t + back : kTileRows + t - second;
  }
  // For indexed rows: copies `bytes` of each plane, from `begin` on.
  template <int kPlanes, int kStretchBytes>
  void gather(const MatmulCall& c, int64_t fine_at, int64_t begin, int64_t bytes, uint8_t* copy) {
    stride = kCopyStride<kStretchBytes>;
    fine = 2 * kTileRows * stride;
    for (int t = 0; t < count; ++t) {
      const uint8_t* const from = act_row(c, t0 + t) + begin;
      uint8_t* const to = copy + t * stride;
      FRESHET_UNROLL
      for (int p = 0; p < kPlanes; ++p) {
        for (int64_t k = 0; k < bytes; k += kLine) {
          store_i(to + p * fine + k, load_i(from + p * fine_at + k));
        }
      }
    }
    x[0] = copy;
    x[1] = copy + kTileRows * stride;
  }
};

// The GEMM with gate if the results go through SwiGLU, else the same call.
FRESHET_INLINE MatmulCall gate_of(const MatmulCall& c) {
  MatmulCall gate = c;
  if (c.gate != nullptr) {
    gate.packed = c.gate->packed, gate.bias = c.gate->bias, gate.scale = c.gate->scale;
  }
  return gate;
}

// Applies SwiGLU for a few tokens and one panel.
struct GatedUnits {
  alignas(64) float gate[kTileInts * 2];
  alignas(64) float up[kTileInts * 2];
  FRESHET_INLINE_MEMBER void put(int i, F32 from_gate, F32 from_up) {
    store_f(gate + i * kPanelRows, from_gate);
    store_f(up + i * kPanelRows, from_up);
  }
  // Writes the results of tokens t0 .. t0 + n.
  FRESHET_INLINE_MEMBER void finish(const MatmulCall& c, int64_t panel, int64_t t0, int n) {
    const GateCall& g = *c.gate;
    g.glu(up, gate, up, n * kPanelRows, g.activation, g.limit, g.alpha);
    float* out = c.out + t0 * c.out_stride + panel * kPanelRows;
    for (int i = 0; i < n; ++i, out += c.out_stride) store_f(out, load_f(up + i * kPanelRows));
  }
};

// Size of a step's gathered rows.
template <int kPlanes, int kStretchBytes>
inline constexpr int64_t kCopyBytes = 2 * kPlanes * kTileRows * kCopyStride<kStretchBytes>;

// Tokens that a call with many tokens processes at a time: equal parts in whole steps, at most
// `most`.
FRESHET_INLINE int64_t tokens_at_a_time(int64_t tokens, int64_t most) {
  const int64_t parts = blocks_of(tokens, static_cast<int>(most));
  return blocks_of(blocks_of(tokens, static_cast<int>(parts)), 2 * kTileRows) * 2 * kTileRows;
}

}  // namespace
}  // namespace freshet::cpu

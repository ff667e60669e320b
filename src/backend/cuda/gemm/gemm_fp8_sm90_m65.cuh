// Shared by the FP8 kernels for many tokens: the sums of a tile, and the epilogue. The order of
// sums is that of gemm_fp8_sm90_m1_64.cu, so results are bit-identical.
//
// A block takes 64 G tokens and NT tiles of 8 rows. G consumer warpgroups multiply the stages of
// the pipeline, each its 64 tokens, so that a lane reads the scales of 2 tokens rather than of 32.
// Tokens beyond the last are computed from whatever lies in shared memory, and not written.
#pragma once

#include <type_traits>

#include "backend/cuda/gemm/gemm_fp8_sm90_pipeline.cuh"

namespace freshet::cuda {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// sum += part times the scales of a lane's two tokens and those of the rows at `rows`.
template <int NT, Fp8Scaled::How kHow>
__device__ __forceinline__ void fp8_add(float (&sum)[NT][4], const float (&part)[NT][4],
                                        float2 tokens, const uint8_t* rows, uint32_t of_rows) {
  float2 s0 = make_float2(tokens.x, tokens.x), s1 = make_float2(tokens.y, tokens.y);
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    const uint8_t* scales = rows + j * kTileScales;
    float2 w = make_float2(1.0f, 1.0f);
    if constexpr (kHow == Fp8Scaled::kSteps) {
      w.x = w.y = *reinterpret_cast<const float*>(scales);
    } else if constexpr (kHow == Fp8Scaled::kMixed) {
      const float2 own = *reinterpret_cast<const float2*>(scales + threadIdx.x % 4 * 8);
      const bool whole = (of_rows >> j & 1) != 0;
      w = make_float2(whole ? 1.0f : own.x, whole ? 1.0f : own.y);
    }
    // Tiles of a panel share the scale of a K step.
    if constexpr (kHow == Fp8Scaled::kMixed) {
      s0 = make_float2(__fmul_rn(w.x, tokens.x), __fmul_rn(w.y, tokens.x));
      s1 = make_float2(__fmul_rn(w.x, tokens.y), __fmul_rn(w.y, tokens.y));
    } else if (kHow == Fp8Scaled::kSteps && j % Fp8Noted<NT>::kSame == 0) {
      s0.x = s0.y = __fmul_rn(w.x, tokens.x);
      s1.x = s1.y = __fmul_rn(w.x, tokens.y);
    }
    sum[j][0] = __fmaf_rn(part[j][0], s0.x, sum[j][0]);
    sum[j][1] = __fmaf_rn(part[j][1], s0.y, sum[j][1]);
    sum[j][2] = __fmaf_rn(part[j][2], s1.x, sum[j][2]);
    sum[j][3] = __fmaf_rn(part[j][3], s1.y, sum[j][3]);
  }
}

// sum *= the row scales at `rows`, for tiles with one scale per row.
template <int NT>
__device__ __forceinline__ void fp8_scale(float (&sum)[NT][4], const uint8_t* rows,
                                          uint32_t of_rows) {
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    if ((of_rows >> j & 1) == 0) continue;
    const float2 w = *reinterpret_cast<const float2*>(rows + j * kTileScales + threadIdx.x % 4 * 8);
    sum[j][0] = __fmul_rn(sum[j][0], w.x);
    sum[j][1] = __fmul_rn(sum[j][1], w.y);
    sum[j][2] = __fmul_rn(sum[j][2], w.x);
    sum[j][3] = __fmul_rn(sum[j][3], w.y);
  }
}

// Scales of a lane's two tokens among its warpgroup's 64.
__device__ __forceinline__ float2 token_scales(const Fp8Reader& ring) {
  const uint8_t* own = ring.stages + ring.offset + threadIdx.x / 32 * (2 * kE4M3TileBytes) +
                       kTileCodes + threadIdx.x % 32 / 4 * 4;
  return make_float2(*reinterpret_cast<const float*>(own),
                     *reinterpret_cast<const float*>(own + kE4M3TileBytes));
}

// sum += the next K step for a warpgroup's 64 tokens. After the last step, calls end(scales of its
// rows).
template <int NT, Fp8Scaled::How kHow, class End>
__device__ __forceinline__ void fp8_step(Fp8Reader& ring, float (&sum)[NT][4], uint32_t of_rows,
                                         bool last, const End& end) {
  float part[NT][4];
  const auto places = static_cast<uint32_t>(ring.offset) >> 4;
  ring.wait_full();
  fp8_ask(part, ring.tokens_at + places, ring.rows_at + places);
  const float2 scales = token_scales(ring);
  wgmma_wait<0>();
  fp8_add<NT, kHow>(sum, part, scales, ring.scales(), of_rows);
  if (last) end(ring.scales());
  pin(sum);
  ring.release(ring.at.stage);
  ring.next();
}

// The same for U steps: the next step is multiplied while the previous one is scaled.
template <int NT, Fp8Scaled::How kHow, int U, class End>
__device__ __forceinline__ void fp8_steps(Fp8Reader& ring, float (&sum)[NT][4], uint32_t of_rows,
                                          bool last, const End& end) {
  float part[2][NT][4];
  float2 scales[2];
  const uint8_t* rows[2];
  int stage[2];
  const auto ask = [&](int i) {
    const auto places = static_cast<uint32_t>(ring.offset) >> 4;
    ring.wait_full();
    fp8_ask(part[i], ring.tokens_at + places, ring.rows_at + places);
    scales[i] = token_scales(ring);
    rows[i] = ring.scales();
    stage[i] = ring.at.stage;
    ring.next();
  };
  ask(0);
#pragma unroll
  for (int u = 0; u < U; ++u) {
    if (u + 1 < U) {
      ask((u + 1) % 2);
      wgmma_wait<1>();
    } else {
      wgmma_wait<0>();
    }
    fp8_add<NT, kHow>(sum, part[u % 2], scales[u % 2], rows[u % 2], of_rows);
    if (u + 1 == U && last) end(rows[u % 2]);
    pin(sum);
    ring.release(stage[u % 2]);
  }
}

// Epilogue of a tile whose rows all exist and have no bias: short, straight-line code. Code that
// runs once is fetched from L2 first; with a branch per number, the epilogue of QKV took 4.6 us.
template <int NT>
struct Fp8Whole {
  float2* to[2];  // a lane's first pair of rows, for each of two tokens
  bool real[2];
  float2 before[2][NT];  // the values to add to
  __device__ __forceinline__ Fp8Whole(const ProductArgs& p, int64_t tokens, int64_t token,
                                      int64_t row) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      to[n] = reinterpret_cast<float2*>(p.out + (token + n * 8) * p.out_stride + row);
      real[n] = token + n * 8 < tokens;
#pragma unroll
      for (int j = 0; j < NT; ++j) before[n][j] = make_float2(0.0f, 0.0f);
    }
  }
  __device__ __forceinline__ void load() {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if (!real[n]) continue;
#pragma unroll
      for (int j = 0; j < NT; ++j) before[n][j] = to[n][j * 4];
    }
  }
  __device__ __forceinline__ void put(const ProductArgs& p, const float (&sum)[NT][4]) {
    const float scale = p.scale;
    float2 v[2][NT];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        v[n][j] = make_float2(__fmul_rn(sum[j][n * 2], scale), __fmul_rn(sum[j][n * 2 + 1], scale));
      }
    }
    if (p.add != 0) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int j = 0; j < NT; ++j) {
          v[n][j] = make_float2(__fadd_rn(before[n][j].x, v[n][j].x),
                                __fadd_rn(before[n][j].y, v[n][j].y));
        }
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if (!real[n]) continue;
#pragma unroll
      for (int j = 0; j < NT; ++j) to[n][j * 4] = v[n][j];
    }
  }
};

// Where a lane writes a tile's sums: two adjacent rows of two tokens.
struct Fp8Place {
  int64_t token, row;
  bool pairs, whole;
};
template <int NT>
__device__ __forceinline__ Fp8Place fp8_place(const ProductArgs& p, const ProductTile& tile) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const bool pairs = p.out_stride % 2 == 0 && reinterpret_cast<uintptr_t>(p.out) % 8 == 0;
  return {tile.token_tile * 8 + warp * 16 + lane / 4, tile.unit * 8 + lane % 4 * 2, pairs,
          pairs && p.bias == nullptr && (tile.unit + NT) * 8 <= p.weight.rows};
}

// Epilogue of tiles that Fp8Whole can't write.
template <int NT>
__device__ __forceinline__ void fp8_finish_some(const ProductArgs& p, int64_t tokens,
                                                const float (&sum)[NT][4], const Fp8Place& place) {
  constexpr int kAtOnce = 8;  // loads of the values to add to that are in flight together
  const int64_t token = place.token, first = place.row, end = p.weight.rows;
  const bool pairs = place.pairs;
#pragma unroll
  for (int from = 0; from < NT; from += kAtOnce) {
    // Calls body(index of the pair, its row, its address) for all pairs.
    const auto each = [&](auto&& body) {
#pragma unroll
      for (int n = 0; n < kAtOnce * 2; ++n) {
        if (from + n / 2 >= NT) break;
        const int64_t row = first + (from + n / 2) * 8, t = token + n % 2 * 8;
        if (row < end && t < tokens) body(n, row, p.out + t * p.out_stride + row);
      }
    };
    float2 before[kAtOnce * 2] = {};
    if (p.add != 0) {
      each([&](int n, int64_t row, const float* at) {
        if (pairs && row + 1 < end) {
          before[n] = *reinterpret_cast<const float2*>(at);
        } else {
          before[n] = make_float2(at[0], row + 1 < end ? at[1] : 0.0f);
        }
      });
    }
    each([&](int n, int64_t row, float* to) {
      const int j = from + n / 2;
      float2 v = make_float2(sum[j][n % 2 * 2], sum[j][n % 2 * 2 + 1]);
      if (p.bias != nullptr) {
        v.x = __fadd_rn(v.x, p.bias[row]);
        if (row + 1 < end) v.y = __fadd_rn(v.y, p.bias[row + 1]);
      }
      v = make_float2(__fmul_rn(v.x, p.scale), __fmul_rn(v.y, p.scale));
      if (p.add != 0) v = make_float2(__fadd_rn(before[n].x, v.x), __fadd_rn(before[n].y, v.y));
      if (pairs && row + 1 < end) {
        *reinterpret_cast<float2*>(to) = v;
      } else {
        to[0] = v.x;
        if (row + 1 < end) to[1] = v.y;
      }
    });
  }
}

// Epilogue of a tile.
template <int NT>
__device__ __forceinline__ void fp8_finish(const ProductArgs& p, int64_t tokens,
                                           const float (&sum)[NT][4], const ProductTile& tile) {
  const Fp8Place place = fp8_place<NT>(p, tile);
  if (place.whole) {
    Fp8Whole<NT> whole(p, tokens, place.token, place.row);
    if (p.add != 0) whole.load();
    whole.put(p, sum);
  } else {
    fp8_finish_some<NT>(p, tokens, sum, place);
  }
}

// The range of slices of a tile that a block computes.
struct Fp8Leaves {
  int first, end;
};

// total = the sums of the slices, added from left to right, or that of the first slice only unless
// `adds`. `sum` is that of the last slice. Calls first() after the first slice, and last(scales of
// its last step's rows) at the end of the last one.
template <int NT, Fp8Scaled::How kHow, class First, class Last>
__device__ __forceinline__ void fp8_leaves(Fp8Reader& ring, float (&total)[NT][4],
                                           float (&sum)[NT][4], const WeightView& w,
                                           Fp8Leaves leaves, bool adds, uint32_t of_rows,
                                           const First& first, const Last& last) {
  // (A slice may have only eight steps. Unrolled by eight, half of them would run while their code
  // is still being fetched.)
  constexpr int kAtOnce = NT <= 12 && kHow != Fp8Scaled::kMixed ? 4 : 1;
  const LeafCut cut = leaf_cut(w);
  for (int leaf = leaves.first; leaf < leaves.end; ++leaf) {
#pragma unroll
    for (int j = 0; j < NT; ++j) sum[j][0] = sum[j][1] = sum[j][2] = sum[j][3] = 0.0f;
    const auto end = [&](const uint8_t* rows) {
      if (leaf == leaves.first) {
#pragma unroll
        for (int j = 0; j < NT; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) total[j][i] = sum[j][i];
        }
      } else if (adds) {
#pragma unroll
        for (int j = 0; j < NT; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) total[j][i] = __fadd_rn(total[j][i], sum[j][i]);
        }
      }
      if (leaf + 1 == leaves.end) last(rows);
      pin(total);
    };
    int left = cut.leaf(leaf).count;
    if constexpr (kAtOnce > 1) {
      for (; left >= kAtOnce; left -= kAtOnce) {
        fp8_steps<NT, kHow, kAtOnce>(ring, sum, of_rows, left == kAtOnce, end);
      }
    }
    for (; left > 0; --left) fp8_step<NT, kHow>(ring, sum, of_rows, left == 1, end);
    if (leaf == leaves.first) first();
  }
}

// The facts on the tile whose first stage has arrived.
__device__ __forceinline__ Fp8Facts facts_at(const Fp8Facts* of, const Fp8Reader& ring) {
  const int4 facts = *reinterpret_cast<const int4*>(of + ring.at.stage);
  const auto same = [](int v) { return __shfl_sync(0xffffffff, v, 0); };
  return {{same(facts.x), same(facts.y), same(facts.z), same(facts.w)}};
}

// Calls body() with the kind of row scales as a compile-time constant.
template <class Body>
__device__ __forceinline__ void fp8_as(const Fp8Scaled& scaled, const Body& body) {
  if (scaled.how == Fp8Scaled::kRows) {
    body(std::integral_constant<Fp8Scaled::How, Fp8Scaled::kRows>{});
  } else if (scaled.how == Fp8Scaled::kSteps) {
    body(std::integral_constant<Fp8Scaled::How, Fp8Scaled::kSteps>{});
  } else {
    body(std::integral_constant<Fp8Scaled::How, Fp8Scaled::kMixed>{});
  }
}

// total = the sums of all slices, added from left to right. Between the wgmmas of two steps there
// is nothing but the scaled additions: everything the next wgmma needs is found while a step is
// multiplied. If the row scales aren't needed, a stage is released before its sum is scaled, so
// that the producer refills it sooner.
template <int NT, Fp8Scaled::How kHow>
__device__ __forceinline__ void fp8_sum_ahead(Fp8Reader& ring, float (&total)[NT][4],
                                              const LeafCut& cut, uint32_t of_rows) {
  constexpr bool kLeaveFirst = kHow == Fp8Scaled::kRows;
  float sum[NT][4], part[NT][4];
  int leaf = 0;
  const auto ask = [&]() {
    const auto places = static_cast<uint32_t>(ring.offset) >> 4;
    fp8_ask(part, ring.tokens_at + places, ring.rows_at + places);
  };
  const auto add = [&](float2 scales, const uint8_t* rows) {
    pin(part);
    fp8_add<NT, kHow>(sum, part, scales, rows, of_rows);
    pin(sum);
  };
  const auto zero = [&]() {
#pragma unroll
    for (int j = 0; j < NT; ++j) sum[j][0] = sum[j][1] = sum[j][2] = sum[j][3] = 0.0f;
  };
  const auto end_leaf = [&]() {
#pragma unroll
    for (int j = 0; j < NT; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        total[j][i] = leaf == 0 ? sum[j][i] : __fadd_rn(total[j][i], sum[j][i]);
      }
    }
    pin(total);
  };
  zero();
  ring.wait_full();
  ask();
#pragma unroll 1
  for (;; ++leaf) {  // a loop of steps alone: even code that is jumped over would slow it down
    const bool last = leaf + 1 == 1 << cut.shift;
#pragma unroll 1
    for (int left = cut.leaf(leaf).count - (last ? 1 : 0); left > 0; --left) {
      const float2 scales = token_scales(ring);
      const uint8_t* rows = ring.scales();
      const int its = ring.at.stage;
      ring.next();
      const bool there = ring.is_full();
      wgmma_wait<0>();
      if (kLeaveFirst) ring.release(its);
      add(scales, rows);
      if (!kLeaveFirst) ring.release(its);
      if (!there) ring.wait_full();
      ask();
    }
    if (last) break;
    end_leaf();
    zero();
  }
  const float2 scales = token_scales(ring);
  wgmma_wait<0>();
  add(scales, ring.scales());
  end_leaf();
  if (kHow != Fp8Scaled::kSteps) fp8_scale<NT>(total, ring.scales(), of_rows);
  pin(total);
  ring.release(ring.at.stage);
  ring.next();
}

#endif

}  // namespace freshet::cuda

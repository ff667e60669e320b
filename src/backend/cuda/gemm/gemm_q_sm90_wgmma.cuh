// The kernel around gemm_q_sm90_pipeline.cuh: its epilogues and its launch (Hopper).
//
// Blocks may be persistent and loop over output tiles, adding all split-K slices from left to right
// in a second set of sums. If that makes too few tiles, the two blocks of a cluster share K
// instead, and their warpgroups share rows or slices; they add sums through distributed shared
// memory, also from left to right. (Larger clusters don't fit on all SMs.) Bit-identical to
// gemm_sm80_small_m.cu.
#pragma once

#include "backend/cuda/gemm/gemm_q_sm90_pipeline.cuh"

namespace freshet::cuda::decode {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
template <class F>
__device__ __forceinline__ Work work_of(const ProductArgs& p, int64_t tokens) {
  return {p.weight.data,    p.weight.rows, p.weight.cols, p.act,  p.act_chunks,
          (tokens + 7) / 8, p.out,         p.out_stride,  tokens, p.bias,
          p.scale,          p.add != 0,    F::kUp};
}

// Every token is in bounds.
struct AllTokens {
  __device__ __forceinline__ bool operator()(int64_t) const { return true; }
};

// The operations of finish() for four rows of a token.
__device__ __forceinline__ float4 bias_of(const Work& w, int64_t row) {
  if (w.bias == nullptr) return {};
  return {w.bias[row], w.bias[row + 1], w.bias[row + 2], w.bias[row + 3]};
}
__device__ __forceinline__ float4 ended(const Work& w, const float4& sum, const float4& bias) {
  const auto end = [&](float v, float b) {
    v = __fmul_rn(v, w.up);
    if (w.bias != nullptr) v = __fadd_rn(v, b);
    return __fmul_rn(v, w.scale);
  };
  return {end(sum.x, bias.x), end(sum.y, bias.y), end(sum.z, bias.z), end(sum.w, bias.w)};
}
__device__ __forceinline__ float4 ended(const Work& w, const float4& sum, const float4& bias,
                                        const float4& before) {
  const float4 v = ended(w, sum, bias);
  return {__fadd_rn(before.x, v.x), __fadd_rn(before.y, v.y), __fadd_rn(before.z, v.z),
          __fadd_rn(before.w, v.w)};
}

// The operations of finish() for a warpgroup's 64 rows. Sums pass through shared memory, so that
// each thread writes 16 bytes of a token's rows; tokens for which there(token) is false are not
// written.
template <int NT, class There = AllTokens>
__device__ __forceinline__ void finish_rows(const Work& w, const float (&sum)[NT][4],
                                            int64_t row_tile, int64_t token_tile, float* room,
                                            const There& there = {}) {
  const int thread = static_cast<int>(threadIdx.x % 128), lane = thread % 32;
  const int64_t row = row_tile * 16 + lane % 16 * 4;
  const bool real = row < w.rows;
  const float4 bias = real ? bias_of(w, row) : float4{};
  const auto together = [&] {
    asm volatile("bar.sync %0, 128;" ::"r"(2 + static_cast<int>(threadIdx.x / 128)) : "memory");
  };
#pragma unroll
  for (int first = 0; first < NT; first += kOutTokens / 8) {
    together();
#pragma unroll
    for (int n = 0; n < kOutTokens / 8 * 4; ++n) {
      const int token = n / 4 * 8 + lane % 4 * 2 + n % 2;
      room[token * kOutStride + thread / 32 * 16 + lane / 4 + n % 4 / 2 * 8] =
          sum[first + n / 4][n % 4];
    }
    together();
#pragma unroll
    for (int n = 0; n < kOutTokens / 8; ++n) {
      const int at = n * 8 + thread / 16;
      const int64_t token = (token_tile + first) * 8 + at;
      if (!real || token >= w.tokens || !there(token)) continue;
      const float4 v = *reinterpret_cast<const float4*>(room + at * kOutStride + lane % 16 * 4);
      auto* to = reinterpret_cast<float4*>(w.out + token * w.out_stride + row);
      *to = w.add ? ended(w, v, bias, *to) : ended(w, v, bias);
    }
  }
}

// SwiGLU in a warpgroup that has both matrices' sums of two row tiles; `product`: the warp's
// matrix.
template <int NT, class F, class Unit = SiluUnit>
__device__ __forceinline__ void finish_mixed(const Activations& act, const ProductArgs& product,
                                             float (&sum)[NT][4], float* room, int64_t row_tile,
                                             int64_t token_tile, const Unit& unit = {}) {
  const int thread = static_cast<int>(threadIdx.x % 128), lane = thread % 32;
  const bool up = thread >= 64;
  row_tile += thread / 32 % 2;
  const bool real = row_tile * 16 < product.weight.rows;
  float4* place = reinterpret_cast<float4*>(room) + thread % 64;
  const auto together = [&] {
    asm volatile("bar.sync %0, 128;" ::"r"(2 + static_cast<int>(threadIdx.x / 128)) : "memory");
  };
  end_sums<NT, F>(product, sum, row_tile * 16 + lane / 4);
  if (up) {
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      place[j * 64] = make_float4(sum[j][0], sum[j][1], sum[j][2], sum[j][3]);
    }
  }
  together();
  if (!up) {
    const int64_t tile = row_tile / 4 * act.core_tiles + token_tile;
    uint8_t* to = act.data + (tile * 4 + row_tile % 4) * 256 + lane * 4;
    const int left = real ? static_cast<int>(act.core_tiles - token_tile) : 0;
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      const float4 v = place[j * 64];
      const float other[4] = {v.x, v.y, v.z, v.w};
      put_gated(to + j * kTokenTileBytes, sum[j], other, j < left, unit);
    }
  }
  together();
}

// SwiGLU where a thread has the same rows of both matrices.
template <int NT, class F>
__device__ __forceinline__ void finish_both(const Activations& act, const ProductList& list,
                                            float (&gate)[NT][4], float (&up)[NT][4],
                                            int64_t row_tile, int64_t token_tile) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const bool real = row_tile * 16 < list.of[0].weight.rows;
  end_sums<NT, F>(list.of[0], gate, row_tile * 16 + lane / 4);
  end_sums<NT, F>(list.of[1], up, row_tile * 16 + lane / 4);
  const int64_t tile = row_tile / 4 * act.core_tiles + token_tile;
  uint8_t* to = act.data + (tile * 4 + row_tile % 4) * 256 + lane * 4;
  const int left = real ? static_cast<int>(act.core_tiles - token_tile) : 0;
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    put_gated(to + j * kTokenTileBytes, gate[j], up[j], j < left, SiluUnit{});
  }
}

// total = the next tile's slices, from left to right.
template <class S>
__device__ __forceinline__ void sum_tile(Way<S>& way, const Leaves<S>& leaves, Sums<S>& total) {
  constexpr int kAll = S::kDeep * S::NT;
  Sums<S> sum = {};
#pragma unroll
  for (int j = 0; j < kAll; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) total[j][i] = -0.0f;  // the identity of addition
  }
  way.enter();
  way.decode(way.a[0], 0);
  for (int leaf = 0; leaf < leaves.parts; ++leaf) {
    sum_leaf<S>(way, sum, leaves.count(leaf), leaf + 1 == leaves.parts);
#pragma unroll
    for (int j = 0; j < kAll; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) total[j][i] = __fadd_rn(total[j][i], sum[j][i]);
    }
  }
}

// Consumer warpgroups: tile after tile.
template <class S>
__device__ __forceinline__ void walk(const Rings<S>& rings, const ProductList& list, int64_t tokens,
                                     int tiles, const Activations& act, float* room) {
  constexpr int NT = S::NT;
  using F = typename S::F;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const Leaves<S> leaves(list);
  Way<S> way(rings);
  each_tile<S>(list, tokens, tiles, [&](const ProductTile& tile) {
    Sums<S> total;
    sum_tile<S>(way, leaves, total);
    wait();
    if constexpr (S::kGate && S::kDeep == 2) {
      finish_both<NT, F>(act, list, sums_of<S>(total, 0), sums_of<S>(total, 1), tile.unit + warp,
                         tile.token_tile);
      return;
    } else if constexpr (S::kMixed) {
      finish_mixed<NT, F>(act, list.of[warp % 4 / 2], total, room + warp / 4 * S::kOutFloats,
                          tile.unit + warp / 4 * 2, tile.token_tile);
      return;
    } else if constexpr (S::kGate) {
      finish_gated<NT, S::kRound, F>(act, list.of[warp / 4], total, reinterpret_cast<float4*>(room),
                                     tile.unit, tile.unit + S::kRowTiles, tile.token_tile);
      return;
    }
    const Work w = work_of<F>(list.of[tile.product], tokens);
#pragma unroll
    for (int deep = 0; deep < S::kDeep; ++deep) {
      float(&rows)[NT][4] = sums_of<S>(total, deep);
      const int64_t unit = tile.unit + deep * S::kGroups * 4;
      if (w.rows % 4 == 0 && whole_rows(w.out, w.out_stride)) {
        finish_rows<NT>(w, rows, unit + warp / 4 * 4, tile.token_tile,
                        room + warp / 4 * S::kOutFloats);
      } else {
        finish<NT>(w, rows, unit + warp, tile.token_tile, lane);
      }
    }
  });
}

// Consumer warpgroups: their slices, whose sums replace the stages.
template <class S>
__device__ __forceinline__ void leave_sums(const Rings<S>& rings, const ProductList& list,
                                           float4* shared) {
  constexpr int NT = S::NT;
  const int thread = static_cast<int>(threadIdx.x);
  const int part = S::kAny ? warp_index() / (S::kConsumers / 32 / S::kParts) : 0;
  const Leaves<S> leaves(list);
  Way<S> way(rings);
  float sum[S::kLeaves][NT][4];
  way.enter();
  way.decode(way.a[0], 0);
#pragma unroll
  for (int l = 0; l < S::kLeaves; ++l) {
    const int leaf = leaves.first + l;
    if (leaf >= leaves.last) break;
    if constexpr (!S::kAny) {
      sum_leaf<S>(way, sum[l], leaves.count(leaf), leaf + 1 == leaves.last);
      continue;
    }
    const int count = leaves.count(leaves.beside(leaf, part));
    const int chunks = (count + kChunkPieces - 1) / kChunkPieces;
    sum_leaf<S>(way, sum[l], count, leaf + 1 == leaves.last, leaves.chunks(leaf) - chunks);
  }
  asm volatile("bar.sync 1, %0;" ::"n"(S::kConsumers) : "memory");  // all reads of stages are done
#pragma unroll
  for (int l = 0; l < S::kLeaves; ++l) {
    if (leaves.first + l >= leaves.last) break;
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      const float(&v)[4] = sum[l][j];
      shared[(l * NT + j) * S::kConsumers + thread] = make_float4(v[0], v[1], v[2], v[3]);
    }
  }
}

// A block's half of a tile's tokens. Sums pass through shared memory, so that a thread writes four
// adjacent rows.
template <class S>
struct Half {
  static constexpr int kTokens = S::NT * 8 / kPair, kRows = S::kRowTiles * 16, kQuads = kRows / 4;
  static constexpr int kStride = kRows + 4,
                       kEach = (kTokens * kQuads + S::kConsumers - 1) / S::kConsumers;
  const Work w;
  int64_t row, token;
  float4 before[kEach];

  __device__ __forceinline__ Half(const Work& work, const ProductTile& tile)
      : w(work), row(tile.unit * 16), token(tile.token_tile * 8 + blockIdx.z * kTokens) {}
  // Calls body(index, quad, its address in shared memory, its destination).
  template <class Body>
  __device__ __forceinline__ void each(const Body& body) {
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      const int at = n * S::kConsumers + static_cast<int>(threadIdx.x);
      const int quad = at % kQuads, t = at / kQuads;
      if (t < kTokens && token + t < w.tokens && row + quad * 4 < w.rows) {
        body(n, row + quad * 4, t * kStride + quad * 4, w.out + (token + t) * w.out_stride);
      }
    }
  }
  __device__ __forceinline__ void load() {
    if (!w.add) return;
    each([&](int n, int64_t r, int, const float* from) {
      before[n] = *reinterpret_cast<const float4*>(from + r);
    });
  }
  __device__ __forceinline__ void store(const float* room) {
    each([&](int n, int64_t r, int at, float* to) {
      const float4 sum = *reinterpret_cast<const float4*>(room + at), bias = bias_of(w, r);
      *reinterpret_cast<float4*>(to + r) =
          w.add ? ended(w, sum, bias, before[n]) : ended(w, sum, bias);
    });
  }
};

// A warp adds 16 rows of 8 tokens at a time, slices from left to right, once both blocks have
// written theirs. Loads for several of these are in flight before the first one is added.
template <class S>
__device__ __forceinline__ void add_leaves(const ProductList& list, int64_t tokens,
                                           const ProductTile& tile, const float4* shared,
                                           float* room) {
  constexpr int NT = S::NT, kConsumers = S::kConsumers, kStep = kConsumers / 32;
  constexpr int kAll = NT * S::kRowTiles / kPair, kMost = S::kGroups > 2 ? 1 : 4;
  constexpr int kAtOnce = kAll / kStep < 1 ? 1 : kAll / kStep < kMost ? kAll / kStep : kMost;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const Leaves<S> leaves(list);
  const int each = leaves.last - leaves.first;  // per warpgroup
  const Work w = work_of<typename S::F>(list.of[tile.product], tokens);
  const bool whole = w.rows % 4 == 0 && whole_rows(w.out, w.out_stride);
  Half<S> half(w, tile);
  if (whole) half.load();
  cluster_sync();
  for (int first = thread / 32; first < kAll; first += kAtOnce * kStep) {
    float4 of[kAtOnce][kMostLeaves];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int n = first + i * kStep;
      if (n >= kAll) break;
      const float4* place =
          shared + (n / S::kRowTiles + static_cast<int>(blockIdx.z) * (NT / kPair)) * kConsumers +
          n % S::kRowTiles * 32 + lane;
#pragma unroll
      for (int l = 0; l < kMostLeaves; ++l) {
        if (l >= leaves.parts) break;
        const int group = l / each;
        of[i][l] = from_block(
            place + l % each * NT * kConsumers + group % S::kParts * (kConsumers / S::kParts),
            group / S::kParts);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int n = first + i * kStep;
      if (n >= kAll) break;
      float all[1][4] = {{of[i][0].x, of[i][0].y, of[i][0].z, of[i][0].w}};
#pragma unroll
      for (int l = 1; l < kMostLeaves; ++l) {
        if (l >= leaves.parts) break;
        const float part[4] = {of[i][l].x, of[i][l].y, of[i][l].z, of[i][l].w};
#pragma unroll
        for (int k = 0; k < 4; ++k) all[0][k] = __fadd_rn(all[0][k], part[k]);
      }
      if (whole) {
        float* to = room + (n / S::kRowTiles * 8 + lane % 4 * 2) * Half<S>::kStride +
                    n % S::kRowTiles * 16 + lane / 4;
#pragma unroll
        for (int k = 0; k < 4; ++k) to[k % 2 * Half<S>::kStride + k / 2 * 8] = all[0][k];
      } else {
        finish<1>(w, all, tile.unit + n % S::kRowTiles,
                  tile.token_tile + n / S::kRowTiles + blockIdx.z * (NT / kPair), lane);
      }
    }
  }
  cluster_arrive_relaxed();
  if (whole) {
    asm volatile("bar.sync 1, %0;" ::"n"(S::kConsumers) : "memory");
    half.store(room);
  }
  cluster_wait();  // a block must not exit while others read its memory
}
#endif

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
template <class S>
__device__ __forceinline__ void decode_block(const ProductList& list, int64_t tokens, int tiles,
                                             const Activations& act) {
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ Barriers<S> barriers;
  const Rings<S> rings = start_rings<S>(shared, barriers);
  if (threadIdx.x >= S::kConsumers) {
    give_registers<S>();
    const Leaves<S> leaves(list);
    copy_both<S>([&](int thread) { copy_rows<S>(rings, list, tokens, tiles, leaves, thread); },
                 [&](int thread) { copy_tokens<S>(rings, list, tokens, tiles, leaves, thread); });
    __syncwarp();
    if constexpr (S::kSplit) {
      cluster_sync();
      cluster_sync();
    }
  } else {
    // The first weights are decoded while the previous kernel still runs.
    take_registers<S>();
    if constexpr (S::kSplit) {
      auto* sums = reinterpret_cast<float4*>(shared);
      const ProductTile tile = find_tile<S>(list, tokens, static_cast<int>(blockIdx.x));
      leave_sums<S>(rings, list, sums);
      wait();
      add_leaves<S>(list, tokens, tile, sums, reinterpret_cast<float*>(shared + S::kSumsBytes));
    } else {
      walk<S>(rings, list, tokens, tiles, act, reinterpret_cast<float*>(shared + S::kRings));
    }
  }
}
#endif

// Blocks: persistent, or [tiles, 1, 2] if kSplit. If every block has one tile, that may be in T's
// format.
template <class S, class T = S>
__global__ void __launch_bounds__(S::kThreads, 1)
    decode_kernel(const __grid_constant__ ProductList list, int64_t tokens, int tiles,
                  const __grid_constant__ Activations act) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  let_next_start();
  if constexpr (S::F::kCode != T::F::kCode) {
    const int product = find_tile<S>(list, tokens, static_cast<int>(blockIdx.x)).product;
    if (list.of[product].weight.code == T::F::kCode) {
      return decode_block<T>(list, tokens, tiles, act);
    }
  }
  decode_block<S>(list, tokens, tiles, act);
#endif
}

template <class S, class T = S>
int launch_decode(const Context& ctx, const ProductList& given, int64_t tokens,
                  const Activations& act = {}) {
  static_assert(S::NT == T::NT && S::kThreads == T::kThreads);
  constexpr int kShared = S::kShared > T::kShared ? S::kShared : T::kShared;
  ProductList list = with_blocks(given, 16 * S::kRowTiles);
  if constexpr (S::kRowTiles != T::kRowTiles) {
    for (int i = 0; i < list.count; ++i) {
      const WeightView& w = list.of[i].weight;
      const int rows = 16 * (w.code == T::F::kCode ? T::kRowTiles : S::kRowTiles);
      list.first_block[i + 1] = list.first_block[i] + static_cast<int32_t>(ceil_div(w.rows, rows));
    }
  }
  const auto tiles = static_cast<int>(list.first_block[list.count] * ceil_div(tokens, S::NT * 8));
  const auto kernel = decode_kernel<S, T>;
  if (const int error = raise_shared(kernel, kShared); error != 0) return error;
  const dim3 cluster(1, 1, S::kSplit ? kPair : 1);
  const int blocks = S::kSplit || tiles < ctx.multiprocessors ? tiles : ctx.multiprocessors;
  const dim3 grid(static_cast<unsigned>(blocks), 1, cluster.z);
  return launch_cluster(ctx, kernel, grid, dim3(S::kThreads), kShared, cluster, list, tokens, tiles,
                        act);
}

}  // namespace freshet::cuda::decode

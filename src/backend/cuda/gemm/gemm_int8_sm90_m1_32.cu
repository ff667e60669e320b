// GEMM with INT8 weights for at most 32 tokens (Hopper).
//
// It is limited by bandwidth: every SM runs one block, and all blocks take the same number of tiles
// of 16 rows, with all of K. Each of a block's eight warps takes an eighth of the K steps and
// streams it through a pipeline of its own, several weight tiles and the step's activations per
// stage. The weights that fit the pipelines are copied before the previous kernel ends.
#include "backend/cuda/gemm/gemm_int8.cuh"
#include "backend/cuda/runtime/kernels.cuh"
#include "backend/cuda/runtime/pipeline.cuh"

namespace freshet::cuda {
namespace {

// NT: token tiles; R: row tiles of a warp at a time.
template <int NT, int R>
struct Int8FewShape {
  static constexpr int kRowBytes = R * INT8::kTileBytes;
  static constexpr int kStageBytes = kRowBytes + NT * kInt8TileBytes;
  // Token tiles that are added up at a time, one item per warp.
  static constexpr int kTogether = R * NT <= kWarps ? NT : NT % 2 == 0 && R * 2 <= kWarps ? 2 : 1;
  static constexpr int kItems = R * kTogether, kRounds = NT / kTogether;
  static constexpr int kSumBytes = kWarps * kItems * 32 * 16;
  static constexpr int kStages = ((224 << 10) - kSumBytes) / (kWarps * kStageBytes);
  // Stages requested before the previous kernel has ended: more would slow that kernel down.
  static constexpr int kFew = (64 << 10) / (kWarps * kRowBytes);
  static constexpr int kEarly = kFew < 1 ? 1 : kFew < kStages ? kFew : kStages;
  static constexpr int kRings = kWarps * kStages * kStageBytes;
  static constexpr int kBytes = kRings + kSumBytes;
  static_assert(kStages >= 2 && kEarly >= 1 && kItems <= kWarps && kRounds * kTogether == NT);
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// A warp's K steps of the block's tiles: all its steps for R tiles, then for the next R. One lane
// issues the copies.
template <int NT, int R>
struct Int8Stream {
  using S = Int8FewShape<NT, R>;
  const ProductArgs& p;
  int64_t first;  // the block's first tile
  int tiles, begin, steps;
  uint32_t token_bytes;
  int64_t token_step;
  uint8_t* ring;
  Pipeline pipe;
  uint64_t policy;
  int group = 0, step = 0, stage = 0;  // of the next copy

  __device__ __forceinline__ int groups() const { return (tiles + R - 1) / R; }
  __device__ __forceinline__ int tiles_of(int of) const { return min(R, tiles - of * R); }
  __device__ __forceinline__ bool more() const { return group < groups() && steps > 0; }
  __device__ __forceinline__ void ask_rows() {
    const int64_t tile = first + group * R;
    const int count = tiles_of(group);
    const int here = min(count, kPanelTiles<INT8> - static_cast<int>(tile % kPanelTiles<INT8>));
    const int64_t at = (begin + step) * int64_t{kInt8PanelBytes};
    uint8_t* to = ring + stage * S::kStageBytes;
    uint64_t* barrier = pipe.filled(stage);
    pipe.expect(stage, static_cast<uint32_t>(count * INT8::kTileBytes) + token_bytes);
    const auto copy = [&](uint8_t* where, int64_t from, int n) {
      copy_weights(shared_address(where), p.weight.data + tile_at<INT8>(from, p.weight.cols) + at,
                   static_cast<uint32_t>(n * INT8::kTileBytes), shared_address(barrier), policy);
    };
    copy(to, tile, here);
    if (here < count) copy(to + here * INT8::kTileBytes, tile + here, count - here);
  }
  __device__ __forceinline__ void ask_tokens(int of_step, int to_stage) {
    bulk_copy(ring + to_stage * S::kStageBytes + S::kRowBytes,
              p.act + (begin + of_step) * token_step, token_bytes, pipe.filled(to_stage));
  }
  __device__ __forceinline__ void next() {
    stage = stage + 1 < S::kStages ? stage + 1 : 0;
    if (++step == steps) step = 0, ++group;
  }
};

// Adds a K step of 128 columns.
template <int NT, int R>
__device__ __forceinline__ void add_step(int (&sum)[R][NT][4], const uint8_t* stage, int count) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const uint8_t* rows = stage + lane / 8 % 2 * kInt8TileBytes + lane / 16 * 128 + lane % 8 * 16;
  const uint8_t* tokens = stage + Int8FewShape<NT, R>::kRowBytes + lane * 16;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t b[NT][4];
#pragma unroll
    for (int j = 0; j < NT; ++j) ldmatrix4(b[j], tokens + j * kInt8TileBytes + half * 512);
#pragma unroll
    for (int t = 0; t < R; ++t) {
      if (NT > 1 && t >= count) break;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        uint32_t a[4];
        ldmatrix4(a, rows + t * INT8::kTileBytes + half * 512 + k * 256);
#pragma unroll
        for (int j = 0; j < NT; ++j) mma_int8(sum[t][j], a, b[j][2 * k], b[j][2 * k + 1]);
      }
    }
  }
}

// Adds up the warps' sums of a group: each warp takes all partial sums of an item and calls
// end(sum, tile, token tile, round).
template <int NT, int R, class End>
__device__ __forceinline__ void add_warps(const int (&sum)[R][NT][4], int4* shared, int count,
                                          const End& end) {
  using S = Int8FewShape<NT, R>;
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int j = 0; j < NT; j += S::kTogether) {
    __syncthreads();  // the previous sums have been read
#pragma unroll
    for (int i = 0; i < S::kItems; ++i) {
      const int(&v)[4] = sum[i % R][j + i / R];
      shared[(warp * S::kItems + i) * 32 + lane] = make_int4(v[0], v[1], v[2], v[3]);
    }
    __syncthreads();
    if (warp >= S::kItems || warp % R >= count) continue;
    int all[4] = {};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const int4 v = shared[(w * S::kItems + warp) * 32 + lane];
      all[0] += v.x, all[1] += v.y, all[2] += v.z, all[3] += v.w;
    }
    end(all, warp % R, j + warp / R, j / S::kTogether);
  }
}
#endif

template <int NT, int R>
__global__ void __launch_bounds__(256, 1)
    few_kernel(const __grid_constant__ ProductList list, int64_t tokens, int share) {
#if __CUDA_ARCH__ >= 900
  using S = Int8FewShape<NT, R>;
  extern __shared__ __align__(128) uint8_t rings[];
  __shared__ uint64_t full[kWarps][S::kStages];
  let_next_start();
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  int i = 0;
  while (i + 1 < list.count && static_cast<int>(blockIdx.x) >= list.first_block[i + 1]) ++i;
  const ProductArgs& p = list.of[i];
  const int steps = int8_steps(p.weight.cols), begin = steps * warp / kWarps;
  const int64_t first = static_cast<int64_t>(blockIdx.x - list.first_block[i]) * share;
  const int64_t left = (p.weight.rows + 15) / 16 - first, act_tiles = (tokens + 7) / 8;
  uint8_t* ring = rings + warp * S::kStages * S::kStageBytes;
  Int8Stream<NT, R> stream{p,
                           first,
                           static_cast<int>(min(static_cast<int64_t>(share), left)),
                           begin,
                           steps * (warp + 1) / kWarps - begin,
                           static_cast<uint32_t>(act_tiles * kInt8TileBytes),
                           act_tiles * kInt8TileBytes,
                           ring,
                           {full[warp]},
                           read_once()};
  if (lane == 0) {
    stream.pipe.init_own(S::kStages);
    int asked = 0;
    for (; asked < S::kEarly && stream.more(); ++asked, stream.next()) stream.ask_rows();
    wait();
    for (int s = 0; s < asked; ++s) stream.ask_tokens(s % stream.steps, s);
    for (; asked < S::kStages && stream.more(); ++asked, stream.next()) {
      stream.ask_rows();
      stream.ask_tokens(stream.step, stream.stage);
    }
  }
  __syncwarp();
  wait();
  const Work w = work_of_int8(p, tokens);
  auto* shared = reinterpret_cast<int4*>(rings + S::kRings);
  // A warp's items have the same tokens in every group.
  float of_tokens[S::kRounds][2];
#pragma unroll
  for (int n = 0; n < S::kRounds; ++n) {
    const int64_t token = (n * S::kTogether + warp / R) * 8 + lane % 4 * 2;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      of_tokens[n][k] = token + k < tokens ? token_scales(p, tokens)[token + k] : 0.0f;
    }
  }
  PipelineState at;
  const int groups = stream.groups();
  for (int group = 0; group < groups; ++group) {
    const int count = stream.tiles_of(group);
    const int64_t tile = first + group * R;
    float of_rows[2] = {};
    Before before;
    if (warp < S::kItems && warp % R < count) {
      const float* its = row_scales_of(p.weight) + (tile + warp % R) * 16 + lane / 4;
      of_rows[0] = its[0];
      of_rows[1] = its[8];
      if (S::kRounds == 1 && w.add) before.load(w, tile + warp % R, warp / R, lane);
    }
    int sum[R][NT][4] = {};
    for (int k = 0; k < stream.steps; ++k) {
      stream.pipe.wait(at);
      add_step<NT, R>(sum, ring + at.stage * S::kStageBytes, count);
      __syncwarp();
      if (lane == 0 && stream.more()) {
        stream.ask_rows();
        stream.ask_tokens(stream.step, stream.stage);
        stream.next();
      }
      at.next(S::kStages);
    }
    add_warps<NT, R>(sum, shared, count, [&](const int(&all)[4], int t, int j, int turn) {
      float v[1][4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        v[0][n] = int8_value(all[n], of_rows[n / 2], of_tokens[turn][n % 2]);
      }
      finish<1>(w, v, tile + t, j, lane, S::kRounds == 1 && w.add ? before.v : nullptr);
    });
  }
#endif
}

template <int NT, int R>
int launch_few(const Context& ctx, const ProductList& list, int64_t tokens, int share) {
  using S = Int8FewShape<NT, R>;
  const auto kernel = few_kernel<NT, R>;
  if (const int error = raise_shared(kernel, S::kBytes); error != 0) return error;
  return launch(ctx, kernel, dim3(static_cast<unsigned>(list.first_block[list.count])), dim3(256),
                S::kBytes, list, tokens, share);
}

template <int NT>
int launch_few(const Context& ctx, const ProductList& list, int64_t tokens, int share) {
  if (share <= 2) return launch_few<NT, 2>(ctx, list, tokens, share);
  if (share == 3) return launch_few<NT, 3>(ctx, list, tokens, share);
  return launch_few<NT, 4>(ctx, list, tokens, share);
}

}  // namespace

int run_int8_few(const Context& ctx, const ProductList& given, int64_t tokens) {
  ProductList list = given;
  const int share = even_share(ctx, list);
  if (tokens <= 8) return launch_few<1>(ctx, list, tokens, share);
  if (tokens <= 16) return launch_few<2>(ctx, list, tokens, share);
  return launch_few<4>(ctx, list, tokens, share);
}

}  // namespace freshet::cuda

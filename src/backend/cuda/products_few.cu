// Products of BF16 weights with at most 32 tokens on Hopper.
//
// Memory decides: every multiprocessor gets one block, and every block the same number of tiles of
// 16 rows, with all of K: nothing meets outside of a block. Its eight warps take a leaf of K each,
// and stream it through rings of their own, several tiles a copy: the copy engine is too slow with
// copies of one. What the rings hold is asked for before the kernel in front has ended. Leaves are
// added from left to right; the bits are those of products.cu.
#include "backend/cuda/kernels.cuh"
#include "backend/cuda/products_few.cuh"

namespace freshet::cuda {
namespace {

// NT: tiles of 8 tokens; R: tiles of rows at once.
template <int NT, int R>
struct Shape : FewSums<NT, R>, FewRings<NT, R, R * BF16::kTileBytes> {};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
template <int NT>
inline constexpr int kAhead = NT == 2 ? 1 : 2;  // pieces of tokens in registers

// A warp's leaf of a share: R tiles at a time, all units of the leaf, then the next R.
template <int NT, int R>
struct Stream {
  using S = Shape<NT, R>;
  const uint8_t* weights;
  int64_t cols;
  Share share;
  int first, units;  // of the leaf
  uint8_t* ring;
  uint64_t* full;
  int group = 0, unit = 0, stage = 0;  // to be asked for next

  __device__ __forceinline__ bool more() const { return group * R < share.count && units > 0; }
  __device__ __forceinline__ int tiles(int of) const { return min(R, share.count - of * R); }
  __device__ __forceinline__ void ask() {
    const int64_t tile = share.first + group * R;
    const int count = tiles(group), here = min(count, static_cast<int>(8 - tile % 8));
    uint8_t* to = ring + stage * S::kStageBytes;
    const int64_t at = (first + unit) * kUnitStep<BF16>;
    barrier_expect(&full[stage], static_cast<uint32_t>(count * BF16::kTileBytes));
    copy_weights(to, weights + tile_at<BF16>(tile, cols) + at,
                 static_cast<uint32_t>(here * BF16::kTileBytes), &full[stage]);
    if (here < count) {  // the rest belongs to the next panel
      copy_weights(to + here * BF16::kTileBytes, weights + tile_at<BF16>(tile + here, cols) + at,
                   static_cast<uint32_t>((count - here) * BF16::kTileBytes), &full[stage]);
    }
    stage = stage + 1 < S::kStages ? stage + 1 : 0;
    if (++unit == units) unit = 0, ++group;
  }
};
#endif

// Few registers leave room for the small kernel in front: the next block starts beside it.
template <int NT, int R>
__global__ void __launch_bounds__(256, NT == 1   ? 3
                                       : NT == 2 ? 2
                                                 : 1)
    few_kernel(const __grid_constant__ ProductList list, int64_t tokens, int share) {
#if __CUDA_ARCH__ >= 900
  using S = Shape<NT, R>;
  extern __shared__ __align__(128) uint8_t rings[];
  __shared__ uint64_t full[kWarps][S::kStages];
  let_next_start();
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  int i = 0;
  while (i + 1 < list.count && static_cast<int>(blockIdx.x) >= list.first_block[i + 1]) ++i;
  const ProductArgs& p = list.of[i];
  const Work w{p.weight.data, p.weight.rows, p.weight.cols, p.act,  p.act_chunks, (tokens + 7) / 8,
               p.out,         p.out_stride,  tokens,        p.bias, p.scale,      p.add != 0};
  const auto units = static_cast<int>((w.cols + 63) / 64);
  const int64_t tiles = (w.rows + 15) / 16;
  const int64_t first = static_cast<int64_t>(blockIdx.x - list.first_block[i]) * share;
  const int begin = units * warp / kWarps;
  Stream<NT, R> stream{w.weights,
                       w.cols,
                       {first, static_cast<int>(min(static_cast<int64_t>(share), tiles - first))},
                       begin,
                       units * (warp + 1) / kWarps - begin,
                       rings + warp * S::kStages * S::kStageBytes,
                       full[warp]};
  if (lane == 0) {
    for (int s = 0; s < S::kStages; ++s) barrier_init(&full[warp][s], 1);
    barriers_ready();
    for (int s = 0; s < S::kStages && stream.more(); ++s) stream.ask();
  }
  __syncwarp();
  wait();
  const uint4* act[NT];
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    const int64_t tile = j < w.act_tiles ? j : w.act_tiles - 1;
    act[j] = reinterpret_cast<const uint4*>(w.act) + tile * w.act_chunks * 32 +
             static_cast<int64_t>(begin) * 64 + lane;
  }
  uint4 b[kAhead<NT>][NT][2];
  const auto load_first = [&] {
#pragma unroll
    for (int d = 0; d < kAhead<NT>; ++d) {
      if (d < stream.units) load_tokens<NT>(b[d], act, d);
    }
  };
  load_first();
  int stage = 0, round = 0;
  for (int group = 0; group * R < stream.share.count; ++group) {
    const int count = stream.tiles(group);
    float sum[R][NT][4] = {};
    for (int k = 0; k < stream.units; k += kAhead<NT>) {
#pragma unroll
      for (int d = 0; d < kAhead<NT>; ++d) {
        if (k + d >= stream.units) break;
        barrier_wait(&full[warp][stage], round);
        const uint8_t* rows = stream.ring + stage * S::kStageBytes;
#pragma unroll
        for (int t = 0; t < R; ++t) {
          if (t >= count) break;
          Piece piece;
          uint4 a[4];
          BF16::load<FromShared>(rows + t * BF16::kTileBytes, 0, lane, piece);
          BF16::decode(piece, 0, lane, a);
          accumulate<BF16, NT>(sum[t], a, b[d], piece, 0);
        }
        if (k + d + kAhead<NT> < stream.units) load_tokens<NT>(b[d], act, k + d + kAhead<NT>);
        __syncwarp();
        if (lane == 0 && stream.more()) stream.ask();
        if (++stage == S::kStages) stage = 0, round ^= 1;
      }
    }
    if ((group + 1) * R < stream.share.count) load_first();
    auto* shared = reinterpret_cast<float4*>(rings + kWarps * S::kStages * S::kStageBytes);
    add_leaves<S>(w, sum, shared, first + group * R, count);
  }
#endif
}

template <int NT, int R>
int launch_few(const ProductList& list, int64_t tokens, int share) {
  return launch_shares<Shape<NT, R>>(few_kernel<NT, R>, list, tokens, share);
}

template <int NT>
int launch_few(const ProductList& list, int64_t tokens, int share) {
  if (share <= 2) return launch_few<NT, 2>(list, tokens, share);
  if (share == 3) return launch_few<NT, 3>(list, tokens, share);
  return launch_few<NT, 4>(list, tokens, share);
}

}  // namespace

bool few_takes(const ProductList& list, int64_t tokens) {
  return capability == 90 && tokens <= 32 && leaves(list.of[0].weight.cols) == kWarps;
}

int run_few(const ProductList& given, int64_t tokens) {
  ProductList list = given;
  const int share = even_share(list);
  if (tokens <= 8) return launch_few<1>(list, tokens, share);
  if (tokens <= 16) return launch_few<2>(list, tokens, share);
  return launch_few<4>(list, tokens, share);
}

}  // namespace freshet::cuda

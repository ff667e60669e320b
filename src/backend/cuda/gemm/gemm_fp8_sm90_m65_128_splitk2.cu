// GEMM with FP8 weights and few rows for 65 to 128 tokens (Hopper): a cluster of two blocks takes a
// tile, and each block half of the split-K slices, so that all SMs read memory.
//
// The first block adds its slices; the second keeps its slices separate. Each block finishes half
// of the tile's rows: it receives the other block's sums for them and continues to add from left to
// right. Bit-identical to gemm_fp8_sm90_m1_64.cu.
#include "backend/cuda/gemm/gemm_fp8_sm90_m65.cuh"
#include "backend/cuda/gemm/gemm_fp8_sm90_m65_128_splitk2.h"
#include "backend/cuda/runtime/cluster.cuh"

namespace freshet::cuda {
namespace {

constexpr int G = 2;  // warpgroups of 64 tokens each

// Buffer for the sums that the other block sends: at most two per block.
template <int NT>
struct Fp8SplitK : Fp8Shape<G, NT> {
  static constexpr int kHalf = NT / 2;
  static constexpr int kRoomBytes = 2 * kHalf * G * 128 * 16;
  static constexpr int kRingBytes = kManyBytes - kRoomBytes;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// A block's sums: of all its slices or of its first one; of its last slice; and the scales of the
// rows that it finishes.
template <int NT>
struct Fp8Half {
  float total[NT][4], last[NT][4];
  float2 scales[NT / 2];
};

// Computes the slices of a block. `scales`: of rows with one scale for all columns; 1 for others.
template <int NT, class First>
__device__ __forceinline__ void take_half(Fp8Reader& ring, Fp8Half<NT>& half, const ProductArgs& p,
                                          int rank, const Fp8Scaled& scaled,
                                          const First& first_sum) {
  const int parts = leaves8(p.weight), first = rank * (NT / 2);
  const Fp8Leaves leaves{parts * rank / 2, parts * (rank + 1) / 2};
  fp8_as(scaled, [&](auto how) {
    constexpr Fp8Scaled::How kHow = decltype(how)::value;
    fp8_leaves<NT, kHow>(ring, half.total, half.last, p.weight, leaves, rank == 0, scaled.of_rows,
                         first_sum, [&](const uint8_t* rows) {
#pragma unroll
                           for (int j = 0; j < NT / 2; ++j) {
                             const bool whole = (scaled.rows_of<kHow>() >> (first + j) & 1) != 0;
                             half.scales[j] = make_float2(1.0f, 1.0f);
                             if (!whole) continue;
                             half.scales[j] = *reinterpret_cast<const float2*>(
                                 rows + (first + j) * kTileScales + threadIdx.x % 4 * 8);
                           }
                         });
  });
}

// Sends the sums for the half of the tile that the other block finishes (kOther).
template <int NT, int kOther>
__device__ __forceinline__ void send_half(const float (&sum)[NT][4], float4* room,
                                          uint64_t* there) {
  using S = Fp8SplitK<NT>;
  const uint32_t to = place_in_block(room + threadIdx.x, kOther);
  const uint32_t barrier = place_in_block(there, kOther);
#pragma unroll
  for (int j = 0; j < S::kHalf; ++j) {
    send(to + j * S::kConsumers * 16, sum[kOther * S::kHalf + j], barrier);
  }
}

// sum = all slices for this block's half (kMine); `room` has the other block's sums, of two slices
// if `two`.
template <int NT, int kMine>
__device__ __forceinline__ void add_half(float (&sum)[NT / 2][4], const Fp8Half<NT>& half,
                                         const float4* room, bool two) {
  using S = Fp8SplitK<NT>;
  const float4* at = room + threadIdx.x;
#pragma unroll
  for (int j = 0; j < S::kHalf; ++j) {
    const float4 v = at[j * S::kConsumers];
    const float other[4] = {v.x, v.y, v.z, v.w};
    const float(&mine)[4] = half.total[kMine * S::kHalf + j];
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[j][i] = __fadd_rn(mine[i], other[i]);
  }
  if (two) {
#pragma unroll
    for (int j = 0; j < S::kHalf; ++j) {
      float last[4];
      if constexpr (kMine == 0) {
        const float4 v = at[(S::kHalf + j) * S::kConsumers];
        last[0] = v.x, last[1] = v.y, last[2] = v.z, last[3] = v.w;
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) last[i] = half.last[S::kHalf + j][i];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[j][i] = __fadd_rn(sum[j][i], last[i]);
    }
  }
#pragma unroll
  for (int j = 0; j < S::kHalf; ++j) {
    const float2 w = half.scales[j];
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[j][i] = __fmul_rn(sum[j][i], i % 2 == 0 ? w.x : w.y);
  }
}
#endif

template <int NT>
__global__ void __launch_bounds__(Fp8SplitK<NT>::kThreads, 1)
    halves_kernel(const __grid_constant__ ProductList list, int64_t tokens, Fp8Stages stages) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Fp8SplitK<NT>;
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ uint64_t full[kMostStages], empty[kMostStages], there;
  let_next_start();
  // Slices of the second block; the same for all GEMMs.
  const bool two = leaves8(list.of[0].weight) > 2;
  if (threadIdx.x == S::kConsumers) {
    barrier_init(&there, 1);
    barrier_expect(&there, (two && blockIdx.x % 2 == 0 ? 2 : 1) * S::kHalf * S::kConsumers * 16);
  }
  const Fp8Ring ring = fp8_ring<S>(stages, shared, full, empty);
  const int index = static_cast<int>(blockIdx.x) / 2, rank = static_cast<int>(blockIdx.x) % 2;
  const int producer = warp_index() - S::kConsumers / 32;
  auto* room = reinterpret_cast<float4*>(shared + S::kRingBytes);
  cluster_begun();  // the other block's barriers are initialised
  if (producer >= 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    if (threadIdx.x % 32 == 0) {
      fp8_produce<G, NT>(ring, list, tokens, {index, 1, index + 1}, producer, rank, 2);
    }
    __syncwarp();
    cluster_wait();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    ProductTile tile = find_product_tile<S::kTokenTiles, NT>(list, tokens, index);
    const ProductArgs& p = list.of[tile.product];
    Fp8Noted<NT> noted;
    noted.look_up([&](int j) { return scaled_panel(p.weight, (tile.unit + j) / 8); });
    wait();
    Fp8Half<NT> half;
    Fp8Reader reader = fp8_reader(ring, NT);
    // The second block sends its first slice while its last one is multiplied.
    take_half<NT>(reader, half, p, rank, noted.scaled(), [&] {
      if (!two) return;
      __syncwarp();
      cluster_wait();
      if (rank == 1) send_half<NT, 0>(half.total, room, &there);
    });
    // The values to add to are loaded while the blocks exchange sums.
    tile.unit += rank * S::kHalf;
    const Fp8Place place = fp8_place<S::kHalf>(p, tile);
    Fp8Whole<S::kHalf> whole(p, tokens, place.token, place.row);
    if (place.whole && p.add != 0) whole.load();
    if (!two) {
      __syncwarp();
      cluster_wait();
    }
    if (rank == 0) {
      send_half<NT, 1>(half.total, room, &there);
    } else if (two) {
      send_half<NT, 0>(half.last, room + S::kHalf * S::kConsumers, &there);
    } else {
      send_half<NT, 0>(half.total, room, &there);
    }
    barrier_wait(&there, 0);
    float sum[S::kHalf][4];
    if (rank == 0) {
      add_half<NT, 0>(sum, half, room, two);
    } else {
      add_half<NT, 1>(sum, half, room, two);
    }
    if (place.whole) {
      whole.put(p, sum);
    } else {
      fp8_finish_some<S::kHalf>(p, tokens, sum, place);
    }
  }
#endif
}

template <int NT>
int launch_halves(const Context& ctx, const ProductList& given, int64_t tokens) {
  using S = Fp8SplitK<NT>;
  const ProductList list = with_blocks(given, NT * 8);
  const auto kernel = halves_kernel<NT>;
  if (const int error = raise_shared(kernel, kManyBytes); error != 0) return error;
  const auto tiles = static_cast<unsigned>(list.first_block[list.count]);
  return launch_cluster(ctx, kernel, dim3(tiles * 2), dim3(S::kThreads), kManyBytes, dim3(2), list,
                        tokens, fp8_stages<G, NT>(tokens, S::kRingBytes));
}

}  // namespace

int run_fp8_halves(const Context& ctx, const ProductList& list, int64_t tokens) {
  return fp8_splitk_tiles(ctx, problem_of(list, tokens)) == 8
             ? launch_halves<8>(ctx, list, tokens)
             : launch_halves<12>(ctx, list, tokens);
}

}  // namespace freshet::cuda

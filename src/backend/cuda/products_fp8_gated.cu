// Gate and up in FP8 with many tokens, and the gated unit of their sums as activations in E4M3.
//
// A tile has 64 rows of gate and the same 64 of up, so that a lane has both numbers of its
// features. 128 features share a scale: a block takes two such tiles in a row, and keeps what the
// first gives in shared memory, each thread its own. The bits are those of products_fp8.cu, of
// glu() and of put_e4m3().
#include "backend/cuda/products_fp8_many.cuh"
#include "backend/cuda/products_gated.cuh"

namespace freshet::cuda {
namespace {

constexpr int kTiles = 16, kHalf = kTiles / 2;
constexpr int kPairRows = 2 * kPanelRows;

// G: warpgroups of 64 tokens each.
template <int G>
struct Gated : Fp8Shape<G, kTiles> {
  static constexpr int kKeptBytes = kHalf * G * 128 * 16;
  static constexpr int kRingBytes = kManyBytes - kKeptBytes;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Two tiles of a block, of 128 features; units are panels.
template <int G>
__device__ __forceinline__ ProductTile pair_at(const ProductList& list, int64_t tokens, int index) {
  return find_product_tile<Gated<G>::kTokenTiles, 2>(list, tokens, index);
}

// A thread of each producer.
template <int G>
__device__ __forceinline__ void produce(Fp8Ring ring, const ProductList& list, int64_t tokens,
                                        const Tour& tour, int producer) {
  const WeightView &gate = list.of[0].weight, &up = list.of[1].weight;
  const int64_t act_tiles = (tokens + 7) / 8;
  const bool once = act_tiles <= Gated<G>::kTokenTiles;
  const int steps = steps_of(gate);
  Fp8Filling filling{producer, 0, false};
  ring.stage = producer;
  for (int index = tour.first; index < tour.tiles; index += tour.step) {
    const ProductTile pair = pair_at<G>(list, tokens, index);
    const int left = min(static_cast<int>(act_tiles - pair.token_tile), ring.of.width);
    for (int half = 0; half < 2; ++half) {
      const int64_t at = (pair.unit + half) * steps * kPanelBytes;
      const auto copy_rows = [&](uint8_t* to, int n, uint64_t* barrier) {
        copy_weights(to, gate.data + at + n * kPanelBytes, kPanelBytes, barrier, once);
        copy_weights(to + kPanelBytes, up.data + at + n * kPanelBytes, kPanelBytes, barrier, once);
      };
      fp8_fill(ring, filling, steps, 2 * kPanelBytes, copy_rows,
               list.of[0].act + pair.token_tile * kE4M3TileBytes, act_tiles * kE4M3TileBytes,
               static_cast<uint32_t>(left * kE4M3TileBytes));
    }
  }
}

// A sum as products give it.
__device__ __forceinline__ float ended(const ProductArgs& p, float sum, int64_t row) {
  if (p.bias != nullptr) sum = __fadd_rn(sum, p.bias[row]);
  return __fmul_rn(sum, p.scale);
}

// v = the gated unit of 64 features' sums: gate's tiles of 8 rows, then up's.
__device__ __forceinline__ void gate_sums(float (&v)[kHalf][4], const float (&sum)[kTiles][4],
                                          const ProductList& list, int64_t first) {
#pragma unroll
  for (int j = 0; j < kHalf; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t row = first + j * 8 + threadIdx.x % 4 * 2 + i % 2;
      const float gate = ended(list.of[0], sum[j][i], row);
      const float up = ended(list.of[1], sum[j + kHalf][i], row);
      v[j][i] = __fmul_rn(activate(gate, kSilu), up);
    }
  }
}

// Two halves of 64 features of a lane's tokens, as put_e4m3() does with the same numbers.
template <int G>
__device__ __forceinline__ void put_pair_of_tiles(const Activations& act, const float4* kept,
                                                  const float (&second)[kHalf][4],
                                                  const ProductTile& pair, int64_t tokens) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  float first[kHalf][4];
#pragma unroll
  for (int j = 0; j < kHalf; ++j) {
    const float4 v = kept[j * Gated<G>::kConsumers];
    first[j][0] = v.x, first[j][1] = v.y, first[j][2] = v.z, first[j][3] = v.w;
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int64_t tile = pair.token_tile + warp * 2 + r;
    const bool real = tile * 8 + lane / 4 < tokens;
    float most = 0.0f;
#pragma unroll
    for (int j = 0; j < kHalf; ++j) {
#pragma unroll
      for (int i = r * 2; i < r * 2 + 2; ++i) {
        most = fmaxf(most, fmaxf(fabsf(first[j][i]), fabsf(second[j][i])));
      }
    }
    most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));
    if (tile >= act.core_tiles) continue;
    const E4M3Scale scale = e4m3_scale(real ? most : 0.0f);
    uint8_t* to = act.data + (pair.unit / 2 * act.core_tiles + tile) * kE4M3TileBytes;
    uint8_t* codes = to + lane / 4 * 16 + lane % 4 * 2;
    const auto put = [&](const float(&v)[4], int j) {  // features 8 j on
      const float low = real ? v[r * 2] : 0.0f, high = real ? v[r * 2 + 1] : 0.0f;
      *reinterpret_cast<uint16_t*>(codes + j / 2 * 128 + j % 2 * 8) =
          static_cast<uint16_t>(two_e4m3(__fmul_rn(low, scale.up), __fmul_rn(high, scale.up)));
    };
#pragma unroll
    for (int j = 0; j < kHalf; ++j) {
      put(first[j], j);
      put(second[j], j + kHalf);
    }
    if (lane % 4 == 0) {
      reinterpret_cast<float*>(to + kTokenTile * kE4M3Cols)[lane / 4] = scale.down;
    }
  }
}

// The warpgroups that multiply. `kept`: a thread's first place.
template <int G>
__device__ __forceinline__ void walk(Fp8Ring ring, const ProductList& list, int64_t tokens,
                                     const Tour& tour, const Activations& act, float4* kept) {
  const auto look_up = [&](int index, int half) {
    const ProductTile pair = pair_at<G>(list, tokens, index < tour.tiles ? index : tour.first);
    return fp8_scaled<kTiles>(
        [&](int j) { return scaled_panel(list.of[j / kHalf].weight, pair.unit + half); });
  };
  Fp8Scaled next = look_up(tour.first, 0);
  wait();
  for (int index = tour.first; index < tour.tiles; index += tour.step) {
    const ProductTile pair = pair_at<G>(list, tokens, index);
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const Fp8Scaled scaled = next;
      next = look_up(half == 0 ? index : index + tour.step, 1 - half);
      float sum[kTiles][4], gated[kHalf][4];
      fp8_sum<G, kTiles>(ring, sum, list.of[0].weight.cols, scaled);
      gate_sums(gated, sum, list, (pair.unit + half) * kPanelRows);
      if (half == 0) {
#pragma unroll
        for (int j = 0; j < kHalf; ++j) {
          kept[j * Gated<G>::kConsumers] =
              make_float4(gated[j][0], gated[j][1], gated[j][2], gated[j][3]);
        }
      } else {
        put_pair_of_tiles<G>(act, kept, gated, pair, tokens);
      }
    }
  }
}
#endif

template <int G>
__global__ void __launch_bounds__(Gated<G>::kThreads, 1)
    gated_kernel(const __grid_constant__ ProductList list, int64_t tokens, int tiles,
                 Fp8Stages stages, Activations act) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Gated<G>;
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ uint64_t full[kMostStages], empty[kMostStages];
  let_next_start();
  const Fp8Ring ring = fp8_ring<S>(stages, shared, full, empty);
  const Tour tour{static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), tiles};
  const int producer = warp_index() - S::kConsumers / 32;
  if (producer >= 0) {
    if constexpr (G == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x % 32 == 0) produce<G>(ring, list, tokens, tour, producer);
  } else {
    if constexpr (G == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    walk<G>(ring, list, tokens, tour, act,
            reinterpret_cast<float4*>(shared + S::kRingBytes) + threadIdx.x);
  }
#endif
}

int64_t tiles_of(int64_t rows, int64_t tokens) {
  return ceil_div(rows, kPairRows) * (tokens <= 64 ? 1 : ceil_div(tokens, 128));
}

template <int G>
int launch_gated(const ProductList& list, int64_t tokens, const Activations& act) {
  using S = Gated<G>;
  const auto kernel = gated_kernel<G>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kManyBytes);
  if (error != cudaSuccess) return static_cast<int>(error);
  const auto tiles = static_cast<int>(tiles_of(list.of[0].weight.rows, tokens));
  const int blocks = tiles < multiprocessors ? tiles : multiprocessors;
  return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(S::kThreads), kManyBytes, list,
                tokens, tiles, fp8_stages<G, kTiles>(tokens, S::kRingBytes), act);
}

}  // namespace

bool fp8_gated_fits(int64_t rows, int64_t tokens) {
  // Whole groups of features, and two thirds of the multiprocessors have work until the end.
  const int64_t tiles = tiles_of(rows, tokens), most = multiprocessors;
  return rows % kPairRows == 0 && tiles * 3 >= ceil_div(tiles, most) * most * 2;
}

int run_fp8_gated(const ProductList& gate_and_up, int64_t tokens, const Activations& act) {
  ProductList list = with_blocks(gate_and_up, kPairRows);
  list.count = 1;  // up's rows stand beside gate's
  return tokens <= 64 ? launch_gated<1>(list, tokens, act) : launch_gated<2>(list, tokens, act);
}

}  // namespace freshet::cuda

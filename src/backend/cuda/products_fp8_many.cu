// Products of FP8 weights (E4M3) with more than 64 tokens on Hopper; the order of a sum is that of
// products_fp8.cu, and its bits. A block goes from tile to tile of the product.
#include <algorithm>

#include "backend/cuda/products_fp8_many.cuh"

namespace freshet::cuda {
namespace {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// G warpgroups.
template <int G, int NT>
__device__ __forceinline__ void fp8_walk(Fp8Ring ring, const ProductList& list, int64_t tokens,
                                         const Tour& tour) {
  constexpr int kTokenTiles = Fp8Shape<G, NT>::kTokenTiles;
  const auto look_up = [&](int index) {
    const ProductTile tile =
        find_product_tile<kTokenTiles, NT>(list, tokens, index < tour.tiles ? index : tour.first);
    const WeightView& w = list.of[tile.product].weight;
    return fp8_scaled<NT>([&](int j) { return scaled_panel(w, (tile.unit + j) / 8); });
  };
  Fp8Scaled next = look_up(tour.first);
  wait();
  for (int index = tour.first; index < tour.tiles; index += tour.step) {
    const ProductTile tile = find_product_tile<kTokenTiles, NT>(list, tokens, index);
    const ProductArgs& p = list.of[tile.product];
    const Fp8Scaled scaled = next;
    next = look_up(index + tour.step);
    float sum[NT][4];
    fp8_sum<G, NT>(ring, sum, p.weight.cols, scaled);
    fp8_finish<NT>(p, tokens, sum, tile);
  }
}
#endif

template <int G, int NT>
__global__ void __launch_bounds__(Fp8Shape<G, NT>::kThreads, 1)
    fp8_kernel(const __grid_constant__ ProductList list, int64_t tokens, int tiles,
               Fp8Stages stages) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Fp8Shape<G, NT>;
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ uint64_t full[kMostStages], empty[kMostStages];
  let_next_start();
  const Fp8Ring ring = fp8_ring<S>(stages, shared, full, empty);
  const Tour tour{static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), tiles};
  const int producer = warp_index() - S::kConsumers / 32;
  if (producer >= 0) {
    if constexpr (G == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x % 32 == 0) fp8_produce<G, NT>(ring, list, tokens, tour, producer);
  } else {
    if constexpr (G == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    fp8_walk<G, NT>(ring, list, tokens, tour);
  }
#endif
}

template <int G, int NT>
int launch_fp8(const ProductList& given, int64_t tokens) {
  using S = Fp8Shape<G, NT>;
  const ProductList list = with_blocks(given, NT * 8);
  const auto kernel = fp8_kernel<G, NT>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kManyBytes);
  if (error != cudaSuccess) return static_cast<int>(error);
  const auto tiles = static_cast<int>(list.first_block[list.count] * ceil_div(tokens, G * 64));
  const int blocks = tiles < multiprocessors ? tiles : multiprocessors;
  return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(S::kThreads), kManyBytes, list,
                tokens, tiles, fp8_stages<G, NT>(tokens, kManyBytes));
}

// A way to cut a product: so many warpgroups of tokens and tiles of 8 rows a block.
struct Way {
  int groups, tiles;
  int (*launch)(const ProductList& list, int64_t tokens);
};
constexpr Way kWays[] = {
    {1, 6, launch_fp8<1, 6>},
    {1, 8, launch_fp8<1, 8>},
    {2, 14, launch_fp8<2, 14>},
    {2, 16, launch_fp8<2, 16>},
};

// About how many cycles all steps of 128 columns take: each is multiplied, comes from memory (its
// weights) or the L2 cache (all of it), or is waited for.
int64_t cost(const Way& way, const ProductList& list, int64_t tokens) {
  constexpr int64_t kMemory = 20, kCache = 45, kLeast = 260;  // bytes a cycle, cycles
  int64_t tiles = 0;
  for (int i = 0; i < list.count; ++i) tiles += ceil_div(list.of[i].weight.rows, way.tiles * 8);
  tiles *= ceil_div(tokens, way.groups * 64);
  const int64_t act_tiles = ceil_div(tokens, kTokenTile), most = way.groups * 8;
  const int64_t of_rows = way.tiles * kE4M3TileBytes;
  const int64_t of_tokens = (act_tiles < most ? act_tiles : most) * kE4M3TileBytes;
  int64_t cycles = std::max<int64_t>(kLeast, way.groups * way.tiles * 17);
  cycles = std::max(cycles, (of_rows + of_tokens) / kCache);
  if (act_tiles <= most) cycles = std::max(cycles, of_rows / kMemory);
  return ceil_div(tiles, multiprocessors) * cycles;
}

}  // namespace

bool fp8_wide_fits(const ProductList& list, int64_t tokens) {
  int64_t tiles = 0;
  for (int i = 0; i < list.count; ++i) tiles += ceil_div(list.of[i].weight.rows, 128);
  const int64_t places = ceil_div(tiles, multiprocessors) * multiprocessors;
  return tokens <= 64 && tiles >= 2 * multiprocessors && tiles * 10 >= places * 9;
}

int run_fp8_wide(const ProductList& list, int64_t tokens) {
  return launch_fp8<1, 16>(list, tokens);
}

int run_fp8_many(const ProductList& list, int64_t tokens) {
  const Way* best = nullptr;
  for (const Way& way : kWays) {
    if (best == nullptr || cost(way, list, tokens) < cost(*best, list, tokens)) best = &way;
  }
  return best->launch(list, tokens);
}

}  // namespace freshet::cuda

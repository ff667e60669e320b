// GEMM with BF16 weights of few rows for 33 to 128 tokens (Hopper): two blocks of a cluster share
// rows, and each processes half of the split-K slices.
//
// Tokens are on the 64-row side of wgmma, and any number of 8-row tiles on the other, so that every
// pair of blocks has the same number of rows, of whichever GEMM. Two warpgroups have 64 tokens
// each, or, with up to 64 tokens, half of the rows each. The first block adds its slices; the
// second keeps its slices separate and sends those of the first block's rows as soon as they are
// ready: four sums sent for each one received, but only the latency of the last slice is exposed.
// Slices are added from left to right; bit-identical to gemm_sm80_small_m.cu.
#include "backend/cuda/gemm/gemm_bf16_sm90_wgmma.cuh"
#include "backend/cuda/runtime/cluster.cuh"

namespace freshet::cuda {
namespace {

constexpr int kLeaves = kWarps / 2;  // per block
constexpr int kSharedBytes = 222 << 10;

// G: tiles of 64 tokens; NT: tiles of 8 rows.
template <int G_, int NT_>
struct Bf16SplitK {
  static constexpr int G = G_, NT = NT_;
  static constexpr int kTiles = NT * G / 2;      // per warpgroup
  static constexpr int kFirst = G == 2 ? 3 : 2;  // of which the first block writes these
  static constexpr int kProducers = 4;
  static constexpr bool kTokensLead = true;
  static constexpr int kGroupRows = G == 1 ? kTiles * kTokenBytes : 0;
  static constexpr int kGroupTokens = G == 2 ? 8 * kTokenBytes : 0;
  static constexpr int kRowBytes = NT * kTokenBytes, kStageBytes = kRowBytes + G * 8 * kTokenBytes;
  static constexpr int kSent =
      kTiles - kFirst > kLeaves* kFirst ? kTiles - kFirst : kLeaves* kFirst;
  static constexpr int kStages = (kSharedBytes - kSent * kConsumers * 16) / kStageBytes;
  static constexpr int kRoom = kStages * kStageBytes;
  static constexpr int kBytes = kRoom + kSent * kConsumers * 16;
};
constexpr int kThreads = kConsumers + kProducerWarps * 32;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// A pair's 16-row tiles, of all GEMMs.
struct PairTiles {
  int first, count;
};
__device__ __forceinline__ int product_of(const ProductList& list, int tile) {
  int i = 0;
  while (i + 1 < list.count && tile >= list.first_block[i + 1]) ++i;
  return i;
}

// The number of contiguous runs in memory.
struct Run {
  const uint8_t* from;
  uint32_t to, bytes;
};
template <int N>
struct Runs {
  Run of[N];
  int count;
};
template <int N>
struct SharedRuns {
  const Runs<N>& runs;
  uint32_t all;
  Run first, second;
  int count;

  __device__ __forceinline__ uint32_t bytes() const { return all; }
  __device__ __forceinline__ void copy(uint8_t* to, int64_t at, uint64_t* barrier) const {
    copy_weights(to, first.from + at, first.bytes, barrier);
    if (count == 1) return;
    copy_weights(to + second.to, second.from + at, second.bytes, barrier);
    for (int r = 2; r < count; ++r) {
      const Run& run = runs.of[r];
      copy_weights(to + run.to, run.from + at, run.bytes, barrier);
    }
  }
};
template <int N>
__device__ __forceinline__ SharedRuns<N> find_runs(Runs<N>& runs, const ProductList& list,
                                                   const PairTiles& tiles, int64_t unit) {
  constexpr int kPanel = kPanelTiles<BF16>;
  uint32_t to = 0;
  runs.count = 0;
  for (int tile = tiles.first; tile < tiles.first + tiles.count;) {
    const int i = product_of(list, tile), in = tile - list.first_block[i];
    const int end = min(tiles.first + tiles.count, list.first_block[i + 1]);
    const int count = min(end - tile, kPanel - in % kPanel);
    const WeightView& w = list.of[i].weight;
    const auto bytes = static_cast<uint32_t>(count * BF16::kTileBytes);
    runs.of[runs.count++] = {w.data + tile_at<BF16>(in, w.cols) + unit * kUnitStep<BF16>, to,
                             bytes};
    to += bytes;
    tile += count;
  }
  return {runs, to, runs.of[0], runs.of[N > 1 ? 1 : 0], runs.count};
}

// Where the sums of a 16-row tile go.
struct alignas(16) Place {
  float* out;  // nullptr: nowhere
  int stride;
  float scale;
};
template <class S>
struct Places {
  static constexpr int kTiles = S::NT / 2;
  Place of[kTiles];
  alignas(16) float bias[kTiles * 16];  // -0.0f if there is none
  int rows[kTiles];
  bool adds[kTiles];
  bool plain, adds_any;  // all tiles: whole, 16-byte aligned; some tile adds

  // Called by the first warp.
  __device__ __forceinline__ void look_up(const ProductList& list, const PairTiles& tiles) {
    const int in = static_cast<int>(threadIdx.x);
    bool fits = true, adding = false;
    if (in < tiles.count) {
      const int i = product_of(list, tiles.first + in);
      const ProductArgs& p = list.of[i];
      const int64_t row = static_cast<int64_t>(tiles.first + in - list.first_block[i]) * 16;
      of[in] = {p.out + row, static_cast<int>(p.out_stride), p.scale};
      rows[in] = static_cast<int>(min(int64_t{16}, p.weight.rows - row));
      adds[in] = adding = p.add != 0;
      fits =
          rows[in] == 16 && p.out_stride % 4 == 0 && reinterpret_cast<uintptr_t>(p.out) % 16 == 0;
      for (int r = 0; r < 16; ++r) {
        bias[in * 16 + r] = p.bias != nullptr && r < rows[in] ? p.bias[row + r] : -0.0f;
      }
    } else if (in < kTiles) {
      of[in] = {}, rows[in] = 0, adds[in] = false;
    }
    const bool all = __all_sync(0xffffffff, fits), any = __any_sync(0xffffffff, adding);
    if (in == 0) plain = all, adds_any = any;
  }
};

// The first of a warp's 16 tokens.
template <class S>
__device__ __forceinline__ int first_token() {
  const int warp = warp_index();
  return (S::G == 2 ? warp : warp % 4) * 16;
}

// The epilogue of a warp: 16 tokens by the kOwn 8-row tiles, from From on, of its warpgroup that
// its block writes. It runs once and is bound by instruction fetch, so the code is small and common
// conditions are tested once. Sums go through shared memory, so that adjacent lanes write adjacent
// addresses: pairs of rows per lane would be 32-byte requests, whose rate per SM is low.
template <class S, int From, int To>
struct SplitKEnd {
  static constexpr int kOwn = To - From, kQuads = kOwn * 2;          // groups of four rows
  static constexpr int kWidth = kOwn * 8 + (kOwn % 2 == 0 ? 8 : 0);  // per token, no bank conflicts
  static constexpr int kSums = kConsumers / 32 * 16 * kWidth;
  static_assert((kSums + kOwn * kConsumers * 4) * 4 <= S::kRoom);

  const Places<S>& places;
  int tokens, warp, lane;
  float *sums, *before;

  __device__ __forceinline__ SplitKEnd(const Places<S>& all, int count, uint8_t* stages)
      : places(all), tokens(count), warp(threadIdx.x / 32), lane(threadIdx.x % 32) {
    sums = reinterpret_cast<float*>(stages) + warp * 16 * kWidth;
    before = reinterpret_cast<float*>(stages) + kSums + threadIdx.x * 4;
  }

  // Four rows of a token.
  struct Four {
    int token, quad;  // within the warp and the epilogue
    int all;          // within the block
    float* at;
    float scale;
    bool real;
  };
  __device__ __forceinline__ Four four(int n) const {
    Four f;
    f.token = (n * 32 + lane) / kQuads;
    f.quad = n * 32 + lane - f.token * kQuads;
    f.all = From * 2 + f.quad + (S::G == 1 ? warp / 4 * S::kTiles * 2 : 0);
    const Place place = places.of[f.all / 4];
    const int token = first_token<S>() + f.token;
    f.at = place.out + static_cast<int64_t>(token) * place.stride + f.all % 4 * 4;
    f.scale = place.scale;
    f.real = place.out != nullptr && token < tokens;
    return f;
  }
  // Loads the old values, for the addition, into shared memory.
  __device__ __forceinline__ void ask() const {
    if (!places.plain || !places.adds_any) return;
#pragma unroll 3
    for (int n = 0; n < kOwn; ++n) {
      const Four f = four(n);
      cp_async16(before + n * kConsumers * 4, f.at, f.real && places.adds[f.all / 4]);
    }
    cp_async_commit();
  }
  __device__ __forceinline__ void leave(int j, const float (&v)[4]) const {
    float* to = sums + lane / 4 * kWidth + j * 8 + lane % 4 * 2;
    *reinterpret_cast<float2*>(to) = make_float2(v[0], v[1]);
    *reinterpret_cast<float2*>(to + 8 * kWidth) = make_float2(v[2], v[3]);
  }
  __device__ __forceinline__ static float ended(float sum, float bias, float scale) {
    return __fmul_rn(__fadd_rn(sum, bias), scale);
  }
  __device__ __forceinline__ void put() const {
    cp_async_wait<0>();
    __syncwarp();
    if (places.plain) {
#pragma unroll 3
      for (int n = 0; n < kOwn; ++n) {
        const Four f = four(n);
        const auto load = [](const float* from) { return *reinterpret_cast<const float4*>(from); };
        const float4 s = load(sums + f.token * kWidth + f.quad * 4),
                     bias = load(places.bias + f.all * 4);
        const float4 b = load(before + n * kConsumers * 4);
        const bool add = places.adds[f.all / 4];
        float4 v = make_float4(ended(s.x, bias.x, f.scale), ended(s.y, bias.y, f.scale),
                               ended(s.z, bias.z, f.scale), ended(s.w, bias.w, f.scale));
        v.x = add ? __fadd_rn(b.x, v.x) : v.x;
        v.y = add ? __fadd_rn(b.y, v.y) : v.y;
        v.z = add ? __fadd_rn(b.z, v.z) : v.z;
        v.w = add ? __fadd_rn(b.w, v.w) : v.w;
        if (f.real) *reinterpret_cast<float4*>(f.at) = v;
      }
      return;
    }
#pragma unroll 1
    for (int n = 0; n < kOwn * 4; ++n) {
      const Four f = four(n / 4);
      const int row = f.all % 4 * 4 + n % 4;
      if (!f.real || row >= places.rows[f.all / 4]) continue;
      float* to = f.at + n % 4;
      const float v = ended(sums[f.token * kWidth + f.quad * 4 + n % 4],
                            places.bias[f.all * 4 + n % 4], f.scale);
      *to = places.adds[f.all / 4] ? __fadd_rn(*to, v) : v;
    }
  }
};

__device__ __forceinline__ void add(float (&to)[4], const float (&v)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = __fadd_rn(to[i], v[i]);
}
__device__ __forceinline__ void add(float (&to)[4], const float4& v) {
  const float four[4] = {v.x, v.y, v.z, v.w};
  add(to, four);
}

// The first block adds its slices.
template <class S>
__device__ __forceinline__ void end_first(float (&leaf)[kLeaves][S::kTiles][4], uint8_t* stages,
                                          uint64_t* there, const Places<S>& places, int tokens) {
  float4* mine = reinterpret_cast<float4*>(stages + S::kRoom) + threadIdx.x;
  auto& sum = leaf[0];
#pragma unroll
  for (int l = 1; l < kLeaves; ++l) {
#pragma unroll
    for (int j = 0; j < S::kTiles; ++j) add(sum[j], leaf[l][j]);
  }
  const uint32_t to = place_in_block(mine, 1), barrier = place_in_block(there, 1);
#pragma unroll
  for (int j = S::kFirst; j < S::kTiles; ++j) {
    send(to + (j - S::kFirst) * kConsumers * 16, sum[j], barrier);
  }
  const SplitKEnd<S, 0, S::kFirst> end(places, tokens, stages);
  end.ask();
  barrier_wait(there, 0);
#pragma unroll
  for (int j = 0; j < S::kFirst; ++j) {
#pragma unroll
    for (int l = 0; l < kLeaves; ++l) add(sum[j], mine[(l * S::kFirst + j) * kConsumers]);
    end.leave(j, sum[j]);
  }
  end.put();
}
// The second block keeps slices separate and sends each one as soon as it is ready.
template <class S>
__device__ __forceinline__ void send_leaf(const float (&sum)[S::kTiles][4], int leaf,
                                          uint8_t* stages, uint64_t* there) {
  float4* mine = reinterpret_cast<float4*>(stages + S::kRoom) + threadIdx.x;
  const uint32_t to = place_in_block(mine, 0), barrier = place_in_block(there, 0);
#pragma unroll
  for (int j = 0; j < S::kFirst; ++j) {
    send(to + (leaf * S::kFirst + j) * kConsumers * 16, sum[j], barrier);
  }
}
template <class S>
__device__ __forceinline__ void end_second(const float (&leaf)[kLeaves][S::kTiles][4],
                                           uint8_t* stages, uint64_t* there,
                                           const Places<S>& places, int tokens) {
  const float4* mine = reinterpret_cast<const float4*>(stages + S::kRoom) + threadIdx.x;
  const SplitKEnd<S, S::kFirst, S::kTiles> end(places, tokens, stages);
  end.ask();
  barrier_wait(there, 0);
#pragma unroll
  for (int j = S::kFirst; j < S::kTiles; ++j) {
    const float4 first = mine[(j - S::kFirst) * kConsumers];
    float sum[4] = {first.x, first.y, first.z, first.w};
#pragma unroll
    for (int l = 0; l < kLeaves; ++l) add(sum, leaf[l][j]);
    end.leave(j - S::kFirst, sum);
  }
  end.put();
}
#endif

// share: 16-row tiles per pair.
template <class S>
__global__ void __launch_bounds__(kThreads, 1)
    halves_kernel(const __grid_constant__ ProductList list, int tokens, int share) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t stages[];
  __shared__ uint64_t full[S::kStages], empty[S::kStages], there;
  __shared__ Places<S> places;
  __shared__ Runs<S::NT / 2> runs[S::kProducers];
  let_next_start();
  const int rank = static_cast<int>(blockIdx.x) % 2;
  const int first = static_cast<int>(blockIdx.x) / 2 * share;
  const PairTiles tiles{first, min(share, list.first_block[list.count] - first)};
  const int64_t cols = list.of[0].weight.cols;
  const int first_leaf = rank * kLeaves;
  if (threadIdx.x == 0) {  // only warps with tokens send
    barrier_init(&there, 1);
    const int warps = (tokens + 15) / 16 * (2 / S::G);
    barrier_expect(&there, static_cast<uint32_t>(warps * 32 * 16) *
                               (rank == 0 ? kLeaves * S::kFirst : S::kTiles - S::kFirst));
  }
  GemmStages<S> ring = start_ring<S>(stages, full, empty, kConsumers / 32);
  cluster_begun();  // the other block has started
  if (warp_index() >= kConsumers / 32) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x % 32 == 0) {
      const int64_t step = static_cast<int64_t>((tokens + 7) / 8) * kTokenBytes;
      const Bf16Slice last = leaf_of(cols, first_leaf + kLeaves - 1);
      const int begin = leaf_of(cols, first_leaf).first;
      bool waited = false;
      fill(ring, find_runs(runs[producer_index()], list, tiles, begin),
           list.of[0].act + begin * step, step, static_cast<uint32_t>(step),
           last.first + last.count - begin, waited);
    }
    __syncwarp();
    cluster_wait();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    cluster_wait();
    if (warp_index() == 0) places.look_up(list, tiles);
    wait();
    const bool ends = first_token<S>() < tokens;
    Reader<S> reader(ring);
    float sum[kLeaves][S::kTiles][4];
#pragma unroll
    for (int l = 0; l < kLeaves; ++l) {
      sum_pieces<S, S::kTiles>(reader, sum[l], leaf_of(cols, first_leaf + l).count);
      if (rank == 1 && ends) send_leaf<S>(sum[l], l, stages, &there);
    }
    sync_consumers();  // stages are reused for sums
    if (!ends) return;
    if (rank == 0) {
      end_first<S>(sum, stages, &there, places, tokens);
    } else {
      end_second<S>(sum, stages, &there, places, tokens);
    }
  }
#endif
}

template <int G, int NT>
int launch_halves(const Context& ctx, const ProductList& list, int64_t tokens, int share) {
  using S = Bf16SplitK<G, NT>;
  const auto kernel = halves_kernel<S>;
  if (const int error = raise_shared(kernel, S::kBytes); error != 0) return error;
  const auto pairs = static_cast<unsigned>(ceil_div(list.first_block[list.count], share));
  return launch_cluster(ctx, kernel, dim3(pairs * 2), dim3(kThreads), S::kBytes, dim3(2), list,
                        static_cast<int>(tokens), share);
}

ProductList with_tiles(const ProductList& list) {
  return with_blocks(list, 16);
}
int share_of(const Context& ctx, const ProductList& list) {
  return static_cast<int>(ceil_div(list.first_block[list.count], ctx.multiprocessors / 2));
}

}  // namespace

int run_halves(const Context& ctx, const ProductList& given, int64_t tokens) {
  const ProductList list = with_tiles(given);
  const int share = share_of(ctx, list);
  if (tokens <= 64) {
    return share <= 4 ? launch_halves<1, 8>(ctx, list, tokens, share)
                      : launch_halves<1, 12>(ctx, list, tokens, share);
  }
  return share <= 4 ? launch_halves<2, 8>(ctx, list, tokens, share)
                    : launch_halves<2, 12>(ctx, list, tokens, share);
}

}  // namespace freshet::cuda

// Products of BF16 weights of few rows with 33 to 128 tokens on Hopper: two blocks of a cluster
// share rows, and each takes half of the leaves of K.
//
// Tokens are on the 64-row side of wgmma, and any number of tiles of 8 rows on the other, so that
// every pair has as many rows as any other, of whatever product. Two warpgroups take 64 tokens
// each, or of up to 64 tokens half of the rows each. The first block adds its leaves up; the second
// keeps its own apart, and sends those of the rows that the first ends as soon as they are there:
// four sums for each, where it gets one, but only the last one's way takes time. Leaves are added
// from left to right, and the bits are those of products.cu.
#include "backend/cuda/cluster.cuh"
#include "backend/cuda/products_wgmma.cuh"

namespace freshet::cuda {
namespace {

constexpr int kLeaves = kWarps / 2;  // of a block
constexpr int kSharedBytes = 222 << 10;

// G: tiles of 64 tokens; NT: tiles of 8 rows.
template <int G_, int NT_>
struct Halves {
  static constexpr int G = G_, NT = NT_;
  static constexpr int kTiles = NT * G / 2;      // of a warpgroup
  static constexpr int kFirst = G == 2 ? 3 : 2;  // of these the first block ends
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
// A pair's tiles of 16 rows, of all products.
struct Tiles {
  int first, count;
};
__device__ __forceinline__ int product_of(const ProductList& list, int tile) {
  int i = 0;
  while (i + 1 < list.count && tile >= list.first_block[i + 1]) ++i;
  return i;
}

// They lie in so many runs of memory.
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
                                                   const Tiles& tiles, int64_t unit) {
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

// Where the sums of a tile of 16 rows go.
struct Place {
  float* out;
  const float* bias;
  int64_t stride;
  float scale;
  int rows;
  bool add, aligned;  // fours of rows
};
__device__ __forceinline__ Place place_of(const ProductList& list, const Tiles& tiles, int in) {
  if (in >= tiles.count) return {};
  const int i = product_of(list, tiles.first + in);
  const ProductArgs& p = list.of[i];
  const int64_t row = static_cast<int64_t>(tiles.first + in - list.first_block[i]) * 16;
  const auto rows = static_cast<int>(min(int64_t{16}, p.weight.rows - row));
  const bool aligned = p.out_stride % 4 == 0 && reinterpret_cast<uintptr_t>(p.out) % 16 == 0;
  return {p.out + row,  p.bias != nullptr ? p.bias + row : nullptr,
          p.out_stride, p.scale,
          rows,         p.add != 0,
          aligned};
}

// Four rows of it and a token, which a lane writes.
struct End {
  const Place& place;
  int row, token;
  bool real;

  __device__ __forceinline__ float* at() const { return place.out + token * place.stride + row; }
  __device__ __forceinline__ bool whole() const { return place.aligned && row + 4 <= place.rows; }
  // What is added to its sums, on its way to shared memory.
  __device__ __forceinline__ void ask(float* to) const {
    if (!real || !place.add) return;
    if (whole()) {
      cp_async16(to, at());
      return;
    }
    for (int i = 0; i < min(4, place.rows - row); ++i) cp_async_number(to + i, at() + i);
  }
  __device__ __forceinline__ void put(const float* sum, const float* before) const {
    if (!real) return;
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[i] = sum[i];
      if (place.bias != nullptr && row + i < place.rows) {
        v[i] = __fadd_rn(v[i], place.bias[row + i]);
      }
      v[i] = __fmul_rn(v[i], place.scale);
      if (place.add) v[i] = __fadd_rn(before[i], v[i]);
    }
    if (whole()) {
      *reinterpret_cast<float4*>(at()) = make_float4(v[0], v[1], v[2], v[3]);
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (row + i < place.rows) at()[i] = v[i];
    }
  }
};

// What a warp ends: 16 tokens, of its warpgroup's tiles of 8 rows those that are its block's.
template <class S>
struct Ends {
  const Place* places;
  int tokens, warp;

  __device__ __forceinline__ int first_token() const { return (S::G == 2 ? warp : warp % 4) * 16; }
  // Of the tiles from `first` on, a token's after another's, four rows.
  __device__ __forceinline__ End of(int first, int in, int quad) const {
    const int at = first + quad / 2 + (S::G == 1 ? warp / 4 * S::kTiles : 0);
    const int row = at % 2 * 8 + quad % 2 * 4, token = first_token() + in;
    const Place& place = places[at / 2];
    return {place, row, token, row < place.rows && token < tokens};
  }
};

// Adds up a block's own tiles [From, To), as sum(tile, v) gives them once the other's are `there`,
// and writes them. They go through shared memory, so that neighbours write what lies side by side:
// pairs of rows a lane would be requests of 32 bytes, of which a multiprocessor makes few.
template <class S, int From, int To, class Sum>
__device__ __forceinline__ void end_own(const Ends<S>& ends, uint8_t* stages, uint64_t* there,
                                        const Sum& sum) {
  constexpr int kOwn = To - From, kQuads = kOwn * 2;
  constexpr int kWidth = kOwn * 8 + (kOwn % 2 == 0 ? 8 : 0);  // of a token, for all banks
  constexpr int kSums = kConsumers / 32 * 16 * kWidth;
  static_assert((kSums + kOwn * kConsumers * 4) * 4 <= S::kRoom);
  const int lane = static_cast<int>(threadIdx.x % 32);
  float* sums = reinterpret_cast<float*>(stages) + ends.warp * 16 * kWidth;
  float* before = reinterpret_cast<float*>(stages) + kSums + threadIdx.x * 4;
#pragma unroll 3
  for (int n = 0; n < kOwn; ++n) {
    const int at = n * 32 + lane;
    ends.of(From, at / kQuads, at % kQuads).ask(before + n * kConsumers * 4);
  }
  cp_async_commit();
  barrier_wait(there, 0);
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    float v[4];
    sum(From + j, v);
    float* to = sums + lane / 4 * kWidth + j * 8 + lane % 4 * 2;
    *reinterpret_cast<float2*>(to) = make_float2(v[0], v[1]);
    *reinterpret_cast<float2*>(to + 8 * kWidth) = make_float2(v[2], v[3]);
  }
  cp_async_wait<0>();
  __syncwarp();
#pragma unroll 3
  for (int n = 0; n < kOwn; ++n) {
    const int at = n * 32 + lane, token = at / kQuads, quad = at % kQuads;
    const float4 v = *reinterpret_cast<const float4*>(sums + token * kWidth + quad * 4);
    const float4 b = *reinterpret_cast<const float4*>(before + n * kConsumers * 4);
    const float all[4] = {v.x, v.y, v.z, v.w}, known[4] = {b.x, b.y, b.z, b.w};
    ends.of(From, token, quad).put(all, known);
  }
}

__device__ __forceinline__ void add(float (&to)[4], const float (&v)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = __fadd_rn(to[i], v[i]);
}
__device__ __forceinline__ void add(float (&to)[4], const float4& v) {
  const float four[4] = {v.x, v.y, v.z, v.w};
  add(to, four);
}

// The first block adds its leaves up.
template <class S>
__device__ __forceinline__ void end_first(float (&leaf)[kLeaves][S::kTiles][4], uint8_t* stages,
                                          uint64_t* there, const Ends<S>& ends) {
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
  end_own<S, 0, S::kFirst>(ends, stages, there, [&](int j, float(&v)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = sum[j][i];
#pragma unroll
    for (int l = 0; l < kLeaves; ++l) add(v, mine[(l * S::kFirst + j) * kConsumers]);
  });
}
// The second keeps them apart, and sends a leaf's as soon as they are there.
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
__device__ __forceinline__ void end_second(const float (&sum)[kLeaves][S::kTiles][4],
                                           uint8_t* stages, uint64_t* there, const Ends<S>& ends) {
  const float4* mine = reinterpret_cast<const float4*>(stages + S::kRoom) + threadIdx.x;
  end_own<S, S::kFirst, S::kTiles>(ends, stages, there, [&](int j, float(&v)[4]) {
    const float4 first = mine[(j - S::kFirst) * kConsumers];
    v[0] = first.x, v[1] = first.y, v[2] = first.z, v[3] = first.w;
#pragma unroll
    for (int l = 0; l < kLeaves; ++l) add(v, sum[l][j]);
  });
}
#endif

// share: tiles of 16 rows of a pair.
template <class S>
__global__ void __launch_bounds__(kThreads, 1)
    halves_kernel(const __grid_constant__ ProductList list, int tokens, int share) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t stages[];
  __shared__ uint64_t full[S::kStages], empty[S::kStages], there;
  __shared__ Place places[S::NT / 2];
  __shared__ Runs<S::NT / 2> runs[S::kProducers];
  let_next_start();
  const int rank = static_cast<int>(blockIdx.x) % 2;
  const int first = static_cast<int>(blockIdx.x) / 2 * share;
  const Tiles tiles{first, min(share, list.first_block[list.count] - first)};
  const int64_t cols = list.of[0].weight.cols;
  const int first_leaf = rank * kLeaves;
  if (threadIdx.x == 0) {  // what comes is of warps with tokens
    barrier_init(&there, 1);
    const int warps = (tokens + 15) / 16 * (2 / S::G);
    barrier_expect(&there, static_cast<uint32_t>(warps * 32 * 16) *
                               (rank == 0 ? kLeaves * S::kFirst : S::kTiles - S::kFirst));
  }
  Ring<S> ring = start_ring<S>(stages, full, empty, kConsumers / 32);
  cluster_begun();  // nobody sends to a block that has not
  if (warp_index() >= kConsumers / 32) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x % 32 == 0) {
      const int64_t step = static_cast<int64_t>((tokens + 7) / 8) * kTokenBytes;
      const Leaf last = leaf_of(cols, first_leaf + kLeaves - 1);
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
    if (threadIdx.x < S::NT / 2) {
      places[threadIdx.x] = place_of(list, tiles, static_cast<int>(threadIdx.x));
    }
    __syncwarp();
    const Ends<S> ends{places, tokens, warp_index()};
    wait();
    const bool sends = rank == 1 && ends.first_token() < tokens;
    Reader<S> reader(ring);
    float sum[kLeaves][S::kTiles][4];
#pragma unroll
    for (int l = 0; l < kLeaves; ++l) {
      sum_pieces<S, S::kTiles>(reader, sum[l], leaf_of(cols, first_leaf + l).count);
      if (sends) send_leaf<S>(sum[l], l, stages, &there);
    }
    sync_consumers();  // stages become the place of sums
    if (ends.first_token() >= tokens) return;
    if (rank == 0) {
      end_first<S>(sum, stages, &there, ends);
    } else {
      end_second<S>(sum, stages, &there, ends);
    }
  }
#endif
}

template <int G, int NT>
int launch_halves(const ProductList& list, int64_t tokens, int share) {
  using S = Halves<G, NT>;
  const auto kernel = halves_kernel<S>;
  if (const int error = raise_shared(kernel, S::kBytes); error != 0) return error;
  const auto pairs = static_cast<unsigned>(ceil_div(list.first_block[list.count], share));
  return launch_cluster(kernel, dim3(pairs * 2), dim3(kThreads), S::kBytes, dim3(2), list,
                        static_cast<int>(tokens), share);
}

constexpr int kMost = 6;  // tiles of 16 rows of a pair

ProductList with_tiles(const ProductList& list) {
  return with_blocks(list, 16);
}
int share_of(const ProductList& list) {
  return static_cast<int>(ceil_div(list.first_block[list.count], multiprocessors / 2));
}

}  // namespace

bool halves_take(const ProductList& list, int64_t tokens) {
  return tokens <= 128 && leaves(list.of[0].weight.cols) == kWarps &&
         share_of(with_tiles(list)) <= kMost;
}

int run_halves(const ProductList& given, int64_t tokens) {
  const ProductList list = with_tiles(given);
  const int share = share_of(list);
  if (tokens <= 64) {
    return share <= 4 ? launch_halves<1, 8>(list, tokens, share)
                      : launch_halves<1, 12>(list, tokens, share);
  }
  return share <= 4 ? launch_halves<2, 8>(list, tokens, share)
                    : launch_halves<2, 12>(list, tokens, share);
}

}  // namespace freshet::cuda

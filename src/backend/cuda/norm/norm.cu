// Norms of rows. The row length alone determines the order of its sums: lane v of 512 takes units
// of eight elements v, v + 512, ... from left to right, and one tree adds the lanes' sums. A thread
// is one lane if there are few rows, and four lanes if there are many: then a block has four rows,
// so that it writes core matrices in runs of 64 bytes.
#include "backend/cuda/runtime/cluster.cuh"
#include "backend/cuda/runtime/common.cuh"
#include "backend/cuda/runtime/kernels.cuh"

namespace freshet::cuda {
namespace {

constexpr int kLanes = 512, kWarpsOfRow = kLanes / 32;
constexpr int kFewRows = 264;  // two per SM of an H100

// A thread's part of a row: the first unit of each of its lanes in registers; others are read
// again.
// kAlone: the block has no other row.
template <int kThreads, bool kAlone = true>
struct RowNorm {
  static constexpr int kEach = kLanes / kThreads;  // lanes
  using Unit = float[kUnit];

  const float* x;
  int64_t n;
  bool whole;
  Unit held[kEach];

  __device__ __forceinline__ static int64_t column(int lane) {
    const unsigned thread = kAlone ? threadIdx.x : threadIdx.x % kThreads;
    return (static_cast<int64_t>(thread) + lane * kThreads) * kUnit;
  }
  __device__ __forceinline__ void load() {
#pragma unroll
    for (int l = 0; l < kEach; ++l) load_unit(held[l], x, column(l), n, whole);
  }
  // Sums f(v, column) over the row; all threads get the sum.
  template <class F>
  __device__ __forceinline__ float sum(float* shared, const F& f) const {
    float sums[kEach] = {};
#pragma unroll
    for (int l = 0; l < kEach; ++l) {
#pragma unroll
      for (int i = 0; i < kUnit; ++i) f(sums[l], held[l][i], column(l) + i);
      for (int64_t c = column(l) + kLanes * kUnit; c < n; c += kLanes * kUnit) {
        Unit v;
        load_unit(v, x, c, n, whole);
#pragma unroll
        for (int i = 0; i < kUnit; ++i) f(sums[l], v[i], c + i);
      }
    }
    const int warp = static_cast<int>((kAlone ? threadIdx.x : threadIdx.x % kThreads) / 32);
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {
#pragma unroll
      for (int l = 0; l < kEach; ++l) {
        sums[l] = __fadd_rn(sums[l], __shfl_xor_sync(0xffffffff, sums[l], step));
      }
    }
#pragma unroll
    for (int l = 0; l < kEach; ++l) {
      if (lane == 0) shared[warp + l * (kThreads / 32)] = sums[l];
    }
    if constexpr (kAlone) {
      __syncthreads();
    } else {
      asm volatile("bar.sync %0, %1;" ::"r"(1 + threadIdx.x / kThreads), "n"(kThreads) : "memory");
    }
    float v = shared[lane % kWarpsOfRow];
#pragma unroll
    for (int step = kWarpsOfRow / 2; step > 0; step >>= 1) {
      v = __fadd_rn(v, __shfl_xor_sync(0xffffffff, v, step));
    }
    return v;
  }
};

template <int kThreads>
__global__ void __launch_bounds__(kThreads, kThreads == kLanes ? 2 : 5)
    norm_kernel(Rows out, Rows x, NormArgs a, Activations act) {
  __shared__ float shared[2][kWarpsOfRow];
  using Norm = RowNorm<kThreads>;
  let_next_start();
  const int64_t row = blockIdx.x, n = x.cols;
  const int64_t end = act.data != nullptr ? padded_cols(act, n) : n;
  const bool whole_out = whole_rows(out.data, out.stride);
  const bool whole_weight = whole_rows(a.weight, 0) && whole_rows(a.bias, 0);
  // With a single row memory latency dominates, so weights are loaded before the row is ready.
  typename Norm::Unit weight[Norm::kEach];
  const auto load_weight = [&] {
#pragma unroll
    for (int l = 0; l < Norm::kEach; ++l) {
      load_unit(weight[l], a.weight, Norm::column(l), a.weight != nullptr ? n : 0, whole_weight);
    }
  };
  if (kThreads == kLanes) load_weight();
  wait();
  if (row >= x.rows) {  // padding of the activations
    const float zeros[kUnit] = {};
    for (int64_t c = Norm::column(0); c < end; c += kThreads * kUnit) {
      put_any(act, row, c, n, zeros);
    }
    return;
  }
  Norm r;
  r.x = x.data + row * x.stride;
  r.n = n;
  r.whole = whole_rows(x.data, x.stride);
  r.load();
  const auto count = static_cast<float>(n);
  float mean = 0.0f;
  if (a.layer != 0) {
    mean = r.sum(shared[0], [](float& s, float v, int64_t) { s = __fadd_rn(s, v); }) / count;
  }
  const float squares = r.sum(shared[1], [&](float& s, float v, int64_t c) {
    const float d = c < n ? v - mean : 0.0f;
    s = __fmaf_rn(d, d, s);
  });
  const float scale = rsqrtf(squares / count + a.eps);
  const auto put = [&](int64_t c, typename Norm::Unit& v, const typename Norm::Unit& w) {
    if (c >= end) return;
    float b[kUnit];
    load_unit(b, a.bias, c, a.bias != nullptr ? n : 0, whole_weight);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      v[i] = __fmul_rn(__fsub_rn(v[i], mean), scale);
      if (a.weight != nullptr) v[i] = __fmul_rn(v[i], w[i]);
      if (a.bias != nullptr) v[i] = __fadd_rn(v[i], b[i]);
      if (c + i >= n) v[i] = 0.0f;
    }
    if (out.data != nullptr) store_unit(out.data + row * out.stride, v, c, n, whole_out);
    if (act.data != nullptr) put_any(act, row, c, n, v);
  };
  if (kThreads != kLanes) load_weight();
#pragma unroll
  for (int l = 0; l < Norm::kEach; ++l) {
    put(Norm::column(l), r.held[l], weight[l]);
    for (int64_t c = Norm::column(l) + kLanes * kUnit; c < end; c += kLanes * kUnit) {
      typename Norm::Unit v, w;
      load_unit(v, r.x, c, n, r.whole);
      load_unit(w, a.weight, c, a.weight != nullptr ? n : 0, whole_weight);
      put(c, v, w);
    }
  }
}

// An RMS norm of whole units, as most layers have.
bool plain(const Rows& x, const NormArgs& a) {
  const auto whole = [](const float* p, int64_t stride) {
    return reinterpret_cast<uintptr_t>(p) % 16 == 0 && stride % 4 == 0;
  };
  return a.layer == 0 && a.weight != nullptr && a.bias == nullptr && x.cols % kUnit == 0 &&
         whole(x.data, x.stride) && whole(a.weight, 0);
}

__device__ __forceinline__ void load_whole(float (&v)[kUnit], const float* from) {
  load_unit(v, from, 0, kUnit, true);
}

// Both kernels for plain norms compute a row's sum of squares in this order, so that they are
// bit-identical. v: a lane's first unit of row `from`, at column `first`; zeros for padding rows.
constexpr int kRound = kLanes * kUnit;

__device__ __forceinline__ float squares_of_warp(const float (&v)[kUnit], const float* from,
                                                 int first, int n, bool real) {
  float sum = 0.0f;
  const auto add = [&](const float(&of)[kUnit]) {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) sum = __fmaf_rn(of[i], of[i], sum);
  };
  add(v);
#pragma unroll 1
  for (int c = first + kRound; c < n && real; c += kRound) {
    float more[kUnit];
    load_whole(more, from + c);
    add(more);
  }
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) {
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffff, sum, step));
  }
  return sum;
}

__device__ __forceinline__ float sum_of_warps(const float (&of_warps)[kWarpsOfRow], int lane) {
  float sum = of_warps[lane % kWarpsOfRow];
#pragma unroll
  for (int step = kWarpsOfRow / 2; step > 0; step >>= 1) {
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffff, sum, step));
  }
  return sum;
}

// For one row or a few: latency dominates, so there is little code.
__global__ void __launch_bounds__(kLanes, 3)
    plain_norm_kernel(Rows x, NormArgs a, Activations act) {
  __shared__ float shared[kWarpsOfRow];
  let_next_start();
  const int n = static_cast<int>(x.cols), end = static_cast<int>(padded_cols(act, n));
  const int row = static_cast<int>(blockIdx.x), lane = static_cast<int>(threadIdx.x % 32);
  const int first = static_cast<int>(threadIdx.x) * kUnit;
  float weight[kUnit] = {}, v[kUnit] = {};
  if (first < n) load_whole(weight, a.weight + first);
  wait();
  const bool real = row < x.rows;  // or padding of the activations
  const float* from = x.data + row * x.stride;
  if (real && first < n) load_whole(v, from + first);
  float sum = squares_of_warp(v, from, first, n, real);
  if (lane == 0) shared[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = sum_of_warps(shared, lane);
  const float scale = rsqrtf(sum / static_cast<float>(n) + a.eps);
#pragma unroll 1
  for (int c = first; c < end; c += kRound) {
    if (c > first) {
      if (real && c < n) load_whole(v, from + c);
      if (c < n) load_whole(weight, a.weight + c);
    }
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      v[i] = real && c < n ? __fmul_rn(__fmul_rn(v[i], scale), weight[i]) : 0.0f;
    }
    put_any(act, row, c, n, v);
  }
}

// The same for some dozens of rows as core matrices: a cluster has the eight rows of a tile, and
// each of its blocks an eighth of the lanes of all rows, so that whole lines are written. With one
// row per block, each unit was a memory request of its own; an SM issues one in about five cycles,
// which was half of the time. The order of sums is plain_norm_kernel's, so results are
// bit-identical.
constexpr int kClusterBlocks = 8, kLanesOfBlock = kLanes / kClusterBlocks;
constexpr int kTileUnit = kTokenTile * 16 + 16;  // for all rows; padded against bank conflicts
constexpr int kLeastOfClusters = 17;             // rows

__global__ void __launch_bounds__(kLanes, 3)
    plain_cluster_kernel(Rows x, NormArgs a, Activations act) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  __shared__ float shared[kTokenTile][kWarpsOfRow];
  __shared__ __align__(16) uint8_t staged[kLanesOfBlock * kTileUnit];
  __shared__ uint64_t there;
  constexpr int kWarpsOfLanes = kLanesOfBlock / 32;
  constexpr int kUnits = kPadCols / kUnit, kTileBytes = kTokenTile * kPadCols * 2;
  let_next_start();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int rank = static_cast<int>(blockIdx.x) % kClusterBlocks;
  const int tile = static_cast<int>(blockIdx.x) / kClusterBlocks;
  const int in_tile = warp / kWarpsOfLanes, row = tile * kTokenTile + in_tile;
  const int of_row = rank * kWarpsOfLanes + warp % kWarpsOfLanes;  // this warp among 16
  const int n = static_cast<int>(x.cols), first = (of_row * 32 + lane) * kUnit;
  if (thread == 0) {
    barrier_init(&there, 1);
    barrier_expect(&there, sizeof shared);
    barriers_ready();
  }
  __syncwarp();
  cluster_arrive_relaxed();
  float weight[kUnit] = {}, v[kUnit] = {};
  if (first < n) load_whole(weight, a.weight + first);
  cluster_wait();  // the other blocks have started
  wait();
  const bool real = row < x.rows;  // or padding of the activations
  const float* from = x.data + row * x.stride;
  if (real && first < n) load_whole(v, from + first);
  float sum = squares_of_warp(v, from, first, n, real);
  if (lane < kClusterBlocks) send_to_block(&shared[in_tile][of_row], lane, sum, &there);
  barrier_wait(&there, 0);
  sum = sum_of_warps(shared[in_tile], lane);
  const float scale = rsqrtf(sum / static_cast<float>(n) + a.eps);
#pragma unroll 1
  for (int c = first, base = rank * kLanesOfBlock * kUnit; base < n; c += kRound, base += kRound) {
    if (c > first) {
      __syncthreads();  // the previous round has been written
      if (real && c < n) load_whole(v, from + c);
      if (c < n) load_whole(weight, a.weight + c);
    }
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      v[i] = real && c < n ? __fmul_rn(__fmul_rn(v[i], scale), weight[i]) : 0.0f;
    }
    *reinterpret_cast<uint4*>(staged + (c - base) / kUnit * kTileUnit + in_tile * 16) = make_uint4(
        pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
    __syncthreads();
    const int unit = thread / kTokenTile, its_row = thread % kTokenTile;
    const int64_t to = (base / kPadCols + unit / kUnits) * act.core_tiles + tile;
    if (base + unit * kUnit < n) {
      *reinterpret_cast<uint4*>(act.data + to * kTileBytes + unit % kUnits * 128 + its_row * 16) =
          *reinterpret_cast<const uint4*>(staged + unit * kTileUnit + its_row * 16);
    }
  }
#endif
}

// For many rows whose F32 result is needed: a thread keeps all units of its lanes (kEach) and
// little else, so that many rows are in flight.
template <int kEach>
__global__ void __launch_bounds__(kLanes / 4, 24 / kEach)
    plain_rows_kernel(Rows out, Rows x, NormArgs a) {
  __shared__ float shared[kWarpsOfRow];
  constexpr int kThreads = kLanes / 4, kWarpsOfBlock = kThreads / 32;
  let_next_start();
  const auto n = static_cast<int>(x.cols), lane = static_cast<int>(threadIdx.x % 32);
  const int first = static_cast<int>(threadIdx.x) * kUnit;
  wait();
  const float* from = x.data + blockIdx.x * x.stride;
  float v[kEach][kUnit] = {};
#pragma unroll
  for (int l = 0; l < kEach; ++l) {
    const int c = first + l * kThreads * kUnit;
    if (c < n) load_whole(v[l], from + c);
  }
#pragma unroll
  for (int l = 0; l < 4; ++l) {
    float sum = 0.0f;
    if (l < kEach) {
#pragma unroll
      for (int i = 0; i < kUnit; ++i) sum = __fmaf_rn(v[l][i], v[l][i], sum);
#pragma unroll
      for (int step = 16; step > 0; step >>= 1) {
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffff, sum, step));
      }
    }
    if (lane == 0) shared[threadIdx.x / 32 + l * kWarpsOfBlock] = sum;
  }
  __syncthreads();
  float sum = shared[lane % kWarpsOfRow];
#pragma unroll
  for (int step = kWarpsOfRow / 2; step > 0; step >>= 1) {
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffff, sum, step));
  }
  const float scale = rsqrtf(sum / static_cast<float>(n) + a.eps);
#pragma unroll
  for (int l = 0; l < kEach; ++l) {
    const int c = first + l * kThreads * kUnit;
    if (c >= n) continue;
    float w[kUnit];
    load_whole(w, a.weight + c);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) w[i] = __fmul_rn(__fmul_rn(v[l][i], scale), w[i]);
    store_unit(out.data + blockIdx.x * out.stride, w, c, n, true);
  }
}

int launch_plain_rows(const Context& ctx, const Rows& out, const Rows& x, const NormArgs& norm) {
  const auto kernel = x.cols <= kLanes * kUnit / 2 ? plain_rows_kernel<2> : plain_rows_kernel<4>;
  return launch(ctx, kernel, dim3(static_cast<unsigned>(x.rows)), dim3(kLanes / 4), 0, out, x,
                norm);
}

// For many rows whose result only GEMMs read, as core matrices.
constexpr int kTileRows = 4, kTileThreads = kLanes / 4;
constexpr int kStagedUnit = kTileRows * 16 + 16;  // no bank conflicts within a quarter warp
constexpr int64_t kMostStaged = 8192;             // columns

__global__ void __launch_bounds__(kTileRows* kTileThreads, 2)
    norm_tile_kernel(Rows x, NormArgs a, Activations act) {
  extern __shared__ __align__(16) uint8_t staged[];
  __shared__ float shared[kTileRows][2][kWarpsOfRow];
  using Norm = RowNorm<kTileThreads, false>;
  let_next_start();
  const int in_tile = static_cast<int>(threadIdx.x / kTileThreads);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kTileRows, row = first + in_tile;
  const int64_t n = x.cols, end = padded_cols(act, n);
  const bool whole_weight = whole_rows(a.weight, 0) && whole_rows(a.bias, 0);
  wait();
  Norm r;
  r.x = x.data + row * x.stride;
  r.n = row < x.rows ? n : 0;
  r.whole = whole_rows(x.data, x.stride);
  r.load();
  const auto count = static_cast<float>(n);
  float mean = 0.0f;
  if (a.layer != 0) {
    mean =
        r.sum(shared[in_tile][0], [](float& s, float v, int64_t) { s = __fadd_rn(s, v); }) / count;
  }
  const float squares = r.sum(shared[in_tile][1], [&](float& s, float v, int64_t c) {
    const float d = c < r.n ? v - mean : 0.0f;
    s = __fmaf_rn(d, d, s);
  });
  const float scale = rsqrtf(squares / count + a.eps);
  const auto put = [&](int64_t c, Norm::Unit& v) {
    if (c >= end) return;
    Norm::Unit w, b;
    load_unit(w, a.weight, c, a.weight != nullptr ? n : 0, whole_weight);
    load_unit(b, a.bias, c, a.bias != nullptr ? n : 0, whole_weight);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      v[i] = __fmul_rn(__fsub_rn(v[i], mean), scale);
      if (a.weight != nullptr) v[i] = __fmul_rn(v[i], w[i]);
      if (a.bias != nullptr) v[i] = __fadd_rn(v[i], b[i]);
      if (c + i >= r.n) v[i] = 0.0f;
    }
    *reinterpret_cast<uint4*>(staged + c / kUnit * kStagedUnit + in_tile * 16) = make_uint4(
        pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
  };
#pragma unroll
  for (int l = 0; l < Norm::kEach; ++l) {
    put(Norm::column(l), r.held[l]);
    for (int64_t c = Norm::column(l) + kLanes * kUnit; c < end; c += kLanes * kUnit) {
      Norm::Unit v;
      load_unit(v, r.x, c, r.n, r.whole);
      put(c, v);
    }
  }
  __syncthreads();
  const int to_row = static_cast<int>(threadIdx.x % kTileRows);
  for (int64_t unit = threadIdx.x / kTileRows; unit < end / kUnit; unit += kTileThreads) {
    *reinterpret_cast<uint4*>(act.data + activation_at(act, first + to_row, unit * kUnit, n) * 2) =
        *reinterpret_cast<const uint4*>(staged + unit * kStagedUnit + to_row * 16);
  }
}

// The same for plain norms, for GEMMs in BF16 or E4M3: the weight is in shared memory before the
// rows are ready, and four lanes of a half warp compute its four scales.
template <bool kE4M3>
struct Staged {  // units of a row: 16 bytes of each of the tile's rows
  static constexpr int kUnits = kE4M3 ? 2 : 1;
  static __host__ __device__ int bytes(int cols) { return cols / (kUnits * kUnit) * kStagedUnit; }
  static __host__ __device__ int all(int cols) {  // with the weight and scales
    return bytes(cols) + cols * 4 + cols / kE4M3Cols * kTileRows * 4;
  }
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// Stages a row's part of the tile: a thread's four lanes from column c on, each 4 lanes' units
// apart.
template <bool kE4M3>
__device__ __forceinline__ void stage(uint8_t* staged, float* scales, int row, int c, int n,
                                      const float (&v)[4][kUnit]) {
  constexpr int kApart = kTileThreads * kUnit;
  if constexpr (kE4M3) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    float most = 0.0f;
#pragma unroll
    for (int l = 0; l < 4; ++l) {
      const float its = most_of_128(v[l]);
      if (lane % 4 == l) most = its;
    }
    const E4M3Scale scale = e4m3_scale(most);
    const int mine = c + lane % 4 * kApart;
    if (lane % 16 < 4 && mine < n) scales[mine / kE4M3Cols * kTileRows + row] = scale.down;
#pragma unroll
    for (int l = 0; l < 4; ++l) {
      const float up = __shfl_sync(0xffffffff, scale.up, lane / 16 * 16 + l);
      const int at = c + l * kApart;
      if (at >= n) continue;
      *reinterpret_cast<uint2*>(staged + at / 16 * kStagedUnit + row * 16 + at % 16) =
          e4m3_codes(v[l], {up, 0.0f});
    }
  } else {
#pragma unroll
    for (int l = 0; l < 4; ++l) {
      const int at = c + l * kApart;
      if (at >= n) continue;
      *reinterpret_cast<uint4*>(staged + at / kUnit * kStagedUnit + row * 16) =
          make_uint4(pack_bf16(v[l][0], v[l][1]), pack_bf16(v[l][2], v[l][3]),
                     pack_bf16(v[l][4], v[l][5]), pack_bf16(v[l][6], v[l][7]));
    }
  }
}

// Writes four rows of core matrices in runs of 64 bytes, and scales in runs of 16.
template <bool kE4M3>
__device__ __forceinline__ void put_staged(const Activations& act, const uint8_t* staged,
                                           const float* scales, int first, int n) {
  const auto row = static_cast<int>(threadIdx.x % kTileRows), in_tile = first % kTokenTile;
  constexpr int kCols = kE4M3 ? kE4M3Cols : 64, kUnits = kCols / (Staged<kE4M3>::kUnits * kUnit);
  constexpr int kBytes = kE4M3 ? kE4M3TileBytes : kTokenTile * 64 * 2;
  uint8_t* to = act.data + static_cast<int64_t>(first / kTokenTile) * kBytes;
  const int64_t step = act.core_tiles * kBytes;
  for (int u = static_cast<int>(threadIdx.x) / kTileRows; u < n / kCols * kUnits;
       u += kTileThreads) {
    *reinterpret_cast<uint4*>(to + u / kUnits * step + u % kUnits * 128 + (in_tile + row) * 16) =
        *reinterpret_cast<const uint4*>(staged + u * kStagedUnit + row * 16);
  }
  if constexpr (kE4M3) {
    for (int b = static_cast<int>(threadIdx.x); b < n / kCols; b += kLanes) {
      *reinterpret_cast<float4*>(to + b * step + kTokenTile * kE4M3Cols + in_tile * 4) =
          *reinterpret_cast<const float4*>(scales + b * kTileRows);
    }
  }
}
#endif

template <bool kE4M3>
__global__ void __launch_bounds__(kLanes, 2)
    plain_tile_kernel(Rows x, NormArgs a, Activations act) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) uint8_t staged[];
  __shared__ float shared[kTileRows][kWarpsOfRow];
  constexpr int kApart = kTileThreads * kUnit;
  let_next_start();
  const auto n = static_cast<int>(x.cols), first = static_cast<int>(blockIdx.x) * kTileRows;
  const auto in_tile = static_cast<int>(threadIdx.x / kTileThreads), row = first + in_tile;
  const auto lane = static_cast<int>(threadIdx.x % 32);
  const int from = static_cast<int>(threadIdx.x % kTileThreads) * kUnit;
  auto* weight = reinterpret_cast<float*>(staged + Staged<kE4M3>::bytes(n));
  float* scales = weight + n;
  for (int c = static_cast<int>(threadIdx.x) * 4; c < n; c += kLanes * 4) {
    cp_async16(weight + c, a.weight + c);
  }
  cp_async_commit();
  wait();
  const bool real = row < x.rows;  // or padding of the activations
  const float* its = x.data + (real ? row : 0) * x.stride;
  const auto load = [&](float(&v)[4][kUnit], int c) {
#pragma unroll
    for (int l = 0; l < 4; ++l) {
      if (real && c + l * kApart < n) {
        load_whole(v[l], its + c + l * kApart);
      } else {
#pragma unroll
        for (float& each : v[l]) each = 0.0f;
      }
    }
  };
  float v[4][kUnit], sums[4] = {};
  const auto add = [&] {
#pragma unroll
    for (int l = 0; l < 4; ++l) {
#pragma unroll
      for (const float each : v[l]) sums[l] = __fmaf_rn(each, each, sums[l]);
    }
  };
#pragma unroll 1
  for (int base = 0; base < n; base += kRound) {
    load(v, base + from);
    add();
  }
#pragma unroll
  for (int l = 0; l < 4; ++l) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {
      sums[l] = __fadd_rn(sums[l], __shfl_xor_sync(0xffffffff, sums[l], step));
    }
    if (lane == 0)
      shared[in_tile][threadIdx.x % kTileThreads / 32 + l * (kTileThreads / 32)] = sums[l];
  }
  cp_async_wait<0>();
  __syncthreads();
  float sum = shared[in_tile][lane % kWarpsOfRow];
#pragma unroll
  for (int step = kWarpsOfRow / 2; step > 0; step >>= 1) {
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffff, sum, step));
  }
  const float scale = rsqrtf(sum / static_cast<float>(n) + a.eps);
#pragma unroll 1
  for (int base = 0; base < n; base += kRound) {
    const int c = base + from;
    if (n > kRound) load(v, c);
#pragma unroll
    for (int l = 0; l < 4; ++l) {
      if (c + l * kApart >= n) continue;
      float w[kUnit];
      load_whole(w, weight + c + l * kApart);
#pragma unroll
      for (int i = 0; i < kUnit; ++i) v[l][i] = __fmul_rn(__fmul_rn(v[l][i], scale), w[i]);
    }
    stage<kE4M3>(staged, scales, in_tile, c, n, v);
  }
  __syncthreads();
  put_staged<kE4M3>(act, staged, scales, first, n);
#endif
}

template <bool kE4M3>
int launch_plain_tiles(const Context& ctx, const Rows& x, const NormArgs& norm,
                       const Activations& act) {
  const auto kernel = plain_tile_kernel<kE4M3>;
  const int bytes = Staged<kE4M3>::all(static_cast<int>(x.cols));
  if (const int error = raise_shared(kernel, bytes); error != 0) return error;
  const int64_t tiles = ceil_div(x.rows, kTokenTile) * (kTokenTile / kTileRows);
  return launch(ctx, kernel, dim3(static_cast<unsigned>(tiles)), dim3(kLanes),
                static_cast<size_t>(bytes), x, norm, act);
}

}  // namespace

int norm(const Context& ctx, const Rows* out, const Rows* x, const NormArgs* norm,
         const Activations* act) {
  if (act->data != nullptr && act->int8 != 0) return norm_int8(ctx, *x, *norm, *act);
  const int64_t rows = act->data != nullptr ? ceil_div(x->rows, kTokenTile) * kTokenTile : x->rows;
  const bool usual = plain(*x, *norm);
  if (x->rows > kFewRows && act->data == nullptr && usual && whole_rows(out->data, out->stride) &&
      x->cols <= kLanes * kUnit) {
    return launch_plain_rows(ctx, *out, *x, *norm);
  }
  if (ctx.capability >= 90 && x->rows > kFewRows && act->core_tiles > 0 && out->data == nullptr &&
      usual && x->cols <= kMostStaged && x->cols % kE4M3Cols == 0) {
    return act->e4m3 != 0 ? launch_plain_tiles<true>(ctx, *x, *norm, *act)
                          : launch_plain_tiles<false>(ctx, *x, *norm, *act);
  }
  if (x->rows > kFewRows && act->core_tiles > 0 && act->e4m3 == 0 && out->data == nullptr &&
      x->cols <= kMostStaged) {
    const auto bytes = static_cast<int>(padded_cols(*act, x->cols) / kUnit) * kStagedUnit;
    if (const int error = raise_shared(norm_tile_kernel, bytes); error != 0) return error;
    return launch(ctx, norm_tile_kernel, dim3(static_cast<unsigned>(rows / kTileRows)),
                  dim3(kTileRows * kTileThreads), static_cast<size_t>(bytes), *x, *norm, *act);
  }
  const dim3 grid(static_cast<unsigned>(rows));
  if (ctx.capability >= 90 && x->rows >= kLeastOfClusters && x->rows <= kFewRows &&
      act->core_tiles > 0 && act->e4m3 == 0 && out->data == nullptr && usual &&
      x->cols % kPadCols == 0) {
    return launch_cluster(ctx, plain_cluster_kernel, grid, dim3(kLanes), 0, dim3(kClusterBlocks),
                          *x, *norm, *act);
  }
  if (x->rows <= kFewRows && act->data != nullptr && out->data == nullptr && usual) {
    return launch(ctx, plain_norm_kernel, grid, dim3(kLanes), 0, *x, *norm, *act);
  }
  if (x->rows <= kFewRows) {
    return launch(ctx, norm_kernel<kLanes>, grid, dim3(kLanes), 0, *out, *x, *norm, *act);
  }
  return launch(ctx, norm_kernel<kLanes / 4>, grid, dim3(kLanes / 4), 0, *out, *x, *norm, *act);
}

}  // namespace freshet::cuda

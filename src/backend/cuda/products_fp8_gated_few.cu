// Gate and up in FP8 with at most 8 tokens, and the gated unit of their sums in E4M3.
//
// A block takes 128 features, which share a scale: of four warpgroups two have panels of 64 rows of
// gate, two the same of up, weights on the 64-row side of wgmma, each with a ring of its own. All
// of K is one leaf (whole_in_k()). Tokens are copied once, and stay. What the rings hold is asked
// for before the kernel in front has ended, a little at a time (ahead.cuh). The bits are those of
// products_fp8_gated.cu.
#include "backend/cuda/ahead.cuh"
#include "backend/cuda/products_fp8_few.cuh"
#include "backend/cuda/products_gated.cuh"

namespace freshet::cuda {
namespace {

constexpr int kGroups = 4, kConsumers = kGroups * 128;
constexpr int kThreads = kConsumers + 32 * kGroups;  // a warp a ring copies
constexpr int kPanels = kE4M3Cols / kPanelRows;      // of gate, and of up
constexpr int kMostStages = 8;

// Where gate's and up's sums meet, and codes wait to be written.
struct Meeting {
  float4 up[kPanels][128];
  float most[kPanels * 4][kTokenTile];  // of each warp's features
  alignas(16) uint8_t codes[kE4M3TileBytes];
};

int own_bytes(int64_t cols) {
  return most_steps(cols, 1) * kE4M3TileBytes;
}
int stages_for(int64_t cols) {
  const int fit = (kFp8SharedBytes - static_cast<int>(sizeof(Meeting)) - own_bytes(cols)) /
                  kPanelBytes / kGroups;
  return fit < kMostStages ? fit : kMostStages;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
using Panels = Ring<kPanelBytes>;

// One thread a ring. Each copies its share of the tokens.
__device__ __forceinline__ void produce(Panels ring, const ProductList& list, const Tour& tour,
                                        int group, uint8_t* own, uint64_t* here,
                                        const volatile int& ended) {
  constexpr int kInFlight = (kAheadBytes / kGroups + kPanelBytes - 1) / kPanelBytes;
  const ProductArgs& p = list.of[group / kPanels];
  const int steps = most_steps(p.weight.cols, 1);
  const auto start_tokens = [&] {
    wait();
    const int first = steps * group / kGroups;
    const auto bytes =
        static_cast<uint32_t>((steps * (group + 1) / kGroups - first) * kE4M3TileBytes);
    barrier_expect(here, bytes);
    if (bytes > 0) bulk_copy(own + first * kE4M3TileBytes, tokens_at(p, 1, first, 0), bytes, here);
  };
  int issued = 0;  // in all
  for (int tile = tour.first; tile < tour.tiles; tile += tour.step) {
    const uint8_t* from = panel_at(p.weight, tile * kPanels + group % kPanels, 0);
    for (int n = 0; n < steps; ++n, ++issued, ring.next(), from += kPanelBytes) {
      if (issued == ring.count) start_tokens();
      if (issued >= kInFlight && issued < ring.count) {
        landed(&ring.full[issued - kInFlight], ended);
      }
      if (issued >= ring.count) barrier_wait(&ring.empty[ring.stage], ring.round ^ 1);
      barrier_expect(&ring.full[ring.stage], kPanelBytes);
      copy_weights(ring.data(), from, kPanelBytes, &ring.full[ring.stage]);
    }
  }
  if (issued <= ring.count) start_tokens();
}

// The sums of a warpgroup's panel, as products give them.
__device__ __forceinline__ void sum_panel(float (&sum)[1][4], Panels& ring, const ProductArgs& p,
                                          int64_t panel, bool of_rows, const uint8_t* own,
                                          uint64_t* here, bool first) {
  constexpr uint32_t kStagePlaces = kPanelBytes >> 4, kTilePlaces = kE4M3TileBytes >> 4;
  const uint32_t ring_at = kept_place(ring.stages), own_at = kept_place(own);
  const int steps = most_steps(p.weight.cols, 1), lane = static_cast<int>(threadIdx.x % 32);
  clear(sum);
  int share = 0;  // of the tokens
  for (int n = 0; n < steps; ++n, ring.next()) {
    for (; first && share < kGroups && steps * share / kGroups <= n; ++share) {
      barrier_wait(&here[share], 0);
    }
    barrier_wait(&ring.full[ring.stage], ring.round);
    float part[1][4];
    fp8_ask<1>(part, ring_at + ring.stage * kStagePlaces, own_at + n * kTilePlaces);
    const float2 scales = step_scales(ring.data(), of_rows);
    wgmma_wait<0>();
    add_step<1>(sum, part, scales, own + n * kE4M3TileBytes);
    __syncwarp();
    if (lane == 0) barrier_arrive(&ring.empty[ring.stage]);
  }
  const int64_t row = panel * kPanelRows + threadIdx.x % 128 / 32 * 16 + lane / 4;
  if (of_rows) {
    const uint8_t* tile = p.weight.data + tile_at<FP8>(row / 16, p.weight.cols);
    const auto times = [&](int of) {
      return __ldg(reinterpret_cast<const float*>(tile + FP8::scale_place(of)));
    };
    const float2 scales = make_float2(times(lane / 4), times(lane / 4 + 8));
    sum[0][0] = __fmul_rn(sum[0][0], scales.x);
    sum[0][1] = __fmul_rn(sum[0][1], scales.x);
    sum[0][2] = __fmul_rn(sum[0][2], scales.y);
    sum[0][3] = __fmul_rn(sum[0][3], scales.y);
  }
  end_sums<1>(p, sum, row);
}

__device__ __forceinline__ void sync_gates() {
  asm volatile("bar.sync 1, 256;" ::: "memory");
}

// Gate's warpgroups: the unit's numbers of 128 features, as put_e4m3() does with the same.
__device__ __forceinline__ void put_features(Meeting& m, const Activations& act,
                                             const float (&gate)[4], int64_t tile, int panel,
                                             int64_t tokens) {
  const int thread = static_cast<int>(threadIdx.x % 128), lane = thread % 32;
  const int warp = panel * 4 + thread / 32, token = lane % 4 * 2;
  const float4 up = m.up[panel][thread];
  const float ups[4] = {up.x, up.y, up.z, up.w};
  float v[4], most[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[i] = token + i % 2 < tokens ? __fmul_rn(activate(gate[i], kSilu), ups[i]) : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    most[i] = fmaxf(fabsf(v[i]), fabsf(v[i + 2]));
#pragma unroll
    for (int step = 4; step < 32; step <<= 1) {
      most[i] = fmaxf(most[i], __shfl_xor_sync(0xffffffff, most[i], step));
    }
    if (lane < 4) m.most[warp][token + i] = most[i];
  }
  sync_gates();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    most[i] = 0.0f;
#pragma unroll
    for (int w = 0; w < kPanels * 4; ++w) most[i] = fmaxf(most[i], m.most[w][token + i]);
    const E4M3Scale scale = e4m3_scale(most[i]);
    const uint32_t two = two_e4m3(__fmul_rn(v[i], scale.up), __fmul_rn(v[i + 2], scale.up));
    uint8_t* to = m.codes + warp * 128 + (token + i) * 16 + lane / 4;
    to[0] = static_cast<uint8_t>(two);
    to[8] = static_cast<uint8_t>(two >> 8);
    if (warp == 0 && lane < 4) {
      reinterpret_cast<float*>(m.codes + kTokenTile * kE4M3Cols)[token + i] = scale.down;
    }
  }
  sync_gates();
  const int at = panel * 128 + thread;
  if (at < kE4M3TileBytes / 16) {
    reinterpret_cast<uint4*>(act.data + tile * kE4M3TileBytes)[at] =
        reinterpret_cast<const uint4*>(m.codes)[at];
  }
}
#endif

__global__ void __launch_bounds__(kThreads, 1)
    gated_few_kernel(const __grid_constant__ ProductList list, int64_t tokens, int tiles,
                     int stages, Activations act) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ uint64_t full[kGroups][kMostStages], empty[kGroups][kMostStages], here[kGroups];
  __shared__ volatile int ended;  // the kernel in front
  let_next_start();
  if (threadIdx.x == kConsumers) {
    ended = 0;
    for (int g = 0; g < kGroups; ++g) {
      for (int s = 0; s < stages; ++s) {
        barrier_init(&full[g][s], 1);
        barrier_init(&empty[g][s], 4);
      }
      barrier_init(&here[g], 1);
    }
    barriers_ready();
  }
  __syncthreads();
  const int warp = warp_index();
  const bool produces = warp >= kConsumers / 32;
  const int group = produces ? warp - kConsumers / 32 : warp / 4;
  const Tour tour{static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), tiles};
  Panels ring{shared + group * stages * kPanelBytes, full[group], empty[group], stages};
  auto& meeting = *reinterpret_cast<Meeting*>(shared + kGroups * stages * kPanelBytes);
  uint8_t* own = reinterpret_cast<uint8_t*>(&meeting + 1);
  if (produces) {
    if (threadIdx.x % 32 == 0) produce(ring, list, tour, group, own, &here[group], ended);
    return;
  }
  const int matrix = group / kPanels, panel = group % kPanels;
  const ProductArgs& p = list.of[matrix];
  int how = scaled(p.weight, static_cast<int64_t>(tour.first) * kPanels + panel);
  wait();
  if (threadIdx.x == 0) ended = 1;
  for (int tile = tour.first; tile < tour.tiles; tile += tour.step) {
    const bool of_rows = how == FP8::kOfRows;
    if (tile + tour.step < tour.tiles) {
      how = scaled(p.weight, static_cast<int64_t>(tile + tour.step) * kPanels + panel);
    }
    float sum[1][4];
    sum_panel(sum, ring, p, static_cast<int64_t>(tile) * kPanels + panel, of_rows, own, here,
              tile == tour.first);
    const auto& v = sum[0];
    if (matrix == 1) {
      meeting.up[panel][threadIdx.x % 128] = make_float4(v[0], v[1], v[2], v[3]);
      asm volatile("bar.arrive 2, 512;" ::: "memory");
      if (tile + tour.step < tour.tiles) asm volatile("bar.sync 3, 512;" ::: "memory");
    } else {
      asm volatile("bar.sync 2, 512;" ::: "memory");
      put_features(meeting, act, v, tile, panel, tokens);
      if (tile + tour.step < tour.tiles) asm volatile("bar.arrive 3, 512;" ::: "memory");
    }
  }
#endif
}

}  // namespace

bool fp8_gated_few_fits(int64_t cols, int64_t tokens) {
  return tokens <= kTokenTile && stages_for(cols) >= 3;
}

int run_fp8_gated_few(const ProductList& gate_and_up, int64_t tokens, const Activations& act) {
  const WeightView& gate = gate_and_up.of[0].weight;
  const int stages = stages_for(gate.cols), tiles = static_cast<int>(gate.rows / kE4M3Cols);
  const int bytes =
      kGroups * stages * kPanelBytes + static_cast<int>(sizeof(Meeting)) + own_bytes(gate.cols);
  const cudaError_t error =
      cudaFuncSetAttribute(gated_few_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return static_cast<int>(error);
  const int blocks = tiles < multiprocessors ? tiles : multiprocessors;
  return launch(gated_few_kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads),
                static_cast<size_t>(bytes), gate_and_up, tokens, tiles, stages, act);
}

}  // namespace freshet::cuda

// Gate and up GEMMs with FP8 weights and a SwiGLU epilogue in E4M3 for at most 64 tokens (Hopper).
//
// A block takes 128 features, which share a scale. Two of its four consumer warpgroups each take a
// panel of 64 rows of gate, the other two the same rows of up, with weights on the 64-row side of
// wgmma and one pipeline per warpgroup. K is a single slice (whole_in_k()). Up to 8 tokens, the
// activations are copied once and stay resident in shared memory; more tokens have a pipeline of
// their own. The weights that fit the pipelines are copied before the previous kernel ends, a few
// stages at a time (prefetch_weights.cuh). Results are bit-identical to swiglu_fp8_sm90_m65.cu.
#include "backend/cuda/gemm/gemm_fp8_sm90_m1_64.cuh"
#include "backend/cuda/gemm/swiglu_epilogue.cuh"

namespace freshet::cuda {
namespace {

constexpr int kGroups = 4, kConsumers = kGroups * 128;
constexpr int kThreads = kConsumers + 32 * kGroups;  // one producer warp per pipeline
constexpr int kPanels = kE4M3Cols / kPanelRows;      // panels of gate, and as many of up
constexpr int kMostStages = 8;

// Staging buffer in which up's sums are handed over to gate's warpgroups, kAtOnce tiles of 8 tokens
// at a time. The encoded output then reuses the buffer.
template <int NT>
struct Meeting {
  static constexpr int kAtOnce = NT < 4 ? NT : 4;
  float4 up[kAtOnce][kPanels][128];
  float most[kPanels * 4][NT * kTokenTile];  // largest magnitude of each warp's features
  __device__ __forceinline__ uint8_t* codes() { return reinterpret_cast<uint8_t*>(up); }
};
static_assert(sizeof(Meeting<8>::up) >= 8 * kE4M3TileBytes);

int own_bytes(int64_t cols) {
  return most_steps(cols, 1) * kE4M3TileBytes;
}
// Shared memory besides the pipelines: staging buffer, scratch for prefetches and resident
// activations.
int rest_bytes(int64_t cols) {
  return static_cast<int>(sizeof(Meeting<1>)) + kNearBytes + own_bytes(cols);
}
int stages_for(int64_t cols) {
  const int fit = (kFp8SharedBytes - rest_bytes(cols)) / kPanelBytes / kGroups;
  return fit < kMostStages ? fit : kMostStages;
}

// More than 8 tokens: a pipeline of panels per warpgroup, and one pipeline of activations with its
// own producer warp.
template <int NT>
struct Some {
  static constexpr int kThreads = kConsumers + 32 * (kGroups + 1);
  // Leaves registers for a norm's block: the bound is set as if this block had this many threads.
  static constexpr int kBoundThreads = NT <= 4 ? 896 : kThreads;
  static constexpr int kTokenBytes = NT * kE4M3TileBytes, kStages = 5;
  static constexpr int kRoom =
      kFp8SharedBytes - static_cast<int>(sizeof(Meeting<NT>)) - kGroups * kStages * kPanelBytes;
  static constexpr int kFit = kRoom / kTokenBytes;
  static constexpr int kTokenStages = kFit < 16 ? kFit : 16;
  static constexpr int kBytes = kGroups * kStages * kPanelBytes + kTokenStages * kTokenBytes +
                                static_cast<int>(sizeof(Meeting<NT>));
  static_assert(kTokenStages >= kStages);
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
using Panels = PanelRing<kPanelBytes>;

// Producer of one pipeline (one thread): copies the panels of all tiles; calls asked(n) before step
// n.
template <class Asked>
__device__ __forceinline__ void copy_panels(Panels ring, const ProductList& list, const Tour& tour,
                                            int group, const volatile int& ended,
                                            const Asked& asked) {
  // (Only one panel is in flight, so waiting for the lookup of its scales costs nothing.)
  constexpr int kInFlight = (kFp8AheadBytes / kGroups + kPanelBytes - 1) / kPanelBytes;
  const ProductArgs& p = list.of[group / kPanels];
  const int steps = most_steps(p.weight.cols, 1);
  const auto look_up = [&](int tile) {
    return scaled(p.weight, static_cast<int64_t>(tile) * kPanels + group % kPanels);
  };
  int issued = 0;  // K steps, over all tiles
  int how = look_up(tour.first);
  for (int tile = tour.first; tile < tour.tiles; tile += tour.step) {
    const uint8_t* from = panel_at(p.weight, tile * kPanels + group % kPanels, 0);
    const int next = tile + tour.step < tour.tiles ? look_up(tile + tour.step) : 0;
    for (int n = 0; n < steps; ++n, ++issued, ring.next(), from += kPanelBytes) {
      if (issued >= kInFlight && issued < ring.count) {
        landed(ring.pipe.filled(issued - kInFlight), ended);
      }
      asked(issued);
      if (issued >= ring.count) ring.pipe.acquire(ring.at);
      copy_codes(ring.data(), from, ring.filled());
      copy_scales(ring.data(), from, scale_bytes(how), ring.filled());
    }
    how = next;
  }
}

// Producer for up to 8 tokens: each pipeline's thread also copies its share of the activations,
// once the previous kernel has ended and before it requests more weights.
__device__ __forceinline__ void produce(const Panels& ring, const ProductList& list,
                                        const Tour& tour, int group, uint8_t* own, uint64_t* here,
                                        Near near, const volatile int& ended) {
  const ProductArgs& p = list.of[group / kPanels];
  const int steps = most_steps(p.weight.cols, 1);
  bool started = false;
  const auto start_tokens = [&] {
    wait();
    const int first = steps * group / kGroups;
    const auto bytes =
        static_cast<uint32_t>((steps * (group + 1) / kGroups - first) * kE4M3TileBytes);
    barrier_expect(here, bytes);
    if (bytes > 0) bulk_copy(own + first * kE4M3TileBytes, tokens_at(p, 1, first, 0), bytes, here);
    started = true;
  };
  copy_panels(ring, list, tour, group, ended, [&](int issued) {
    if (started || (issued < ring.count && ended == 0)) return;
    const int64_t panel = static_cast<int64_t>(tour.first) * kPanels + group % kPanels;
    near.bring(panel_at(p.weight, panel, issued), steps - issued, ended);
    start_tokens();
    near.end();
  });
  if (!started) start_tokens();
}

constexpr uint32_t kStagePlaces = kPanelBytes >> 4, kTilePlaces = kE4M3TileBytes >> 4;

// Looks up the pages (TLB) of the activations and of the output.
__device__ __forceinline__ void look_up_pages(const ProductArgs& p, const Activations& act,
                                              const Tour& tour) {
  if (threadIdx.x == 0) look_up_page(act.data + tour.first * act.core_tiles * kE4M3TileBytes);
  if (threadIdx.x == 1) look_up_page(p.act);
}

// Row scales of a lane's two rows if the panel has one scale per row: loaded before the K loop,
// since the epilogue would wait for them.
__device__ __forceinline__ float2 whole_scales(const ProductArgs& p, int64_t panel, int how) {
  if (how != FP8Panels::kOfRows) return make_float2(1.0f, 1.0f);
  const int64_t row = panel * kPanelRows + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  const float* at = row_scale(p.weight, row);
  const auto times = [&](int of) {
    float v;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(at + of));
    return v;
  };
  return make_float2(times(0), times(8));
}

// Turns a panel's sums into the output of a GEMM: times the row scales, then bias and so on.
template <int NT>
__device__ __forceinline__ void end_panel(float (&sum)[NT][4], const ProductArgs& p, int64_t panel,
                                          const float2& scales) {
#pragma unroll
  for (int j = 0; j < NT; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[j][i] = __fmul_rn(sum[j][i], i < 2 ? scales.x : scales.y);
  }
  end_sums<NT>(p, sum, panel * kPanelRows + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4);
}

// Sums of a warpgroup's panel, with resident activations.
__device__ __forceinline__ void sum_panel(float (&sum)[1][4], Panels& ring, const ProductArgs& p,
                                          int how, const uint8_t* own, uint64_t* here, bool first) {
  const uint32_t ring_at = kept_place(ring.stages), own_at = kept_place(own);
  const int steps = most_steps(p.weight.cols, 1), lane = static_cast<int>(threadIdx.x % 32);
  clear(sum);
  int share = 0;  // next part of the activations to wait for
  for (int n = 0; n < steps; ++n, ring.next()) {
    for (; first && share < kGroups && steps * share / kGroups <= n; ++share) {
      barrier_wait(&here[share], 0);
    }
    ring.pipe.wait(ring.at);
    float part[1][4];
    fp8_ask<1>(part, ring_at + ring.at.stage * kStagePlaces, own_at + n * kTilePlaces);
    const float2 scales = step_scales(ring.data(), how);
    wgmma_wait<0>();
    add_step<1>(sum, part, scales, own + n * kE4M3TileBytes);
    __syncwarp();
    ring.pipe.release(ring.at.stage);
  }
}

template <int NT>
using Tokens = PanelRing<NT * kE4M3TileBytes>;

// The same with a pipeline of activations.
template <int NT>
__device__ __forceinline__ void sum_panel(float (&sum)[NT][4], Panels& ring, Tokens<NT>& tokens,
                                          const ProductArgs& p, int how) {
  const uint32_t ring_at = kept_place(ring.stages), tokens_place = kept_place(tokens.stages);
  const int steps = most_steps(p.weight.cols, 1), lane = static_cast<int>(threadIdx.x % 32);
  clear(sum);
#pragma unroll 1
  for (int n = 0; n < steps; ++n, ring.next(), tokens.next()) {
    tokens.pipe.wait(tokens.at);
    ring.pipe.wait(ring.at);
    float part[NT][4];
    fp8_ask<NT>(part, ring_at + ring.at.stage * kStagePlaces,
                tokens_place + tokens.at.stage * (NT * kTilePlaces));
    const float2 scales = step_scales(ring.data(), how);
    wgmma_wait<0>();
    add_step<NT>(sum, part, scales, tokens.data());
    __syncwarp();
    ring.pipe.release(ring.at.stage);
    tokens.pipe.release(tokens.at.stage, 1);
  }
}

__device__ __forceinline__ void sync_gates() {
  asm volatile("bar.sync 1, 256;" ::: "memory");
}

// Replaces gate's sums of some token tiles by SwiGLU outputs; zeros beyond the last token.
template <int NT, int kFirst>
__device__ __forceinline__ void take_units(float (&v)[NT][4], const Meeting<NT>& m, int panel,
                                           int64_t tokens) {
  const int thread = static_cast<int>(threadIdx.x % 128), token = thread % 4 * 2;
#pragma unroll
  for (int j = 0; j < Meeting<NT>::kAtOnce; ++j) {
    const float4 up = m.up[j][panel][thread];
    const float ups[4] = {up.x, up.y, up.z, up.w};
    float(&its)[4] = v[kFirst + j];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool real = (kFirst + j) * kTokenTile + token + i % 2 < tokens;
      its[i] = real ? __fmul_rn(activate(its[i], kSilu), ups[i]) : 0.0f;
    }
  }
}

// Gate's warpgroups encode their outputs of 128 features as E4M3; bit-identical to put_e4m3().
template <int NT>
__device__ __forceinline__ void put_features(Meeting<NT>& m, const Activations& act,
                                             const float (&v)[NT][4], int64_t tile, int panel) {
  const int thread = static_cast<int>(threadIdx.x % 128), lane = thread % 32;
  const int warp = panel * 4 + thread / 32, token = lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < NT; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float most = fmaxf(fabsf(v[j][i]), fabsf(v[j][i + 2]));
#pragma unroll
      for (int step = 4; step < 32; step <<= 1) {
        most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, step));
      }
      if (lane < 4) m.most[warp][j * kTokenTile + token + i] = most;
    }
  }
  sync_gates();
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    uint8_t* codes = m.codes() + j * kE4M3TileBytes;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float most = 0.0f;
#pragma unroll
      for (int w = 0; w < kPanels * 4; ++w) {
        most = fmaxf(most, m.most[w][j * kTokenTile + token + i]);
      }
      const E4M3Scale scale = e4m3_scale(most);
      const uint32_t two = two_e4m3(__fmul_rn(v[j][i], scale.up), __fmul_rn(v[j][i + 2], scale.up));
      uint8_t* to = codes + warp * 128 + (token + i) * 16 + lane / 4;
      to[0] = static_cast<uint8_t>(two);
      to[8] = static_cast<uint8_t>(two >> 8);
      if (warp == 0 && lane < 4) {
        reinterpret_cast<float*>(codes + kTokenTile * kE4M3Cols)[token + i] = scale.down;
      }
    }
  }
  sync_gates();
  const int bytes =
      static_cast<int>(act.core_tiles) * kE4M3TileBytes;  // per K step; at most NT tiles
  for (int at = (panel * 128 + thread) * 16; at < bytes; at += kPanels * 128 * 16) {
    *reinterpret_cast<uint4*>(act.data + tile * bytes + at) =
        *reinterpret_cast<const uint4*>(m.codes() + at);
  }
}

// Epilogue of a tile: up's warpgroups hand over their sums; gate's warpgroups compute SwiGLU and
// write the result. Up's warpgroups wait for the buffer to be free again only if there are `more`
// tiles.
template <int NT>
__device__ __forceinline__ void meet(Meeting<NT>& m, const Activations& act, float (&sum)[NT][4],
                                     int matrix, int panel, int64_t tile, int64_t tokens,
                                     bool more) {
  constexpr int kAtOnce = Meeting<NT>::kAtOnce;
  static_assert(NT / kAtOnce <= 2);
  if (matrix == 1) {
#pragma unroll
    for (int first = 0; first < NT; first += kAtOnce) {
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const float(&v)[4] = sum[first + j];
        m.up[j][panel][threadIdx.x % 128] = make_float4(v[0], v[1], v[2], v[3]);
      }
      asm volatile("bar.arrive 2, 512;" ::: "memory");
      if (first + kAtOnce < NT || more) asm volatile("bar.sync 3, 512;" ::: "memory");
    }
    return;
  }
  asm volatile("bar.sync 2, 512;" ::: "memory");
  take_units<NT, 0>(sum, m, panel, tokens);
  if constexpr (kAtOnce < NT) {
    asm volatile("bar.arrive 3, 512;" ::: "memory");
    asm volatile("bar.sync 2, 512;" ::: "memory");
    take_units<NT, kAtOnce>(sum, m, panel, tokens);
  }
  put_features<NT>(m, act, sum, tile, panel);
  if (more) asm volatile("bar.arrive 3, 512;" ::: "memory");
}
#endif

__global__ void __launch_bounds__(kThreads, 1)
    gated_few_kernel(const __grid_constant__ ProductList list, int64_t tokens, int tiles,
                     int stages, Activations act) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ uint64_t full[kGroups][kMostStages], empty[kGroups][kMostStages];
  __shared__ uint64_t here[kGroups], near[kGroups];
  __shared__ volatile int ended;  // set once the previous kernel has ended
  let_next_start();
  if (threadIdx.x == kConsumers) {
    ended = 0;
    for (int g = 0; g < kGroups; ++g) {
      for (int s = 0; s < stages; ++s) {
        Pipeline{full[g], empty[g]}.init_stage(s, 4);
      }
      barrier_init(&here[g], 1);
      barrier_init(&near[g], 1);
    }
    barriers_ready();
  }
  __syncthreads();
  const int warp = warp_index();
  const bool produces = warp >= kConsumers / 32;
  const int group = produces ? warp - kConsumers / 32 : warp / 4;
  const Tour tour{static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), tiles};
  Panels ring{shared + group * stages * kPanelBytes, {full[group], empty[group]}, stages};
  auto& meeting = *reinterpret_cast<Meeting<1>*>(shared + kGroups * stages * kPanelBytes);
  uint8_t* near_at = reinterpret_cast<uint8_t*>(&meeting + 1);
  uint8_t* own = near_at + kNearBytes;
  if (produces) {
    if (threadIdx.x % 32 == 0) {
      produce(ring, list, tour, group, own, &here[group], {near_at, &near[group]}, ended);
    }
    return;
  }
  const int matrix = group / kPanels, panel = group % kPanels;
  const ProductArgs& p = list.of[matrix];
  int how = scaled(p.weight, static_cast<int64_t>(tour.first) * kPanels + panel);
  look_up_pages(p, act, tour);
  wait();
  if (threadIdx.x == 0) ended = 1;
  for (int tile = tour.first; tile < tour.tiles; tile += tour.step) {
    const int its_how = how;
    if (tile + tour.step < tour.tiles) {
      how = scaled(p.weight, static_cast<int64_t>(tile + tour.step) * kPanels + panel);
    }
    const int64_t its = static_cast<int64_t>(tile) * kPanels + panel;
    const float2 scales = whole_scales(p, its, its_how);
    float sum[1][4];
    sum_panel(sum, ring, p, its_how, own, here, tile == tour.first);
    end_panel<1>(sum, p, its, scales);
    meet<1>(meeting, act, sum, matrix, panel, tile, tokens, tile + tour.step < tour.tiles);
  }
#endif
}

template <int NT>
__global__ void __launch_bounds__(Some<NT>::kBoundThreads, 1)
    gated_some_kernel(const __grid_constant__ ProductList list, int64_t tokens, int tiles,
                      Activations act) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Some<NT>;
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ uint64_t full[kGroups][S::kStages], empty[kGroups][S::kStages];
  __shared__ uint64_t tokens_full[S::kTokenStages], tokens_empty[S::kTokenStages];
  __shared__ volatile int ended;  // set once the previous kernel has ended
  let_next_start();
  if (threadIdx.x == kConsumers) {
    ended = 0;
    for (int g = 0; g < kGroups; ++g) {
      for (int s = 0; s < S::kStages; ++s) {
        Pipeline{full[g], empty[g]}.init_stage(s, 4);
      }
    }
    for (int s = 0; s < S::kTokenStages; ++s) {
      Pipeline{tokens_full, tokens_empty}.init_stage(s, kConsumers / 32);
    }
    barriers_ready();
  }
  __syncthreads();
  const int warp = warp_index(), producer = warp - kConsumers / 32;
  const int group = producer >= 0 ? producer : warp / 4;
  const Tour tour{static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), tiles};
  uint8_t* rest = shared + kGroups * S::kStages * kPanelBytes;
  Tokens<NT> of_tokens{rest, {tokens_full, tokens_empty}, S::kTokenStages};
  auto& meeting = *reinterpret_cast<Meeting<NT>*>(rest + S::kTokenStages * S::kTokenBytes);
  const auto panels_of = [&](int which) {
    return Panels{
        shared + which * S::kStages * kPanelBytes, {full[which], empty[which]}, S::kStages};
  };
  if (producer == kGroups) {
    if (threadIdx.x % 32 == 0) {
      wait();
      ended = 1;
      const ProductArgs& p = list.of[0];
      const int64_t act_tiles = (tokens + 7) / 8;
      const auto bytes = static_cast<uint32_t>(act_tiles * kE4M3TileBytes);
      const int steps = most_steps(p.weight.cols, 1);
      int issued = 0;
      for (int tile = tour.first; tile < tour.tiles; tile += tour.step) {
        for (int n = 0; n < steps; ++n, ++issued, of_tokens.next()) {
          uint64_t* barrier = of_tokens.filled();
          if (issued >= of_tokens.count) {
            of_tokens.pipe.acquire(of_tokens.at);
          }
          barrier_expect(barrier, bytes);
          bulk_copy(of_tokens.data(), tokens_at(p, act_tiles, n, 0), bytes, barrier);
        }
      }
    }
    return;
  }
  if (producer >= 0) {
    if (threadIdx.x % 32 == 0) {
      copy_panels(panels_of(group), list, tour, group, ended, [](int) {});
    }
    return;
  }
  Panels ring = panels_of(group);
  const int matrix = group / kPanels, panel = group % kPanels;
  const ProductArgs& p = list.of[matrix];
  int how = scaled(p.weight, static_cast<int64_t>(tour.first) * kPanels + panel);
  look_up_pages(p, act, tour);
  wait();
  for (int tile = tour.first; tile < tour.tiles; tile += tour.step) {
    const bool more = tile + tour.step < tour.tiles;
    const int its_how = how;
    if (more) how = scaled(p.weight, static_cast<int64_t>(tile + tour.step) * kPanels + panel);
    const int64_t its = static_cast<int64_t>(tile) * kPanels + panel;
    const float2 scales = whole_scales(p, its, its_how);
    float sum[NT][4];
    sum_panel<NT>(sum, ring, of_tokens, p, its_how);
    end_panel<NT>(sum, p, its, scales);
    meet<NT>(meeting, act, sum, matrix, panel, tile, tokens, more);
  }
#endif
}

template <int NT>
int launch_some(const Context& ctx, const ProductList& gate_and_up, int64_t tokens,
                const Activations& act) {
  using S = Some<NT>;
  const auto kernel = gated_some_kernel<NT>;
  if (const int error = raise_shared(kernel, S::kBytes); error != 0) return error;
  const auto tiles = static_cast<int>(gate_and_up.of[0].weight.rows / kE4M3Cols);
  const int blocks = tiles < ctx.multiprocessors ? tiles : ctx.multiprocessors;
  return launch(ctx, kernel, dim3(static_cast<unsigned>(blocks)), dim3(S::kThreads),
                static_cast<size_t>(S::kBytes), gate_and_up, tokens, tiles, act);
}

}  // namespace

int run_fp8_gated_few(const Context& ctx, const ProductList& gate_and_up, int64_t tokens,
                      const Activations& act) {
  const WeightView& gate = gate_and_up.of[0].weight;
  const int stages = stages_for(gate.cols);
  if (tokens > 32) return launch_some<8>(ctx, gate_and_up, tokens, act);
  if (tokens > 16) return launch_some<4>(ctx, gate_and_up, tokens, act);
  if (tokens > 8 || stages < 3) return launch_some<2>(ctx, gate_and_up, tokens, act);
  const auto tiles = static_cast<int>(gate.rows / kE4M3Cols);
  const int bytes = kGroups * stages * kPanelBytes + rest_bytes(gate.cols);
  if (const int error = raise_shared(gated_few_kernel, bytes); error != 0) return error;
  const int blocks = tiles < ctx.multiprocessors ? tiles : ctx.multiprocessors;
  return launch(ctx, gated_few_kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads),
                static_cast<size_t>(bytes), gate_and_up, tokens, tiles, stages, act);
}

}  // namespace freshet::cuda

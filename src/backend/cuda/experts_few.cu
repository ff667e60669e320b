// Experts in BF16 with at most 8 tokens on Hopper, in two kernels: gate and up, and down with the
// sums of what experts gave.
//
// Nobody groups tokens: every block routes them all from the router's logits, one a warp, and lists
// the experts in use in the order of their ids. That costs less than a kernel that tells the
// others. A block of the first kernel has an even share of all chosen experts' tiles of 16 rows of
// gate and up, a leaf of K a warp, as in products_few.cu. A block of the second has a tile of rows
// (or two) of all of them, so that it can add up what they gave; its warps take leaves, and experts
// side by side. It routes and asks for its first weights while the first kernel runs: both fit a
// multiprocessor together. The bits are those of experts_wgmma.cu and its sums.
#include "backend/cuda/experts_route.cuh"
#include "backend/cuda/gating.cuh"
#include "backend/cuda/kernels.cuh"
#include "backend/cuda/products.cuh"

namespace freshet::cuda {
namespace {

constexpr int kTokens = 8, kMostChosen = 64;  // pairs of token and expert
constexpr int kRunTiles = 4;                  // tiles of rows of ff come in such runs
constexpr int kGateTiles = 2, kGateStageBytes = kGateTiles * BF16::kTileBytes;
constexpr int kGateStages = 2;  // of a warp: with more in flight everything else waits longer
constexpr int kGateRing = kGateStages * kGateStageBytes;
constexpr int kGateSums = kWarps * kGateTiles * 32;  // float4, of which there are two sets
// No two blocks of the first kernel fit a multiprocessor: they would leave others idle.
constexpr int kGateBytes = 112 << 10;
static_assert(kWarps * kGateRing + 2 * kGateSums * 16 <= kGateBytes);

// R: tiles of rows of a block of the second kernel. A stage has 64 columns of them and of tokens.
template <int R>
struct Down {
  static constexpr int kTileBytes = R * BF16::kTileBytes, kStageBytes = kTileBytes + 1024;
  static constexpr int kStages = R == 1 ? 4 : 2;
  static constexpr int kSums = kWarps * R * 32;  // float4, of which there are two sets
  static constexpr int kRings = kWarps * kStages * kStageBytes;
  static constexpr int kBytes = kRings + 2 * kSums * 16;
};

// Experts in use, ascending. In shared memory.
struct Chosen {
  const uint8_t* weights[kMostChosen];
  float weight[kMostChosen][kTokens];
  uint32_t tokens[kMostChosen];  // a bit each
  int32_t expert[kMostChosen];
  int32_t slot[kFewExperts];  // of an expert; -1: not in use
  int32_t ids[kMostChosen];
  float of_pair[kMostChosen];
  int32_t of_warp[kFewExperts / 32], count;
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// All threads; `mine`: the weights of the expert that has this thread's number. `room`: see
// routing_room().
template <bool kWithWeights>
__device__ __forceinline__ void choose(const FewExpertsArgs& e, Chosen& c, float* room,
                                       const uint8_t* mine) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int top_k = e.routing.top_k, pairs = e.tokens * top_k;
  if (e.logits == nullptr) {
    if (thread < pairs) {
      c.ids[thread] = __ldcg(e.ids + thread);
      c.of_pair[thread] = __ldcg(e.weights + thread);
    }
  } else if (warp < e.tokens) {
    route_token<kFewExperts / 32>(e.logits + warp * e.logits_stride, e.routing,
                                  room + warp * routing_room(e.routing), c.ids + warp * top_k,
                                  c.of_pair + warp * top_k);
  }
  if (thread < kFewExperts) c.slot[thread] = -1;
  __syncthreads();
  if (thread < pairs) c.slot[c.ids[thread]] = 0;
  __syncthreads();
  const bool used = thread < kFewExperts && c.slot[thread] >= 0;
  const uint32_t in_warp = __ballot_sync(0xffffffff, used);
  if (lane == 0 && thread < kFewExperts) c.of_warp[warp] = __popc(in_warp);
  __syncthreads();
  int before = 0, all = 0;
#pragma unroll
  for (int w = 0; w < kFewExperts / 32; ++w) {
    if (w < warp) before += c.of_warp[w];
    all += c.of_warp[w];
  }
  if (thread == 0) c.count = all;
  if (used) {
    const int slot = before + __popc(in_warp & ((1u << lane) - 1));
    c.slot[thread] = slot;
    c.expert[slot] = thread;
    c.weights[slot] = mine;
    c.tokens[slot] = 0;
  }
  __syncthreads();
  if constexpr (kWithWeights) {
    if (thread < pairs) {
      const int slot = c.slot[c.ids[thread]], token = thread / top_k;
      c.weight[slot][token] = c.of_pair[thread];
      atomicOr(&c.tokens[slot], 1u << token);
    }
    __syncthreads();
  }
}

__device__ __forceinline__ void start_barriers(uint64_t* full, int stages) {
  for (int s = 0; s < stages; ++s) barrier_init(&full[s], 1);
  barriers_ready();
}
__device__ __forceinline__ void ask(const uint8_t* ring, uint64_t* barrier, const uint8_t* from,
                                    int at, uint32_t bytes, uint64_t policy) {
  barrier_expect(barrier, bytes);
  copy_weights(shared_address(ring) + static_cast<uint32_t>(at), from, bytes,
               shared_address(barrier), policy);
}

// sum += 16 rows and 64 columns that lie at `tile`, for 8 tokens.
__device__ __forceinline__ void add_tile(float (&sum)[4], const uint8_t* tile,
                                         const uint4 (&b)[2]) {
  Piece piece;
  BF16::load<FromShared>(tile, 0, static_cast<int>(threadIdx.x % 32), piece);
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const uint4& v = b[n / 2];
    mma(sum, piece.q[n], n % 2 == 0 ? v.x : v.z, n % 2 == 0 ? v.y : v.w);
  }
}
__device__ __forceinline__ void add_leaf(float (&sum)[4], const float4& leaf) {
  sum[0] = __fadd_rn(sum[0], leaf.x);
  sum[1] = __fadd_rn(sum[1], leaf.y);
  sum[2] = __fadd_rn(sum[2], leaf.z);
  sum[3] = __fadd_rn(sum[3], leaf.w);
}

// A block's share of the tiles of gate's rows of all chosen experts, one after the other; up's go
// with them.
struct GateShare {
  int tiles, begin, end;  // of an expert; of all
  __device__ GateShare(const FewExpertsArgs& e, int chosen) : tiles(static_cast<int>(e.ff / 16)) {
    const int all = chosen * tiles, blocks = static_cast<int>(gridDim.x);
    begin = static_cast<int>(static_cast<int64_t>(all) * blockIdx.x / blocks);
    end = static_cast<int>(static_cast<int64_t>(all) * (blockIdx.x + 1) / blocks);
  }
  // Tiles to be taken at once: they lie side by side.
  __device__ __forceinline__ int together(int at) const {
    return min(min(kGateTiles, end - at), kRunTiles - at % kRunTiles);
  }
};

// A warp's leaf of the share: some tiles of gate, the same of up, the next of gate. One lane asks.
struct GateStream {
  const Chosen& chosen;
  GateShare share;
  int64_t cols;
  int first, units;  // of the leaf
  const uint8_t* ring;
  uint64_t* full;
  int at, matrix = 0, unit = 0, stage = 0;  // to be asked for next
  const uint8_t* from = nullptr;
  uint32_t bytes = 0;

  __device__ __forceinline__ bool more() const { return at < share.end; }
  __device__ __forceinline__ void find() {
    const int slot = at / share.tiles, tile = at % share.tiles + matrix * share.tiles;
    from = chosen.weights[slot] + tile_at<BF16>(tile, cols) + first * kUnitStep<BF16>;
    bytes = static_cast<uint32_t>(share.together(at) * BF16::kTileBytes);
  }
  __device__ __forceinline__ void ask_next(uint64_t policy) {
    ask(ring, &full[stage], from, stage * kGateStageBytes, bytes, policy);
    from += kUnitStep<BF16>;
    stage = stage + 1 < kGateStages ? stage + 1 : 0;
    if (++unit < units) return;
    unit = 0;
    if (matrix == 1) at += share.together(at);
    matrix ^= 1;
    if (more()) find();
  }
};

__device__ __forceinline__ uint32_t transposed(uint32_t v) {
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(v));
  return v;
}

// A warp's 16 rows of gate and up for 8 tokens, from row `tile` * 16 of an expert on.
__device__ __forceinline__ void put_gated(const FewExpertsArgs& e, const Chosen& c, int slot,
                                          int tile, const float (&gate)[4], const float (&up)[4]) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t row = static_cast<int64_t>(tile) * 16 + lane / 4;
  float v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float g = gate[i], u = up[i];
    if (e.gate_up_bias != nullptr) {
      const float* bias = e.gate_up_bias + c.expert[slot] * 2 * e.ff + row + i / 2 * 8;
      g = __fadd_rn(g, bias[0]);
      u = __fadd_rn(u, bias[e.ff]);
    }
    v[i] = gated(g, u, e.glu);
  }
  const uint2 two =
      make_uint2(transposed(pack_bf16(v[0], v[1])), transposed(pack_bf16(v[2], v[3])));
  const int64_t to = activation_at({e.act, 0, 0}, static_cast<int64_t>(slot) * kTokens + lane / 4,
                                   static_cast<int64_t>(tile) * 16 + lane % 4 * 2, e.ff);
  *reinterpret_cast<uint2*>(e.act + to * 2) = two;
}
// The share's sums, gated. `sums`: room for two sets; b: a lane's activations of the warp's leaf.
template <int kHeld>
__device__ __forceinline__ void multiply_share(const FewExpertsArgs& e, GateStream& stream,
                                               float4* sums, const uint4 (&b)[kHeld][2],
                                               uint64_t policy) {
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  int stage = 0, round = 0, set = 0;
  float gates[4];
  for (int at = stream.share.begin; at < stream.share.end; at += stream.share.together(at)) {
    const int count = stream.share.together(at);
#pragma unroll 1
    for (int matrix = 0; matrix < 2; ++matrix) {
      float sum[kGateTiles][4] = {};
#pragma unroll
      for (int k = 0; k < kHeld; ++k) {
        if (k >= stream.units) break;
        barrier_wait(&stream.full[stage], round);
        const uint8_t* rows = stream.ring + stage * kGateStageBytes;
#pragma unroll
        for (int t = 0; t < kGateTiles; ++t) {  // sums of what is nobody's are, too
          add_tile(sum[t], rows + t * BF16::kTileBytes, b[k]);
        }
        __syncwarp();
        if (lane == 0 && stream.more()) stream.ask_next(policy);
        if (++stage == kGateStages) stage = 0, round ^= 1;
      }
      float4* to = sums + set * kGateSums;
#pragma unroll
      for (int t = 0; t < kGateTiles; ++t) {
        to[(warp * kGateTiles + t) * 32 + lane] =
            make_float4(sum[t][0], sum[t][1], sum[t][2], sum[t][3]);
      }
      __syncthreads();  // the other set is free: who read it has come here
      set ^= 1;
      if (warp >= count) continue;
      const float4 leaf = to[warp * 32 + lane];
      float all[4] = {leaf.x, leaf.y, leaf.z, leaf.w};
#pragma unroll
      for (int w = 1; w < kWarps; ++w) add_leaf(all, to[(w * kGateTiles + warp) * 32 + lane]);
      if (matrix == 1) {
        put_gated(e, stream.chosen, at / stream.share.tiles, at % stream.share.tiles + warp, gates,
                  all);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) gates[i] = all[i];
      }
    }
  }
}
#endif

// kHeld: units of 64 columns of a leaf, at most; their activations stay in registers.
template <int kHeld>
__global__ void __launch_bounds__(256, 2) gate_kernel(const __grid_constant__ FewExpertsArgs e) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t rings[];
  __shared__ uint64_t full[kWarps][kGateStages];
  __shared__ Chosen chosen;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  if (lane == 0) start_barriers(full[warp], kGateStages);
  const uint8_t* mine = thread < e.routing.experts ? e.gate_up[thread] : nullptr;
  const auto all_units = static_cast<int>((e.hidden + 63) / 64);
  const int first = all_units * warp / kWarps;
  const int units = all_units * (warp + 1) / kWarps - first;
  auto* sums = reinterpret_cast<float4*>(rings + kWarps * kGateRing);
  auto* room = reinterpret_cast<float*>(sums);
  wait();
  let_next_start();  // who starts now may rely on the logits
  uint4 b[kHeld][2] = {};
  const uint4* in = reinterpret_cast<const uint4*>(e.in) + first * 64 + lane;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    if (k >= units || lane / 4 >= e.tokens) continue;
    b[k][0] = in[k * 64];
    b[k][1] = in[k * 64 + 32];
  }
  choose<false>(e, chosen, room, mine);
  const uint8_t* ring = rings + warp * kGateRing;
  const GateShare share(e, chosen.count);
  GateStream stream{chosen, share, e.hidden, first, units, ring, full[warp], share.begin};
  const uint64_t policy = read_once();
  if (lane == 0 && stream.more()) {
    stream.find();
    for (int s = 0; s < kGateStages && stream.more(); ++s) stream.ask_next(policy);
  }
  if (blockIdx.x == 0 && e.logits != nullptr && thread < e.tokens * e.routing.top_k) {
    e.ids[thread] = chosen.ids[thread];
    e.weights[thread] = chosen.of_pair[thread];
  }
  __syncwarp();
  multiply_share<kHeld>(e, stream, sums, b, policy);
#endif
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// What a warp of the second kernel reads: a leaf of every so manieth expert.
struct DownLeaf {
  int leaves, apart, leaf, phase;  // experts side by side; this warp's
  int first, units;
  __device__ DownLeaf(int64_t ff, int warp) : leaves(cuda::leaves(ff)) {
    apart = kWarps / leaves;
    leaf = warp % leaves;
    phase = warp / leaves;
    const auto all = static_cast<int>(ff / 64);
    first = all * leaf / leaves;
    units = all * (leaf + 1) / leaves - first;
  }
};

// A warp's leaves, a unit of 64 columns a stage. Lanes copy: the bulk copy engine is slow with so
// little at once. Tokens that an expert did not get are zeros: of few tokens most are.
template <int R>
struct DownStream {
  using S = Down<R>;
  const FewExpertsArgs& e;
  const Chosen& chosen;
  const DownLeaf& l;
  int64_t first;  // bytes from an expert's beginning to the leaf's
  uint8_t* ring;
  int bytes, lane;        // of a unit of weights; this one
  int slot, unit, stage;  // to be asked for next

  __device__ __forceinline__ bool more() const { return slot < chosen.count; }
  __device__ __forceinline__ uint8_t* to() const {
    return ring + stage * S::kStageBytes + lane * 16;
  }
  __device__ __forceinline__ void ask_weights() const {
    const uint8_t* from = chosen.weights[slot] + first + unit * kUnitStep<BF16> + lane * 16;
#pragma unroll
    for (int i = 0; i < S::kTileBytes; i += 512) {
      if (R == 1 || i < bytes) cp_async16(to() + i, from + i);
    }
  }
  __device__ __forceinline__ void ask_tokens() const {
    const bool real = (chosen.tokens[slot] >> lane / 4 & 1) != 0;
    const uint8_t* from =
        e.act + (slot * (e.ff / 64) + l.first + unit) * (kTokens * 64 * 2) + lane * 16;
    cp_async16(to() + S::kTileBytes, from, real);
    cp_async16(to() + S::kTileBytes + 512, from + 512, real);
  }
  __device__ __forceinline__ void next() {
    stage = stage + 1 < S::kStages ? stage + 1 : 0;
    if (++unit < l.units) return;
    unit = 0;
    slot += l.apart;
  }
};

// A warp's 16 rows of the result for 8 tokens, as mma has them: experts are added one by one.
struct Result {
  const FewExpertsArgs& e;
  int64_t row;
  int token;
  float before[4] = {}, sum[4] = {};
  bool began[2] = {};

  __device__ Result(const FewExpertsArgs& args, int64_t tile)
      : e(args),
        row(tile * 16 + threadIdx.x % 32 / 4),
        token(static_cast<int>(threadIdx.x % 4) * 2) {}
  __device__ __forceinline__ bool real(int i) const {
    return token + i % 2 < e.tokens && row + i / 2 * 8 < e.hidden;
  }
  __device__ __forceinline__ float* at(int i) const {
    return e.out.data + (token + i % 2) * e.out.stride + row + i / 2 * 8;
  }
  __device__ __forceinline__ void load() {
    if (e.add == 0) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (real(i)) before[i] = *at(i);
    }
  }
  __device__ __forceinline__ void add(const Chosen& c, int slot, const float (&given)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int t = token + i % 2;
      if ((c.tokens[slot] >> t & 1) == 0) continue;
      float v = given[i];
      if (e.down_bias != nullptr && row + i / 2 * 8 < e.hidden) {
        v = __fadd_rn(v, e.down_bias[c.expert[slot] * e.hidden + row + i / 2 * 8]);
      }
      const float w = c.weight[slot][t];
      sum[i] = began[i % 2] ? __fmaf_rn(v, w, sum[i]) : __fmul_rn(v, w);
    }
    began[0] = began[0] || (c.tokens[slot] >> token & 1) != 0;
    began[1] = began[1] || (c.tokens[slot] >> (token + 1) & 1) != 0;
  }
  __device__ __forceinline__ void store() const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (real(i)) *at(i) = e.add != 0 ? __fadd_rn(before[i], sum[i]) : sum[i];
    }
  }
};
#endif

template <int R>
__global__ void __launch_bounds__(256, 2) down_kernel(const __grid_constant__ FewExpertsArgs e) {
#if __CUDA_ARCH__ >= 900
  using S = Down<R>;
  extern __shared__ __align__(128) uint8_t rings[];
  __shared__ Chosen chosen;
  let_next_start();
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  auto* sums = reinterpret_cast<float4*>(rings + S::kRings);
  choose<true>(e, chosen, reinterpret_cast<float*>(sums),
               thread < e.routing.experts ? e.down[thread] : nullptr);
  const int64_t first_tile = static_cast<int64_t>(blockIdx.x) * R;
  const auto tiles = static_cast<int>(min(int64_t{R}, (e.hidden + 15) / 16 - first_tile));
  const DownLeaf l(e.ff, warp);
  uint8_t* ring = rings + warp * S::kStages * S::kStageBytes;
  const int64_t first = tile_at<BF16>(first_tile, e.ff) + l.first * kUnitStep<BF16>;
  DownStream<R> stream{e, chosen, l, first, ring, tiles * BF16::kTileBytes, lane, l.phase, 0, 0};
  // The first kernel's results come later than the first weights.
  DownStream<R> tokens = stream;
#pragma unroll 1
  for (int s = 0; s < S::kStages && stream.more(); ++s, stream.next()) stream.ask_weights();
  wait();
#pragma unroll 1
  for (int s = 0; s < S::kStages && tokens.more(); ++s, tokens.next()) tokens.ask_tokens();
  cp_async_commit();
  Result result(e, first_tile + warp);
  if (warp < tiles) result.load();
  cp_async_wait<0>();
  int stage = 0, set = 0;
#pragma unroll 1
  for (int base = 0; base < chosen.count; base += l.apart) {
    const int slot = base + l.phase;
    float sum[R][4] = {};
    if (slot < chosen.count) {
#pragma unroll 1
      for (int unit = 0; unit < l.units; ++unit) {
        cp_async_wait<S::kStages - 1>();
        __syncwarp();
        const uint8_t* at = ring + stage * S::kStageBytes;
        const auto* its = reinterpret_cast<const uint4*>(at + S::kTileBytes) + lane;
        const uint4 b[2] = {its[0], its[32]};
#pragma unroll
        for (int t = 0; t < R; ++t) add_tile(sum[t], at + t * BF16::kTileBytes, b);
        __syncwarp();
        if (stream.more()) {
          stream.ask_weights();
          stream.ask_tokens();
          stream.next();
        }
        cp_async_commit();  // so that they can be counted
        stage = stage + 1 < S::kStages ? stage + 1 : 0;
      }
    }
    float4* to = sums + set * S::kSums;
#pragma unroll
    for (int t = 0; t < R; ++t) {
      to[(warp * R + t) * 32 + lane] = make_float4(sum[t][0], sum[t][1], sum[t][2], sum[t][3]);
    }
    __syncthreads();  // the other set is free: who read it has come here
    set ^= 1;
    if (warp >= tiles) continue;
#pragma unroll 1
    for (int i = 0; i < l.apart && base + i < chosen.count; ++i) {
      const float4* of = to + (i * l.leaves * R + warp) * 32 + lane;
      float all[4] = {of->x, of->y, of->z, of->w};
      for (int leaf = 1; leaf < l.leaves; ++leaf) add_leaf(all, of[leaf * R * 32]);
      result.add(chosen, base + i, all);
    }
  }
  if (warp < tiles) result.store();
#endif
}

template <class Kernel>
int launch_few(Kernel kernel, int64_t blocks, int bytes, const FewExpertsArgs& e) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return static_cast<int>(error);
  const cudaError_t carved = leave_shared(kernel);
  if (carved != cudaSuccess) return static_cast<int>(carved);
  return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(256), static_cast<size_t>(bytes),
                e);
}

}  // namespace

int few_experts_fit(Code code, const FewExpertsArgs* e) {
  return code == Code::kBF16 && capability == 90 && e->tokens <= kTokens &&
         e->tokens * e->routing.top_k <= kMostChosen && e->routing.experts <= kFewExperts &&
         leaves(e->hidden) == kWarps && e->hidden <= 4096 && e->ff % (kRunTiles * 16) == 0;
}

int few_experts(const FewExpertsArgs* e) {
  const int error = e->hidden <= 2048 ? launch_few(gate_kernel<4>, multiprocessors, kGateBytes, *e)
                                      : launch_few(gate_kernel<8>, multiprocessors, kGateBytes, *e);
  if (error != 0) return error;
  const int64_t tiles = ceil_div(e->hidden, 16);
  return tiles <= multiprocessors
             ? launch_few(down_kernel<1>, tiles, Down<1>::kBytes, *e)
             : launch_few(down_kernel<2>, ceil_div(tiles, 2), Down<2>::kBytes, *e);
}

}  // namespace freshet::cuda

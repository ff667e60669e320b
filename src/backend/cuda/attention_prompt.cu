// Attention of prompts, for the usual sizes of heads.
//
// A block takes 128 rows of a key head, 16 a warp, and walks all they see. Chunks of 64 keys pass
// through a ring in shared memory, their blocks' ids a chunk ahead of them. Chunks that all rows of
// a warp see whole need no mask, and those that none sees no work.
#include "backend/cuda/attention.cuh"
#include "backend/cuda/kernels.cuh"

namespace freshet::cuda {
namespace {

constexpr int kPromptWarps = 8, kThreads = kPromptWarps * 32, kRows = kPromptWarps * 16;
constexpr int kStages = 3;

template <int D>
struct Shared {
  __half queries[kRows * (D + 8)];
  __half keys[kStages][kChunk * (D + 8)], values[kStages][kChunk * (D + 8)];
};

// What a block works on.
struct Walk {
  Tile tile;
  int kv_head, group;
  int low, high;  // keys that some row sees
  __device__ __forceinline__ int position(int row) const {
    return tile.context - tile.queries + (tile.first_row + row) / group;
  }
};

// The id of the block that holds a lane's part of a chunk.
__device__ __forceinline__ int id_of(const AttentionArgs& a, const Walk& w, int chunk) {
  const int block = chunk * (kChunk / kBlockTokens) + static_cast<int>(threadIdx.x % 4);
  return block * kBlockTokens <= w.high
             ? a.batch.tables[w.tile.sequence * a.batch.table_stride + block]
             : 0;
}

// Asks for a chunk's keys and values, zeros where nobody looks.
template <int D>
__device__ __forceinline__ void fetch(Shared<D>& s, const AttentionArgs& a, const Walk& w,
                                      int chunk, int id) {
  constexpr int kVectors = D / 8, kAtOnce = kThreads / kVectors;
  const int thread = static_cast<int>(threadIdx.x);
  const int vector = thread % kVectors, key = thread / kVectors, stage = chunk % kStages;
#pragma unroll
  for (int n = 0; n < kChunk / kAtOnce; ++n) {
    const int at = n * kAtOnce + key, p = chunk * kChunk + at;
    const bool valid = p >= w.low && p <= w.high;
    const int64_t block = __shfl_sync(0xffffffff, id, at / kBlockTokens);
    const int to = at * (D + 8) + vector * 8;
    cp_async16(s.keys[stage] + to,
               keys_at(a.cache, block, w.kv_head, at % kBlockTokens) + vector * 8, valid);
    cp_async16(s.values[stage] + to,
               values_at(a.cache, block, w.kv_head, at % kBlockTokens) + vector * 8, valid);
  }
}

// Queries of all rows in F16, four loads of a thread at a time.
template <int D>
__device__ __forceinline__ void load_queries(Shared<D>& s, const AttentionArgs& a, const Walk& w) {
  constexpr int kVectors = D / 4, kAtOnce = 4;
  for (int base = static_cast<int>(threadIdx.x); base < kRows * kVectors;
       base += kAtOnce * kThreads) {
    float4 v[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int at = base + n * kThreads, row = at / kVectors, r = w.tile.first_row + row;
      v[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (row < w.tile.rows) {
        v[n] = *reinterpret_cast<const float4*>(
            a.q + (w.tile.query_start + r / w.group) * a.q_stride +
            (w.kv_head * w.group + r % w.group) * D + at % kVectors * 4);
      }
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int at = base + n * kThreads;
      const __half2 low = __halves2half2(to_half(v[n].x), to_half(v[n].y));
      const __half2 high = __halves2half2(to_half(v[n].z), to_half(v[n].w));
      *reinterpret_cast<uint2*>(s.queries + at / kVectors * (D + 8) + at % kVectors * 4) =
          make_uint2(reinterpret_cast<const uint32_t&>(low),
                     reinterpret_cast<const uint32_t&>(high));
    }
  }
}

// Scores of a warp's 16 rows with a chunk's keys.
template <int D>
__device__ __forceinline__ void multiply_keys(float (&score)[8][4], const Shared<D>& s, int stage) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const __half* queries = s.queries + (warp * 16 + lane % 16) * (D + 8) + lane / 16 * 8;
  const __half* keys = s.keys[stage] + (lane / 16 * 8 + lane % 8) * (D + 8) + lane / 8 % 2 * 8;
#pragma unroll
  for (int k = 0; k < D; k += 16) {
    uint32_t q[4];
    ldmatrix4(q, queries + k);
    const uint4 operand = make_uint4(q[0], q[1], q[2], q[3]);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      uint32_t b[4];
      ldmatrix4(b, keys + j * 8 * (D + 8) + k);
      mma_half(score[j], operand, b[0], b[1]);
      mma_half(score[j + 1], operand, b[2], b[3]);
    }
  }
}

// Scores become weights; the sums so far are taken to the new maximum. kMasked: some row does not
// see some key; `seen` has the first and last that rows g and g + 8 do, as places in the chunk.
template <int VT, bool kMasked>
__device__ __forceinline__ void soften(float (&score)[8][4], Sums<VT>& sums, const AttentionArgs& a,
                                       const int (&seen)[2][2]) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  float most[2] = {sums.m[0], sums.m[1]};
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float v = score_of(a, score[j][i]);
      const int key = j * 8 + lane % 4 * 2 + i % 2;
      if (kMasked && (key < seen[i / 2][0] || key > seen[i / 2][1])) v = -INFINITY;
      score[j][i] = v;
      most[i / 2] = fmaxf(most[i / 2], v);
    }
  }
  weigh<VT, kMasked>(score, most, sums);
}

template <int D>
__device__ __forceinline__ void multiply_values(Sums<D / 8>& sums, const float (&weight)[8][4],
                                                const Shared<D>& s, int stage) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const __half* values = s.values[stage] + lane % 16 * (D + 8) + lane / 16 * 8;
#pragma unroll
  for (int k = 0; k < kChunk / 16; ++k) {
    const float(&low)[4] = weight[2 * k];
    const float(&high)[4] = weight[2 * k + 1];
    const uint4 operand = make_uint4(pack_half(low[0], low[1]), pack_half(low[2], low[3]),
                                     pack_half(high[0], high[1]), pack_half(high[2], high[3]));
#pragma unroll
    for (int j = 0; j < D / 8; j += 2) {
      uint32_t b[4];
      ldmatrix4_trans(b, values + k * 16 * (D + 8) + j * 8);
      mma_half(sums.acc[j], operand, b[0], b[1]);
      mma_half(sums.acc[j + 1], operand, b[2], b[3]);
    }
  }
}

template <int D>
__device__ __forceinline__ void take_chunk(Sums<D / 8>& sums, const Shared<D>& s,
                                           const AttentionArgs& a, int chunk,
                                           const int (&limit)[2][2], bool masked) {
  float score[8][4] = {};
  multiply_keys<D>(score, s, chunk % kStages);
  const int from = chunk * kChunk;
  const int seen[2][2] = {{limit[0][0] - from, limit[0][1] - from},
                          {limit[1][0] - from, limit[1][1] - from}};
  if (masked) {
    soften<D / 8, true>(score, sums, a, seen);
  } else {
    soften<D / 8, false>(score, sums, a, seen);
  }
  multiply_values<D>(sums, score, s, chunk % kStages);
}

template <int D>
__device__ __forceinline__ void write_rows(const Sums<D / 8>& sums, const AttentionArgs& a,
                                           const Walk& w) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = warp * 16 + lane / 4 + r * 8;
    if (row >= w.tile.rows) continue;
    const int query = (w.tile.first_row + row) / w.group;
    const int head = w.kv_head * w.group + (w.tile.first_row + row) % w.group;
    float* to = a.out + (w.tile.query_start + query) * a.out_stride + head * D + lane % 4 * 2;
    const Ending end = ending(sums.m[r], sums.l[r], a.sinks, head);
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
      *reinterpret_cast<float2*>(to + j * 8) =
          make_float2(end_value(sums.acc[j][r * 2], end), end_value(sums.acc[j][r * 2 + 1], end));
    }
  }
}

// Blocks: [tiles of rows, key heads]; the last tiles of a sequence see most and come first.
template <int D>
__global__ void __launch_bounds__(kThreads, 1)
    prompt_kernel(const __grid_constant__ AttentionArgs a) {
  extern __shared__ __align__(16) uint8_t memory[];
  auto& s = *reinterpret_cast<Shared<D>*>(memory);
  let_next_start();
  wait();
  Walk w;
  w.kv_head = static_cast<int>(blockIdx.y);
  w.group = a.heads / a.cache.kv_heads;
  w.tile = find_tile(a.batch, w.group, kRows, static_cast<int>(gridDim.x - 1 - blockIdx.x));
  if (w.tile.sequence < 0) return;
  const auto first_seen = [&](int p) { return a.window > 0 ? max(0, p - a.window + 1) : 0; };
  w.low = first_seen(w.position(0));
  w.high = w.position(w.tile.rows - 1);
  const int first_chunk = w.low / kChunk, last_chunk = w.high / kChunk;
  for (int n = 0; n < kStages - 1; ++n) {
    const int id = id_of(a, w, first_chunk + n);
    if (first_chunk + n <= last_chunk) fetch(s, a, w, first_chunk + n, id);
    cp_async_commit();
  }
  int next_id = id_of(a, w, first_chunk + kStages - 1);
  load_queries(s, a, w);
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const bool works = warp * 16 < w.tile.rows;
  const int first = w.position(min(warp * 16, w.tile.rows - 1));  // positions of this warp
  const int last = w.position(min(warp * 16 + 15, w.tile.rows - 1));
  int limit[2][2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    limit[r][1] = w.position(min(warp * 16 + lane / 4 + r * 8, w.tile.rows - 1));
    limit[r][0] = first_seen(limit[r][1]);
  }
  Sums<D / 8> total, sums;
  total.clear();
  sums.clear();
  for (int chunk = first_chunk; chunk <= last_chunk; ++chunk) {
    cp_async_wait<kStages - 2>();
    __syncthreads();  // the chunk is here, and all have left the one before it
    const int next = chunk + kStages - 1;
    if (next <= last_chunk) fetch(s, a, w, next, next_id);
    cp_async_commit();
    next_id = id_of(a, w, next + 1);
    const int from = chunk * kChunk, to = from + kChunk - 1;
    if (works && from <= last && to >= first_seen(first)) {
      take_chunk<D>(sums, s, a, chunk, limit, from < first_seen(last) || to > first);
    }
    if (chunk % kChunks == kChunks - 1 || chunk == last_chunk) {
      total.merge(sums);
      sums.clear();
    }
  }
  if (works) write_rows<D>(total, a, w);
}

template <int D>
int run(const AttentionArgs& a) {
  static const cudaError_t kRaised = cudaFuncSetAttribute(
      prompt_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared<D>));
  if (kRaised != cudaSuccess) return static_cast<int>(kRaised);
  const int64_t group = a.heads / a.cache.kv_heads;
  const int64_t tiles = a.batch.tokens * group / kRows + a.batch.sequences;
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(a.cache.kv_heads));
  return launch(prompt_kernel<D>, grid, dim3(kThreads), sizeof(Shared<D>), a);
}

}  // namespace

bool prompt_fits(const AttentionArgs& a) {
  const int d = a.cache.key_dim;
  // Fewer rows leave warps without work; other GPUs may lack the shared memory.
  return capability >= 90 && a.max_queries * (a.heads / a.cache.kv_heads) > kRows / 2 &&
         a.cache.value_dim == d && (d == 64 || d == 128) && a.out_stride % 2 == 0 &&
         a.q_stride % 4 == 0;
}

int attention_prompt(const AttentionArgs& a) {
  return a.cache.key_dim == 64 ? run<64>(a) : run<128>(a);
}

}  // namespace freshet::cuda

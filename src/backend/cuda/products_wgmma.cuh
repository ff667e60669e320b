// What the kernels of BF16 products by wgmma share: a ring of stages in shared memory, 64 columns
// of weights and of tokens each, the sums that warpgroups make of it, and how
// they are written.
//
// A stage S has kStages, kStageBytes, kRowBytes (its tokens stand behind), the bytes from one
// warpgroup's rows and tokens to the other's, kGroupRows and kGroupTokens, and kTokensLead: whether
// tokens are on the 64-row side of wgmma. kProducers threads fill its ring, a stage in turn: to ask
// for a copy takes one some 340 cycles.
#pragma once

#include "backend/cuda/products.cuh"
#include "backend/cuda/wgmma.cuh"

namespace freshet::cuda {

inline constexpr int kConsumers = 256;
inline constexpr int kProducerWarps = 4;
inline constexpr int kPanelBytes = static_cast<int>(kUnitStep<BF16>);  // 64 columns of its 128 rows
inline constexpr int kTokenBytes = kTokenTile * 64 * 2;                // a tile's

inline constexpr int kRingBytes = 216 << 10;  // or less

template <class Kernel>
int raise_shared(Kernel kernel, int bytes) {
  return static_cast<int>(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Pieces of 64 columns of a leaf.
struct Leaf {
  int first, count;
};
__device__ __forceinline__ Leaf leaf_of(int64_t cols, int leaf) {
  const int units = static_cast<int>((cols + 63) / 64), shift = 31 - __clz(leaves(cols));
  const int first = units * leaf >> shift;
  return {first, (units * (leaf + 1) >> shift) - first};
}

// Where a stage's rows come from: one run of memory, or one after the other.
template <int Bytes>
struct OneRun {
  const uint8_t* from;
  __device__ static constexpr uint32_t bytes() { return Bytes; }
  __device__ __forceinline__ void copy(uint8_t* to, int64_t at, uint64_t* barrier) const {
    bulk_copy(to, from + at, Bytes, barrier);
  }
};
template <int Bytes>
struct TwoRuns {
  const uint8_t *from, *other;
  __device__ static constexpr uint32_t bytes() { return 2 * Bytes; }
  __device__ __forceinline__ void copy(uint8_t* to, int64_t at, uint64_t* barrier) const {
    bulk_copy(to, from + at, Bytes, barrier);
    bulk_copy(to + Bytes, other + at, Bytes, barrier);
  }
};

template <class S>
struct Ring {
  uint8_t* stages;
  uint64_t *full, *empty;
  int at = 0;  // pieces taken or given so far
  __device__ __forceinline__ int stage() const { return at % S::kStages; }
  __device__ __forceinline__ int round() const { return at / S::kStages & 1; }
  __device__ __forceinline__ uint8_t* data() const { return stages + stage() * S::kStageBytes; }
};

__device__ __forceinline__ void sync_consumers() {
  asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");
}
__device__ __forceinline__ int producer_index() {
  return (static_cast<int>(threadIdx.x) - kConsumers) / 32;
}
template <class S>
__device__ __forceinline__ bool produces() {
  return threadIdx.x % 32 == 0 && threadIdx.x < kConsumers + S::kProducers * 32;
}

// A producer's share of filling the ring with `count` pieces. Weights are asked for before the
// kernel in front of this one has ended, tokens after.
template <class S, class Rows>
__device__ __forceinline__ void fill(Ring<S>& ring, const Rows& rows, const uint8_t* tokens,
                                     int64_t token_step, uint32_t bytes, int count, bool& waited) {
  constexpr int kProducers = S::kProducers;
  static_assert(kProducers <= kProducerWarps && kProducers <= S::kStages);
  const auto copy_rows = [&](int n, int stage) {
    barrier_expect(&ring.full[stage], rows.bytes() + bytes);
    rows.copy(ring.stages + stage * S::kStageBytes, n * kUnitStep<BF16>, &ring.full[stage]);
  };
  const auto copy_tokens = [&](int n, int stage) {
    bulk_copy(ring.stages + stage * S::kStageBytes + S::kRowBytes, tokens + n * token_step, bytes,
              &ring.full[stage]);
  };
  int n = (producer_index() - ring.at % kProducers + kProducers) % kProducers;
  if (!waited) {
    const int first = n, ahead = min(count, S::kStages);
#pragma unroll 1
    for (; n < ahead; n += kProducers) copy_rows(n, n);
    wait();
#pragma unroll 1
    for (int k = first; k < ahead; k += kProducers) copy_tokens(k, k);
    waited = true;
  }
  int stage = (ring.at + n) % S::kStages, round = (ring.at + n) / S::kStages & 1;
#pragma unroll 1
  for (; n < count; n += kProducers) {
    barrier_wait(&ring.empty[stage], round ^ 1);  // of the first round there is nothing to wait for
    copy_rows(n, stage);
    copy_tokens(n, stage);
    stage += kProducers;
    if (stage >= S::kStages) stage -= S::kStages, round ^= 1;
  }
  ring.at += count;
}

template <class S>
__device__ __forceinline__ Ring<S> start_ring(uint8_t* stages, uint64_t* full, uint64_t* empty,
                                              int readers) {
  if (threadIdx.x == 0) {
    for (int s = 0; s < S::kStages; ++s) {
      barrier_init(&full[s], 1);
      barrier_init(&empty[s], readers);
    }
    barriers_ready();
  }
  __syncthreads();
  return {stages, full, empty};
}

// sum += a piece, for the 64 rows of `lead`, and what stands on the other side.
template <int NT>
__device__ __forceinline__ void add_piece(float (&sum)[NT][4], const uint8_t* lead,
                                          const uint8_t* other, bool first) {
  const uint64_t a = operand_at(lead), b = operand_at(other);
  wgmma_begin();
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma(sum, a + k * kNextStep, b + k * kNextStep, !first || k > 0);
  wgmma_commit();
}

// sum = the next `count` pieces; the stage of the last one is handed back unless it is `kept`.
template <class S, int NT>
__device__ __forceinline__ void sum_pieces(Ring<S>& ring, float (&sum)[NT][4], int count,
                                           bool kept = false) {
  const int group = static_cast<int>(threadIdx.x / 128);
  const int rows = group * S::kGroupRows, tokens = S::kRowBytes + group * S::kGroupTokens;
  const auto leave = [&](int stage) {
    if (threadIdx.x % 32 == 0) barrier_arrive(&ring.empty[stage]);
  };
  int before = -1;
#pragma unroll 1
  for (int n = 0; n < count; ++n, ++ring.at) {
    barrier_wait(&ring.full[ring.stage()], ring.round());
    const uint8_t* data = ring.data();
    add_piece<NT>(sum, data + (S::kTokensLead ? tokens : rows),
                  data + (S::kTokensLead ? rows : tokens), n == 0);
    wgmma_wait<1>();
    if (before >= 0) leave(before);
    before = ring.stage();
  }
  wgmma_wait<0>();
  if (before >= 0 && !kept) leave(before);
}

template <int NT>
__device__ __forceinline__ void add_sums(float (&total)[NT][4], const float (&sum)[NT][4]) {
#pragma unroll
  for (int j = 0; j < NT; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) total[j][i] = __fadd_rn(total[j][i], sum[j][i]);
  }
}

// total = the sum of all leaves, from left to right.
template <class S, int NT>
__device__ __forceinline__ void sum_leaves(Ring<S>& ring, float (&total)[NT][4], int64_t cols) {
  const int parts = leaves(cols);
  float sum[NT][4] = {};
#pragma unroll
  for (int j = 0; j < NT; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) total[j][i] = -0.0f;  // adds nothing, not even a sign
  }
#pragma unroll 1
  for (int leaf = 0; leaf < parts; ++leaf) {
    sum_pieces<S, NT>(ring, sum, leaf_of(cols, leaf).count);
    add_sums(total, sum);
  }
}

__device__ __forceinline__ Work work_of(const ProductArgs& p, int64_t tokens) {
  return {p.weight.data, p.weight.rows, p.weight.cols, p.act,  p.act_chunks, (tokens + 7) / 8,
          p.out,         p.out_stride,  tokens,        p.bias, p.scale,      p.add != 0};
}
#endif

}  // namespace freshet::cuda

// Shared by the BF16 GEMMs by wgmma: a pipeline whose stages have 64 columns of weights and of
// tokens, the sums of the consumer warpgroups, and the epilogue.
//
// A stage type S has kStages, kStageBytes, kRowBytes (tokens follow the weights), the byte offsets
// of the second warpgroup's rows and tokens, kGroupRows and kGroupTokens, and kTokensLead: whether
// tokens are on the 64-row side of wgmma. kProducers threads fill the pipeline, stage by stage in
// turn, since issuing a copy takes a thread about 340 cycles.
#pragma once

#include "backend/cuda/gemm/gemm.cuh"
#include "backend/cuda/mma/wgmma_bf16.cuh"
#include "backend/cuda/runtime/pipeline.cuh"

namespace freshet::cuda {

inline constexpr int kConsumers = 256;
inline constexpr int kProducerWarps = 4;
// 64 columns of a panel's 128 rows.
inline constexpr int kPanelBytes = static_cast<int>(kUnitStep<BF16>);
inline constexpr int kTokenBytes = kTokenTile * 64 * 2;  // 64 columns of a token tile

inline constexpr int kRingBytes = 216 << 10;  // upper bound

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// A split-K slice, in pieces of 64 columns.
struct Bf16Slice {
  int first, count;
};
__device__ __forceinline__ Bf16Slice leaf_of(int64_t cols, int leaf) {
  const int units = static_cast<int>((cols + 63) / 64), shift = 31 - __clz(leaves(cols));
  const int first = units * leaf >> shift;
  return {first, (units * (leaf + 1) >> shift) - first};
}

// The rows of a stage: one contiguous run in memory, or two.
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

// The pipeline of weights and tokens, and a thread's position in it.
template <class S>
struct GemmStages {
  uint8_t* stages;
  Pipeline pipe;
  PipelineState at;
  int ahead = 0;  // pieces that the other producers copy before this one's next
  __device__ __forceinline__ uint8_t* data() const { return stages + at.stage * S::kStageBytes; }
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

// Copies a producer's share of `count` pieces. Weights are copied before the previous kernel has
// ended, tokens after that.
template <class S, class Rows>
__device__ __forceinline__ void fill(GemmStages<S>& ring, const Rows& rows, const uint8_t* tokens,
                                     int64_t token_step, uint32_t bytes, int count, bool& waited) {
  constexpr int kProducers = S::kProducers;
  static_assert(kProducers <= kProducerWarps && kProducers <= S::kStages);
  const auto copy_rows = [&](int n, int stage) {
    ring.pipe.expect(stage, rows.bytes() + bytes);
    rows.copy(ring.stages + stage * S::kStageBytes, n * kUnitStep<BF16>, ring.pipe.filled(stage));
  };
  const auto copy_tokens = [&](int n, int stage) {
    bulk_copy(ring.stages + stage * S::kStageBytes + S::kRowBytes, tokens + n * token_step, bytes,
              ring.pipe.filled(stage));
  };
  int n = kProducers == 1 ? 0 : ring.ahead;
  if (!waited) {
    const int first = kProducers == 1 ? 0 : producer_index(), most = min(count, S::kStages);
    n = first;
#pragma unroll 1
    for (; n < most; n += kProducers) copy_rows(n, n);
    wait();
#pragma unroll 1
    for (int k = first; k < most; k += kProducers) copy_tokens(k, k);
    waited = true;
    ring.at.advance(S::kStages, n);
  }
#pragma unroll 1
  for (; n < count; n += kProducers) {
    ring.pipe.acquire(ring.at);
    copy_rows(n, ring.at.stage);
    copy_tokens(n, ring.at.stage);
    ring.at.advance(S::kStages, kProducers);
  }
  ring.ahead = n - count;
}

template <class S>
__device__ __forceinline__ GemmStages<S> start_ring(uint8_t* stages, uint64_t* full,
                                                    uint64_t* empty, int readers) {
  const Pipeline pipe{full, empty};
  if (threadIdx.x == 0) pipe.init(S::kStages, readers);
  __syncthreads();
  return {stages, pipe};
}

// A consumer warpgroup's view of the pipeline: the operand with 64 rows, and the other one.
// Descriptors are computed once.
template <class S>
struct Reader {
  uint32_t lead, other;  // operands in stage 0
  PipelineAt pipe;
  PipelineState at;
  int before = 0;

  __device__ __forceinline__ explicit Reader(const GemmStages<S>& ring)
      : pipe{kept(shared_address(ring.pipe.full)), kept(shared_address(ring.pipe.empty))} {
    const int group = static_cast<int>(threadIdx.x / 128);
    const uint32_t rows = place(ring.stages + group * S::kGroupRows);
    const uint32_t tokens = place(ring.stages + S::kRowBytes + group * S::kGroupTokens);
    lead = S::kTokensLead ? tokens : rows;
    other = S::kTokensLead ? rows : tokens;
  }
  __device__ __forceinline__ static uint32_t place(const uint8_t* shared) {
    return kept(static_cast<uint32_t>(operand_at(shared)));
  }
  // Descriptor of a K step of 16 columns.
  __device__ __forceinline__ static uint64_t step(uint32_t low, int k) {
    return operand_at(nullptr) >> 32 << 32 | (low + static_cast<uint32_t>(k * kNextStep));
  }
  // Releases the stage of the previous piece.
  __device__ __forceinline__ void leave() const { pipe.release(before); }
  // Waits for the next piece.
  __device__ __forceinline__ void wait_full() const { pipe.wait(at); }
  // sum += K steps [begin, end) of the piece, or sum = them if `first`.
  template <int NT>
  __device__ __forceinline__ void multiply(float (&sum)[NT][4], int begin, int end,
                                           bool first) const {
    const uint32_t from = at.stage * (S::kStageBytes >> 4), a = lead + from, b = other + from;
    wgmma_begin();
#pragma unroll
    for (int k = begin; k < end; ++k) wgmma(sum, step(a, k), step(b, k), !first || k > 0);
    wgmma_commit();
  }
  __device__ __forceinline__ void next() {
    before = at.stage;
    at.next(S::kStages);
  }
  // sum += the next piece, or sum = it if `first`: half of a piece is multiplied while the next one
  // is waited for.
  template <int NT>
  __device__ __forceinline__ void add(float (&sum)[NT][4], bool first) {
    wait_full();
#pragma unroll
    for (int k = 0; k < 4; k += 2) {
      multiply(sum, k, k + 2, first);
      wgmma_wait<1>();
      if (k == 0 && !first) leave();
    }
    next();
  }
  __device__ __forceinline__ void end() const {
    wgmma_wait<0>();
    leave();
  }
};

// sum = the next `count` pieces (at least one). A stage is released as soon as it is multiplied,
// not when the next one has arrived; the last stage is kept if `stays`.
template <class S, int NT>
__device__ __forceinline__ void sum_pieces(Reader<S>& reader, float (&sum)[NT][4], int count,
                                           bool stays = false) {
#pragma unroll 1
  for (int n = 0; n < count; ++n) {
    reader.wait_full();
    reader.multiply(sum, 0, 4, n == 0);
    reader.next();
    wgmma_wait<0>();
    if (n + 1 < count || !stays) reader.leave();
  }
}

template <int NT>
__device__ __forceinline__ void add_sums(float (&total)[NT][4], const float (&sum)[NT][4]) {
#pragma unroll
  for (int j = 0; j < NT; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) total[j][i] = __fadd_rn(total[j][i], sum[j][i]);
  }
}

// total = the sums of all slices, added from left to right.
template <class S, int NT>
__device__ __forceinline__ void sum_leaves(Reader<S>& reader, float (&total)[NT][4], int64_t cols) {
  const int parts = leaves(cols);
  float sum[NT][4] = {};
#pragma unroll
  for (int j = 0; j < NT; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) total[j][i] = -0.0f;  // -0 is the identity of addition
  }
#pragma unroll 1
  for (int leaf = 0; leaf < parts; ++leaf) {
    sum_pieces<S, NT>(reader, sum, leaf_of(cols, leaf).count);
    add_sums(total, sum);
  }
}

__device__ __forceinline__ Work work_of(const ProductArgs& p, int64_t tokens) {
  return {p.weight.data, p.weight.rows, p.weight.cols, p.act,  p.act_chunks, (tokens + 7) / 8,
          p.out,         p.out_stride,  tokens,        p.bias, p.scale,      p.add != 0};
}
#endif

}  // namespace freshet::cuda

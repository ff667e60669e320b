// A device with memory of its own, as Ops uses it. Implemented by a backend whose kernels cannot
// run on host pointers.
//
// Ops checks shapes, then forwards the call. Matrices, weights and parameters point into the
// device's memory; spans of ids and positions, and the batch's tables, are in host memory. Work is
// enqueued in order, and only wait() waits for it. Used by one thread. Batch invariance holds here
// as in ops.h.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>

#include "base/thread_pool.h"
#include "ops/copy_lane.h"
#include "ops/ops.h"

namespace freshet::ops {

class Device : public Memory {
 public:
  virtual std::string name() const = 0;  // for display: "NVIDIA H200"
  virtual size_t free_bytes() const = 0;
  virtual size_t total_bytes() const = 0;
  virtual Memory& host_memory() = 0;  // host memory with fast copies
  virtual Status write(void* to, const void* host, size_t bytes) = 0;
  virtual void fetch(void* host, const void* from, size_t bytes) = 0;  // valid after wait()
  virtual void wait() = 0;
  // note() records event 0 or 1 after the work enqueued so far; await() waits for that event only.
  virtual void note(int which) = 0;
  virtual void await(int which) = 0;

  // A queue of copies of these blocks to and from host_memory(), which must not outlive the device;
  // nullptr: there is none.
  virtual std::unique_ptr<CopyLane> copy_lane(const LaneLayers& /*groups*/) { return nullptr; }

  // For measurements: the seconds that the device needs for the work that body enqueues, and the
  // highest rate in bytes per second at which it reads its memory.
  virtual double time(FunctionRef<void()> body) = 0;
  virtual Result<double> read_rate() = 0;

  // The inputs list the host arrays that the step's ops will receive, and the key, the values that
  // decide which ops run. The caller guarantees that equal keys give the same ops in the same order
  // with the same pointers, so a device may replay a recorded step.
  virtual void step(const StepInputs& inputs, FunctionRef<void()> body) = 0;

  // The kernel row for GEMMs with this format; nullptr if there is none.
  virtual const MatmulKernel* matmul_row(quant::Format format) const = 0;
  // The kernels for GEMMs with this weight, for display; by number of tokens if they depend on it.
  virtual std::string kernel_names(const Weight& weight) const = 0;
  // An upper bound for the bytes of pack(), from the number of rows and columns only.
  virtual int64_t packed_bytes(quant::Format format, int64_t rows, int64_t cols, Use use) const = 0;
  virtual Result<Buffer> pack(ThreadPool& pool, quant::Format format,
                              std::span<const uint8_t* const> rows, int64_t cols, Use use) = 0;
  // Ok, or one line that says why a cache of this shape isn't supported.
  virtual Status supports(const KvShape& shape) const = 0;
  virtual Status supports(const Routing& routing) const = 0;
  // Upper bound of the states per channel that selective_scan() supports.
  virtual int most_selective_states() const = 0;

  virtual void embed(const Matrix& out, const Weight& table, std::span<const int32_t> ids,
                     float scale, int32_t offset) = 0;
  // Weight::outliers do not count here, nor in fused operations: Ops splits such products.
  virtual void matmul(const Matrix& x, std::span<const Product> products) = 0;
  virtual void matmul_heads(const Matrix& x, std::span<const Weight> weights,
                            const Matrix& out) = 0;
  // kept: x with zeros in these columns; apart: these columns alone. Both are in the device's
  // scratch memory, for the GEMMs that follow.
  virtual void split_columns(const Matrix& x, const OutlierColumns& outliers, Matrix& kept,
                             Matrix& apart) = 0;
  // sums += x^T x with the bits of the host's GEMM for Use::kExact. sums: [x.cols, x.cols],
  // symmetric; x.cols and its stride are multiples of four.
  virtual void add_moments(float* sums, const Matrix& x) = 0;
  virtual void norm(const Matrix& out, const Matrix& x, const Norm& norm) = 0;
  virtual void norm_heads(const Matrix& x, int heads, int head_dim, const Norm& norm,
                          bool weight_per_head) = 0;
  virtual void rope_table(float* cos_sin, std::span<const int32_t> positions,
                          std::span<const float> inv_freq, float scale,
                          const PositionScale& growth) = 0;
  virtual void rope(const Matrix& x, int heads, int head_dim, int offset, int rotary_dim,
                    bool interleaved, const float* cos_sin) = 0;
  virtual void store_kv(const KvView& cache, const Matrix& k, const Matrix& v,
                        const AttentionBatch& batch) = 0;
  virtual void attention(const Matrix& out, const Matrix& q, const KvView& cache,
                         const AttentionBatch& batch, const AttentionParams& params) = 0;
  // As Ops::key_scores(), but the sums have their new values after take_scores(), which REQUIRES
  // that the step was awaited.
  virtual void key_scores(const Matrix& q, const KvView& cache, const AttentionBatch& batch,
                          const AttentionParams& params, std::span<const ScoredQueries> scored) = 0;
  virtual void take_scores(ThreadPool& pool) = 0;
  virtual void gather_kv(const KvView& cache, std::span<const int32_t> from,
                         std::span<const int32_t> to, const int32_t* kept, int32_t count) = 0;
  // Waits for all that was enqueued.
  virtual void read_keys(const KvView& cache, std::span<const int32_t> blocks, int head,
                         int32_t slots, float* keys) = 0;
  virtual void glu(const Matrix& out, const Matrix& gate, const Matrix& up, const Glu& glu) = 0;
  virtual void activation(const Matrix& x, Activation activation) = 0;
  virtual void add(const Matrix& out, const Matrix& x, float scale) = 0;
  virtual void scale(const Matrix& x, float scale) = 0;
  virtual void softcap(const Matrix& x, float cap) = 0;
  virtual void gather_rows(const Matrix& out, const Matrix& x, std::span<const int32_t> rows) = 0;
  virtual void sigmoid_gate(const Matrix& x, const Matrix& gate) = 0;
  virtual void sigmoid_product(const Matrix& x, const Matrix& gate) = 0;
  virtual void xielu(const Matrix& x, const Xielu& xielu) = 0;
  // Slots and saves of a state's batch are in host memory, like all tables.
  virtual void causal_conv(const CausalConv& conv) = 0;
  virtual void selective_scan(const SelectiveScan& scan) = 0;
  virtual void linear_scan(const LinearScan& scan) = 0;
  virtual void delta_scan(const DeltaScan& scan) = 0;
  virtual void argmax(const Matrix& x, int32_t* ids) = 0;
  // Whether sample() accepts rows of `vocab` logits. words: sampling descriptors (ops/sample.h),
  // whose `last` index `tokens`.
  virtual bool samples(int64_t vocab) const = 0;
  virtual void sample(const Matrix& logits, std::span<const int32_t> words,
                      std::span<const int32_t> tokens, int32_t* ids) = 0;
  // From here on, ids[i] is named[from[i]] (a sampled token) if from[i] >= 0, or what `map` says of
  // it unless that is nullptr; 0 if nothing was sampled. Both spans belong to the step.
  virtual void take_ids(std::span<const int32_t> ids, std::span<const int32_t> from,
                        const int32_t* named, const int32_t* map) = 0;
  virtual void route(const Matrix& logits, const Routing& routing, int32_t* ids,
                     float* weights) = 0;
  // hooks: nullptr, or the hooks to call around each expert's projections.
  virtual void moe(const Matrix& out, const Matrix& x, const int32_t* ids, const float* weights,
                   int top_k, const Experts& experts, bool add, ProjectionHooks* hooks) = 0;

  // Fused operations (ops/fused.h). False means that nothing was done, and Ops runs the
  // composition. A device may decide for each call.
  virtual bool project(const Input& /*in*/, std::span<const Product> /*products*/) { return false; }
  virtual bool prepare(const Input& /*in*/, std::span<const Weight* const> /*readers*/) {
    return false;
  }
  virtual bool heads(const Heads& /*heads*/) { return false; }
  virtual bool attend(const Attend& /*attend*/) { return false; }
  virtual bool qkv_attention(const QkvAttention& /*layer*/) { return false; }
  virtual bool latent_attention(const LatentAttention& /*layer*/) { return false; }
  virtual bool gated(const GatedMlp& /*mlp*/) { return false; }
  virtual bool moe_block(const MoeBlock& /*block*/) { return false; }
  virtual bool add_residual(const ResidualAdd& /*end*/) { return false; }

  virtual size_t scratch_bytes(const Ops::ShapeLimits& limits) const = 0;
  virtual Status set_scratch(size_t bytes) = 0;
  // Reserves memory for all arrays of a step (StepInputs) together.
  virtual Status set_inputs(size_t bytes) = 0;
};

}  // namespace freshet::ops

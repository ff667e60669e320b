// A device with memory of its own, as Ops sees it: what a backend implements whose kernels cannot
// run on the host's pointers.
//
// Ops checks shapes, then hands the call on. Matrices, weights and parameters point into the
// device's memory; spans of ids and positions, and the batch's tables, are the host's. Work is
// enqueued in order, and only wait() waits for it. One thread. The law of the batch holds here as
// in ops.h.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>

#include "base/thread_pool.h"
#include "ops/ops.h"

namespace freshet::ops {

class Device : public Memory {
 public:
  virtual std::string name() const = 0;  // for people: "NVIDIA H200"
  virtual size_t free_bytes() const = 0;
  virtual size_t total_bytes() const = 0;
  virtual Memory& host_memory() = 0;  // of the host, fast to copy from and to
  virtual Status write(void* to, const void* host, size_t bytes) = 0;
  virtual void fetch(void* host, const void* from, size_t bytes) = 0;  // there after wait()
  virtual void wait() = 0;
  // Of what was enqueued so far: note 0 or 1, and waiting for that alone.
  virtual void note(int which) = 0;
  virtual void await(int which) = 0;

  // For measuring: seconds that the device takes for what body enqueues, and bytes a second that it
  // reads from its memory at best.
  virtual double time(FunctionRef<void()> body) = 0;
  virtual Result<double> read_rate() = 0;

  // What a step is made of, by the caller's word: host arrays that ops of the step will be given,
  // and the numbers that decide which ops run. With equal keys the same ops come in the same order
  // with the same pointers, so a device may play back what it saw.
  virtual void step(const StepInputs& inputs, FunctionRef<void()> body) = 0;

  // The row that multiplies with a format; nullptr: none does.
  virtual const MatmulKernel* matmul_row(quant::Format format) const = 0;
  // The kernels that multiply with a weight, for people: by tokens, if they depend on them.
  virtual std::string kernel_names(const Weight& weight) const = 0;
  // What pack() takes at most, by the rows' number alone.
  virtual int64_t packed_bytes(quant::Format format, int64_t rows, int64_t cols, Use use) const = 0;
  virtual Result<Buffer> pack(ThreadPool& pool, quant::Format format,
                              std::span<const uint8_t* const> rows, int64_t cols, Use use) = 0;
  // One line that says why a cache of this shape cannot be served, or ok.
  virtual Status supports(const KvShape& shape) const = 0;
  virtual Status supports(const Routing& routing) const = 0;

  virtual void embed(const Matrix& out, const Weight& table, std::span<const int32_t> ids,
                     float scale, int32_t offset) = 0;
  virtual void matmul(const Matrix& x, std::span<const Product> products) = 0;
  virtual void matmul_heads(const Matrix& x, std::span<const Weight> weights,
                            const Matrix& out) = 0;
  virtual void norm(const Matrix& out, const Matrix& x, const Norm& norm) = 0;
  virtual void norm_heads(const Matrix& x, int heads, int head_dim, const Norm& norm,
                          bool weight_per_head) = 0;
  virtual void rope_table(float* cos_sin, std::span<const int32_t> positions,
                          std::span<const float> inv_freq, float scale) = 0;
  virtual void rope(const Matrix& x, int heads, int head_dim, int offset, int rotary_dim,
                    bool interleaved, const float* cos_sin) = 0;
  virtual void store_kv(const KvView& cache, const Matrix& k, const Matrix& v,
                        const AttentionBatch& batch) = 0;
  virtual void attention(const Matrix& out, const Matrix& q, const KvView& cache,
                         const AttentionBatch& batch, const AttentionParams& params) = 0;
  virtual void glu(const Matrix& out, const Matrix& gate, const Matrix& up, const Glu& glu) = 0;
  virtual void activation(const Matrix& x, Activation activation) = 0;
  virtual void add(const Matrix& out, const Matrix& x, float scale) = 0;
  virtual void scale(const Matrix& x, float scale) = 0;
  virtual void softcap(const Matrix& x, float cap) = 0;
  virtual void gather_rows(const Matrix& out, const Matrix& x, std::span<const int32_t> rows) = 0;
  virtual void sigmoid_gate(const Matrix& x, const Matrix& gate) = 0;
  virtual void argmax(const Matrix& x, int32_t* ids) = 0;
  // Whether sample() may be asked for rows of so many logits. words: ops/sample.h, whose `last` are
  // of `tokens`.
  virtual bool samples(int64_t vocab) const = 0;
  virtual void sample(const Matrix& logits, std::span<const int32_t> words,
                      std::span<const int32_t> tokens, int32_t* ids) = 0;
  // From here on, number i of `ids` is named[from[i]] where from[i] >= 0. Both are the step's.
  virtual void take_ids(std::span<const int32_t> ids, std::span<const int32_t> from,
                        const int32_t* named) = 0;
  virtual void route(const Matrix& logits, const Routing& routing, int32_t* ids,
                     float* weights) = 0;
  // hooks: nullptr, or what is to be called around each expert's projections.
  virtual void moe(const Matrix& out, const Matrix& x, const int32_t* ids, const float* weights,
                   int top_k, const Experts& experts, bool add, ProjectionHooks* hooks) = 0;

  // Fused operations (ops/fused.h). False: nothing was done, and Ops is to run the composition. A
  // device may decide for each call.
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
  // Room for the arrays that a step names (StepInputs), together.
  virtual Status set_inputs(size_t bytes) = 0;
};

}  // namespace freshet::ops

// What a model may ask of a device.
//
// Ops is the one door between layers and kernels. Each call checks shapes once, picks the planned
// kernel row and runs it on the pool; kernels themselves check nothing. One Ops serves one engine
// and is called from its step thread only.
//
// Law of the batch: for every op, an output row depends on its own input rows alone, bit for bit;
// never on how many rows there are, on their order, or on the number of workers. Sums run in an
// order fixed by the shape of the weight (products) or by position (attention).
//
// Activations are F32 matrices [tokens, features]. Weights are in their stored format, packed once
// at load (ops/weight.h). Pointers are device pointers: layers never read through them.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "base/thread_pool.h"
#include "ops/arguments.h"
#include "ops/attention.h"
#include "ops/fused.h"
#include "ops/hooks.h"
#include "ops/kernel_table.h"
#include "ops/weight.h"
#include "tensor/buffer.h"

namespace freshet::ops {

struct OpsOptions {
  bool reference =
      false;  // every op in its plain F32 form; weights decoded to F32 as they are used
  std::vector<std::string> force_kernels;  // "matmul=q4_0.avx2": fails to plan where it cannot run
  size_t scratch_bytes = 0;                // workspace for the kernels, from the memory plan
};

class Device;

// See Device::step.
struct StepInputs {
  std::span<const std::span<const int32_t>>
      arrays;  // host arrays that the step's ops will be given
  std::span<const int64_t> key;
  bool repeats = false;  // whether steps of this key are likely to come again
};

class Ops {
 public:
  // `backend` is the table to choose from, reference_kernels() what it lacks; `capabilities` say
  // what the processor can run. An error names a forced kernel that cannot run here.
  static Result<std::unique_ptr<Ops>> create(ThreadPool& pool, const KernelTable& backend,
                                             const Capabilities& capabilities,
                                             const OpsOptions& options);
  // On a device with memory of its own (ops/device.h); its pointers are not the host's.
  static std::unique_ptr<Ops> create(ThreadPool& pool, std::unique_ptr<Device> device);
  ~Ops();

  // nullptr on the host. Memory for what ops read and write, and for what they leave for the host.
  Device* device() const;
  Memory* memory() const;
  Memory* host_memory() const;
  // A copy of numbers of the host, for ops to read.
  Result<Buffer> upload(std::span<const float> values);
  // Copies a result to the host, where it is after the next wait().
  void fetch(void* host, const void* from, size_t bytes);
  void wait();
  // Runs body, the ops of one step; a device may play back an earlier step of the same key instead.
  void step(const StepInputs& inputs, FunctionRef<void()> body);

  ThreadPool& pool();
  const Capabilities& capabilities() const;
  bool reference() const;
  // Whether products take weights whose columns are in another order (Weight::inputs).
  bool reorders_inputs() const;
  // Names of the rows that are planned, for tests and for `inspect`.
  std::string_view matmul_row(quant::Format format) const;
  std::string kernel_names(const Weight& weight) const;  // for `inspect`
  std::string_view attention_row(const KvShape& shape) const;
  std::string_view vector_row() const;

  // Packs rows (each row_bytes(format, cols) bytes, anywhere in memory, e.g. in a mapped file) for
  // the kernel that this device will use. The same rows give the same Weight whatever the pool's
  // size. `look` is called with each row before it is packed, in parallel.
  static constexpr auto kNoLook = [](const uint8_t*) {};
  Result<Weight> pack(quant::Format format, std::span<const uint8_t* const> rows, int64_t cols,
                      FunctionRef<void(const uint8_t* row)> look = kNoLook,
                      Use use = Use::kProducts);

  // A Weight from what pack() made of it before, in a program of the same kPackedVersion and with
  // the same row for its format. Host only. An error: these are not as many bytes.
  Result<Weight> adopt(quant::Format format, int64_t rows, int64_t cols, Buffer packed);

  // out[t] = row ids[t] + offset of table, decoded, times scale. out: [tokens, cols]
  void embed(const Matrix& out, const Weight& table, std::span<const int32_t> ids, float scale,
             int32_t offset = 0);
  // Several products of the same x run as one region; x is quantised once for all of them.
  void matmul(const Matrix& x, std::span<const Product> products);
  // Per head: out[t, h] = x[t, h] W_h^T. x: [tokens, heads * W.cols], out: [tokens, heads *
  // W.rows].
  void matmul_heads(const Matrix& x, std::span<const Weight> weights, const Matrix& out);

  void norm(const Matrix& out, const Matrix& x, const Norm& norm);  // over a row
  void norm_heads(const Matrix& x, int heads, int head_dim, const Norm& norm,
                  bool weight_per_head);  // in place

  // cos_sin: [tokens, 2, rotary_dim / 2]: scale * cos and scale * sin of position * inv_freq.
  void rope_table(float* cos_sin, std::span<const int32_t> positions,
                  std::span<const float> inv_freq, float scale);
  // Rotates the first rotary_dim features of each head, in place. interleaved: pairs (2i, 2i+1);
  // otherwise (i, i + rotary_dim / 2). x: [tokens, heads * head_dim], the rotated part at `offset`
  // in a head.
  void rope(const Matrix& x, int heads, int head_dim, int offset, int rotary_dim, bool interleaved,
            const float* cos_sin);

  // Writes new keys and values (rounded to the cache's type) to their blocks. k: [tokens, kv_heads
  // * key_dim].
  void store_kv(const KvView& cache, const Matrix& k, const Matrix& v, const AttentionBatch& batch);
  // Causal attention of the batch's queries over the cache. q: [tokens, heads * key_dim],
  // out: [tokens, heads * value_dim].
  void attention(const Matrix& out, const Matrix& q, const KvView& cache,
                 const AttentionBatch& batch, const AttentionParams& params);

  void glu(const Matrix& out, const Matrix& gate, const Matrix& up, const Glu& glu);
  void activation(const Matrix& x, Activation activation);    // in place
  void add(const Matrix& out, const Matrix& x, float scale);  // out += scale * x
  void scale(const Matrix& x, float scale);                   // in place
  void softcap(const Matrix& x, float cap);                   // cap * tanh(x / cap), in place
  void gather_rows(const Matrix& out, const Matrix& x, std::span<const int32_t> rows);
  // x[t] *= sigmoid(gate[t, 0]); in place (the shared expert's gate of Qwen2-MoE).
  void sigmoid_gate(const Matrix& x, const Matrix& gate);
  // ids[t]: the lowest column that holds the largest number of row t, NaNs passed over; -1 where
  // nothing is above minus infinity.
  void argmax(const Matrix& x, int32_t* ids);
  // Whether sample() may be called: by a device, for so many logits a row.
  bool samples(int64_t vocab) const;
  // ids[t]: the token that the words (ops/sample.h) ask for of row t; -1 where none can follow.
  void sample(const Matrix& logits, std::span<const int32_t> words, std::span<const int32_t> tokens,
              int32_t* ids);
  // See Device::take_ids, note and await; for devices.
  void take_ids(std::span<const int32_t> ids, std::span<const int32_t> from, const int32_t* named);
  void note(int which);
  void await(int which);

  // ids, weights: [tokens, top_k]
  void route(const Matrix& logits, const Routing& routing, int32_t* ids, float* weights);
  // out[t] = [out[t] +] sum over the chosen experts, in order of expert id. x: [tokens, hidden].
  void moe(const Matrix& out, const Matrix& x, const int32_t* ids, const float* weights, int top_k,
           const Experts& experts, bool add);

  // ---- Fused operations (ops/fused.h)

  // Projections of an input: norm and GEMMs.
  void project(const Input& in, std::span<const Product> products);
  // in.normed = norm(in.x), for projections with these weights later, which then get in.normed as
  // their x and the same in.shared.
  void prepare(const Input& in, std::span<const Weight* const> readers);
  // As a call of its own, queries and keys are there afterwards.
  void heads(const Heads& heads);
  void attend(const Attend& attend);
  void qkv_attention(const QkvAttention& layer);
  void latent_attention(const LatentAttention& layer);
  void gated(const GatedMlp& mlp);
  void moe_block(const MoeBlock& block);
  void add_residual(const ResidualAdd& end);

  // Sets hooks around every projection from now on, or none (nullptr). Of steps of at most `tokens`
  // tokens, and outputs that are added to a residual of `cols` columns: that is memory that hooks
  // take. To be called before Model::reserve(), so that its plan has room for projections that
  // hooks do themselves. Steps are not recorded meanwhile.
  Status set_projection_hooks(ProjectionHooks* hooks, int64_t tokens = 0, int64_t cols = 0);

  // Workspace that the calls above may need for at most `tokens` rows (for the memory plan).
  struct ShapeLimits {
    int64_t tokens = 0;
    int64_t max_cols = 0;        // widest input of a product
    int64_t max_rows = 0;        // widest output
    int64_t max_gated_cols = 0;  // widest input of a gated MLP
    int64_t max_expert_ff = 0;
    int top_k = 0;
    int heads = 0;
    int max_head_dim = 0;
    int64_t max_context = 0;
  };
  size_t scratch_bytes(const ShapeLimits& limits) const;
  // Reserves at least so many bytes of scratch. It never shrinks, so several models may reserve
  // what each needs, in any order.
  Status set_scratch(size_t bytes);
  Status set_inputs(size_t bytes);  // the same, of a device: for the arrays of a step

 private:
  struct Impl;
  explicit Ops(std::unique_ptr<Impl> impl);
  void run_matmul(const Matrix& x, std::span<const Product> products);
  bool run_gated_by_pieces(const GatedMlp& mlp);
  void run_shared_expert(const MoeBlock& block);
  std::unique_ptr<Impl> impl_;
};

}  // namespace freshet::ops

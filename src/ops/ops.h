// The operations that models run on a device.
//
// Ops is the only interface between layers and kernels. Each call checks shapes once, picks the
// planned kernel row and runs it on the pool; kernels check nothing themselves. One Ops serves one
// engine and is called only from its step thread.
//
// Batch invariance: for every op, an output row depends only on its own input rows, bit for bit. It
// never depends on the number or the order of rows, or on the number of workers. Sums run in an
// order that is fixed by the shape of the weight (GEMM) or by position (attention).
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
#include "ops/state.h"
#include "ops/weight.h"
#include "tensor/buffer.h"

namespace freshet::ops {

struct OpsOptions {
  bool reference =
      false;  // every op in its plain F32 form; weights are decoded to F32 when they are used
  std::vector<std::string> force_kernels;  // "matmul=q4_0.avx2": planning fails if it cannot run
  size_t scratch_bytes = 0;                // workspace for the kernels, from the memory plan
};

class Device;

// See Device::step.
struct StepInputs {
  std::span<const std::span<const int32_t>>
      arrays;  // the host arrays that will be passed to ops of the step
  std::span<const int64_t> key;
  bool repeats = false;  // whether steps with this key are likely to recur
};

class Ops {
 public:
  // `backend` is the table to choose from; reference_kernels() fills its gaps. `capabilities` say
  // what the processor can run. Fails, with the kernel's name, if a forced kernel cannot run here.
  static Result<std::unique_ptr<Ops>> create(ThreadPool& pool, const KernelTable& backend,
                                             const Capabilities& capabilities,
                                             const OpsOptions& options);
  // For a device with memory of its own (ops/device.h). Its pointers are not valid on the host.
  static std::unique_ptr<Ops> create(ThreadPool& pool, std::unique_ptr<Device> device);
  ~Ops();

  // device() is nullptr on the host. memory() holds the data that ops read and write, host_memory()
  // the results that they leave for the host.
  Device* device() const;
  Memory* memory() const;
  Memory* host_memory() const;
  // Copies values of the host to memory that ops can read.
  Result<Buffer> upload(std::span<const float> values);
  // Copies a result to the host; it is valid after the next wait().
  void fetch(void* host, const void* from, size_t bytes);
  void wait();
  // Runs body, the ops of one step. A device may replay an earlier step with the same key instead.
  void step(const StepInputs& inputs, FunctionRef<void()> body);

  ThreadPool& pool();
  const Capabilities& capabilities() const;
  bool reference() const;
  // Whether GEMMs accept weights whose columns are in another order (Weight::inputs).
  bool reorders_inputs() const;
  // Names of the planned rows, for tests and for `inspect`.
  std::string_view matmul_row(quant::Format format) const;
  std::string kernel_names(const Weight& weight) const;  // for `inspect`
  std::string_view attention_row(const KvShape& shape) const;
  std::string_view vector_row() const;

  // Packs rows (each row_bytes(format, cols) bytes, anywhere in memory, e.g. in a mapped file) for
  // the kernel that this device will use. The same rows give the same Weight for every size of the
  // pool. Calls `look` with each row before packing it, in parallel.
  static constexpr auto kNoLook = [](const uint8_t*) {};
  Result<Weight> pack(quant::Format format, std::span<const uint8_t* const> rows, int64_t cols,
                      FunctionRef<void(const uint8_t* row)> look = kNoLook,
                      Use use = Use::kProducts);

  // Makes a Weight from the packed bytes of an earlier pack(), by a program with the same
  // kPackedVersion and the same row for the format. Host only. Fails if the number of bytes is
  // wrong.
  Result<Weight> adopt(quant::Format format, int64_t rows, int64_t cols, Buffer packed);

  // Gives a weight outlier columns: `values` is [weight.rows, columns] (see Weight::outliers). Call
  // it before scratch_bytes(), whose result then has room for products in two parts.
  Status set_outliers(Weight& weight, std::vector<int32_t> columns, Weight values);

  // out[t] = scale * table[ids[t] + offset], decoded. out: [tokens, cols]
  void embed(const Matrix& out, const Weight& table, std::span<const int32_t> ids, float scale,
             int32_t offset = 0);
  // Several GEMMs with the same x run as one parallel region; x is quantised once for all of them.
  void matmul(const Matrix& x, std::span<const Product> products);
  // Per head: out[t, h] = x[t, h] W_h^T. x: [tokens, heads * W.cols], out: [tokens, heads *
  // W.rows].
  void matmul_heads(const Matrix& x, std::span<const Weight> weights, const Matrix& out);

  void norm(const Matrix& out, const Matrix& x, const Norm& norm);  // over a row
  void norm_heads(const Matrix& x, int heads, int head_dim, const Norm& norm,
                  bool weight_per_head);  // in place

  // cos_sin: [tokens, 2, rotary_dim / 2]: scale * cos and scale * sin of position * inv_freq, times
  // `growth` of the position.
  void rope_table(float* cos_sin, std::span<const int32_t> positions,
                  std::span<const float> inv_freq, float scale, const PositionScale& growth = {});
  // The same for tokens with a position on each of several axes: frequency i is multiplied by the
  // position on axis axes[i]. positions: [tokens, count]. Host only.
  void rope_table(float* cos_sin, std::span<const int32_t> positions, int count,
                  std::span<const int> axes, std::span<const float> inv_freq, float scale);
  // Rotates the first rotary_dim features of each head, in place. interleaved: pairs (2i, 2i+1);
  // otherwise (i, i + rotary_dim / 2). x: [tokens, heads * head_dim], the rotated part at `offset`
  // in a head.
  void rope(const Matrix& x, int heads, int head_dim, int offset, int rotary_dim, bool interleaved,
            const float* cos_sin);

  // Stores new keys and values, rounded to the cache's type, in their blocks, and the bounds of the
  // blocks that they fill, if keys are bounded. k: [tokens, kv_heads * key_dim].
  void store_kv(const KvView& cache, const Matrix& k, const Matrix& v, const AttentionBatch& batch);
  // Causal attention of the batch's queries over the cache. q: [tokens, heads * key_dim], out:
  // [tokens, heads * value_dim].
  void attention(const Matrix& out, const Matrix& q, const KvView& cache,
                 const AttentionBatch& batch, const AttentionParams& params);

  // Attention in which some queries read only a part of their sequence (BlockSelection). By bounds
  // (ops_select.cc), for each KV head: the first block, the newest ones, and those whose bounds
  // promise its query heads the highest scores. By components (ops_sparq.cc), for each KV head: the
  // newest tokens, and those to which its query heads give the largest weights as far as these
  // components tell; the mean of the values stands for the others. Ties go to the earlier block or
  // token. Queries with no more blocks than that read all of them. selections: [sequences]. Host
  // only.
  void selected_attention(const Matrix& out, const Matrix& q, const KvView& cache,
                          const AttentionBatch& batch, const AttentionParams& params,
                          std::span<const BlockSelection> selections);

  // Adds the softmax weights that attention() gives each key, for the scored queries, to the sums:
  // integers in units of 1 / kScoreUnits, so that the order of additions doesn't matter. others:
  // nullptr, or AttentionParams::sums of further keys, which have a share of the weights; host
  // only. On a device the sums, on the host, have their new values after take_scores().
  void key_scores(const Matrix& q, const KvView& cache, const AttentionBatch& batch,
                  const AttentionParams& params, std::span<const ScoredQueries> scored,
                  const float* others = nullptr);
  // After a step with key_scores() that was awaited.
  void take_scores();
  // Copies the keys and values of slots kept[head * count + i], ascending in a head, to slot i of
  // the blocks `to`, bits unchanged. Blocks may be in both lists.
  void gather_kv(const KvView& cache, std::span<const int32_t> from, std::span<const int32_t> to,
                 const int32_t* kept, int32_t count);
  // As attention(), over what sequences keep in 4 bits, too: attention over either part, merged in
  // F32. Returns AttentionParams::sums of the coarse tokens, valid until the next call. Host only.
  const float* attend_both(const Matrix& out, const Matrix& q, const KvView& cache,
                           const AttentionBatch& batch, const AttentionParams& params,
                           const CoarseTokens& coarse);
  // As gather_kv(); before that, encodes the slots that aren't kept in 4 bits. Host only.
  void recode_kv(const KvView& cache, std::span<const int32_t> from, std::span<const int32_t> to,
                 const int32_t* kept, int32_t count, const Recoding& recoding);
  // The keys of a head in the first `slots` slots of the blocks, as attention() reads them:
  // [slots, key_dim]. Thread-safe on the host only.
  void read_keys(const KvView& cache, std::span<const int32_t> blocks, int head, int32_t slots,
                 float* keys) const;

  void glu(const Matrix& out, const Matrix& gate, const Matrix& up, const Glu& glu);
  void activation(const Matrix& x, Activation activation);    // in place
  void xielu(const Matrix& x, const Xielu& xielu);            // in place
  void add(const Matrix& out, const Matrix& x, float scale);  // out += scale * x
  void scale(const Matrix& x, float scale);                   // in place
  void scale_cols(const Matrix& x, const float* factors);     // x[t, c] *= factors[c]; host only
  void softcap(const Matrix& x, float cap);                   // cap * tanh(x / cap), in place
  void gather_rows(const Matrix& out, const Matrix& x, std::span<const int32_t> rows);
  // out[rows[i]] = [out[rows[i]] +] x[i]. Host only.
  void put_rows(const Matrix& out, std::span<const int32_t> rows, const Matrix& x, bool add);
  // x[t] *= sigmoid(gate[t, 0]), in place (the gate of Qwen2-MoE's shared expert).
  void sigmoid_gate(const Matrix& x, const Matrix& gate);
  // ids[t]: the argmax of row t. Ties go to the lowest column and NaNs are skipped; -1 if no value
  // is above minus infinity.
  void argmax(const Matrix& x, int32_t* ids);
  // Whether sample() is available: needs a device that supports rows of `vocab` logits.
  bool samples(int64_t vocab) const;
  // ids[t]: the token sampled from row t by its sampling descriptor in `words` (ops/sample.h); -1
  // if no token is possible.
  void sample(const Matrix& logits, std::span<const int32_t> words, std::span<const int32_t> tokens,
              int32_t* ids);
  // See Device::take_ids, note and await; only on devices.
  void take_ids(std::span<const int32_t> ids, std::span<const int32_t> from, const int32_t* named,
                const int32_t* map);
  void note(int which);
  void await(int which);

  // ids, weights: [tokens, top_k]
  void route(const Matrix& logits, const Routing& routing, int32_t* ids, float* weights);
  // out[t] = [out[t] +] sum over the chosen experts, in order of expert id. x: [tokens, hidden].
  void moe(const Matrix& out, const Matrix& x, const int32_t* ids, const float* weights, int top_k,
           const Experts& experts, bool add);

  // x *= sigmoid(gate), in place.
  void sigmoid_product(const Matrix& x, const Matrix& gate);
  // ---- Sequences with states (ops/state.h). Processed token by token, so that chunking a sequence
  // into steps changes no bit.
  void causal_conv(const CausalConv& conv);
  void selective_scan(const SelectiveScan& scan);
  void linear_scan(const LinearScan& scan);
  void delta_scan(const DeltaScan& scan);

  // ---- Fused operations (ops/fused.h)

  // Projections of an input: norm and GEMMs.
  void project(const Input& in, std::span<const Product> products);
  // in.normed = norm(in.x), for later projections with these weights. Those receive in.normed as
  // their x, and the same in.shared.
  void prepare(const Input& in, std::span<const Weight* const> readers);
  // If called on its own, queries and keys are complete when it returns.
  void heads(const Heads& heads);
  void attend(const Attend& attend);
  void qkv_attention(const QkvAttention& layer);
  void latent_attention(const LatentAttention& layer);
  void gated(const GatedMlp& mlp);
  void moe_block(const MoeBlock& block);
  void add_residual(const ResidualAdd& end);

  // Sets hooks around every projection from now on, or none (nullptr). `tokens` is the most tokens
  // per step, `cols` the most columns of an output that is added to a residual: hooks need memory
  // for these. Call it before Model::reserve(), whose plan then includes the projections that hooks
  // run themselves. Steps are not recorded while hooks are set.
  Status set_projection_hooks(ProjectionHooks* hooks, int64_t tokens = 0, int64_t cols = 0);

  // Workspace that the calls above may need for at most `tokens` rows (for the memory plan).
  struct ShapeLimits {
    int64_t tokens = 0;
    int64_t max_cols = 0;        // widest input of a GEMM
    int64_t max_rows = 0;        // widest output
    int64_t max_gated_cols = 0;  // widest input of a gated MLP
    int64_t max_expert_ff = 0;
    int top_k = 0;
    int heads = 0;
    int max_head_dim = 0;
    int64_t max_context = 0;
    // Widest input of a product in two parts, with its outlier columns. At least that of the
    // weights that were given some already.
    int64_t split_cols = 0;
  };
  size_t scratch_bytes(const ShapeLimits& limits) const;
  // Reserves at least this many bytes of scratch. It never shrinks, so several models may reserve
  // their needs in any order.
  Status set_scratch(size_t bytes);
  Status set_inputs(size_t bytes);  // the same on a device, for the arrays of a step

 private:
  struct Impl;
  explicit Ops(std::unique_ptr<Impl> impl);
  void run_matmul(const Matrix& x, std::span<const Product> products);
  void run_split(const Matrix& x, std::span<const Product> products);
  void run_whole(const Matrix& x, std::span<const Product> products);
  void bound_keys(const KvView& cache, const AttentionBatch& batch);
  void sum_values(const KvView& cache, const AttentionBatch& batch);
  void selected_tokens(const Matrix& out, const Matrix& q, const KvView& cache,
                       const AttentionBatch& batch, const AttentionParams& params,
                       std::span<const BlockSelection> selections);
  std::span<const uint8_t> encode_coarse(const KvView& cache, std::span<const int32_t> from,
                                         const Recoding& recoding);
  bool run_gated_by_pieces(const GatedMlp& mlp);
  void run_shared_expert(const MoeBlock& block);
  std::unique_ptr<Impl> impl_;
};

}  // namespace freshet::ops

// A GPU behind the plug-in's table: the part of the CUDA backend that needs no CUDA.
//
// Memory: weights, the cache and the model's arena have their own buffers. Scratch is one circular
// buffer, whose size scratch_bytes() plans. A small staging area uploads ids, positions and block
// tables once per step. GEMMs read their input in BF16 (or E4M3, INT8) in a layout of their own; an
// operation whose result only GEMMs read writes just that encoded form, to scratch. Fused
// operations (ops/fused.h, docs/fusion.md) say which results these are; an encoded form lives as
// long as its operation, or as long as its Input::shared. Every operation is enqueued when it is
// called. Repeated steps are recorded as graphs and replayed. Used by one thread.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "backend/cuda/api.h"
#include "backend/cuda/kernel_names.h"
#include "ops/device.h"

namespace freshet::cuda {

class CudaDevice final : public ops::Device {
 public:
  static Result<std::unique_ptr<ops::Device>> open(const Api& api, int index,
                                                   const ForcedRows& forced);
  ~CudaDevice() override;

  Result<void*> take(size_t bytes) override;
  void give_back(void* memory) override;
  void copy(void* to, const void* from, size_t bytes) override;

  std::string name() const override { return name_; }
  size_t free_bytes() const override { return free_; }
  size_t total_bytes() const override { return total_; }
  Memory& host_memory() override { return pinned_; }
  Status write(void* to, const void* host, size_t bytes) override;
  void fetch(void* host, const void* from, size_t bytes) override;
  void wait() override;
  std::unique_ptr<ops::CopyLane> copy_lane(const ops::LaneLayers& groups) override;
  double time(FunctionRef<void()> body) override;
  Result<double> read_rate() override;
  void step(const ops::StepInputs& inputs, FunctionRef<void()> body) override;

  const DeviceLimits& limits() const { return limits_; }
  const ops::MatmulKernel* matmul_row(quant::Format format) const override;
  std::string kernel_names(const ops::Weight& weight) const override;
  int64_t packed_bytes(quant::Format format, int64_t rows, int64_t cols,
                       ops::Use use) const override;
  Result<Buffer> pack(ThreadPool& pool, quant::Format format, std::span<const uint8_t* const> rows,
                      int64_t cols, ops::Use use) override;
  Status supports(const ops::KvShape& shape) const override;
  Status supports(const ops::Routing& routing) const override;
  int most_selective_states() const override { return kMostSelectiveStates; }

  void embed(const Matrix& out, const ops::Weight& table, std::span<const int32_t> ids, float scale,
             int32_t offset) override;
  void matmul(const Matrix& x, std::span<const ops::Product> products) override;
  void matmul_heads(const Matrix& x, std::span<const ops::Weight> weights,
                    const Matrix& out) override;
  void split_columns(const Matrix& x, const ops::OutlierColumns& outliers, Matrix& kept,
                     Matrix& apart) override;
  void add_moments(float* sums, const Matrix& x) override;
  void norm(const Matrix& out, const Matrix& x, const ops::Norm& norm) override;
  void norm_heads(const Matrix& x, int heads, int head_dim, const ops::Norm& norm,
                  bool weight_per_head) override;
  void rope_table(float* cos_sin, std::span<const int32_t> positions,
                  std::span<const float> inv_freq, float scale,
                  const ops::PositionScale& growth) override;
  void rope(const Matrix& x, int heads, int head_dim, int offset, int rotary_dim, bool interleaved,
            const float* cos_sin) override;
  void store_kv(const ops::KvView& cache, const Matrix& k, const Matrix& v,
                const ops::AttentionBatch& batch) override;
  void attention(const Matrix& out, const Matrix& q, const ops::KvView& cache,
                 const ops::AttentionBatch& batch, const ops::AttentionParams& params) override;
  void key_scores(const Matrix& q, const ops::KvView& cache, const ops::AttentionBatch& batch,
                  const ops::AttentionParams& params,
                  std::span<const ops::ScoredQueries> scored) override;
  void take_scores(ThreadPool& pool) override;
  void gather_kv(const ops::KvView& cache, std::span<const int32_t> from,
                 std::span<const int32_t> to, const int32_t* kept, int32_t count) override;
  void read_keys(const ops::KvView& cache, std::span<const int32_t> blocks, int head, int32_t slots,
                 float* keys) override;
  void glu(const Matrix& out, const Matrix& gate, const Matrix& up, const ops::Glu& glu) override;
  void activation(const Matrix& x, ops::Activation activation) override;
  void add(const Matrix& out, const Matrix& x, float scale) override;
  void scale(const Matrix& x, float scale) override;
  void softcap(const Matrix& x, float cap) override;
  void gather_rows(const Matrix& out, const Matrix& x, std::span<const int32_t> rows) override;
  void sigmoid_gate(const Matrix& x, const Matrix& gate) override;
  void sigmoid_product(const Matrix& x, const Matrix& gate) override;
  void xielu(const Matrix& x, const ops::Xielu& xielu) override;
  void causal_conv(const ops::CausalConv& conv) override;
  void selective_scan(const ops::SelectiveScan& scan) override;
  void linear_scan(const ops::LinearScan& scan) override;
  void delta_scan(const ops::DeltaScan& scan) override;
  void argmax(const Matrix& x, int32_t* ids) override;
  bool samples(int64_t vocab) const override { return api_.sampling.samples(ctx_, vocab) != 0; }
  void sample(const Matrix& logits, std::span<const int32_t> words, std::span<const int32_t> tokens,
              int32_t* ids) override;
  void take_ids(std::span<const int32_t> ids, std::span<const int32_t> from, const int32_t* named,
                const int32_t* map) override;
  void note(int which) override;
  void await(int which) override;
  void route(const Matrix& logits, const ops::Routing& routing, int32_t* ids,
             float* weights) override;
  void moe(const Matrix& out, const Matrix& x, const int32_t* ids, const float* weights, int top_k,
           const ops::Experts& experts, bool add, ops::ProjectionHooks* hooks) override;

  bool project(const ops::Input& in, std::span<const ops::Product> products) override;
  bool prepare(const ops::Input& in, std::span<const ops::Weight* const> readers) override;
  bool heads(const ops::Heads& heads) override;
  bool attend(const ops::Attend& attend) override;
  bool latent_attention(const ops::LatentAttention& layer) override;
  bool gated(const ops::GatedMlp& mlp) override;
  bool moe_block(const ops::MoeBlock& block) override;

  size_t scratch_bytes(const ops::Ops::ShapeLimits& limits) const override;
  Status set_scratch(size_t bytes) override;
  Status set_inputs(size_t bytes) override;

 private:
  class Pinned final : public Memory {
   public:
    Pinned(const Api& api, Context* ctx) : api_(api), ctx_(ctx) {}
    Result<void*> take(size_t bytes) override;
    void give_back(void* memory) override;
    void copy(void* to, const void* from, size_t bytes) override;

   private:
    const Api& api_;
    Context* ctx_;
  };
  struct Close {
    const Api* api;
    void operator()(Context* context) const { api->close(context); }
  };
  // How rows are packed: for GEMMs and, if `beside` is another code, followed by a section for
  // lookups or exact GEMMs.
  struct Packing {
    Code code, beside;
    int64_t bytes = 0, bytes_beside = 0;
  };
  using Forms = ops::EncodedForms;
  using Readers = std::span<const ops::Weight* const>;
  // Up to this many tokens, every expert in use gets all of them.
  static constexpr int64_t kWholeTokens = 32;
  struct Registered {
    const int32_t* host;
    size_t size;
    const int32_t* device;
  };
  // The part of a router that runs together with its experts: an optional norm, the router's GEMM
  // and the routes. One kernel runs them together if one supports it.
  struct Pending {
    const ops::MoeBlock& block;
    bool norm = false, router = false;
    ProductArgs product{};
    RoutingArgs routing{};
  };
  // Sums of scores on their way to the host: [rows, slots], to be added to rows `stride` apart.
  struct ScoreRows {
    const int64_t* from;
    int64_t* to;
    int64_t rows, slots, stride;
  };
  struct Played {
    int seen = 0;
    bool loose = false;  // it uses arrays that the step didn't register
    void* graph = nullptr;
  };

  CudaDevice(const Api& api, Context* ctx)
      : api_(api), context_(ctx, Close{&api}), ctx_(ctx), pinned_(api, ctx) {}
  Status open_buffers();
  void check(int error, const char* what) const;
  void forget_steps();
  uint8_t* scratch(size_t bytes);
  template <class T>
  T* scratch_array(int64_t n) {
    return reinterpret_cast<T*>(scratch(static_cast<size_t>(n) * sizeof(T)));
  }
  // How an operation writes its result.
  struct Output {
    Rows rows;        // no data if nobody reads the F32 values
    Activations act;  // no data if no GEMM reads them
  };
  // The output for GEMMs with these weights. keep: others read the F32 values, too. whole_rows: the
  // operation's kernels see whole rows at once.
  Output output_for(const Matrix& out, Readers readers, bool keep, bool whole_rows, Forms& forms);
  void normalise(const ops::Input& in, Readers readers, Forms& forms);
  Activations new_form(const Matrix& of, Order order, Forms& forms);
  Activations new_form_for_experts(const Matrix& of, Forms& forms);
  // x in the encoded form, which is computed if it does not exist yet.
  const uint8_t* form_of(const Matrix& x, Order order, Forms& forms);
  const int32_t* ints(std::span<const int32_t> host);
  const int32_t* stage(std::span<const int32_t> host);
  uint8_t* host_stage() {
    return host_stage_.data() + static_cast<size_t>(stage_turn_) * host_stage_.size() / 2;
  }
  BatchArgs batch_args(const ops::AttentionBatch& batch, int64_t tokens);
  StateArgs state_args(const ops::StateRef& state, int64_t tokens);
  const uint8_t* const* table_of(std::span<const ops::Weight> weights);
  ProductArgs product_args(const Matrix& x, const ops::Product& product, Forms& forms);
  void run_products(const Matrix& x, std::span<const ops::Product> products, Forms& forms);
  void run_products_of_heads(const Matrix& x, std::span<const ops::Weight> weights,
                             const Matrix& out, Forms& forms);
  bool slices_heads(const ops::Weight& first, int64_t tokens) const;
  HeadsArgs heads_args(const ops::Heads& heads);
  void run_attention(const Matrix& out, const Matrix& q, const ops::KvView& cache,
                     const ops::AttentionBatch& batch, const ops::AttentionParams& params,
                     const HeadsArgs* before, const ops::Weight* reader, bool keep, Forms& forms);
  // q rotated as a cache with rotated keys needs it; q itself for other caches. in_place: q may be
  // overwritten.
  Matrix queries_for(const ops::KvView& cache, const Matrix& q, bool in_place);
  int64_t* score_room(int64_t count);
  void run_key_scores(KeyScoreArgs& args, bool clear);
  void send_key_scores(const KeyScoreArgs& args, std::span<const ScoreRows> to);
  int32_t scored_queries(const Matrix& q, const ops::KvView& cache, int64_t token, int64_t queries,
                         int64_t to);
  void score_in_pieces(KeyScoreArgs& args, const Matrix& q, const ops::KvView& cache,
                       const ScoredPart& part, int64_t queries, const ScoreRows& to);
  int pack_rows(ThreadPool& pool, std::span<const uint8_t* const> rows, size_t row_bytes, int slot,
                FunctionRef<int(const uint8_t* raw)> pack);
  Packing packing_of(quant::Format format, int64_t rows, int64_t cols, ops::Use use) const;
  WeightView product_view(const ops::Weight& w) const;
  static bool is_router(const ops::Product& product, const Matrix& x);
  bool route_one(Pending& pending, Forms& forms);
  void run_groups(const GroupArgs& groups, Pending* pending, Forms& forms);
  void run_moe(const Matrix& out, const Matrix& x, const int32_t* ids, const float* weights,
               int top_k, const ops::Experts& experts, bool add, Pending* pending, Forms& forms,
               ops::ProjectionHooks* hooks);
  bool run_few_experts(const Matrix& out, const Matrix& x, const int32_t* ids, const float* weights,
                       int top_k, const ops::Experts& experts, bool add, Pending* pending,
                       Forms& forms);
  GroupArgs new_groups(const int32_t* ids, const float* weights, int64_t tokens, int top_k,
                       int64_t experts, int slot_tokens, int slots);
  static ExpertsArgs experts_args(const ops::Experts& experts);
  void* run_experts(const Matrix& x, const ops::Experts& experts, const GroupArgs& groups,
                    Forms& forms);
  float* run_experts_singly(const Matrix& x, const ops::Experts& experts, const GroupArgs& groups,
                            ops::ProjectionHooks* hooks);
  // The places of an expert's tokens.
  struct ExpertPlaces {
    size_t expert;
    int64_t first;
    std::vector<int32_t> tokens;
  };
  std::vector<ExpertPlaces> places_of(const GroupArgs& groups);
  void run_expert(const ops::Weight& first, const uint8_t* const* table, const uint8_t* act,
                  float* out, const float* bias, const GroupArgs& groups);

  const Api& api_;
  std::unique_ptr<Context, Close> context_;  // declared first: buffers are released before it
  Context* ctx_;
  Pinned pinned_;
  std::string name_;
  DeviceLimits limits_;
  ForcedRows forced_ = kNoForcedRows;
  size_t free_ = 0, total_ = 0;
  // What holds addresses of buffers. Declared before them, since releasing a buffer clears it.
  std::map<std::vector<int64_t>, Played> steps_;
  std::map<std::pair<const void*, const void*>, const uint8_t* const*> known_tables_;
  size_t tables_at_ = 0;
  Buffer scratch_;
  uint64_t scratch_at_ = 0;  // only grows; the offset is modulo the buffer's size
  Buffer stage_, host_stage_;
  size_t stage_at_ = 0;
  int stage_turn_ = 0;  // the half of the host staging memory that this step uses
  std::array<bool, 2> stage_used_{};
  bool loose_ = false;
  bool recording_ = false;
  std::vector<Registered> registered_;
  Buffer tables_;
  // Rows being uploaded and packed; raw_ also holds what operations on stored keys compute.
  Buffer raw_, host_raw_;
  std::vector<ScoreRows> score_rows_;  // of the step in flight
  std::vector<Buffer> score_rooms_;    // host memory of score_rows_, filled in order
  size_t score_room_ = 0;
  int64_t score_room_at_ = 0;  // numbers taken of the room
};

}  // namespace freshet::cuda

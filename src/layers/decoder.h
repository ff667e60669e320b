// The forward pass of every decoder: runs a ModelSpec with its weights.
//
// The residual stream is [tokens, hidden] in F32; each branch of each layer adds to it, normalised
// as the spec says. After the last branch that stores keys and values, only the rows that need
// logits continue, if they are the last of their sequences. See model.h for the contract.
//
// decoder.cc has the pass itself, decoder_plan.cc its memory, and decoder_step.cc the step around
// it.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "layers/branch_kinds.h"
#include "layers/model.h"
#include "layers/step.h"

namespace freshet {

class EncoderPass;
class VisionTower;

class Decoder final : public Model {
 public:
  // `infos` lists the weights for inspection. `ops` must outlive the decoder, as must `host`: on a
  // device, what the ends of a tower for pictures run on.
  Decoder(ModelSpec spec, ModelWeights weights, std::vector<WeightInfo> infos, ops::Ops& ops,
          ops::Ops* host = nullptr);
  // Uses the weights of another decoder: a spec with fewer layers runs the first ones. `ends`: its
  // embedding and head are used if `weights` has none.
  Decoder(ModelSpec spec, std::shared_ptr<const ModelWeights> weights,
          std::shared_ptr<const ModelWeights> ends, std::vector<WeightInfo> infos, ops::Ops& ops,
          ops::Ops* host = nullptr);

  ~Decoder() override;

  // For a draft head whose input features are normalised (FeatureSpec::input_norm): normalises them
  // in this many equal parts rather than as a whole.
  void split_input_norm(int parts) { input_norm_parts_ = parts; }

  const ModelSpec& spec() const override { return spec_; }
  // Bytes of a workspace. Models that share their Ops share all but `own`.
  struct Workspace {
    size_t own = 0;      // activations, and results that wait for the host
    size_t scratch = 0;  // for the ops
    size_t inputs = 0;   // on a device: for the inputs of a step
  };
  Workspace workspace(int64_t tokens, int64_t logit_rows, int64_t context) const;
  size_t workspace_bytes(int64_t tokens, int64_t logit_rows, int64_t context) const override {
    const Workspace w = workspace(tokens, logit_rows, context);
    return w.own + w.scratch + w.inputs;
  }
  Status reserve(int64_t tokens, int64_t logit_rows, int64_t context) override;
  Status capture(const std::vector<int>& boundaries) override;
  bool samples() const override { return ops_.samples(spec_.vocab_size); }
  void forward(const ForwardBatch& batch, const KvStorage& cache,
               const StepResults& results) override;
  void start(const ForwardBatch& batch, const KvStorage& cache, const StepResults& results,
             int turn) override;
  void finish(const ForwardBatch& batch, const StepResults& results, int turn) override;
  std::vector<WeightInfo> weights() const override { return infos_; }
  ops::Ops* key_ops() override { return &ops_; }
  std::shared_ptr<const ModelWeights> share() const override { return weights_; }
  VisionTower* vision() override { return tower_.get(); }
  EncoderPass* encoder() override { return encoder_.get(); }

 private:
  size_t arena_bytes(int64_t tokens, int64_t logit_rows) const;
  size_t input_bytes(int64_t tokens, int64_t logit_rows, int64_t context) const;
  ops::Ops::ShapeLimits limits(int64_t tokens, int64_t context) const;
  const ops::Weight& embedding() const {
    return weights_->embedding.empty() ? ends_->embedding : weights_->embedding;
  }
  ops::Product head(const Matrix& logits) const;
  Matrix embed(Step& step);
  std::span<const int32_t> types_of(const ForwardBatch& batch) const;
  void encode(const ForwardBatch& batch, const KvStorage& cache);
  void write_states(const ForwardBatch& batch, const KvStorage& cache, size_t input);
  bool stops();
  void write_cross(const ForwardBatch& batch, const KvStorage& cache, size_t first,
                   const ForwardBatch& encoded, const Matrix& states);
  Matrix feature_stream(const ForwardBatch& batch, const Matrix& embedded);
  ops::Input paired_input(const Matrix& stream);
  ops::Input side_input(const BranchSpec& spec, const BranchWeights& w, const Matrix& stream,
                        ops::Norm& norm);
  void rope_tables(const ForwardBatch& batch, std::vector<const float*>& tables);
  void axis_table(const ForwardBatch& batch, size_t rope, float* table);
  bool find_even_positions(const ForwardBatch& batch, bool narrows);
  void put_pictures(const ForwardBatch& batch, int level, const Matrix& x);
  const BranchSpec& branch_of(int layer, int branch) const {
    return spec_.layers[static_cast<size_t>(layer)].branches[static_cast<size_t>(branch)];
  }
  const BranchWeights& weights_of(int layer, int branch) const {
    return weights_->layers[static_cast<size_t>(layer)].branches[static_cast<size_t>(branch)];
  }
  // -1: the branch stores nothing.
  int cache_layer_of(int layer, int branch) const {
    return cache_layers_[static_cast<size_t>(layer)][static_cast<size_t>(branch)];
  }
  Matrix run_layer(Step& step, int layer, const Matrix& x, Step* last);
  Matrix run_parallel(Step& step, int layer, const Matrix& x, Step* last);
  ops::Input branch_input(int layer, int branch, const Matrix& stream, ops::Norm& norm);
  void branch(Step& step, int layer, int branch, const ops::Input& in, const Matrix& x);
  void store(Step& step, int layer, int branch, const ops::Input& in);
  void store_features(Step& step);
  // Whether the batch has the features that the model needs.
  bool has_features(const ForwardBatch& batch) const {
    return !spec_.features || spec_.features->use == FeatureSpec::Use::kStored ||
           batch.features != nullptr;
  }
  Matrix logit_rows(const Step& step, const Step& last, const Matrix& x);
  void run(Step& step, Step* last, const Matrix& logits, const Matrix& hidden,
           std::span<const Matrix> boundaries);
  void copy_boundary(int boundary, const Matrix& x, std::span<const Matrix> boundaries);
  bool take_last_rows(const ForwardBatch& batch, const KvStorage& cache);
  static void find_views(const ForwardBatch& batch, const KvStorage& cache,
                         std::vector<KeyView>& views);
  void describe_step(const ForwardBatch& batch, const KvStorage& cache, const Matrix& logits,
                     bool narrows, std::span<const int64_t> how);
  void fetch(const ForwardBatch& batch, const Matrix& logits, const int32_t* best,
             const StepResults& results);
  void fetch_all(const ForwardBatch& batch, const Matrix& logits, const Matrix& states,
                 const int32_t* best, const StepResults& results, int turn);
  void write_logits(Step& step, const Matrix& x, const Matrix& logits, const Matrix& hidden);

  ModelSpec spec_;
  int input_norm_parts_ = 1;
  std::shared_ptr<const ModelWeights> weights_, ends_;
  std::vector<WeightInfo> infos_;
  ops::Ops& ops_;
  BranchPlace last_stored_;
  std::vector<std::vector<int>> cache_layers_;  // [layers][branches]: -1: stores nothing
  std::vector<int> last_cache_layers_;  // for branches that run only for rows that need logits
  Matrix embedded_;                     // in a draft head's step: the input of its first branch
  Matrix embeddings_;                   // of the current step, for side streams
  Matrix side_, next_side_;             // the side stream, and room for the one that follows it
  std::vector<int> captures_;           // the boundaries that results may contain
  std::vector<Matrix> boundaries_;      // of the current step
  const FunctionRef<bool()>* between_ = nullptr;  // of the current step
  bool stopped_ = false;                          // it has ended the current step
  Arena arena_;
  int64_t max_tokens_ = 0;
  int64_t max_logit_rows_ = 0;
  Buffer named_;  // [max_logit_rows], on a device: sampled tokens of the last batch
  std::vector<Vector> frequencies_;  // [ropes]
  // Of ropes with several axes, for tables that a device cannot make (decoder_axes.cc).
  std::vector<std::vector<float>> host_frequencies_;  // [ropes]
  std::vector<float> host_table_;
  // On a device, of a step with positions on several axes: the positions of its tokens, if each
  // has the same on all. `last_even_` is for last_.
  std::vector<int32_t> even_, last_even_;
  std::vector<int32_t> every_;            // 0, 1, 2 ... up to max_tokens_
  std::vector<int32_t> zeros_;            // token types of a batch that has none
  std::unique_ptr<EncoderPass> encoder_;  // nullptr if the model has none
  std::unique_ptr<VisionTower> tower_;    // nullptr if the model has none or it was not loaded
  std::vector<int32_t> cross_tables_;
  std::vector<std::span<const int32_t>> step_arrays_;
  std::vector<int64_t> step_key_;
  std::vector<const float*> cos_sin_;  // [ropes], of the current step
  // The rows that need logits, which continue after all keys and values are stored.
  ForwardBatch last_;
  std::vector<int> last_groups_;  // the groups whose block tables last_ has
  std::vector<const float*> last_cos_sin_;
  std::vector<KeyView> key_views_, last_key_views_;  // [groups]
};

}  // namespace freshet

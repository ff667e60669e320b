// The forward pass of every decoder: runs a ModelSpec with its weights.
//
// Residual stream [tokens, hidden] in F32; each layer adds an attention branch and an MLP branch to
// it, normalised where the spec says. The last layer goes on with the rows whose logits are wanted,
// where those are the last of their sequences. See model.h for the contract.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "layers/model.h"
#include "layers/step.h"

namespace freshet {

class Decoder final : public Model {
 public:
  // `infos` lists the weights for inspection. `ops` must outlive the decoder.
  Decoder(ModelSpec spec, ModelWeights weights, std::vector<WeightInfo> infos, ops::Ops& ops);

  const ModelSpec& spec() const override { return spec_; }
  size_t workspace_bytes(int64_t tokens, int64_t logit_rows, int64_t context) const override;
  Status reserve(int64_t tokens, int64_t logit_rows, int64_t context) override;
  bool samples() const override { return ops_.samples(spec_.vocab_size); }
  void forward(const ForwardBatch& batch, const KvStorage& cache,
               const StepResults& results) override;
  void start(const ForwardBatch& batch, const KvStorage& cache, const StepResults& results,
             int turn) override;
  void finish(const ForwardBatch& batch, const StepResults& results, int turn) override;
  std::vector<WeightInfo> weights() const override { return infos_; }

 private:
  size_t arena_bytes(int64_t tokens, int64_t logit_rows) const;
  size_t input_bytes(int64_t tokens, int64_t logit_rows, int64_t context) const;
  ops::Ops::ShapeLimits limits(int64_t tokens, int64_t context) const;
  Matrix embed(Step& step);
  void rope_tables(const std::vector<int32_t>& positions, std::vector<const float*>& tables);
  Matrix run_layer(Step& step, int layer, const Matrix& x, Step* last);
  void branch(Step& step, int layer, bool attention, const ops::Input& in, const Matrix& x);
  void run(Step& step, Step* last, const Matrix& logits, const Matrix& hidden);
  void fetch(const ForwardBatch& batch, const Matrix& logits, const int32_t* best,
             const StepResults& results);
  void write_logits(Step& step, const Matrix& x, const Matrix& logits, const Matrix& hidden);

  ModelSpec spec_;
  ModelWeights weights_;
  std::vector<WeightInfo> infos_;
  ops::Ops& ops_;
  Arena arena_;
  int64_t max_tokens_ = 0;
  int64_t max_logit_rows_ = 0;
  Buffer named_;                     // [max_logit_rows], a device's: the tokens of the last batch
  std::vector<Vector> frequencies_;  // [ropes]
  std::vector<int32_t> every_;       // 0, 1, 2 ... up to max_tokens_
  std::vector<std::span<const int32_t>> step_arrays_;
  std::vector<int64_t> step_key_;
  std::vector<const float*> cos_sin_;  // [ropes], of the step
  // What of the step the last layer goes on with, once all keys and values are stored.
  ForwardBatch last_;
  std::vector<const float*> last_cos_sin_;
};

}  // namespace freshet

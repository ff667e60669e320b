// Random weights in a format, for branches of any kind (branch_loading.h) and for what is around
// the layers. With `count_only` nothing is made, and bytes() tells what would be.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "layers/weights.h"
#include "models/dummy.h"

namespace freshet::models {

// What a matrix is for, which decides its rows. Embeddings of models with experts are so large that
// what the layers add to them is little. So a router, whose rows are all distinct, sees a token's
// own embedding and chooses experts evenly; and the largest logit of a greedy step is mostly that
// of the token itself, so that sequences repeat their own tokens.
enum class Fill { kPlain, kRouter, kEmbedding, kHead };

class DummyMaker {
 public:
  DummyMaker(const ModelSpec& spec, DummyFormat format, ops::Ops& ops, bool count_only = false)
      : spec_(spec), format_(format), ops_(ops), count_only_(count_only) {}

  void set_layer(int layer) { layer_ = layer; }

  // In the format that DummyFormat gives the role in this layer, or in `format`.
  Status matrix(ops::Weight& out, const std::string& name, Role role, int64_t rows, int64_t cols,
                Fill fill = Fill::kPlain, ops::Use use = ops::Use::kProducts);
  Status matrix(ops::Weight& out, const std::string& name, quant::Format format, int64_t rows,
                int64_t cols, Fill fill, ops::Use use);
  Status vector(Vector& out, int64_t size, float value);
  Status linear(Linear& out, const std::string& name, Role role, int64_t rows, int64_t cols,
                bool bias, Fill fill = Fill::kPlain);
  Status norm(NormWeights& out, const std::optional<NormSpec>& spec, int64_t size);
  Status mlp(MlpWeights& out, const MlpSpec& spec, int64_t hidden, const std::string& prefix);

  std::vector<Model::WeightInfo> take_infos() { return std::move(infos_); }
  // With count_only: of all weights, packed.
  size_t bytes() const { return bytes_; }

 private:
  const std::vector<uint8_t>& pool_of(quant::Format format, int64_t rows, int64_t cols, Fill fill);

  const ModelSpec& spec_;
  DummyFormat format_;
  ops::Ops& ops_;
  bool count_only_;
  size_t bytes_ = 0;
  int layer_ = 0;
  std::map<std::tuple<quant::Format, int64_t, Fill>, std::vector<uint8_t>> pools_;
  std::vector<Model::WeightInfo> infos_;
  uint64_t state_ = 1;
};

}  // namespace freshet::models

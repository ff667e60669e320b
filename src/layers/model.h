// A loaded model: weights in a device's form, and the forward pass.
//
// forward() runs one ragged batch: it writes the batch's keys and values to the cache and the
// logits of the requested rows to its results. It allocates nothing; the batch must fit the limits
// of the plan. Called from one thread at a time. Only spec() says which architecture it is.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "kv_cache/kv_storage.h"
#include "layers/batch.h"
#include "layers/spec.h"
#include "loader/checkpoint.h"
#include "ops/ops.h"

namespace freshet {

struct ModelWeights;
class EncoderPass;
class VisionTower;

class Model {
 public:
  virtual ~Model() = default;
  virtual const ModelSpec& spec() const = 0;

  // Workspace for batches of at most `tokens` tokens with `logit_rows` logits rows and contexts of
  // at most `context` tokens. Must be called before forward().
  virtual size_t workspace_bytes(int64_t tokens, int64_t logit_rows, int64_t context) const = 0;
  virtual Status reserve(int64_t tokens, int64_t logit_rows, int64_t context) = 0;
  // From the next reserve() on, steps may ask for the residual stream after the given layers
  // (StepResults::boundaries). Ascending, from 0 to the number of layers.
  virtual Status capture(const std::vector<int>& boundaries) {
    return boundaries.empty() ? Status() : unsupported("this model shows no inner states");
  }

  virtual void forward(const ForwardBatch& batch, const KvStorage& cache,
                       const StepResults& results) = 0;

  // Whether batches may have sampling descriptors, and ids from the previous batch (batch.h). Then
  // start() may return before it is done, and the next batch may be started before finish() has
  // waited for the results. `turn` is a buffer index that alternates between 0 and 1.
  virtual bool samples() const { return false; }
  virtual void start(const ForwardBatch& batch, const KvStorage& cache, const StepResults& results,
                     int /*turn*/) {
    forward(batch, cache, results);
  }
  virtual void finish(const ForwardBatch& /*batch*/, const StepResults& /*results*/, int /*turn*/) {
  }

  // Ops that can read and move stored keys and values; nullptr: attention only.
  virtual ops::Ops* key_ops() { return nullptr; }

  // For models that share weights with this one, such as its draft heads; nullptr: not supported.
  virtual std::shared_ptr<const ModelWeights> share() const { return nullptr; }

  // The tower for pictures; nullptr: the model has none, or it wasn't loaded.
  virtual VisionTower* vision() { return nullptr; }
  // The encoder of an encoder-decoder; nullptr: the model has none.
  virtual EncoderPass* encoder() { return nullptr; }

  // Every weight: name, format, shape, bytes, kernel; for `inspect`.
  struct WeightInfo {
    std::string name;
    quant::Format format;
    int64_t rows, cols;
    size_t bytes;
    std::string kernel;
  };
  virtual std::vector<WeightInfo> weights() const = 0;
};

using Progress = std::function<void(size_t done_bytes, size_t total_bytes)>;

// models/registry.cc: reads only the configuration (cheap; for plans and `inspect`).
Result<ModelSpec> read_spec(const loader::Checkpoint& checkpoint);
// models/registry.cc: packs every weight, or maps weights packed earlier: `weight_cache` is a
// folder for those (models/weight_cache.h), or empty. The checkpoint may be closed afterwards.
Result<std::unique_ptr<Model>> load_model(const loader::Checkpoint& checkpoint, ops::Ops& ops,
                                          const Progress& progress,
                                          const std::string& weight_cache = {});

}  // namespace freshet

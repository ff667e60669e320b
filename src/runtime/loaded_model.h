// A model that is ready to run: its weights, where it runs, and the memory that it needs there.
//
// The engine, evaluation and benchmarks all load models here. load() reads or makes the weights,
// reserve() takes the workspace of the largest step, make_cache() the memory of keys and values.
// Before a model is loaded, workspace_bytes() and check_cache() tell from its ModelSpec what it
// will need. Models that share a Compute keep it alive. Not thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kv_cache/kv_storage.h"
#include "layers/model.h"
#include "loader/checkpoint.h"
#include "runtime/compute.h"

namespace freshet::runtime {

struct LoadOptions : ComputeOptions {
  std::string model;  // folder or file
  // "dummy:FORMAT": random weights in the shape of `model`, a folder with a configuration
  std::string load_format = "auto";
  std::string weight_cache_dir;  // see load_model()
  std::function<void(const std::string& stage, double fraction)> on_progress;
  std::string mmproj;        // the tower of a GGUF model; "": none
  std::string hf_overrides;  // EngineOptions::hf_overrides, for `model` alone
};

// The largest step that a model will run.
struct StepLimits {
  int64_t tokens = 0;
  int64_t logit_rows = 0;
  int64_t context = 0;  // of a sequence
};

bool has_random_weights(const LoadOptions& options);
// The format of load_format. REQUIRES: has_random_weights(). Errors tell how to write it.
Result<quant::Format> random_format(const LoadOptions& options);
// options.model: with random weights, its configuration alone.
Result<loader::Checkpoint> open_checkpoint(const LoadOptions& options);
// The same for `path`, a drafter's.
Result<loader::Checkpoint> open_checkpoint(const LoadOptions& options, const std::string& path);
// The model's shape: with random weights, of its configuration alone.
Result<ModelSpec> read_spec(const loader::Checkpoint& checkpoint, const LoadOptions& options);
// An estimate of the packed weights, for a plan; some formats take more bytes than in the file.
Result<size_t> packed_bytes(const loader::Checkpoint& checkpoint, const ModelSpec& spec,
                            const LoadOptions& options, ops::Ops& ops);

class LoadedModel {
 public:
  static Result<std::unique_ptr<LoadedModel>> load(std::shared_ptr<Compute> compute,
                                                   const LoadOptions& options);
  // From a checkpoint of open_checkpoint(); options.model is not used.
  static Result<std::unique_ptr<LoadedModel>> load(std::shared_ptr<Compute> compute,
                                                   const loader::Checkpoint& checkpoint,
                                                   const LoadOptions& options);
  // `model` runs on the ops of `compute`.
  LoadedModel(std::shared_ptr<Compute> compute, std::unique_ptr<Model> model)
      : compute_(std::move(compute)), model_(std::move(model)) {}

  Compute& compute() const { return *compute_; }
  std::shared_ptr<Compute> shared_compute() const { return compute_; }
  ops::Ops& ops() const { return compute_->ops(); }
  std::string device() const { return compute_->device_name(); }
  Model& model() const { return *model_; }
  const ModelSpec& spec() const { return model_->spec(); }
  size_t weight_bytes() const;

  // Must be called before the first step. Other models on the same Compute may reserve more or
  // less, in any order.
  Status reserve(const StepLimits& limits);
  // blocks: for each cache group of kv_cache_spec(spec(), types).
  Result<KvStorage> make_cache(const KvTypes& types, const std::vector<int32_t>& blocks) const;
  // The same for groups formed differently.
  Result<KvStorage> make_cache(const KvCacheSpec& spec, const std::vector<int32_t>& blocks) const;
  // Room for logits on the host, [rows, vocab], where steps may write them.
  Result<Buffer> make_logits(int64_t rows) const;

 private:
  std::shared_ptr<Compute> compute_;
  std::unique_ptr<Model> model_;
};

// The types that --kv-cache-dtype and --kv-cache-dtype-skip-layers ask for. The error is one line.
Result<KvTypes> kv_types(const Compute& compute, const std::string& dtype,
                         const std::vector<int>& skip_layers, const ModelSpec& spec);
Result<KvTypes> kv_types(ops::KvType type, ops::KvType wide, const std::vector<int>& skip_layers,
                         const ModelSpec& spec);

// One line that says why `compute` cannot hold such a cache, or ok.
Status check_cache(const Compute& compute, const KvCacheSpec& cache);

// A model in a plan for several on one Compute.
struct PlannedModel {
  const ModelSpec& spec;
  StepLimits limits;
};
// Bytes that reserve() takes for all of these together: the activations of each, and once the
// largest scratch of any.
size_t workspace_bytes(Compute& compute, std::span<const PlannedModel> models);

}  // namespace freshet::runtime

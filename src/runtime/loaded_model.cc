#include "runtime/loaded_model.h"

#include <algorithm>
#include <optional>

#include "base/json.h"
#include "layers/decoder.h"
#include "models/dummy.h"
#include "models/registry.h"

namespace freshet::runtime {
namespace {

constexpr std::string_view kRandomWeights = "dummy:";

Result<std::unique_ptr<Model>> make_dummy(const loader::Checkpoint& checkpoint, ops::Ops& ops,
                                          const LoadOptions& options) {
  if (!options.weight_cache_dir.empty()) {
    return invalid_argument("--weight-cache-dir is for --load-format auto: {} weights are random",
                            options.load_format);
  }
  FRESHET_ASSIGN_OR_RETURN(const quant::Format format, random_format(options));
  FRESHET_ASSIGN_OR_RETURN(const ModelSpec spec, read_spec(checkpoint, options));
  return models::dummy_model(spec, [&](auto...) { return format; }, ops);
}

}  // namespace

bool has_random_weights(const LoadOptions& options) {
  return options.load_format != "auto";
}

Result<quant::Format> random_format(const LoadOptions& options) {
  const std::string& asked = options.load_format;
  const auto format =
      asked.starts_with(kRandomWeights)
          ? quant::format_by_name(std::string_view(asked).substr(kRandomWeights.size()))
          : std::nullopt;
  if (format && quant::info(*format).encode != nullptr) return *format;
  return invalid_argument(
      "--load-format {}: write auto, or dummy: and a format, e.g. dummy:bf16 or dummy:int4_g128",
      asked);
}

namespace {

Result<loader::Checkpoint> open_plain(const LoadOptions& options) {
  if (!has_random_weights(options)) return loader::Checkpoint::open(options.model, options.mmproj);
  if (!options.mmproj.empty())
    return invalid_argument("--mmproj is for --load-format auto: random weights have no tower");
  return open_checkpoint(options, options.model);
}

}  // namespace

Result<loader::Checkpoint> open_checkpoint(const LoadOptions& options) {
  FRESHET_ASSIGN_OR_RETURN(loader::Checkpoint checkpoint, open_plain(options));
  if (options.hf_overrides.empty()) return checkpoint;
  const auto overrides = json::parse(options.hf_overrides);
  const Status done = overrides.ok() ? checkpoint.override_config(*overrides) : overrides.status();
  if (!done.ok()) return done.with_context("--hf-overrides");
  return checkpoint;
}

Result<loader::Checkpoint> open_checkpoint(const LoadOptions& options, const std::string& path) {
  if (!has_random_weights(options)) return loader::Checkpoint::open(path);
  FRESHET_RETURN_IF_ERROR(random_format(options).status());
  return loader::Checkpoint::open_bare(path + "/config.json");
}

Result<ModelSpec> read_spec(const loader::Checkpoint& checkpoint, const LoadOptions& options) {
  return has_random_weights(options) ? models::read_spec(checkpoint.config())
                                     : freshet::read_spec(checkpoint);
}

Result<size_t> packed_bytes(const loader::Checkpoint& checkpoint, const ModelSpec& spec,
                            const LoadOptions& options, ops::Ops& ops) {
  if (has_random_weights(options)) {
    FRESHET_ASSIGN_OR_RETURN(const quant::Format format, random_format(options));
    return models::dummy_bytes(spec, [&](auto...) { return format; }, ops);
  }
  const ops::Device* const device = ops.device();
  size_t bytes = 0;
  for (const loader::TensorSource& t : checkpoint.tensors()) {
    size_t packed = t.bytes;
    if (t.dtype == "F8_E4M3") packed += t.bytes / 32;  // an F32 scale for each 128 numbers
    if (device != nullptr && t.format && t.shape.size() > 1) {
      const int64_t cols = t.shape.back(), rows = t.elements() / std::max<int64_t>(cols, 1);
      const bool table = rows == spec.vocab_size && cols == spec.embedding_size;
      const auto use = table ? ops::Use::kTable : ops::Use::kProducts;
      const int64_t there = device->packed_bytes(*t.format, rows, cols, use);
      packed = std::max(packed, static_cast<size_t>(there));
    }
    bytes += packed;
  }
  // Routers are kept in F32, on a GPU in BF16 too: 4 bytes per number more than in the file.
  for (const LayerSpec& layer : spec.layers) {
    const MoeSpec* const moe = layer.find<MoeSpec>();
    if (moe == nullptr) continue;
    bytes += sizeof(float) * static_cast<size_t>(moe->routing.experts) *
             static_cast<size_t>(spec.hidden_size);
  }
  return bytes;
}

Result<std::unique_ptr<LoadedModel>> LoadedModel::load(std::shared_ptr<Compute> compute,
                                                       const LoadOptions& options) {
  FRESHET_ASSIGN_OR_RETURN(const auto checkpoint, open_checkpoint(options));
  return load(std::move(compute), checkpoint, options);
}

Result<std::unique_ptr<LoadedModel>> LoadedModel::load(std::shared_ptr<Compute> compute,
                                                       const loader::Checkpoint& checkpoint,
                                                       const LoadOptions& options) {
  if (has_random_weights(options)) {
    FRESHET_ASSIGN_OR_RETURN(auto model, make_dummy(checkpoint, compute->ops(), options));
    return std::make_unique<LoadedModel>(std::move(compute), std::move(model));
  }
  const auto progress = [&](size_t done, size_t total) {
    if (!options.on_progress) return;
    options.on_progress("loading weights",
                        total > 0 ? static_cast<double>(done) / static_cast<double>(total) : 1.0);
  };
  FRESHET_ASSIGN_OR_RETURN(ops::Ops* const host, compute->host_ops());
  FRESHET_ASSIGN_OR_RETURN(auto model, models::load_model_on(checkpoint, compute->ops(), *host,
                                                             progress, options.weight_cache_dir));
  return std::make_unique<LoadedModel>(std::move(compute), std::move(model));
}

size_t LoadedModel::weight_bytes() const {
  size_t bytes = 0;
  for (const Model::WeightInfo& w : model_->weights()) bytes += w.bytes;
  return bytes;
}

Status LoadedModel::reserve(const StepLimits& limits) {
  return model_->reserve(limits.tokens, limits.logit_rows, limits.context);
}

Result<KvStorage> LoadedModel::make_cache(const KvTypes& types,
                                          const std::vector<int32_t>& blocks) const {
  return make_cache(kv_cache_spec(spec(), types), blocks);
}

Result<KvStorage> LoadedModel::make_cache(const KvCacheSpec& cache,
                                          const std::vector<int32_t>& blocks) const {
  FRESHET_RETURN_IF_ERROR(check_cache(*compute_, cache));
  return KvStorage::allocate(cache, blocks, ops().memory());
}

Result<Buffer> LoadedModel::make_logits(int64_t rows) const {
  const auto count = static_cast<size_t>(rows * spec().vocab_size);
  return Buffer::allocate(count * sizeof(float), ops().host_memory());
}

Result<KvTypes> kv_types(const Compute& compute, const std::string& dtype,
                         const std::vector<int>& skip_layers, const ModelSpec& spec) {
  const bool scratch = reads_both_ways(spec);  // keys and values live for one step
  FRESHET_ASSIGN_OR_RETURN(const ops::KvType type, compute.kv_type(dtype, scratch));
  FRESHET_ASSIGN_OR_RETURN(const ops::KvType wide, compute.kv_type("auto", scratch));
  return kv_types(type, wide, skip_layers, spec);
}

Result<KvTypes> kv_types(ops::KvType type, ops::KvType wide, const std::vector<int>& skip_layers,
                         const ModelSpec& spec) {
  KvTypes types(type);
  types.wide = wide;
  const auto layers = static_cast<int>(spec.layers.size());
  for (const int layer : skip_layers) {
    if (layer < 0 || layer >= layers) {
      return invalid_argument("--kv-cache-dtype-skip-layers {}: the model has layers 0 to {}",
                              layer, layers - 1);
    }
    types.wide_layers.push_back(layer);
  }
  return types;
}

Status check_cache(const Compute& compute, const KvCacheSpec& cache) {
  const ops::Device* const device = compute.device();
  for (const KvLayer& layer : cache.layers) {
    if (layer.state_bytes > 0) continue;
    FRESHET_RETURN_IF_ERROR(ops::check_shape(layer.shape));
    if (device != nullptr) FRESHET_RETURN_IF_ERROR(device->supports(layer.shape));
  }
  return {};
}

size_t workspace_bytes(Compute& compute, std::span<const PlannedModel> models) {
  size_t own = 0, scratch = 0, inputs = 0;
  for (const PlannedModel& model : models) {
    const StepLimits& l = model.limits;
    const Decoder weightless(model.spec, {}, {}, compute.ops());  // shapes are all that counts
    const Decoder::Workspace w = weightless.workspace(l.tokens, l.logit_rows, l.context);
    own += w.own;
    scratch = std::max(scratch, w.scratch);
    inputs = std::max(inputs, w.inputs);
  }
  return own + scratch + inputs;
}

}  // namespace freshet::runtime

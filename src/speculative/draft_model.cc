// Draft models: a small language model of the same vocabulary, or the first layers of the target.
#include <algorithm>

#include "layers/decoder.h"
#include "speculative/model_drafter.h"
#include "speculative/registry.h"

namespace freshet::speculative {
namespace {

// Checkpoints may pad their vocabularies to different sizes.
constexpr int kMostPadding = 1024;

Status same_vocabulary(const Config& config, const ModelSpec& draft, const ModelSpec& target) {
  const std::string& path = config.model;
  if (!draft.generates) return invalid_argument("{} writes no text: it cannot draft", path);
  if (config.use_heterogeneous_vocab) return {};
  if (std::abs(draft.vocab_size - target.vocab_size) < kMostPadding) return {};
  return invalid_argument(
      "{} has a vocabulary of {} tokens, the target {}: \"use_heterogeneous_vocab\": true maps "
      "tokens that both have",
      path, draft.vocab_size, target.vocab_size);
}

}  // namespace

Result<DrafterCost> draft_model_cost(const PlanContext& c) {
  FRESHET_ASSIGN_OR_RETURN(const auto checkpoint, loader::Checkpoint::open(c.config.model));
  FRESHET_ASSIGN_OR_RETURN(const ModelSpec spec, read_spec(checkpoint));
  FRESHET_RETURN_IF_ERROR(same_vocabulary(c.config, spec, c.target));
  return DrafterCost{.weights = checkpoint.total_bytes(), .model = spec};
}

Result<std::unique_ptr<Drafter>> make_draft_model(const MakeContext& c) {
  runtime::LoadOptions loading = c.loading;
  loading.model = c.config.model;
  loading.on_progress = {};
  FRESHET_ASSIGN_OR_RETURN(auto model, runtime::LoadedModel::load(c.compute, loading));
  FRESHET_RETURN_IF_ERROR(same_vocabulary(c.config, model->spec(), c.target.spec()));
  ModelDrafterOptions options;
  if (c.config.use_heterogeneous_vocab) {
    FRESHET_ASSIGN_OR_RETURN(const auto target, tokenizer::Tokenizer::load(c.loading.model));
    FRESHET_ASSIGN_OR_RETURN(const auto draft, tokenizer::Tokenizer::load(c.config.model));
    FRESHET_ASSIGN_OR_RETURN(auto made, VocabularyMap::make(target, c.target.spec().vocab_size,
                                                            draft, model->spec().vocab_size));
    options.map = std::make_shared<const VocabularyMap>(std::move(made));
  }
  return make_model_drafter(c, std::move(model), std::move(options));
}

// ---- early exit ------------------------------------------------------------------------------

namespace {

Result<ModelSpec> first_layers(const ModelSpec& target, int layers) {
  if (layers >= static_cast<int>(target.layers.size())) {
    return invalid_argument("exit_layer {}: the model has {} layers", layers, target.layers.size());
  }
  ModelSpec spec = target;
  spec.layers.resize(static_cast<size_t>(layers));
  return spec;
}

// Without a measurement: a quarter of the layers.
int exit_of(const Config& config, const ModelSpec& target) {
  return config.exit_layer > 0 ? config.exit_layer
                               : std::max(1, static_cast<int>(target.layers.size()) / 4);
}

}  // namespace

Result<DrafterCost> early_exit_cost(const PlanContext& c) {
  FRESHET_ASSIGN_OR_RETURN(const ModelSpec spec,
                           first_layers(c.target, exit_of(c.config, c.target)));
  return DrafterCost{.model = spec};
}

Result<std::unique_ptr<Drafter>> make_early_exit(const MakeContext& c) {
  const ModelSpec& target = c.target.spec();
  FRESHET_ASSIGN_OR_RETURN(ModelSpec spec, first_layers(target, exit_of(c.config, target)));
  const auto weights = c.target.model().share();
  if (weights == nullptr) return unsupported("this model cannot share its layers with a drafter");
  auto model = std::make_unique<Decoder>(std::move(spec), weights, nullptr,
                                         std::vector<Model::WeightInfo>(), c.compute->ops());
  return make_model_drafter(c, std::make_unique<runtime::LoadedModel>(c.compute, std::move(model)),
                            {});
}

}  // namespace freshet::speculative

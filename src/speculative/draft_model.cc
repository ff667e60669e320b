// Draft models: a small language model of the same vocabulary, or the first layers of the target.
#include "base/log.h"
#include "models/draft_heads.h"
#include "speculative/exit_layer.h"
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

// The token that stands for those to come, as the model's configuration names it.
Result<int32_t> mask_token(const MakeContext& c, const ModelSpec& spec) {
  const Config& config = c.config;
  FRESHET_ASSIGN_OR_RETURN(const auto checkpoint,
                           runtime::open_checkpoint(c.loading, config.model));
  FRESHET_ASSIGN_OR_RETURN(
      const int32_t token,
      models::read_mask_token(checkpoint.config(), spec.vocab_size, config.model));
  if (token >= 0) return token;
  return invalid_argument(
      "parallel_drafting: {} was not trained for it: its config.json has no pard_token, "
      "ptd_token_id or mask_token_id",
      config.model);
}

}  // namespace

Result<DrafterCost> draft_model_cost(const PlanContext& c) {
  FRESHET_ASSIGN_OR_RETURN(const auto checkpoint,
                           runtime::open_checkpoint(c.loading, c.config.model));
  FRESHET_ASSIGN_OR_RETURN(const ModelSpec spec, runtime::read_spec(checkpoint, c.loading));
  FRESHET_RETURN_IF_ERROR(same_vocabulary(c.config, spec, c.target));
  size_t bytes = checkpoint.total_bytes();
  if (runtime::has_random_weights(c.loading)) {
    FRESHET_ASSIGN_OR_RETURN(bytes,
                             runtime::packed_bytes(checkpoint, spec, c.loading, c.compute.ops()));
  }
  return DrafterCost{.weights = bytes, .model = spec};
}

Result<std::unique_ptr<Drafter>> make_draft_model(const MakeContext& c) {
  runtime::LoadOptions loading = c.loading;
  loading.model = c.config.model;
  loading.on_progress = {};
  FRESHET_ASSIGN_OR_RETURN(auto model, runtime::LoadedModel::load(c.compute, loading));
  FRESHET_RETURN_IF_ERROR(same_vocabulary(c.config, model->spec(), c.target.spec()));
  ModelDrafterOptions options;
  if (c.config.parallel_drafting) {
    FRESHET_ASSIGN_OR_RETURN(options.mask, mask_token(c, model->spec()));
  }
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

Status check_exit(const Config& config, const ModelSpec& target) {
  const auto layers = static_cast<int>(target.layers.size());
  if (config.exit_layer < layers && layers > 1) return {};
  if (config.exit_layer == 0) return invalid_argument("early_exit: the model has a single layer");
  return invalid_argument("exit_layer {}: the model has {} layers", config.exit_layer, layers);
}

}  // namespace

// Without an exit layer in the configuration: of the largest candidate.
Result<DrafterCost> early_exit_cost(const PlanContext& c) {
  FRESHET_RETURN_IF_ERROR(check_exit(c.config, c.target));
  ModelSpec spec = c.target;
  const int layers = c.config.exit_layer > 0
                         ? c.config.exit_layer
                         : exit_candidates(static_cast<int>(spec.layers.size())).back();
  spec.layers.resize(static_cast<size_t>(layers));
  return DrafterCost{.model = std::move(spec)};
}

Result<std::unique_ptr<Drafter>> make_early_exit(const MakeContext& c) {
  const ModelSpec& target = c.target.spec();
  FRESHET_RETURN_IF_ERROR(check_exit(c.config, target));
  const auto weights = c.target.model().share();
  if (weights == nullptr) return unsupported("this model cannot share its layers with a drafter");
  int layers = c.config.exit_layer;
  if (layers == 0) {
    FRESHET_ASSIGN_OR_RETURN(const ExitLayer best,
                             measure_exit_layer(c.compute, target, weights, c.kv_type));
    log_info(
        "early exit behind layer {} of {}: its best token is the model's in {:.0f} % of sampled "
        "texts, a step takes {:.2f} of the model's time",
        best.layers, target.layers.size(), 100.0 * best.agreement, best.cost);
    layers = best.layers;
  }
  return make_model_drafter(c, first_layers(c.compute, target, weights, layers), {});
}

}  // namespace freshet::speculative

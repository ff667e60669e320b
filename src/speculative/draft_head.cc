#include "speculative/draft_head.h"

#include <utility>

#include "models/dummy_head.h"
#include "speculative/model_drafter.h"
#include "speculative/registry.h"

namespace freshet::speculative {

using loader::Checkpoint;
using models::HeadKind;

std::optional<HeadKind> head_kind(std::string_view method) {
  if (method == "eagle") return HeadKind::kEagle;
  if (method == "eagle3") return HeadKind::kEagle3;
  if (method == "mtp") return HeadKind::kMtp;
  if (method == "dflash") return HeadKind::kDFlash;
  return std::nullopt;
}

Result<std::optional<Checkpoint>> open_head(const Config& config) {
  const std::string& path = config.model;
  if (path.empty()) return std::optional<Checkpoint>();
  FRESHET_ASSIGN_OR_RETURN(Checkpoint own, open_drafter(path));
  return std::optional<Checkpoint>(std::move(own));
}

namespace {

// The configuration of an EAGLE-3 head of random weights; null: a layer of the target's shape.
Result<json::Value> random_head_config(const Config& config) {
  if (config.model.empty()) return json::Value();
  FRESHET_ASSIGN_OR_RETURN(const Checkpoint own,
                           Checkpoint::open_bare(config.model + "/config.json"));
  return own.config();
}

Result<models::HeadPlan> head_plan(const PlanContext& c) {
  if (runtime::has_random_weights(c.loading)) {
    FRESHET_ASSIGN_OR_RETURN(const quant::Format format, runtime::random_format(c.loading));
    FRESHET_ASSIGN_OR_RETURN(const json::Value config, random_head_config(c.config));
    return models::plan_dummy_head(
        config, c.target, [&](auto...) { return format; }, c.compute.ops());
  }
  FRESHET_ASSIGN_OR_RETURN(const auto own, open_head(c.config));
  return models::plan_head(*head_kind(c.config.method), own ? *own : c.target_checkpoint, c.target);
}

Result<models::DraftHead> make_head(const MakeContext& c) {
  if (runtime::has_random_weights(c.loading)) {
    FRESHET_ASSIGN_OR_RETURN(const quant::Format format, runtime::random_format(c.loading));
    FRESHET_ASSIGN_OR_RETURN(const json::Value config, random_head_config(c.config));
    return models::dummy_head(
        config, c.target.model(), [&](auto...) { return format; }, c.compute->ops());
  }
  FRESHET_ASSIGN_OR_RETURN(const auto own, open_head(c.config));
  return models::load_head(*head_kind(c.config.method), own ? *own : c.target_checkpoint,
                           c.target.model(), c.compute->ops());
}

// Whether the head drafts as the configuration asks.
Status check_drafts(const Config& c, const models::HeadPlan& plan) {
  if (plan.block > 0) {
    if (c.num_speculative_tokens < plan.block) return {};
    return invalid_argument(
        "num_speculative_tokens {}: {} drafts blocks of {} rows, which give at most {} tokens",
        c.num_speculative_tokens, c.model, plan.block, plan.block - 1);
  }
  if (c.parallel_drafting && plan.mask_token < 0) {
    return invalid_argument("parallel_drafting: {} was not trained for it: it has no 'mask_hidden'",
                            c.model);
  }
  if (!c.parallel_drafting && plan.mask_token >= 0)
    return invalid_argument("{} drafts in one pass: add \"parallel_drafting\": true", c.model);
  return {};
}

}  // namespace

Result<DrafterCost> draft_head_cost(const PlanContext& c) {
  FRESHET_ASSIGN_OR_RETURN(models::HeadPlan plan, head_plan(c));
  FRESHET_RETURN_IF_ERROR(check_drafts(c.config, plan));
  return DrafterCost{.weights = plan.weight_bytes,
                     .boundaries = static_cast<int>(std::ssize(plan.boundaries)),
                     .model = std::move(plan.spec)};
}

Result<std::unique_ptr<Drafter>> make_draft_head(const MakeContext& c) {
  FRESHET_ASSIGN_OR_RETURN(models::DraftHead head, make_head(c));
  ModelDrafterOptions options;
  options.needs.last = head.plan.reads_last;
  options.needs.boundaries = head.plan.boundaries;
  options.target_ids = std::move(head.target_ids);
  options.block = head.plan.block;
  options.mask = head.plan.mask_token;
  options.mask_features = std::move(head.mask_features);
  return make_model_drafter(
      c, std::make_unique<runtime::LoadedModel>(c.compute, std::move(head.model)),
      std::move(options));
}

}  // namespace freshet::speculative

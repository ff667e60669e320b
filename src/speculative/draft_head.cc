#include "speculative/draft_head.h"

#include <utility>

#include "speculative/model_drafter.h"
#include "speculative/registry.h"

namespace freshet::speculative {

using loader::Checkpoint;
using models::HeadKind;

std::optional<HeadKind> head_kind(std::string_view method) {
  if (method == "eagle") return HeadKind::kEagle;
  if (method == "eagle3") return HeadKind::kEagle3;
  if (method == "mtp") return HeadKind::kMtp;
  return std::nullopt;
}

Result<std::optional<Checkpoint>> open_head(const Config& config) {
  const std::string& path = config.model;
  if (path.empty()) return std::optional<Checkpoint>();
  FRESHET_ASSIGN_OR_RETURN(Checkpoint own, open_drafter(path));
  return std::optional<Checkpoint>(std::move(own));
}

Result<DrafterCost> draft_head_cost(const PlanContext& c) {
  FRESHET_ASSIGN_OR_RETURN(const auto own, open_head(c.config));
  FRESHET_ASSIGN_OR_RETURN(
      models::HeadPlan plan,
      models::plan_head(*head_kind(c.config.method), own ? *own : c.target_checkpoint, c.target));
  return DrafterCost{.weights = plan.weight_bytes,
                     .boundaries = static_cast<int>(std::ssize(plan.boundaries)),
                     .model = std::move(plan.spec)};
}

Result<std::unique_ptr<Drafter>> make_draft_head(const MakeContext& c) {
  FRESHET_ASSIGN_OR_RETURN(const auto own, open_head(c.config));
  FRESHET_ASSIGN_OR_RETURN(
      models::DraftHead head,
      models::load_head(*head_kind(c.config.method), own ? *own : c.target_checkpoint,
                        c.target.model(), c.compute->ops()));
  ModelDrafterOptions options;
  options.needs.last = head.plan.reads_last;
  options.needs.boundaries = head.plan.boundaries;
  options.target_ids = std::move(head.target_ids);
  return make_model_drafter(
      c, std::make_unique<runtime::LoadedModel>(c.compute, std::move(head.model)),
      std::move(options));
}

}  // namespace freshet::speculative

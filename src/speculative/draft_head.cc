#include "speculative/draft_head.h"

#include <algorithm>

#include "speculative/chain_drafter.h"
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
  FRESHET_ASSIGN_OR_RETURN(Checkpoint own, path.ends_with(".safetensors")
                                               ? Checkpoint::open_bare(path)
                                               : Checkpoint::open(path));
  return std::optional<Checkpoint>(std::move(own));
}

Result<DrafterCost> draft_head_cost(const PlanContext& c) {
  FRESHET_ASSIGN_OR_RETURN(const auto own, open_head(c.config));
  FRESHET_ASSIGN_OR_RETURN(
      const models::HeadPlan plan,
      models::plan_head(*head_kind(c.config.method), own ? *own : c.target_checkpoint, c.target));
  return DrafterCost{plan.weight_bytes, cache_bytes_per_token(plan.spec, c.kv_type)};
}

Result<std::unique_ptr<Drafter>> make_draft_head(const MakeContext& c) {
  FRESHET_ASSIGN_OR_RETURN(const auto own, open_head(c.config));
  FRESHET_ASSIGN_OR_RETURN(
      models::DraftHead head,
      models::load_head(*head_kind(c.config.method), own ? *own : c.target_checkpoint,
                        c.target.model(), c.compute->ops()));
  DraftRunnerLimits limits;
  limits.max_model_len = c.max_model_len;
  limits.max_tokens = c.max_num_batched_tokens;
  limits.max_rows = draft_rows(c);
  limits.cache_tokens = c.cache_tokens;
  limits.kv_type = c.kv_type;
  FRESHET_ASSIGN_OR_RETURN(auto runner, DraftRunner::create(std::make_unique<runtime::LoadedModel>(
                                                                c.compute, std::move(head.model)),
                                                            limits));
  ChainOptions options;
  options.needs.last = head.plan.reads_last;
  options.needs.boundaries = head.plan.boundaries;
  options.target_ids = std::move(head.target_ids);
  options.vocab = c.target.spec().vocab_size;
  options.greedy = c.config.greedy_drafts;
  options.tree = c.config.tree;
  return std::unique_ptr<Drafter>(
      std::make_unique<ChainDrafter>(std::move(runner), std::move(options)));
}

}  // namespace freshet::speculative

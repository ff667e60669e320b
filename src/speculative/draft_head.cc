// Draft heads: EAGLE, EAGLE-3 and MTP layers (models/draft_heads.h).
#include <algorithm>

#include "models/draft_heads.h"
#include "speculative/chain_drafter.h"
#include "speculative/registry.h"

namespace freshet::speculative {
namespace {

using loader::Checkpoint;
using models::HeadKind;

Result<Checkpoint> open_head(const std::string& path) {
  if (path.ends_with(".safetensors")) return Checkpoint::open_bare(path);
  return Checkpoint::open(path);
}

// An MTP layer is a part of the target's checkpoint, unless its own is named.
template <class Use>
auto with_checkpoint(const Config& config, const Checkpoint& target, const Use& use)
    -> decltype(use(target)) {
  if (config.model.empty()) return use(target);
  FRESHET_ASSIGN_OR_RETURN(const Checkpoint own, open_head(config.model));
  return use(own);
}

HeadKind kind_of_method(std::string_view method) {
  if (method == "eagle") return HeadKind::kEagle;
  return method == "eagle3" ? HeadKind::kEagle3 : HeadKind::kMtp;
}

}  // namespace

Result<DrafterCost> draft_head_cost(const PlanContext& c) {
  return with_checkpoint(
      c.config, c.target_checkpoint, [&](const Checkpoint& from) -> Result<DrafterCost> {
        FRESHET_ASSIGN_OR_RETURN(
            const models::HeadPlan plan,
            models::plan_head(kind_of_method(c.config.method), from, c.target));
        return DrafterCost{plan.weight_bytes, cache_bytes_per_token(plan.spec, c.kv_type)};
      });
}

Result<std::unique_ptr<Drafter>> make_draft_head(const MakeContext& c) {
  const HeadKind kind = kind_of_method(c.config.method);
  FRESHET_ASSIGN_OR_RETURN(
      models::DraftHead head,
      with_checkpoint(c.config, c.target_checkpoint, [&](const Checkpoint& from) {
        return models::load_head(kind, from, c.target.model(), c.compute->ops());
      }));
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

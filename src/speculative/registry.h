// The methods of speculation: one line for each in registry.cc, which names the drafter's factory.
//
// A drafter is loaded in two steps, because memory is planned before any weight is read: cost()
// reads only its configuration, make() its weights. Errors name the drafter's file and what does
// not fit the target.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"
#include "loader/checkpoint.h"
#include "runtime/loaded_model.h"
#include "speculative/config.h"
#include "speculative/drafter.h"

namespace freshet::speculative {

// What a drafter takes, for the memory plan.
struct DrafterCost {
  size_t weights = 0;              // bytes
  size_t bytes_per_row = 0;        // of buffers, for each sequence that it drafts for at once
  int boundaries = 0;              // inner states of the target that it reads of each token
  std::optional<ModelSpec> model;  // that runs beside the target, with a cache of its own
};

// What a drafter is planned for.
struct PlanContext {
  const Config& config;
  const ModelSpec& target;
  const loader::Checkpoint& target_checkpoint;
  runtime::Compute& compute;
  ops::KvType kv_type;
  const runtime::LoadOptions& loading;  // of the target
};

// What a drafter is made from. All references outlive it.
struct MakeContext {
  const Config& config;
  const runtime::LoadOptions& loading;          // of the target
  const loader::Checkpoint& target_checkpoint;  // open during make() only
  runtime::LoadedModel& target;
  std::shared_ptr<runtime::Compute> compute;
  ops::KvType kv_type;
  int max_model_len = 0;
  int max_num_seqs = 0;
  int max_num_batched_tokens = 0;
  int64_t cache_tokens = 0;  // of the target's cache
};

// Drafters that need nothing but the configuration.
std::unique_ptr<Drafter> ngram_drafter(const Config& config);
std::unique_ptr<Drafter> suffix_drafter(const Config& config);

// Upper bound of the logit rows in a step of a drafter: one row per sequence, or a level of each
// tree, or all drafts of a pass. Sequences beyond it get no drafts, which would not pay off in so
// large a batch.
int draft_rows(const Config& config, int max_num_seqs, int max_num_batched_tokens);
// The drafter's checkpoint; a bare .safetensors file has no configuration.
Result<loader::Checkpoint> open_drafter(const std::string& path);

struct Method {
  enum class Model { kNone, kOptional, kNeeded };
  // Whether it runs with a target of random weights: with random weights in the shape of "model",
  // or in the target's.
  enum class Random { kNo, kConfig, kYes };

  std::string_view name;
  Model model = Model::kNone;  // the config's "model"
  bool trees = false;          // whether it can draft trees
  bool looks_up = false;       // runs no model, so that its drafts cost nothing
  Random random = Random::kNo;
  // nullptr: nothing to plan for.
  Result<DrafterCost> (*cost)(const PlanContext& context) = nullptr;
  Result<std::unique_ptr<Drafter>> (*make)(const MakeContext& context) = nullptr;
};

std::span<const Method> methods();
const Method* find_method(std::string_view name);  // nullptr: unknown
// The drafter of the configuration, or all of its drafters combined.
Result<std::unique_ptr<Drafter>> make_drafter(const MakeContext& context);

// The factories, each in the source file of its drafter.
Result<DrafterCost> draft_model_cost(const PlanContext& context);
Result<std::unique_ptr<Drafter>> make_draft_model(const MakeContext& context);
Result<DrafterCost> early_exit_cost(const PlanContext& context);
Result<std::unique_ptr<Drafter>> make_early_exit(const MakeContext& context);
Result<DrafterCost> medusa_cost(const PlanContext& context);
Result<std::unique_ptr<Drafter>> make_medusa(const MakeContext& context);
Result<DrafterCost> draft_head_cost(const PlanContext& context);
Result<std::unique_ptr<Drafter>> make_draft_head(const MakeContext& context);

}  // namespace freshet::speculative

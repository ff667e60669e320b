#include "speculative/registry.h"

#include <algorithm>

#include "speculative/combined.h"

namespace freshet::speculative {
namespace {

using enum Method::Model;
using enum Method::Random;

template <std::unique_ptr<Drafter> (*make)(const Config&)>
Result<std::unique_ptr<Drafter>> from_config(const MakeContext& context) {
  return make(context.config);
}

constexpr Method kMethods[] = {
    {.name = "ngram", .looks_up = true, .random = kYes, .make = from_config<ngram_drafter>},
    {.name = "suffix", .looks_up = true, .random = kYes, .make = from_config<suffix_drafter>},
    {.name = "draft_model",
     .model = kNeeded,
     .trees = true,
     .random = kConfig,
     .cost = draft_model_cost,
     .make = make_draft_model},
    {.name = "medusa", .model = kNeeded, .trees = true, .cost = medusa_cost, .make = make_medusa},
    {.name = "eagle",
     .model = kNeeded,
     .trees = true,
     .cost = draft_head_cost,
     .make = make_draft_head},
    {.name = "eagle3",
     .model = kNeeded,
     .trees = true,
     .random = kYes,
     .cost = draft_head_cost,
     .make = make_draft_head},
    {.name = "mtp",
     .model = kOptional,
     .trees = true,
     .cost = draft_head_cost,
     .make = make_draft_head},
    {.name = "dflash", .model = kNeeded, .cost = draft_head_cost, .make = make_draft_head},
    {.name = "early_exit",
     .trees = true,
     .random = kYes,
     .cost = early_exit_cost,
     .make = make_early_exit},
};

}  // namespace

std::span<const Method> methods() {
  return kMethods;
}

int draft_rows(const Config& config, int max_num_seqs, int max_num_batched_tokens) {
  constexpr int kMost = 256;
  const TreeOptions& tree = config.tree;
  int level = tree.wanted() ? tree.width() * tree.max_batch : 0;
  if (config.parallel_drafting || config.method == "dflash")
    level = std::min(max_num_seqs, kMost) * config.limit();
  return std::min({std::max(max_num_seqs, level), max_num_batched_tokens, kMost});
}

Result<std::unique_ptr<Drafter>> make_drafter(const MakeContext& c) {
  const Method& main = *find_method(c.config.method);
  FRESHET_ASSIGN_OR_RETURN(std::unique_ptr<Drafter> drafter, main.make(c));
  if (c.config.lookups.empty()) return drafter;
  std::vector<std::unique_ptr<Drafter>> lookups;
  if (main.looks_up) lookups.push_back(std::move(drafter));
  for (const std::string& name : c.config.lookups) {
    FRESHET_ASSIGN_OR_RETURN(std::unique_ptr<Drafter> lookup, find_method(name)->make(c));
    lookups.push_back(std::move(lookup));
  }
  return std::unique_ptr<Drafter>(
      std::make_unique<CombinedDrafter>(std::move(lookups), std::move(drafter)));
}

Result<loader::Checkpoint> open_drafter(const std::string& path) {
  if (path.ends_with(".safetensors")) return loader::Checkpoint::open_bare(path);
  return loader::Checkpoint::open(path);
}

const Method* find_method(std::string_view name) {
  const auto* const at = std::ranges::find(kMethods, name, &Method::name);
  return at == std::end(kMethods) ? nullptr : at;
}

}  // namespace freshet::speculative

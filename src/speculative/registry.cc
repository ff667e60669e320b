#include "speculative/registry.h"

#include <algorithm>

namespace freshet::speculative {
namespace {

using enum Method::Model;

template <std::unique_ptr<Drafter> (*make)(const Config&)>
Result<std::unique_ptr<Drafter>> from_config(const MakeContext& context) {
  return make(context.config);
}

constexpr Method kMethods[] = {
    {.name = "ngram", .make = from_config<ngram_drafter>},
    {.name = "suffix", .make = from_config<suffix_drafter>},
    {.name = "draft_model",
     .model = kNeeded,
     .trees = true,
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
     .cost = draft_head_cost,
     .make = make_draft_head},
    {.name = "mtp",
     .model = kOptional,
     .trees = true,
     .cost = draft_head_cost,
     .make = make_draft_head},
    {.name = "early_exit", .trees = true, .cost = early_exit_cost, .make = make_early_exit},
};

}  // namespace

std::span<const Method> methods() {
  return kMethods;
}

int draft_rows(const Config& config, int max_num_seqs, int max_num_batched_tokens) {
  constexpr int kMost = 256;
  const TreeOptions& tree = config.tree;
  const int level = tree.wanted() ? tree.width() * tree.max_batch : 0;
  return std::min({std::max(max_num_seqs, level), max_num_batched_tokens, kMost});
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

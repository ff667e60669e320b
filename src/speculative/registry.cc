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

const Method* find_method(std::string_view name) {
  const auto* const at = std::ranges::find(kMethods, name, &Method::name);
  return at == std::end(kMethods) ? nullptr : at;
}

}  // namespace freshet::speculative

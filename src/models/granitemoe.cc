#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace granitemoe_model {

constexpr NameRule kNames[] = {
    {Role::kRouter, "model.layers.{}.block_sparse_moe.router.layer"},
    {Role::kExpertsGateUp, "model.layers.{}.block_sparse_moe.input_linear"},
    {Role::kExpertsDown, "model.layers.{}.block_sparse_moe.output_linear"},
};

// Granite with experts in all layers.
ModelSpec spec(Config& c) {
  ModelSpec s = granite().spec(c);
  s.architecture = "granitemoe";
  MoeSpec moe;
  moe.expert_ff = s.layers.front().mlp().ff;
  moe.glu.activation = s.layers.front().mlp().activation;
  moe.shared_ff = c.count({"shared_expert_intermediate_size"}, 0);  // in GGUF files alone
  moe.routing.score = ops::Routing::Score::kTopkSoftmax;
  moe.routing.experts = c.size({"num_local_experts", "num_experts"}, 8);
  moe.routing.top_k = c.size({"num_experts_per_tok"}, 2);
  set_experts(s, moe, [](int) { return true; });
  return s;
}

}  // namespace granitemoe_model

Architecture granitemoe() {
  return {.type = "granitemoe",
          .spec = granitemoe_model::spec,
          .names = granitemoe_model::kNames,
          .gguf_interleaves = true};
}

}  // namespace freshet::models

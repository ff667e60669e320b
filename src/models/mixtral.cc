#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace mixtral_model {

constexpr NameRule kNames[] = {
    {Role::kRouter, "model.layers.{}.block_sparse_moe.gate"},
    {Role::kExpertGate, "model.layers.{}.block_sparse_moe.experts.{e}.w1"},
    {Role::kExpertUp, "model.layers.{}.block_sparse_moe.experts.{e}.w3"},
    {Role::kExpertDown, "model.layers.{}.block_sparse_moe.experts.{e}.w2"},
};

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(c, "mixtral",
                             {.kv_heads = 8,
                              .ff = 14336,
                              .context = int64_t{4096} * 32,
                              .eps = 1e-5,
                              .rope = {.theta = 1e6}});
  const int window = c.count({"sliding_window"}, 0);
  MoeSpec moe;
  moe.expert_ff = s.layers.front().mlp().ff;
  moe.glu.activation = s.layers.front().mlp().activation;
  moe.routing.experts = c.size({"num_local_experts", "num_experts"}, 8);
  moe.routing.top_k = c.size({"num_experts_per_tok"}, 2);
  moe.routing.renormalize = true;
  set_experts(s, moe, [](int) { return true; });
  for (LayerSpec& layer : s.layers) layer.attention().window = window >= s.max_context ? 0 : window;
  return s;
}

}  // namespace mixtral_model

Architecture mixtral() {
  return {.type = "mixtral",
          .spec = mixtral_model::spec,
          .names = mixtral_model::kNames,
          .gguf_interleaves = true};
}

}  // namespace freshet::models

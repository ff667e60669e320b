#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace seed_oss_model {

constexpr NameRule kGgufNames[] = {
    {Role::kMlpIn, "blk.{}.post_attention_norm"},
    {Role::kAttentionOut, ""},
};

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(c, "seed_oss",
                             {.vocab = 155136,
                              .layers = 64,
                              .heads = 80,
                              .kv_heads = 8,
                              .head_dim = 128,
                              .ff = 27648,
                              .context = 524288});
  const bool bias = c.flag({"attention_bias"}, true);
  const bool out_bias = c.flag({"attention_out_bias"}, false);
  const bool mlp_bias = c.flag({"mlp_bias"}, false);
  for (LayerSpec& layer : s.layers) {
    layer.attention().qkv_bias = bias;
    layer.attention().out_bias = out_bias;
    layer.mlp().bias = mlp_bias;
  }
  return s;
}

}  // namespace seed_oss_model

Architecture seed_oss() {
  return {
      .type = "seed_oss", .spec = seed_oss_model::spec, .gguf_names = seed_oss_model::kGgufNames};
}

}  // namespace freshet::models

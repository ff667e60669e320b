// ModernBERT (arXiv:2412.13663): norms before the branches, two-sided windows with a rope of their
// own, GeGLU.
#include <algorithm>

#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace modernbert_model {

constexpr NameRule kNames[] = {
    {Role::kEmbedding, "model.embeddings.tok_embeddings"},
    {Role::kEmbeddedNorm, "model.embeddings.norm"},
    {Role::kFinalNorm, "model.final_norm"},
    {Role::kAttentionIn, "model.layers.{}.attn_norm"},
    {Role::kMlpIn, "model.layers.{}.mlp_norm"},
    {Role::kQuery, ""},
    {Role::kQkv, "model.layers.{}.attn.Wqkv"},
    {Role::kOutput, "model.layers.{}.attn.Wo"},
    {Role::kGate, ""},
    {Role::kGateUp, "model.layers.{}.mlp.Wi"},
    {Role::kDown, "model.layers.{}.mlp.Wo"},
};

constexpr NameRule kGgufNames[] = {
    {Role::kQuery, ""},
    {Role::kGate, ""},
};

RopeSpec rope_of_layers(Config& c, const ModelSpec& s, const char* layers, const char* old_key,
                        double theta) {
  return read_rope(
      c, s.layers.front().attention().head_dim,
      {.theta = c.number({old_key}, theta), .layer_type = layers, .max_context = s.max_context});
}

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(c, "modernbert",
                             {.vocab = 50368,
                              .hidden = 768,
                              .layers = 22,
                              .heads = 12,
                              .ff = 1152,
                              .context = 8192,
                              .norm = ops::NormKind::kLayer,
                              .eps = 1e-5,
                              .activation = "gelu",
                              .rotary = false});
  NormSpec norm = *s.final_norm;
  norm.eps = static_cast<float>(c.number({"norm_eps", "layer_norm_eps"}, 1e-5));
  norm.bias = c.flag({"norm_bias"}, false);
  s.final_norm = s.embedded_norm = norm;
  s.generates = false;
  s.tied_embeddings = true;
  s.ropes = {rope_of_layers(c, s, "full_attention", "global_rope_theta", 160000.0),
             rope_of_layers(c, s, "sliding_attention", "local_rope_theta", 10000.0)};
  // local_attention counts both sides.
  const int window = c.size({"local_attention"}, 128) / 2 + 1;
  const int every = c.size({"global_attn_every_n_layers"}, 3);
  const auto slides = [&](int layer) { return layer % every != 0; };
  set_windows(c, s, window, slides);
  const std::vector<std::string> types = c.texts({"layer_types"});
  for (size_t i = 0; i < s.layers.size(); ++i) {
    LayerSpec& layer = s.layers[i];
    AttentionSpec& a = layer.attention();
    a.two_way = true;
    // By the layer's type and not by its window, which is 0 if it exceeds the context.
    const bool local =
        i < types.size() ? types[i] == "sliding_attention" : slides(static_cast<int>(i));
    a.rope = local ? 1 : 0;
    a.qkv_bias = a.out_bias = c.flag({"attention_bias"}, false);
    layer.mlp().bias = c.flag({"mlp_bias"}, false);
    for (BranchSpec& branch : layer.branches) branch.norms.in = norm;
    if (i == 0) layer.branches.front().norms.in.reset();  // the embeddings are normalised already
  }
  return s;
}

}  // namespace modernbert_model

Architecture modernbert() {
  return {.type = "modernbert",
          .spec = modernbert_model::spec,
          .names = modernbert_model::kNames,
          .gguf_names = modernbert_model::kGgufNames};
}

}  // namespace freshet::models

// The names of tensors in published draft heads (draft_heads.h), beside those of Llama's layers.
// Constants.
#pragma once

#include "models/weight_names.h"

namespace freshet::models {

// The reference family's file of bare tensors.
inline constexpr NameRule kBareEagle[] = {
    {Role::kFeatures, "fc"},
    {Role::kAttentionIn, "layer.input_layernorm"},
    {Role::kMlpIn, "layer.post_attention_layernorm"},
    {Role::kQuery, "layer.self_attn.q_proj"},
    {Role::kKey, "layer.self_attn.k_proj"},
    {Role::kValue, "layer.self_attn.v_proj"},
    {Role::kOutput, "layer.self_attn.o_proj"},
    {Role::kGate, "layer.mlp.gate_proj"},
    {Role::kUp, "layer.mlp.up_proj"},
    {Role::kDown, "layer.mlp.down_proj"},
};
inline constexpr NameRule kEagle[] = {
    {Role::kFeatures, "model.fc"},
};
// The first layer's norm is that of the embeddings in EAGLE-3.
inline constexpr NameRule kMidlayerEagle3[] = {
    {Role::kFeatures, "model.fc"},
    {Role::kFeatureInputNorm, "model.input_norm"},
    {Role::kFeatureNorm, "model.midlayer.hidden_norm"},
    {Role::kFeatureEmbeddingNorm, "model.midlayer.input_layernorm"},
    {Role::kMlpIn, "model.midlayer.post_attention_layernorm"},
    {Role::kQuery, "model.midlayer.self_attn.q_proj"},
    {Role::kKey, "model.midlayer.self_attn.k_proj"},
    {Role::kValue, "model.midlayer.self_attn.v_proj"},
    {Role::kOutput, "model.midlayer.self_attn.o_proj"},
    {Role::kGate, "model.midlayer.mlp.gate_proj"},
    {Role::kUp, "model.midlayer.mlp.up_proj"},
    {Role::kDown, "model.midlayer.mlp.down_proj"},
};
inline constexpr NameRule kLayersEagle3[] = {
    {Role::kFeatures, "model.fc"},
    {Role::kFeatureInputNorm, "model.input_norm"},
    {Role::kFeatureNorm, "model.layers.{}.hidden_norm"},
    {Role::kFeatureEmbeddingNorm, "model.layers.{}.input_layernorm"},
};
inline constexpr NameRule kGgufEagle3[] = {
    {Role::kFeatures, "fc"},
    {Role::kFeatureInputNorm, "enc.output_norm"},
    {Role::kFeatureNorm, "blk.{}.attn_norm_2|blk.{}.hidden_norm"},
    {Role::kFeatureEmbeddingNorm, "blk.{}.attn_norm"},
};
inline constexpr NameRule kDeepSeekMtp[] = {
    {Role::kFeatures, "model.layers.{}.eh_proj"},
    {Role::kFeatureNorm, "model.layers.{}.hnorm"},
    {Role::kFeatureEmbeddingNorm, "model.layers.{}.enorm"},
    {Role::kFinalNorm, "model.layers.{}.shared_head.norm"},
    {Role::kHead, "model.layers.{}.shared_head.head"},
    {Role::kEmbedding, "model.layers.{}.embed_tokens"},
};
inline constexpr NameRule kQwen3NextMtp[] = {
    {Role::kFeatures, "mtp.fc"},
    {Role::kFeatureNorm, "mtp.pre_fc_norm_hidden"},
    {Role::kFeatureEmbeddingNorm, "mtp.pre_fc_norm_embedding"},
    {Role::kFinalNorm, "mtp.norm"},
    {Role::kAttentionIn, "mtp.layers.{}.input_layernorm"},
    {Role::kMlpIn, "mtp.layers.{}.post_attention_layernorm"},
    {Role::kQuery, "mtp.layers.{}.self_attn.q_proj"},
    {Role::kKey, "mtp.layers.{}.self_attn.k_proj"},
    {Role::kValue, "mtp.layers.{}.self_attn.v_proj"},
    {Role::kOutput, "mtp.layers.{}.self_attn.o_proj"},
    {Role::kQueryNorm, "mtp.layers.{}.self_attn.q_norm"},
    {Role::kKeyNorm, "mtp.layers.{}.self_attn.k_norm"},
    {Role::kGate, "mtp.layers.{}.mlp.gate_proj"},
    {Role::kUp, "mtp.layers.{}.mlp.up_proj"},
    {Role::kDown, "mtp.layers.{}.mlp.down_proj"},
    {Role::kRouter, "mtp.layers.{}.mlp.gate"},
    {Role::kExpertGate, "mtp.layers.{}.mlp.experts.{e}.gate_proj"},
    {Role::kExpertUp, "mtp.layers.{}.mlp.experts.{e}.up_proj"},
    {Role::kExpertDown, "mtp.layers.{}.mlp.experts.{e}.down_proj"},
    {Role::kExpertsGateUp, "mtp.layers.{}.mlp.experts.gate_up_proj"},
    {Role::kExpertsDown, "mtp.layers.{}.mlp.experts.down_proj"},
    {Role::kSharedGate, "mtp.layers.{}.mlp.shared_expert.gate_proj"},
    {Role::kSharedUp, "mtp.layers.{}.mlp.shared_expert.up_proj"},
    {Role::kSharedDown, "mtp.layers.{}.mlp.shared_expert.down_proj"},
    {Role::kSharedScale, "mtp.layers.{}.mlp.shared_expert_gate"},
};
inline constexpr NameRule kMimoMtp[] = {
    {Role::kFeatures, "model.mtp_layers.{}.input_proj"},
    {Role::kFeatureNorm, "model.mtp_layers.{}.hidden_layernorm"},
    {Role::kFeatureEmbeddingNorm, "model.mtp_layers.{}.token_layernorm"},
    {Role::kFinalNorm, "model.mtp_layers.{}.final_layernorm"},
    {Role::kAttentionIn, "model.mtp_layers.{}.input_layernorm"},
    {Role::kMlpIn, "model.mtp_layers.{}.post_attention_layernorm"},
    {Role::kQuery, "model.mtp_layers.{}.self_attn.q_proj"},
    {Role::kKey, "model.mtp_layers.{}.self_attn.k_proj"},
    {Role::kValue, "model.mtp_layers.{}.self_attn.v_proj"},
    {Role::kOutput, "model.mtp_layers.{}.self_attn.o_proj"},
    {Role::kGate, "model.mtp_layers.{}.mlp.gate_proj"},
    {Role::kUp, "model.mtp_layers.{}.mlp.up_proj"},
    {Role::kDown, "model.mtp_layers.{}.mlp.down_proj"},
};

}  // namespace freshet::models

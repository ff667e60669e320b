// Idefics3 (arXiv:2408.12637) and SmolVLM (arXiv:2504.05299): SigLIP on the squares of a picture,
// and one matrix for the features of neighbouring patches side by side.
#include "models/towers.h"

namespace freshet::models {
namespace idefics3_model {

constexpr NameRule kNames[] = {
    {Role::kPatches, "model.vision_model.embeddings.patch_embedding"},
    {Role::kPositions, "model.vision_model.embeddings.position_embedding"},
    {Role::kFinalNorm, "model.vision_model.post_layernorm"},
    {Role::kAttentionIn, "model.vision_model.encoder.layers.{}.layer_norm1"},
    {Role::kQuery, "model.vision_model.encoder.layers.{}.self_attn.q_proj"},
    {Role::kKey, "model.vision_model.encoder.layers.{}.self_attn.k_proj"},
    {Role::kValue, "model.vision_model.encoder.layers.{}.self_attn.v_proj"},
    {Role::kOutput, "model.vision_model.encoder.layers.{}.self_attn.out_proj"},
    {Role::kMlpIn, "model.vision_model.encoder.layers.{}.layer_norm2"},
    {Role::kUp, "model.vision_model.encoder.layers.{}.mlp.fc1"},
    {Role::kDown, "model.vision_model.encoder.layers.{}.mlp.fc2"},
    {Role::kConnectorOut, "model.connector.modality_projection.proj"},
};

bool spec(Config& c, Config& vision, ModelSpec&, VisionSpec& out) {
  read_square_tower(vision, out, true);
  out.blocks.final_norm = out.blocks.layers.front().branches.front().norms.in;
  out.merge = c.size({"scale_factor"}, 2);
  return true;
}

}  // namespace idefics3_model

TowerFamily idefics3_tower() {
  return {.type = "idefics3", .spec = idefics3_model::spec, .names = idefics3_model::kNames};
}
TowerFamily smolvlm_tower() {
  return {.type = "smolvlm", .spec = idefics3_model::spec, .names = idefics3_model::kNames};
}

}  // namespace freshet::models

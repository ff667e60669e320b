// Gemma 3 (arXiv:2503.19786): SigLIP, means of squares of patches, a norm and one matrix. Tokens of
// a picture see one another in the language model.
#include "models/towers.h"

namespace freshet::models {
namespace gemma3_tower_model {

constexpr NameRule kOwnNames[] = {
    {Role::kConnectorNorm, "multi_modal_projector.mm_soft_emb_norm"},
    {Role::kConnectorOut, "multi_modal_projector.mm_input_projection_weight"},
};

bool spec(Config& c, Config& vision, ModelSpec& text, VisionSpec& out) {
  if (!read_square_tower(vision, out)) return false;
  NormSpec norm = out.blocks.layers.front().branches.front().norms.in.value();
  out.blocks.final_norm = norm;
  const int tokens = c.size({"mm_tokens_per_image"}, 256);
  int side = 1;
  while ((side + 1) * (side + 1) <= tokens) ++side;
  out.merge = out.side / out.patch / side;
  out.mean = true;
  norm.kind = ops::NormKind::kRms;
  norm.bias = false;
  out.merge_norm = norm;
  out.norm_merged = true;
  out.connector_transposed = true;
  for (LayerSpec& layer : text.layers) layer.attention().spans = SpanUse::kAlso;
  return true;
}

}  // namespace gemma3_tower_model

TowerFamily gemma3_tower() {
  static const std::vector<NameRule> names = square_tower_names(gemma3_tower_model::kOwnNames);
  return {.type = "gemma3",
          .spec = gemma3_tower_model::spec,
          .names = names,
          .connector_norm_less_one = true};
}

}  // namespace freshet::models

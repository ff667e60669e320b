// LLaVA (arXiv:2304.08485, arXiv:2310.03744), LLaVA-NeXT and Mistral 3: CLIP or SigLIP, whose last
// layers are left out, or Pixtral's tower (arXiv:2410.07073), and an MLP of two layers. LLaVA-NeXT
// reads a picture as a whole and as a grid of squares; Mistral 3 merges patches before the MLP.
#include "models/towers.h"

namespace freshet::models {
namespace llava_model {

constexpr NameRule kOwnNames[] = {
    {Role::kConnectorNorm, "multi_modal_projector.norm"},
    {Role::kConnectorMerge, "multi_modal_projector.patch_merger.merging_layer"},
    {Role::kConnectorIn, "multi_modal_projector.linear_1"},
    {Role::kConnectorOut, "multi_modal_projector.linear_2"},
    {Role::kNewlineRow, "image_newline"},
};

// Leaves out the layers behind the states that are used.
void cut_layers(Config& c, int otherwise, VisionSpec& out) {
  // Of the list of states that starts with those before the first layer.
  const auto layers = static_cast<int>(out.blocks.layers.size());
  const double asked = c.number({"vision_feature_layer"}, otherwise);
  const int used = static_cast<int>(asked < 0 ? layers + 1 + asked : asked);
  if (used < 1 || used > layers) {
    c.fail(invalid_argument("the configuration's 'vision_feature_layer' is {}: the tower has {}",
                            asked, layers));
    return;
  }
  out.blocks.layers.resize(static_cast<size_t>(used));
}

bool spec(Config& c, Config& vision, ModelSpec& text, VisionSpec& out) {
  const bool squares = read_square_tower(vision, out);
  if (!squares && !read_pixtral_tower(vision, out)) return false;
  cut_layers(c, -2, out);
  const std::string rows = c.text({"vision_feature_select_strategy"}, "default");
  if (rows != "default" && rows != "full") {
    c.fail(unsupported("'vision_feature_select_strategy' is \"{}\"", rows));
  }
  out.drops_first = squares && rows == "default";
  if (!squares && rows == "default")
    c.fail(unsupported("'vision_feature_select_strategy' \"default\" with Pixtral's tower"));
  out.inner = text.hidden_size;
  out.connector_bias = c.flag({"multimodal_projector_bias"}, true);
  out.activation = c.activation({"projector_hidden_act"}, "gelu");
  return true;
}

bool next_spec(Config& c, Config& vision, ModelSpec& text, VisionSpec& out) {
  if (!spec(c, vision, text, out) || out.side == 0) return false;
  if (out.drops_first != out.class_row)
    c.fail(unsupported("LLaVA-NeXT with rows for other things than patches"));
  out.newline_row = true;
  return true;
}

bool mistral3_spec(Config& c, Config& vision, ModelSpec& text, VisionSpec& out) {
  if (!read_pixtral_tower(vision, out)) return false;
  cut_layers(c, -1, out);
  out.merge = c.size({"spatial_merge_size"}, 2);
  out.merge_linear = true;
  out.merge_norm = out.stem_norm;
  out.merge_norm->eps = text.final_norm ? text.final_norm->eps : 1e-6f;
  out.inner = text.hidden_size;
  out.connector_bias = c.flag({"multimodal_projector_bias"}, false);
  out.activation = c.activation({"projector_hidden_act"}, "gelu");
  return true;
}

}  // namespace llava_model

TowerFamily llava_tower() {
  static const std::vector<NameRule> names = square_tower_names(llava_model::kOwnNames);
  return {.type = "llava", .spec = llava_model::spec, .names = names};
}
TowerFamily llava_next_tower() {
  TowerFamily family = llava_tower();
  family.type = "llava_next";
  family.spec = llava_model::next_spec;
  return family;
}
TowerFamily mistral3_tower() {
  TowerFamily family = llava_tower();
  family.type = "mistral3";
  family.spec = llava_model::mistral3_spec;
  return family;
}

}  // namespace freshet::models

// LLaVA (arXiv:2304.08485, arXiv:2310.03744): CLIP or SigLIP, whose last layers are left out, and
// an MLP of two layers.
#include "models/towers.h"

namespace freshet::models {
namespace llava_model {

constexpr NameRule kOwnNames[] = {
    {Role::kConnectorIn, "multi_modal_projector.linear_1"},
    {Role::kConnectorOut, "multi_modal_projector.linear_2"},
};

bool spec(Config& c, Config& vision, ModelSpec& text, VisionSpec& out) {
  if (!read_square_tower(vision, out)) return false;
  // Of the list of states that starts with those before the first layer.
  const auto layers = static_cast<int>(out.blocks.layers.size());
  const double asked = c.number({"vision_feature_layer"}, -2);
  const int used = static_cast<int>(asked < 0 ? layers + 1 + asked : asked);
  if (used < 1 || used > layers) {
    c.fail(invalid_argument("the configuration's 'vision_feature_layer' is {}: the tower has {}",
                            asked, layers));
    return true;
  }
  out.blocks.layers.resize(static_cast<size_t>(used));
  const std::string rows = c.text({"vision_feature_select_strategy"}, "default");
  if (rows != "default" && rows != "full") {
    c.fail(unsupported("'vision_feature_select_strategy' is \"{}\"", rows));
  }
  out.drops_first = rows == "default";
  out.inner = text.hidden_size;
  out.connector_bias = c.flag({"multimodal_projector_bias"}, true);
  out.activation = c.activation({"projector_hidden_act"}, "gelu");
  return true;
}

}  // namespace llava_model

TowerFamily llava_tower() {
  static const std::vector<NameRule> names = square_tower_names(llava_model::kOwnNames);
  return {.type = "llava", .spec = llava_model::spec, .names = names};
}

}  // namespace freshet::models

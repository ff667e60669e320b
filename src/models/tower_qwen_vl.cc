// The towers of Qwen2-VL, Qwen2.5-VL (most of whose layers see windows), Qwen3-VL (DeepStack) and
// Qwen3.5.
#include "models/towers.h"

namespace freshet::models {
namespace qwen_vl_tower {

constexpr NameRule kTwoNames[] = {
    {Role::kPatches, "visual.patch_embed.proj"},
    {Role::kAttentionIn, "visual.blocks.{}.norm1"},
    {Role::kQuery, ""},
    {Role::kQkv, "visual.blocks.{}.attn.qkv"},
    {Role::kOutput, "visual.blocks.{}.attn.proj"},
    {Role::kMlpIn, "visual.blocks.{}.norm2"},
    {Role::kGate, "visual.blocks.{}.mlp.gate_proj"},
    {Role::kUp, "visual.blocks.{}.mlp.up_proj|visual.blocks.{}.mlp.fc1"},
    {Role::kDown, "visual.blocks.{}.mlp.down_proj|visual.blocks.{}.mlp.fc2"},
    {Role::kConnectorNorm, "visual.merger.ln_q"},
    {Role::kConnectorIn, "visual.merger.mlp.0"},
    {Role::kConnectorOut, "visual.merger.mlp.2"},
};

constexpr NameRule kThreeNames[] = {
    {Role::kPatches, "visual.patch_embed.proj"},
    {Role::kPositions, "visual.pos_embed"},
    {Role::kAttentionIn, "visual.blocks.{}.norm1"},
    {Role::kQuery, ""},
    {Role::kQkv, "visual.blocks.{}.attn.qkv"},
    {Role::kOutput, "visual.blocks.{}.attn.proj"},
    {Role::kMlpIn, "visual.blocks.{}.norm2"},
    {Role::kUp, "visual.blocks.{}.mlp.linear_fc1"},
    {Role::kDown, "visual.blocks.{}.mlp.linear_fc2"},
    {Role::kConnectorNorm, "visual.merger.norm"},
    {Role::kConnectorIn, "visual.merger.linear_fc1"},
    {Role::kConnectorOut, "visual.merger.linear_fc2"},
    {Role::kDeepNorm, "visual.deepstack_merger_list.{}.norm"},
    {Role::kDeepIn, "visual.deepstack_merger_list.{}.linear_fc1"},
    {Role::kDeepOut, "visual.deepstack_merger_list.{}.linear_fc2"},
};

// What all have: patches of any picture in merged squares, two frames of the same picture, and a
// rotation whose first half of frequencies has rows and whose second half has columns.
void read_common(Config& v, const TowerDefaults& defaults, VisionSpec& out) {
  out.blocks = tower_blocks(v, defaults);
  out.patch = v.size({"patch_size"}, 14);
  const int times = v.size({"temporal_patch_size"}, 2);
  if (v.size({"in_channels", "in_chans"}, 3) != 3)
    v.fail(unsupported("a tower for pictures of other than three channels"));
  if (out.patch <= 256 && times <= 16) out.patch_values = 3 * times * out.patch * out.patch;
  out.merge = v.size({"spatial_merge_size"}, 2);
  out.merge_norm = defaults.norm;
  out.connector_bias = true;
  if (out.merge <= 64) out.inner = out.merged_width();
  RopeSpec rope;
  if (const json::Value* parameters = v.find({"rope_parameters"})) {
    Config p(*parameters, "vision_config.rope_parameters.");
    rope.theta = p.number({"rope_theta"}, rope.theta);
    v.fail(p.status());
  }
  AttentionSpec& first = out.blocks.layers.front().attention();
  if (first.head_dim % 4 != 0)
    v.fail(unsupported("a tower whose heads have {} features", first.head_dim));
  rope.rotary_dim = first.head_dim / 4 * 4;
  rope.axial = true;
  rope.axes.assign(static_cast<size_t>(rope.rotary_dim / 4), 0);
  rope.axes.insert(rope.axes.end(), rope.axes.size(), 1);
  out.blocks.ropes = {rope};
  for (LayerSpec& layer : out.blocks.layers) layer.attention().rope = 0;
}

bool two(Config&, Config& v, ModelSpec&, VisionSpec& out) {
  const NormSpec norm{.kind = ops::NormKind::kLayer, .eps = 1e-6f, .bias = true};
  TowerDefaults d{
      .hidden = 1280, .layers = 32, .heads = 16, .norm = norm, .activation = "quick_gelu"};
  // Its "hidden_size" is that of the language model.
  d.hidden = v.size({"embed_dim"}, 1280);
  d.ff = static_cast<int>(d.hidden * v.number({"mlp_ratio"}, 4));
  read_common(v, d, out);
  return true;
}

bool two_and_a_half(Config&, Config& v, ModelSpec&, VisionSpec& out) {
  const TowerDefaults d{.hidden = 3584,
                        .layers = 32,
                        .heads = 16,
                        .ff = 3420,
                        .norm = {.eps = 1e-6f},
                        .gated = true,
                        .activation = "silu"};
  read_common(v, d, out);
  const int side = v.size({"window_size"}, 112);
  out.window = side / out.merge / out.patch;
  if (out.window < 1)
    v.fail(invalid_argument("the configuration's 'window_size' is {} pixels", side));
  for (LayerSpec& layer : out.blocks.layers) {
    layer.attention().two_way = false;
    layer.attention().spans = SpanUse::kOnly;
  }
  std::vector<float> full = {7, 15, 23, 31};
  if (v.has("fullatt_block_indexes")) full = v.floats({"fullatt_block_indexes"});
  for (const float index : full) {
    const auto layer = static_cast<size_t>(index);
    if (index < 0 || layer >= out.blocks.layers.size()) {
      v.fail(invalid_argument("the configuration's 'fullatt_block_indexes' names layer {}", index));
      break;
    }
    out.blocks.layers[layer].attention().two_way = true;
    out.blocks.layers[layer].attention().spans = SpanUse::kNone;
  }
  return true;
}

bool three_and_a_half(Config&, Config& v, ModelSpec&, VisionSpec& out) {
  const TowerDefaults d{
      .hidden = 1152,
      .layers = 27,
      .heads = 16,
      .ff = 4304,
      .norm = {.kind = ops::NormKind::kLayer, .eps = 1e-6f, .bias = true},
  };
  read_common(v, d, out);
  out.patch_bias = true;
  out.positions = v.size({"num_position_embeddings"}, 2304);
  out.stretched_positions = true;
  return true;
}

bool three(Config& c, Config& v, ModelSpec& text, VisionSpec& out) {
  three_and_a_half(c, v, text, out);
  std::vector<float> deep = {8, 16, 24};
  if (v.has("deepstack_visual_indexes")) deep = v.floats({"deepstack_visual_indexes"});
  for (const float index : deep) out.deep.push_back(static_cast<int>(index) + 1);
  return true;
}

}  // namespace qwen_vl_tower

TowerFamily qwen2_vl_tower() {
  return {.type = "qwen2_vl", .spec = qwen_vl_tower::two, .names = qwen_vl_tower::kTwoNames};
}
TowerFamily qwen2_5_vl_tower() {
  return {.type = "qwen2_5_vl",
          .spec = qwen_vl_tower::two_and_a_half,
          .names = qwen_vl_tower::kTwoNames};
}
TowerFamily qwen3_vl_tower() {
  return {.type = "qwen3_vl", .spec = qwen_vl_tower::three, .names = qwen_vl_tower::kThreeNames};
}
TowerFamily qwen3_vl_moe_tower() {
  TowerFamily family = qwen3_vl_tower();
  family.type = "qwen3_vl_moe";
  return family;
}
TowerFamily qwen3_5_tower() {
  return {.type = "qwen3_5",
          .spec = qwen_vl_tower::three_and_a_half,
          .names = qwen_vl_tower::kThreeNames};
}
TowerFamily qwen3_5_moe_tower() {
  TowerFamily family = qwen3_5_tower();
  family.type = "qwen3_5_moe";
  return family;
}

}  // namespace freshet::models

// The tower of Llama 3.2 Vision: a picture's tiles see one another, and states of several layers
// stand side by side. The language model reads them by cross-attention.
#include <algorithm>
#include <cmath>

#include "models/branch_loading.h"
#include "models/towers.h"

namespace freshet::models {
namespace mllama_tower_model {

constexpr int kMostPictures = 4;  // of a prompt: the cache has room for as many

constexpr NameRule kNames[] = {
    {Role::kPatches, "vision_model.patch_embedding"},
    {Role::kClassRow, "vision_model.class_embedding"},
    {Role::kPositions, "vision_model.gated_positional_embedding.embedding"},
    {Role::kTilePositions, "vision_model.gated_positional_embedding.tile_embedding"},
    {Role::kTileGate, "vision_model.gated_positional_embedding.gate"},
    {Role::kTilesBefore, "vision_model.pre_tile_positional_embedding.embedding"},
    {Role::kTilesBeforeGate, "vision_model.pre_tile_positional_embedding.gate"},
    {Role::kTilesAfter, "vision_model.post_tile_positional_embedding.embedding"},
    {Role::kTilesAfterGate, "vision_model.post_tile_positional_embedding.gate"},
    {Role::kEmbeddedNorm, "vision_model.layernorm_pre"},
    {Role::kFinalNorm, "vision_model.layernorm_post"},
    {Role::kAttentionIn, "vision_model.transformer.layers.{}.input_layernorm"},
    {Role::kQuery, "vision_model.transformer.layers.{}.self_attn.q_proj"},
    {Role::kKey, "vision_model.transformer.layers.{}.self_attn.k_proj"},
    {Role::kValue, "vision_model.transformer.layers.{}.self_attn.v_proj"},
    {Role::kOutput, "vision_model.transformer.layers.{}.self_attn.o_proj"},
    {Role::kMlpIn, "vision_model.transformer.layers.{}.post_attention_layernorm"},
    {Role::kUp, "vision_model.transformer.layers.{}.mlp.fc1"},
    {Role::kDown, "vision_model.transformer.layers.{}.mlp.fc2"},
    {Role::kConnectorOut, "multi_modal_projector"},
};

constexpr NameRule kLaterNames[] = {
    {Role::kAttentionIn, "vision_model.global_transformer.layers.{}.input_layernorm"},
    {Role::kQuery, "vision_model.global_transformer.layers.{}.self_attn.q_proj"},
    {Role::kKey, "vision_model.global_transformer.layers.{}.self_attn.k_proj"},
    {Role::kValue, "vision_model.global_transformer.layers.{}.self_attn.v_proj"},
    {Role::kOutput, "vision_model.global_transformer.layers.{}.self_attn.o_proj"},
    {Role::kAttentionGate, "vision_model.global_transformer.layers.{}.gate_attn"},
    {Role::kMlpIn, "vision_model.global_transformer.layers.{}.post_attention_layernorm"},
    {Role::kUp, "vision_model.global_transformer.layers.{}.mlp.fc1"},
    {Role::kDown, "vision_model.global_transformer.layers.{}.mlp.fc2"},
    {Role::kMlpGate, "vision_model.global_transformer.layers.{}.gate_ffn"},
};

bool spec(Config&, Config& v, ModelSpec& text, VisionSpec& out) {
  TowerDefaults d{.hidden = 1280,
                  .layers = 32,
                  .heads = 16,
                  .ff = 5120,
                  .norm = {.kind = ops::NormKind::kLayer, .eps = 1e-5f, .bias = true},
                  .activation = "gelu"};
  d.norm.eps = static_cast<float>(v.number({"norm_eps"}, 1e-5));
  out.blocks = tower_blocks(v, d);
  for (LayerSpec& layer : out.blocks.layers) {
    AttentionSpec& a = layer.attention();
    a.qkv_bias = a.out_bias = a.two_way = false;
    a.spans = SpanUse::kOnly;
  }
  out.later = out.blocks;
  const int later = v.size({"num_global_layers"}, 8);
  out.later->layers.resize(static_cast<size_t>(std::min(later, 1024)), out.blocks.layers.front());
  for (LayerSpec& layer : out.later->layers) layer.mlp().tanh_gate = true;
  // Its class has this for the norms around the layers.
  const NormSpec around{.kind = ops::NormKind::kLayer, .eps = 1e-5f, .bias = true};
  out.stem_norm = out.blocks.final_norm = around;
  out.side = v.size({"image_size"}, 448);
  out.patch = v.size({"patch_size"}, 14);
  if (out.patch <= 256) out.patch_values = 3 * out.patch * out.patch;
  out.class_row = true;
  out.tiles = v.size({"max_num_tiles"}, 4);
  const json::Value* const layouts = v.find({"supported_aspect_ratios"});
  out.tile_layouts = 9;
  if (layouts != nullptr && layouts->is_array())
    out.tile_layouts = static_cast<int>(std::min<size_t>(layouts->as_array().size(), 255)) + 1;
  std::vector<float> kept = {3, 7, 15, 23, 30};
  if (v.has("intermediate_layers_indices")) kept = v.floats({"intermediate_layers_indices"});
  for (const float index : kept) out.kept.push_back(static_cast<int>(index) + 1);
  out.connector_bias = true;
  out.cross = true;
  if (out.tiles > 64 || out.side > 1 << 14 || out.side < out.patch) return true;  // not valid
  const int in_row = out.side / out.patch;
  for (LayerSpec& layer : text.layers) {
    if (auto* cross = layer.find<CrossAttentionSpec>())
      cross->encoder_length = kMostPictures * out.tiles * (in_row * in_row + 1);
  }
  return true;
}

}  // namespace mllama_tower_model

TowerFamily mllama_tower() {
  return {.type = "mllama",
          .spec = mllama_tower_model::spec,
          .names = mllama_tower_model::kNames,
          .later_names = mllama_tower_model::kLaterNames};
}

namespace {

// A table of numbers, all times `scale`.
Status read_scaled(WeightReader& reader, Role role, std::string_view suffix, int64_t count,
                   float scale, std::vector<float>& out) {
  FRESHET_ASSIGN_OR_RETURN(const loader::TensorSource* tensor, reader.require(role, suffix));
  FRESHET_ASSIGN_OR_RETURN(out, reader.values(*tensor, count));
  for (float& value : out) value *= scale;
  reader.release(*tensor);
  return {};
}

}  // namespace

Status assemble_tiles(WeightReader& reader, const VisionSpec& spec, TileWeights& out) {
  const int64_t in_row = spec.side / spec.patch, rows = in_row * in_row + 1;
  const int64_t hidden = spec.blocks.hidden_size;
  const int64_t tiles = int64_t{spec.tile_layouts} * spec.tiles;
  FRESHET_ASSIGN_OR_RETURN(const float before, read_tanh_gate(reader, Role::kTilesBeforeGate));
  FRESHET_ASSIGN_OR_RETURN(const float after, read_tanh_gate(reader, Role::kTilesAfterGate));
  FRESHET_ASSIGN_OR_RETURN(const float gate, read_tanh_gate(reader, Role::kTileGate));
  FRESHET_RETURN_IF_ERROR(
      read_scaled(reader, Role::kTilesBefore, ".weight", tiles * hidden, before, out.before));
  FRESHET_RETURN_IF_ERROR(
      read_scaled(reader, Role::kTilesAfter, ".weight", tiles * hidden, after, out.after));
  FRESHET_RETURN_IF_ERROR(
      read_scaled(reader, Role::kPositions, "", rows * hidden, 1 - gate, out.positions));
  return read_scaled(reader, Role::kTilePositions, ".weight", tiles * rows * hidden, gate,
                     out.tile_positions);
}

Status gate_attention(WeightReader& reader, const ModelSpec& spec, ModelWeights& out) {
  for (size_t layer = 0; layer < spec.layers.size(); ++layer) {
    const auto at = static_cast<int>(layer);
    const AttentionSpec& a = spec.layers[layer].attention();
    FRESHET_ASSIGN_OR_RETURN(const float gate, read_tanh_gate(reader, Role::kAttentionGate, at));
    FRESHET_ASSIGN_OR_RETURN(const loader::TensorSource* tensor,
                             reader.require(Role::kOutput, ".weight", at));
    const int64_t cols = int64_t{a.heads} * a.value_dim;
    FRESHET_ASSIGN_OR_RETURN(std::vector<float> values,
                             reader.values(*tensor, spec.hidden_size * cols));
    for (float& value : values) value *= gate;
    FRESHET_ASSIGN_OR_RETURN(const Rows rows, reader.encode(values, cols, quant::Format::kF32));
    auto& attention = std::get<AttentionWeights>(out.layers[layer].branches.front().body);
    FRESHET_RETURN_IF_ERROR(reader.pack(attention.out.weight, tensor->name, rows));
  }
  return {};
}

}  // namespace freshet::models

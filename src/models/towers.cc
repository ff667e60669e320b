#include "models/towers.h"

#include <cmath>

#include "models/assemble.h"

namespace freshet::models {
namespace {

constexpr int kMostTowerLayers = 1024;

std::span<const TowerFamily> tower_families() {
  static const TowerFamily list[] = {llava_tower(),        llava_next_tower(), mistral3_tower(),
                                     qwen2_vl_tower(),     qwen2_5_vl_tower(), qwen3_vl_tower(),
                                     qwen3_vl_moe_tower(), qwen3_5_tower(),    qwen3_5_moe_tower(),
                                     gemma3_tower(),       idefics3_tower(),   smolvlm_tower(),
                                     mllama_tower()};
  return list;
}

// llama.cpp's names.
constexpr NameRule kGgufNames[] = {
    {Role::kPatches, "v.patch_embd"},
    {Role::kClassRow, "v.class_embd"},
    {Role::kPositions, "v.position_embd"},
    {Role::kEmbeddedNorm, "v.pre_ln"},
    {Role::kFinalNorm, "v.post_ln"},
    {Role::kAttentionIn, "v.blk.{}.ln1"},
    {Role::kQuery, "v.blk.{}.attn_q"},
    {Role::kKey, "v.blk.{}.attn_k"},
    {Role::kValue, "v.blk.{}.attn_v"},
    {Role::kQkv, "v.blk.{}.attn_qkv"},
    {Role::kOutput, "v.blk.{}.attn_out"},
    {Role::kMlpIn, "v.blk.{}.ln2"},
    {Role::kGate, "v.blk.{}.ffn_gate"},
    {Role::kUp, "v.blk.{}.ffn_up"},
    {Role::kDown, "v.blk.{}.ffn_down"},
    {Role::kConnectorNorm, "mm.soft_emb_norm|v.post_ln"},
    {Role::kConnectorIn, "mm.0"},
    {Role::kConnectorOut, "mm.2|mm.model.fc|mm.input_projection"},
    {Role::kDeepNorm, "v.deepstack.{}.norm"},
    {Role::kDeepIn, "v.deepstack.{}.fc1"},
    {Role::kDeepOut, "v.deepstack.{}.fc2"},
};

// Older converters gave the two matrices of an MLP each other's name.
std::span<const NameRule> gguf_names_of(const loader::Checkpoint& checkpoint,
                                        const VisionSpec& spec) {
  static const std::vector<NameRule> swapped = [] {
    std::vector<NameRule> names(std::begin(kGgufNames), std::end(kGgufNames));
    names.push_back({Role::kUp, "v.blk.{}.ffn_down"});
    names.push_back({Role::kDown, "v.blk.{}.ffn_up"});
    return names;
  }();
  const loader::TensorSource* const down = checkpoint.find("v.blk.0.ffn_down.weight");
  const int64_t hidden = spec.blocks.hidden_size;
  const bool other = down != nullptr && down->shape.size() == 2 && down->shape[0] != hidden &&
                     down->shape[1] == hidden;
  return other ? std::span<const NameRule>(swapped) : kGgufNames;
}

// Patches of two frames whose weights are two tensors [rows, channels, side, side]: the frames of
// a channel follow one another.
Result<Rows> join_frames(const loader::TensorSource& first, const loader::TensorSource& second,
                         int64_t rows, int64_t values) {
  const quant::FormatInfo& info = quant::info(*first.format);
  if (second.format != first.format || second.shape != first.shape || info.block_size != 1)
    return invalid_argument("tensors '{}' and '{}' differ in type or shape, or have blocks",
                            first.name, second.name);
  Rows out = Rows::shape(*first.format, rows, values);
  const size_t frame = first.bytes / static_cast<size_t>(rows) / 3;  // of a channel
  FRESHET_ASSIGN_OR_RETURN(Buffer joined, Buffer::allocate(2 * first.bytes));
  auto* to = joined.as<uint8_t>();
  for (int64_t row = 0; row < rows; ++row) {
    out.rows[static_cast<size_t>(row)] = to;
    for (int64_t channel = 0; channel < 3; ++channel) {
      const size_t at = static_cast<size_t>(row * 3 + channel) * frame;
      to = std::copy_n(first.data + at, frame, to);
      to = std::copy_n(second.data + at, frame, to);
    }
  }
  out.owned.push_back(std::move(joined));
  return out;
}

// A convolution whose stride is its size: [rows, channels ...] as a matrix.
Status assemble_patches(WeightReader& reader, const VisionSpec& spec, Linear& out) {
  const int64_t rows = spec.blocks.hidden_size;
  FRESHET_ASSIGN_OR_RETURN(const loader::TensorSource* tensor,
                           reader.require(Role::kPatches, ".weight"));
  const loader::TensorSource* const second = reader.find_name(tensor->name + ".1");
  const int64_t frames = second != nullptr ? 2 : 1;
  if (tensor->shape.empty() || tensor->shape[0] != rows ||
      frames * tensor->elements() != rows * spec.patch_values) {
    return invalid_argument("tensor '{}' must have {} rows of {} numbers", tensor->name, rows,
                            spec.patch_values);
  }
  if (!tensor->format)
    return unsupported("tensor '{}' has the type {}", tensor->name, tensor->dtype);
  Rows source = Rows::shape(*tensor->format, rows, spec.patch_values);
  const size_t stride = tensor->bytes / source.rows.size();
  for (size_t r = 0; r < source.rows.size(); ++r) source.rows[r] = tensor->data + r * stride;
  if (second != nullptr) {
    FRESHET_ASSIGN_OR_RETURN(source, join_frames(*tensor, *second, rows, spec.patch_values));
    reader.release(*second);
  }
  FRESHET_RETURN_IF_ERROR(reader.pack(out.weight, tensor->name, source));
  reader.release(*tensor);
  return spec.patch_bias ? reader.vector(out.bias, Role::kPatches, ".bias", -1, rows) : Status();
}

struct ConnectorRoles {
  Role norm, in, out;
};

Status assemble_connector(WeightReader& reader, const VisionSpec& spec, const ConnectorRoles& roles,
                          int index, bool norm_merged, float norm_offset, ConnectorWeights& out) {
  const int64_t merged = spec.merged_width();
  if (spec.merge_norm) {
    const int64_t size = norm_merged ? merged : spec.blocks.hidden_size;
    FRESHET_RETURN_IF_ERROR(
        reader.vector(out.norm.weight, roles.norm, ".weight", index, size, norm_offset));
    if (spec.merge_norm->bias)
      FRESHET_RETURN_IF_ERROR(reader.vector(out.norm.bias, roles.norm, ".bias", index, size));
  }
  int64_t inputs = merged;
  if (spec.merge_linear) {
    inputs = spec.blocks.hidden_size;
    FRESHET_RETURN_IF_ERROR(
        reader.linear(out.merge, Role::kConnectorMerge, index, inputs, merged, false));
  }
  if (spec.inner > 0) {
    FRESHET_RETURN_IF_ERROR(
        reader.linear(out.inner, roles.in, index, spec.inner, inputs, spec.connector_bias));
    inputs = spec.inner;
  }
  if (!spec.connector_transposed)
    return reader.linear(out.out, roles.out, index, spec.width, inputs, spec.connector_bias);
  FRESHET_ASSIGN_OR_RETURN(const loader::TensorSource* tensor,
                           reader.require(roles.out, ".weight", index));
  FRESHET_ASSIGN_OR_RETURN(const Rows source,
                           reader.rows(*tensor, spec.width, inputs, Layout::kTransposed));
  FRESHET_RETURN_IF_ERROR(reader.pack(out.out.weight, tensor->name, source));
  reader.release(*tensor);
  return {};
}

Result<std::shared_ptr<const ModelWeights>> assemble_blocks(WeightReader& reader,
                                                            const ModelSpec& blocks) {
  FRESHET_ASSIGN_OR_RETURN(ModelWeights weights, assemble(reader, blocks));
  return std::make_shared<const ModelWeights>(std::move(weights));
}

}  // namespace

const TowerFamily* tower_of(const json::Value& config) {
  if (!config.is_object()) return nullptr;
  const json::Value* const vision = config.find("vision_config");
  if (vision == nullptr || !vision->is_object()) return nullptr;
  const std::string type = config.get_string("model_type", "");
  for (const TowerFamily& family : tower_families()) {
    if (family.type == type) return &family;
  }
  return nullptr;
}

Status add_tower(const json::Value& config, ModelSpec& text) {
  const TowerFamily* const family = tower_of(config);
  if (family == nullptr || !text.generates) return {};
  Config whole(config);
  Config vision(*config.find("vision_config"), "vision_config.");
  VisionSpec spec;
  spec.family = family->type;
  spec.width = text.hidden_size;
  spec.image_token = whole.count({"image_token_id", "image_token_index"}, -1);
  const bool known = family->spec(whole, vision, text, spec);
  FRESHET_RETURN_IF_ERROR(whole.status());
  FRESHET_RETURN_IF_ERROR(vision.status());
  if (!known) return {};
  text.vision = std::make_shared<const VisionSpec>(std::move(spec));
  return validate(text);
}

bool has_tower(const loader::Checkpoint& checkpoint, const TowerFamily& family) {
  if (checkpoint.kind() == loader::Checkpoint::Kind::kGguf) return checkpoint.tower() != nullptr;
  const WeightNames names = WeightNames::safetensors(family.names);
  for (int choice = 0;; ++choice) {
    const std::string stem = names.stem(Role::kPatches, -1, -1, choice);
    if (stem.empty()) return false;
    if (find_weight(checkpoint, stem) != nullptr) return true;
  }
}

Result<VisionWeights> assemble_tower(MakeReader make, const TowerFamily& family,
                                     const loader::Checkpoint& checkpoint, const VisionSpec& spec,
                                     std::vector<Model::WeightInfo>& infos) {
  VisionWeights out;
  const bool gguf = checkpoint.kind() == loader::Checkpoint::Kind::kGguf;
  const auto names = gguf ? gguf_names_of(checkpoint, spec) : family.names;
  WeightReader reader = make(names, false);
  const int64_t hidden = spec.blocks.hidden_size;
  FRESHET_RETURN_IF_ERROR(assemble_patches(reader, spec, out.patches));
  if (spec.class_row) {
    FRESHET_ASSIGN_OR_RETURN(const loader::TensorSource* tensor,
                             reader.require(Role::kClassRow, ""));
    FRESHET_ASSIGN_OR_RETURN(out.class_row, reader.values(*tensor, hidden));
  }
  if (spec.positions > 0) {
    FRESHET_ASSIGN_OR_RETURN(const loader::TensorSource* tensor,
                             reader.require(Role::kPositions, ".weight"));
    FRESHET_ASSIGN_OR_RETURN(const Rows source, reader.rows(*tensor, spec.positions, hidden));
    FRESHET_RETURN_IF_ERROR(reader.pack(out.positions, tensor->name, source, {}, ops::Use::kTable));
    reader.release(*tensor);
  }
  if (spec.newline_row) {
    FRESHET_ASSIGN_OR_RETURN(const loader::TensorSource* tensor,
                             reader.require(Role::kNewlineRow, ""));
    FRESHET_ASSIGN_OR_RETURN(out.newline, reader.values(*tensor, spec.width));
  }
  if (spec.stem_norm) {
    FRESHET_RETURN_IF_ERROR(
        reader.norm(out.stem_norm, Role::kEmbeddedNorm, *spec.stem_norm, -1, hidden));
  }
  WeightReader layers = make(names, true);
  FRESHET_ASSIGN_OR_RETURN(out.blocks, assemble_blocks(layers, spec.blocks));
  if (spec.tiles > 0) FRESHET_RETURN_IF_ERROR(assemble_tiles(reader, spec, out.tiles));
  constexpr ConnectorRoles kMain{Role::kConnectorNorm, Role::kConnectorIn, Role::kConnectorOut};
  constexpr ConnectorRoles kDeep{Role::kDeepNorm, Role::kDeepIn, Role::kDeepOut};
  FRESHET_RETURN_IF_ERROR(assemble_connector(reader, spec, kMain, -1, spec.norm_merged,
                                             family.connector_norm_less_one && !gguf ? 1.0f : 0.0f,
                                             out.connector));
  out.deep.resize(spec.deep.size());
  for (size_t i = 0; i < out.deep.size(); ++i) {
    // GGUF files count the layers, others the connectors.
    const int index = gguf ? spec.deep[i] - 1 : static_cast<int>(i);
    FRESHET_RETURN_IF_ERROR(
        assemble_connector(reader, spec, kDeep, index, true, 0.0f, out.deep[i]));
  }
  const auto add_infos = [&](WeightReader& from) {
    for (Model::WeightInfo& info : from.take_infos()) infos.push_back(std::move(info));
  };
  add_infos(reader);
  add_infos(layers);
  if (!spec.later) return out;
  WeightReader later = make(family.later_names, true);
  FRESHET_ASSIGN_OR_RETURN(ModelWeights weights, assemble(later, *spec.later));
  FRESHET_RETURN_IF_ERROR(gate_attention(later, *spec.later, weights));
  out.later = std::make_shared<const ModelWeights>(std::move(weights));
  add_infos(later);
  return out;
}

ModelSpec tower_blocks(Config& c, const TowerDefaults& d) {
  ModelSpec s;
  s.architecture = "tower";
  s.vocab_size = 1;
  s.hidden_size = s.embedding_size = c.size({"embed_dim", "hidden_size"}, d.hidden);
  s.max_context = 1 << 20;
  s.shared_embedding = true;
  s.generates = false;
  FeatureSpec stream;
  stream.width = s.hidden_size;
  stream.use = FeatureSpec::Use::kStream;
  s.features = stream;

  AttentionSpec a;
  a.heads = a.kv_heads = c.size({"num_attention_heads", "num_heads", "attention_heads"}, d.heads);
  a.head_dim = a.value_dim = s.hidden_size / a.heads;
  a.scale = static_cast<float>(1 / std::sqrt(double{1} * a.head_dim));
  a.two_way = true;
  a.qkv_bias = a.out_bias = d.bias;
  MlpSpec mlp;
  mlp.gated = d.gated;
  mlp.bias = d.bias;
  mlp.ff = c.size({"intermediate_size"}, d.ff);
  mlp.activation = c.activation({"hidden_act"}, d.activation);
  int layers = c.size({"num_hidden_layers", "depth"}, d.layers);
  if (layers > kMostTowerLayers) {
    c.fail(invalid_argument("the configuration asks for a tower of {} layers", layers));
    layers = 1;
  }
  s.layers.assign(static_cast<size_t>(layers), {{{{.in = d.norm}, a}, {{.in = d.norm}, mlp}}});
  return s;
}

std::vector<NameRule> square_tower_names(std::span<const NameRule> own) {
  std::vector<NameRule> names = {
      {Role::kPatches,
       "vision_tower.embeddings.patch_embedding|"
       "vision_tower.patch_conv"},
      {Role::kClassRow, "vision_tower.embeddings.class_embedding"},
      {Role::kPositions, "vision_tower.embeddings.position_embedding"},
      {Role::kEmbeddedNorm,
       "vision_tower.pre_layrnorm|"
       "vision_tower.ln_pre"},
      {Role::kFinalNorm, "vision_tower.post_layernorm"},
      {Role::kAttentionIn,
       "vision_tower.encoder.layers.{}.layer_norm1|"
       "vision_tower.transformer.layers.{}.attention_norm"},
      {Role::kQuery,
       "vision_tower.encoder.layers.{}.self_attn.q_proj|"
       "vision_tower.transformer.layers.{}.attention.q_proj"},
      {Role::kKey,
       "vision_tower.encoder.layers.{}.self_attn.k_proj|"
       "vision_tower.transformer.layers.{}.attention.k_proj"},
      {Role::kValue,
       "vision_tower.encoder.layers.{}.self_attn.v_proj|"
       "vision_tower.transformer.layers.{}.attention.v_proj"},
      {Role::kOutput,
       "vision_tower.encoder.layers.{}.self_attn.out_proj|"
       "vision_tower.transformer.layers.{}.attention.o_proj"},
      {Role::kMlpIn,
       "vision_tower.encoder.layers.{}.layer_norm2|"
       "vision_tower.transformer.layers.{}.ffn_norm"},
      {Role::kGate, "vision_tower.transformer.layers.{}.feed_forward.gate_proj"},
      {Role::kUp,
       "vision_tower.encoder.layers.{}.mlp.fc1|"
       "vision_tower.transformer.layers.{}.feed_forward.up_proj"},
      {Role::kDown,
       "vision_tower.encoder.layers.{}.mlp.fc2|"
       "vision_tower.transformer.layers.{}.feed_forward.down_proj"},
  };
  names.insert(names.end(), own.begin(), own.end());
  return names;
}

bool read_square_tower(Config& c, VisionSpec& out, bool siglip) {
  const std::string type = c.text({"model_type"}, "clip_vision_model");
  const bool clip = !siglip && type == "clip_vision_model";
  if (!clip && !siglip && type != "siglip_vision_model") return false;
  TowerDefaults d;
  d.norm = {.kind = ops::NormKind::kLayer, .bias = true};
  d.norm.eps = static_cast<float>(c.number({"layer_norm_eps"}, clip ? 1e-5 : 1e-6));
  if (clip) d.activation = "quick_gelu";
  if (siglip) {
    d.hidden = 1152;
    d.heads = 16;
  }
  out.blocks = tower_blocks(c, d);
  out.side = c.size({"image_size"}, 224);
  out.patch = c.size({"patch_size"}, clip || siglip ? 32 : 16);
  out.patch_values = 3 * out.patch * out.patch;
  out.patch_bias = !clip;
  out.class_row = clip;
  const int64_t in_row = out.side / out.patch;
  out.positions = in_row * in_row + (clip ? 1 : 0);
  if (clip) out.stem_norm = d.norm;
  return true;
}

bool read_pixtral_tower(Config& c, VisionSpec& out) {
  if (c.text({"model_type"}, "") != "pixtral") return false;
  TowerDefaults d{.hidden = 1024, .layers = 24, .heads = 16, .ff = 4096, .norm = {.eps = 1e-5f}};
  d.gated = true;
  d.activation = "gelu";
  d.bias = false;
  out.blocks = tower_blocks(c, d);
  out.patch = c.size({"patch_size"}, 16);
  if (c.size({"num_channels"}, 3) != 3)
    c.fail(unsupported("a tower for pictures of other than three channels"));
  if (out.patch <= 256) out.patch_values = 3 * out.patch * out.patch;
  out.stem_norm = d.norm;
  RopeSpec rope;
  rope.theta = c.number({"rope_theta"}, 10000.0);
  if (const json::Value* parameters = c.find({"rope_parameters"})) {
    Config p(*parameters, "vision_config.rope_parameters.");
    rope.theta = p.number({"rope_theta"}, rope.theta);
    c.fail(p.status());
  }
  const int features = out.blocks.layers.front().attention().head_dim;
  if (features % 4 != 0) c.fail(unsupported("a tower whose heads have {} features", features));
  rope.rotary_dim = features / 4 * 4;
  rope.axial = rope.axial_turns = true;
  rope.axes.assign(static_cast<size_t>(rope.rotary_dim / 4), 0);
  rope.axes.insert(rope.axes.end(), rope.axes.size(), 1);
  out.blocks.ropes = {rope};
  for (LayerSpec& layer : out.blocks.layers) layer.attention().rope = 0;
  return true;
}

}  // namespace freshet::models

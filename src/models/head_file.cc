#include "models/head_file.h"

#include <algorithm>

#include "models/gguf_config.h"

namespace freshet::models {

using loader::Checkpoint;
using loader::TensorSource;

HeadFile::HeadFile(const Checkpoint& checkpoint, std::span<const NameRule> names)
    : checkpoint_(checkpoint),
      names_(checkpoint.gguf() != nullptr ? WeightNames::gguf(names)
                                          : WeightNames::safetensors(names)) {}

const TensorSource* HeadFile::find(Role role, std::string_view suffix, int layer) const {
  for (int choice = 0;; ++choice) {
    const std::string stem = names_.stem(role, layer, -1, choice);
    if (stem.empty()) return nullptr;
    const TensorSource* const found = suffix == ".weight"
                                          ? find_weight(checkpoint_, stem)
                                          : find_tensor(checkpoint_, stem + std::string(suffix));
    if (found != nullptr) return found;
  }
}

Result<const TensorSource*> HeadFile::matrix(Role role, int layer) const {
  const TensorSource* const found = find(role, ".weight", layer);
  if (found == nullptr || found->shape.size() != 2) {
    return invalid_argument("{}: tensor '{}.weight' is missing: this is not such a draft head",
                            checkpoint_.path(), names_.stem(role, layer));
  }
  return found;
}

Status check_width(const Checkpoint& checkpoint, const ModelSpec& head, const ModelSpec& target) {
  if (head.hidden_size == target.hidden_size && target.embedding_size == target.hidden_size) {
    return {};
  }
  return invalid_argument("{} has states of {} numbers, the target of {}: it is for another model",
                          checkpoint.path(), head.hidden_size, target.hidden_size);
}

Result<json::Value> head_config(const Checkpoint& checkpoint, const ModelSpec& target) {
  if (checkpoint.gguf() == nullptr) {
    const json::Value* const layer = checkpoint.config().find("transformer_layer_config");
    if (layer == nullptr || !layer->is_object()) return checkpoint.config();
    json::Object all = checkpoint.config().as_object();
    for (const auto& [key, value] : layer->as_object()) {
      if (all.find(key) == nullptr) all[key] = value;
    }
    return json::Value(std::move(all));
  }
  const loader::GgufFile& gguf = *checkpoint.gguf();
  FRESHET_ASSIGN_OR_RETURN(json::Value config, gguf_config(checkpoint));
  if (config.get_string("model_type", "") != "eagle3") {
    return invalid_argument("{} is a model of type '{}', not an EAGLE-3 head", checkpoint.path(),
                            config.get_string("model_type", ""));
  }
  json::Object& all = config.as_object();
  if (all.find("vocab_size") == nullptr) all["vocab_size"] = json::Value(target.vocab_size);
  for (const char* key : {"eagle3.target_layers", "eagle3.extract_layers"}) {
    const auto layers = gguf.get_ints(key);
    if (!layers) continue;
    json::Array ids;
    for (const int64_t id : *layers) ids.emplace_back(id);
    all["eagle_aux_hidden_state_layer_ids"] = std::move(ids);
    break;
  }
  for (const char* key : {"norm_before_residual", "norm_output"}) {
    if (const auto flag = gguf.get_bool(std::string("eagle3.") + key))
      all[key] = json::Value(*flag);
  }
  return config;
}

Status read_layers(const HeadFile& file, ModelSpec& spec) {
  for (int i = 0; i < std::ssize(spec.layers); ++i) {
    LayerSpec& layer = spec.layers[static_cast<size_t>(i)];
    FRESHET_ASSIGN_OR_RETURN(const TensorSource* gate, file.matrix(Role::kGate, i));
    layer.mlp().ff = static_cast<int>(std::min<int64_t>(gate->shape[0], 1 << 24));
    layer.attention().qkv_bias = file.has(Role::kQuery, ".bias", i);
    layer.attention().out_bias = file.has(Role::kOutput, ".bias", i);
    layer.mlp().bias = file.has(Role::kGate, ".bias", i);
  }
  return {};
}

}  // namespace freshet::models

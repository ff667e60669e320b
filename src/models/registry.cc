#include "models/registry.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "layers/decoder.h"
#include "models/architectures.h"
#include "models/assemble.h"
#include "models/gguf_config.h"

namespace freshet {
namespace models {

std::span<const Architecture> architectures() {
  static const Architecture list[] = {
      llama(),     mistral(), mixtral(),     qwen2(),       qwen3(),      qwen2_moe(),
      qwen3_moe(), gemma(),   gemma2(),      gemma3(),      phi3(),       gpt2(),
      gpt_neox(),  opt(),     olmo2(),       granite(),     starcoder2(), stablelm(),
      cohere(),    glm4(),    deepseek_v2(), deepseek_v3(), gpt_oss(),
  };
  return list;
}

Result<const Architecture*> find_architecture(const json::Value& config) {
  if (!config.is_object()) return invalid_argument("the configuration is not a JSON object");
  std::string type = config.get_string("model_type", "");
  if (type.empty()) return invalid_argument("the configuration has no 'model_type'");
  const auto list = architectures();
  const auto found =
      std::find_if(list.begin(), list.end(), [&](const Architecture& a) { return a.type == type; });
  if (found == list.end()) return unsupported("unsupported architecture '{}'", type);
  return &*found;
}

Result<ModelSpec> read_spec(const json::Value& config) {
  FRESHET_ASSIGN_OR_RETURN(const Architecture* architecture, find_architecture(config));
  Config reader(config);
  ModelSpec spec = architecture->spec(reader);
  FRESHET_RETURN_IF_ERROR(reader.status());
  FRESHET_RETURN_IF_ERROR(validate(spec));
  return spec;
}

namespace {

// The language model's part of a multimodal configuration.
json::Value text_config(const json::Value& config) {
  const json::Value* text = config.find("text_config");
  if (config.get_string("model_type", "") != "gemma3" || text == nullptr || !text->is_object()) {
    return config;
  }
  json::Value out = *text;
  out.as_object()["model_type"] = json::Value("gemma3_text");
  return out;
}

Result<json::Value> config_of(const loader::Checkpoint& checkpoint) {
  if (checkpoint.kind() == loader::Checkpoint::Kind::kGguf) return gguf_config(checkpoint);
  return text_config(checkpoint.config());
}

}  // namespace
}  // namespace models

Result<ModelSpec> read_spec(const loader::Checkpoint& checkpoint) {
  FRESHET_ASSIGN_OR_RETURN(const json::Value config, models::config_of(checkpoint));
  return models::read_spec(config);
}

Result<std::unique_ptr<Model>> load_model(const loader::Checkpoint& checkpoint, ops::Ops& ops,
                                          const Progress& progress) {
  FRESHET_ASSIGN_OR_RETURN(const json::Value config, models::config_of(checkpoint));
  FRESHET_ASSIGN_OR_RETURN(const models::Architecture* architecture,
                           models::find_architecture(config));
  FRESHET_ASSIGN_OR_RETURN(ModelSpec spec, models::read_spec(config));
  models::WeightReader reader(checkpoint, *architecture, ops, progress);
  FRESHET_ASSIGN_OR_RETURN(ModelWeights weights, models::assemble(reader, spec));
  if (progress) progress(checkpoint.total_bytes(), checkpoint.total_bytes());
  return std::unique_ptr<Model>(
      new Decoder(std::move(spec), std::move(weights), reader.take_infos(), ops));
}

}  // namespace freshet

#include "models/registry.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/log.h"
#include "layers/decoder.h"
#include "models/architectures.h"
#include "models/assemble.h"
#include "models/gguf_config.h"
#include "models/weight_cache.h"
#include "ops/device.h"

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

// A model that is being loaded.
struct Loading {
  const loader::Checkpoint& checkpoint;
  ops::Ops& ops;
  const Progress& progress;
  const Architecture* architecture = nullptr;
  ModelSpec spec;
};

Result<std::unique_ptr<Model>> load_packing(const Loading& l, WeightCache* packed) {
  WeightReader reader(l.checkpoint, *l.architecture, l.ops, l.progress, packed);
  FRESHET_ASSIGN_OR_RETURN(ModelWeights weights, assemble(reader, l.spec));
  const size_t total = l.checkpoint.total_bytes();
  if (l.progress) l.progress(total, total);
  return std::unique_ptr<Model>(
      new Decoder(l.spec, std::move(weights), reader.take_infos(), l.ops));
}

Result<std::unique_ptr<Model>> load_mapped(const Loading& l, const std::string& path,
                                           std::string_view key) {
  FRESHET_ASSIGN_OR_RETURN(WeightCache cache, WeightCache::open(path, key));
  FRESHET_ASSIGN_OR_RETURN(auto model, load_packing(l, &cache));
  if (!cache.at_end()) return invalid_argument("{} holds more weights than the model", path);
  return model;
}

// `broken`: an error of the model, not of the cache.
Status write_cache(const Loading& l, const std::string& path, std::string_view key,
                   Status& broken) {
  FRESHET_ASSIGN_OR_RETURN(WeightCacheWriter writer, WeightCacheWriter::create(path));
  WeightReader reader(l.checkpoint, *l.architecture, l.ops, l.progress, nullptr, &writer);
  if (const auto weights = assemble(reader, l.spec); !weights.ok()) {
    if (writer.status().ok()) broken = weights.status();
    return weights.status();
  }
  return writer.commit(key);
}

// The model with the cache's weights. Writes the cache first if there is none that fits; nullptr if
// that is impossible.
Result<std::unique_ptr<Model>> load_cached(const Loading& l, const std::string& folder) {
  const std::string path = weight_cache_path(folder, l.checkpoint, l.ops);
  const std::string key = weight_cache_key(l.checkpoint, l.ops);
  auto model = load_mapped(l, path, key);
  if (!model.ok()) {
    log_info("packed weights are written: {}", model.status().message());
    Status broken;
    const Status written = write_cache(l, path, key, broken);
    if (!broken.ok()) return broken;
    if (!written.ok()) {
      const std::string line = fmt::format("packed weights are not kept: {}", written.message());
      log_line(
          written.code() == StatusCode::kResourceExhausted ? LogLevel::kInfo : LogLevel::kWarning,
          line);
    }
    // Also if another process wrote it in the meantime.
    model = load_mapped(l, path, key);
  }
  if (!model.ok()) return std::unique_ptr<Model>();
  log_info("packed weights are mapped from {}", path);
  return model;
}

}  // namespace
}  // namespace models

Result<ModelSpec> read_spec(const loader::Checkpoint& checkpoint) {
  FRESHET_ASSIGN_OR_RETURN(const json::Value config, models::config_of(checkpoint));
  return models::read_spec(config);
}

Result<std::unique_ptr<Model>> load_model(const loader::Checkpoint& checkpoint, ops::Ops& ops,
                                          const Progress& progress,
                                          const std::string& weight_cache) {
  FRESHET_ASSIGN_OR_RETURN(const json::Value config, models::config_of(checkpoint));
  models::Loading l{checkpoint, ops, progress};
  FRESHET_ASSIGN_OR_RETURN(l.architecture, models::find_architecture(config));
  FRESHET_ASSIGN_OR_RETURN(l.spec, models::read_spec(config));
  if (!weight_cache.empty() && ops.device() != nullptr) {
    log_warning("--weight-cache-dir is not used: {} packs for itself", ops.device()->name());
  } else if (!weight_cache.empty()) {
    FRESHET_ASSIGN_OR_RETURN(auto model, models::load_cached(l, weight_cache));
    if (model != nullptr) return model;
  }
  return models::load_packing(l, nullptr);
}

}  // namespace freshet

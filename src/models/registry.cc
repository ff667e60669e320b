#include "models/registry.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include <fmt/ranges.h>

#include "base/log.h"
#include "layers/decoder.h"
#include "models/architectures.h"
#include "models/assemble.h"
#include "models/gguf_config.h"
#include "models/mmproj.h"
#include "models/pooled_heads.h"
#include "models/scaled_rows.h"
#include "models/towers.h"
#include "models/weight_cache.h"
#include "models/weight_reader.h"
#include "ops/device.h"

namespace freshet {
namespace models {

std::span<const Architecture> architectures() {
  static const Architecture list[] = {
      llama(),        mistral(),       mixtral(),    qwen2(),      qwen3(),
      qwen2_moe(),    qwen3_moe(),     gemma(),      gemma2(),     gemma3(),
      phi3(),         gpt2(),          gpt_neox(),   opt(),        olmo2(),
      granite(),      starcoder2(),    stablelm(),   cohere(),     glm4(),
      deepseek_v2(),  deepseek_v3(),   gpt_oss(),    smollm3(),    olmo3(),
      olmoe(),        cohere2(),       exaone4(),    glm4_moe(),   ernie4_5(),
      ernie4_5_moe(), hunyuan_dense(), seed_oss(),   apertus(),    arcee(),
      nemotron(),     phi(),           phimoe(),     falcon(),     minimax_m2(),
      granitemoe(),   gpt_bigcode(),   gptj(),       llama4(),     bert(),
      roberta(),      xlm_roberta(),   camembert(),  nomic_bert(), modernbert(),
      gte(),          gte_new(),       t5(),         mt5(),        bart(),
      mbart(),        whisper(),       lfm2(),       lfm2_moe(),   mamba(),
      falcon_mamba(), mamba2(),        qwen3_next(), falcon_h1(),  granitemoehybrid(),
      bamba(),        jamba(),         nemotron_h(), minimax(),    qwen2_vl(),
      qwen2_5_vl(),   qwen3_vl(),      mllama(),     marian(),     m2m_100(),
      baichuan(),     bloom(),         mpt(),        qwen3_5(),    qwen3_5_moe(),
      qwen3_vl_moe(), zamba2(),
  };
  return list;
}

std::vector<std::string> architecture_names() {
  std::vector<std::string> names;
  for (const Architecture& a : architectures()) names.emplace_back(a.type);
  std::sort(names.begin(), names.end());
  return names;
}

namespace {

const Architecture* by_type(std::string_view type) {
  const auto list = architectures();
  const auto found =
      std::find_if(list.begin(), list.end(), [&](const Architecture& a) { return a.type == type; });
  return found == list.end() ? nullptr : &*found;
}

// Without a model_type the class counts: "architectures": ["Qwen2MoeForCausalLM"].
const Architecture* by_class(const json::Value& config) {
  constexpr std::string_view kEnd = "ForCausalLM";
  const json::Value* classes = config.find("architectures");
  if (classes == nullptr || !classes->is_array()) return nullptr;
  for (const json::Value& one : classes->as_array()) {
    if (!one.is_string() || !one.as_string().ends_with(kEnd)) continue;
    std::string name = one.as_string().substr(0, one.as_string().size() - kEnd.size());
    for (char& c : name) c = static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
    for (const Architecture& a : architectures()) {
      std::string type(a.type);
      std::erase(type, '_');
      if (type == name) return &a;
    }
  }
  return nullptr;
}

}  // namespace

Result<const Architecture*> find_architecture(const json::Value& config) {
  if (!config.is_object()) return invalid_argument("the configuration is not a JSON object");
  const std::string type = config.get_string("model_type", "");
  if (const Architecture* found = by_type(type)) return found;
  if (const Architecture* found = type.empty() ? by_class(config) : nullptr) return found;
  if (type.empty()) return invalid_argument("the configuration has no 'model_type'");
  return unsupported("unsupported architecture '{}'; supported: {}", type,
                     fmt::join(architecture_names(), ", "));
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
  const std::string type = config.get_string("model_type", "");
  const bool parts = text != nullptr && text->is_object();
  // Older files have the language model's keys beside the tower's.
  if (by_type(type + "_text") != nullptr) {
    json::Value out = parts ? *text : config;
    out.as_object()["model_type"] = json::Value(type + "_text");
    return out;
  }
  if (!parts) return config;
  // Of other models with such a part, where this reads it and not the whole.
  const bool whole = by_type(type) != nullptr;
  return !whole && by_type(text->get_string("model_type", "")) != nullptr ? *text : config;
}

// Whether two tensors hold the same numbers in the same format.
bool same_numbers(const loader::TensorSource& a, const loader::TensorSource& b) {
  return a.dtype == b.dtype && a.shape == b.shape && a.bytes == b.bytes &&
         std::memcmp(a.data, b.data, a.bytes) == 0;
}

// What is in the files counts, not what tie_word_embeddings says. A line about a flag that is
// overruled, or "".
std::string settle_head(const loader::Checkpoint& checkpoint, const Architecture& architecture,
                        ModelSpec& spec) {
  if (checkpoint.kind() == loader::Checkpoint::Kind::kGguf || !spec.generates) return {};
  const WeightNames names = WeightNames::safetensors(architecture.names);
  const auto* head = find_weight(checkpoint, names.stem(Role::kHead));
  const auto* embedding = find_weight(checkpoint, names.stem(Role::kEmbedding));
  if (spec.tied_embeddings && head != nullptr && embedding != nullptr) {
    const bool fits = head->shape == embedding->shape || head->dtype != embedding->dtype;
    if (!fits || same_numbers(*head, *embedding)) return {};
    spec.tied_embeddings = false;
    return fmt::format("tie_word_embeddings is not followed: {} and {} are both there and differ",
                       head->name, embedding->name);
  }
  if (!spec.tied_embeddings && head == nullptr && embedding != nullptr && !spec.logits_bias) {
    spec.tied_embeddings = true;
    return fmt::format("there is no {}.weight: the embedding {} is taken for it",
                       names.stem(Role::kHead), embedding->name);
  }
  if (!spec.tied_embeddings && head != nullptr && embedding == nullptr) {
    spec.tied_embeddings = true;
    return fmt::format("there is no {}.weight: the head {} is taken for it",
                       names.stem(Role::kEmbedding), head->name);
  }
  return {};
}

Result<ModelSpec> read_settled(const loader::Checkpoint& checkpoint, const json::Value& config,
                               std::string& warning) {
  FRESHET_ASSIGN_OR_RETURN(const Architecture* architecture, find_architecture(config));
  FRESHET_ASSIGN_OR_RETURN(ModelSpec spec, read_spec(config));
  // Its head gives scores (pooled_heads.h).
  if (is_classifier(config)) spec.generates = false;
  FRESHET_ASSIGN_OR_RETURN(const json::Value whole, whole_config(checkpoint));
  FRESHET_RETURN_IF_ERROR(add_tower(whole, spec));
  warning = settle_head(checkpoint, *architecture, spec);
  spec.split_cols = split_cols(checkpoint);
  return spec;
}

}  // namespace

Result<json::Value> config_of(const loader::Checkpoint& checkpoint) {
  if (checkpoint.kind() == loader::Checkpoint::Kind::kGguf) return gguf_config(checkpoint);
  return text_config(checkpoint.config());
}

namespace {

// A model that is being loaded.
struct Loading {
  const loader::Checkpoint& checkpoint;
  ops::Ops& ops;
  ops::Ops* host;  // for the ends of a tower; nullptr: a device takes text alone
  const Progress& progress;
  const Architecture* architecture = nullptr;
  ModelSpec spec;
};

// All weights of the model, an encoder's and a tower's included. `infos` lists them.
Result<ModelWeights> assemble_all(const Loading& l, WeightCache* packed, WeightCacheWriter* copy,
                                  std::vector<Model::WeightInfo>& infos) {
  WeightReader reader(l.checkpoint, *l.architecture, l.ops, l.progress, packed, copy);
  FRESHET_ASSIGN_OR_RETURN(ModelWeights weights, assemble(reader, l.spec));
  infos = reader.take_infos();
  FRESHET_ASSIGN_OR_RETURN(const json::Value whole, whole_config(l.checkpoint));
  const TowerFamily* const tower = tower_of(whole);
  if (l.spec.vision != nullptr && l.host != nullptr && has_tower(l.checkpoint, *tower)) {
    const Architecture named{.type = tower->type, .spec = nullptr, .names = {}};
    Architecture parts[3] = {named, named, named};
    int part = 0;
    const auto make = [&](std::span<const NameRule> names, bool layers) {
      Architecture& of = parts[part++];
      of.names = of.gguf_names = names;
      return WeightReader(l.checkpoint, of, layers ? l.ops : *l.host, l.progress, packed, copy);
    };
    FRESHET_ASSIGN_OR_RETURN(VisionWeights read,
                             assemble_tower(make, *tower, l.checkpoint, *l.spec.vision, infos));
    weights.vision = std::make_shared<const VisionWeights>(std::move(read));
  }
  if (l.spec.encoder == nullptr) return weights;
  Architecture named = *l.architecture;
  named.names = l.architecture->encoder_names;
  WeightReader encoder(l.checkpoint, named, l.ops, l.progress, packed, copy);
  FRESHET_ASSIGN_OR_RETURN(ModelWeights read, assemble(encoder, *l.spec.encoder));
  weights.encoder = std::make_shared<const ModelWeights>(std::move(read));
  for (Model::WeightInfo& info : encoder.take_infos()) infos.push_back(std::move(info));
  return weights;
}

Result<std::unique_ptr<Model>> load_packing(const Loading& l, WeightCache* packed) {
  std::vector<Model::WeightInfo> infos;
  FRESHET_ASSIGN_OR_RETURN(ModelWeights weights, assemble_all(l, packed, nullptr, infos));
  const size_t total = l.checkpoint.total_bytes();
  if (l.progress) l.progress(total, total);
  return std::unique_ptr<Model>(
      new Decoder(l.spec, std::move(weights), std::move(infos), l.ops, l.host));
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
  std::vector<Model::WeightInfo> infos;
  if (const auto weights = assemble_all(l, nullptr, &writer, infos); !weights.ok()) {
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

// The last weight of a layer's first branch, or one that the layer does not share.
Role last_weight_of(const LayerSpec& layer) {
  if (layer.branches.front().side == Side::kOpens) return Role::kSideLinear;
  const BranchBody& body = layer.branches.front().body;
  if (std::holds_alternative<AttentionSpec>(body) || std::holds_alternative<MlaSpec>(body))
    return Role::kOutput;
  if (std::holds_alternative<MlpSpec>(body)) return Role::kDown;
  if (std::holds_alternative<CrossAttentionSpec>(body)) return Role::kCrossOutput;
  return std::holds_alternative<MoeSpec>(body) ? Role::kRouter : Role::kStateOut;
}

}  // namespace

Result<Description> describe(const loader::Checkpoint& checkpoint) {
  FRESHET_ASSIGN_OR_RETURN(const json::Value config, config_of(checkpoint));
  Description d;
  FRESHET_ASSIGN_OR_RETURN(d.architecture, find_architecture(config));
  std::string warning;  // which load_model() gives
  FRESHET_ASSIGN_OR_RETURN(d.spec, read_settled(checkpoint, config, warning));
  return d;
}

Status check_weights_present(const loader::Checkpoint& checkpoint) {
  FRESHET_ASSIGN_OR_RETURN(const Description described, describe(checkpoint));
  const Architecture* const architecture = described.architecture;
  const ModelSpec& spec = described.spec;
  const bool gguf = checkpoint.kind() == loader::Checkpoint::Kind::kGguf;
  const WeightNames names = gguf ? WeightNames::gguf(architecture->gguf_names)
                                 : WeightNames::safetensors(architecture->names);
  const auto has = [&](const std::string& stem) {
    return stem.empty() || find_weight(checkpoint, stem) != nullptr;
  };
  const std::string embedding = names.stem(Role::kEmbedding);
  if (!has(embedding) && (gguf || !has(names.stem(Role::kHead))))
    return invalid_argument("lacks the weight {}.weight: are all files there?", embedding);
  const int last = static_cast<int>(spec.layers.size()) - 1;
  for (const int layer : {0, last}) {
    const std::string output =
        names.stem(last_weight_of(spec.layers[static_cast<size_t>(layer)]), layer);
    if (!has(output))
      return invalid_argument("lacks the weight {}.weight: are all files there?", output);
  }
  return {};
}

}  // namespace models

Result<ModelSpec> read_spec(const loader::Checkpoint& checkpoint) {
  FRESHET_ASSIGN_OR_RETURN(models::Description described, models::describe(checkpoint));
  return std::move(described.spec);
}

namespace models {
namespace {

Result<std::unique_ptr<Model>> load(const loader::Checkpoint& checkpoint, ops::Ops& ops,
                                    ops::Ops* host, const Progress& progress,
                                    const std::string& weight_cache) {
  FRESHET_ASSIGN_OR_RETURN(const json::Value config, config_of(checkpoint));
  Loading l{checkpoint, ops, host, progress};
  FRESHET_ASSIGN_OR_RETURN(l.architecture, find_architecture(config));
  std::string warning;
  FRESHET_ASSIGN_OR_RETURN(l.spec, read_settled(checkpoint, config, warning));
  if (!warning.empty()) log_warning("{}", warning);
  if (!weight_cache.empty() && ops.device() != nullptr) {
    log_warning("--weight-cache-dir is not used: {} packs for itself", ops.device()->name());
  } else if (!weight_cache.empty()) {
    FRESHET_ASSIGN_OR_RETURN(auto model, load_cached(l, weight_cache));
    if (model != nullptr) return model;
  }
  return load_packing(l, nullptr);
}

}  // namespace

Result<std::unique_ptr<Model>> load_model_on(const loader::Checkpoint& checkpoint, ops::Ops& ops,
                                             ops::Ops& host, const Progress& progress,
                                             const std::string& weight_cache) {
  return load(checkpoint, ops, &host, progress, weight_cache);
}

}  // namespace models

Result<std::unique_ptr<Model>> load_model(const loader::Checkpoint& checkpoint, ops::Ops& ops,
                                          const Progress& progress,
                                          const std::string& weight_cache) {
  ops::Ops* const host = ops.device() == nullptr ? &ops : nullptr;
  return models::load(checkpoint, ops, host, progress, weight_cache);
}

}  // namespace freshet

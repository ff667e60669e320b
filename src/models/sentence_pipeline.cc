#include "models/sentence_pipeline.h"

#include <algorithm>
#include <filesystem>

#include "loader/safetensors.h"
#include "models/finite.h"

namespace freshet::models {
namespace {

namespace fs = std::filesystem;
using loader::SafetensorsFile;
using loader::TensorSource;

constexpr int kMaxFeatures = 1 << 20;

Result<std::vector<float>> numbers(const TensorSource& source) {
  FRESHET_ASSIGN_OR_RETURN(const quant::Format format, source.usable_format());
  const quant::FormatInfo& info = quant::info(format);
  std::vector<float> out(static_cast<size_t>(source.elements()));
  if (source.elements() % info.block_size != 0)
    return invalid_argument("tensor '{}' is not whole blocks of {}", source.name, info.name);
  info.decode(source.data, out.data(), source.elements());
  if (!all_finite(out))
    return invalid_argument("tensor '{}' holds a NaN or an infinity", source.name);
  return out;
}

Result<std::vector<float>> vector_of(const TensorSource* source, int64_t size) {
  if (source == nullptr) return std::vector<float>();
  if (source->elements() != size) {
    return invalid_argument("tensor '{}' has {} numbers, {} are needed", source->name,
                            source->elements(), size);
  }
  return numbers(*source);
}

// A file of a module; `where` begins errors.
struct Module {
  std::string folder;
  std::string where;
  json::Value config;

  Result<SafetensorsFile> weights() const {
    const std::string path = folder + "/model.safetensors";
    std::error_code error;
    if (!fs::exists(path, error) && fs::exists(folder + "/pytorch_model.bin", error)) {
      return unsupported("{}/pytorch_model.bin: only safetensors are read; convert it", where);
    }
    return SafetensorsFile::open(path);
  }
};

Result<HeadStage::Act> torch_act(std::string_view name) {
  using Kind = HeadStage::Act;
  const size_t dot = name.rfind('.');
  const std::string_view last = dot == name.npos ? name : name.substr(dot + 1);
  for (const auto& [known, act] : {std::pair{"Tanh", Kind::kTanh},
                                   {"Identity", Kind::kNone},
                                   {"GELU", Kind::kGelu},
                                   {"ReLU", Kind::kRelu},
                                   {"SiLU", Kind::kSilu},
                                   {"Sigmoid", Kind::kSigmoid}}) {
    if (last == known) return act;
  }
  return unsupported("activation_function '{}' is not supported", name);
}

// One member of the flags, or pooling_mode of newer files.
Status read_pooling(const Module& m, PooledHead& head) {
  static constexpr std::pair<std::string_view, PoolKind> kModes[] = {
      {"cls", PoolKind::kFirst},
      {"mean", PoolKind::kMean},
      {"max", PoolKind::kMax},
      {"lasttoken", PoolKind::kLast},
      {"mean_sqrt_len", PoolKind::kMeanSqrt},
  };
  static constexpr std::string_view kFlags[] = {
      "pooling_mode_cls_token", "pooling_mode_mean_tokens", "pooling_mode_max_tokens",
      "pooling_mode_lasttoken", "pooling_mode_mean_sqrt_len_tokens"};
  int found = 0;
  const std::string mode = m.config.get_string("pooling_mode", "");
  for (size_t i = 0; i < std::size(kModes); ++i) {
    const json::Value* flag = m.config.find(kFlags[i]);
    const bool set = flag != nullptr && flag->is_bool() && flag->as_bool();
    if (!set && mode != kModes[i].first) continue;
    head.pool = kModes[i].second;
    ++found;
  }
  if (found != 1) {
    return unsupported(
        "{}/config.json: one pooling mode of cls, mean, max, lasttoken and mean_sqrt_len is "
        "supported, {} are set",
        m.where, found);
  }
  return {};
}

Status read_dense(const Module& m, PooledHead& head) {
  FRESHET_ASSIGN_OR_RETURN(const SafetensorsFile file, m.weights());
  const TensorSource* weight = file.find("linear.weight");
  if (weight == nullptr)
    return invalid_argument("{}/model.safetensors: 'linear.weight' is missing", m.where);
  FRESHET_ASSIGN_OR_RETURN(HeadStage stage,
                           linear_stage(*weight, file.find("linear.bias"), head.size));
  const std::string act = m.config.get_string("activation_function", "Tanh");
  FRESHET_ASSIGN_OR_RETURN(stage.act, torch_act(act));
  head.size = stage.out;
  head.stages.push_back(std::move(stage));
  return {};
}

Status read_layer_norm(const Module& m, PooledHead& head) {
  FRESHET_ASSIGN_OR_RETURN(const SafetensorsFile file, m.weights());
  const TensorSource* weight = file.find("norm.weight");
  if (weight == nullptr)
    return invalid_argument("{}/model.safetensors: 'norm.weight' is missing", m.where);
  FRESHET_ASSIGN_OR_RETURN(HeadStage stage, norm_stage(*weight, file.find("norm.bias"), head.size,
                                                       1e-5f, HeadStage::Kind::kLayerNorm));
  head.stages.push_back(std::move(stage));
  return {};
}

// Of a language model that scores: the token whose logit counts, and the one that it is compared
// with, if there is one.
Status read_logit_score(const Module& m, PooledHeads& heads) {
  for (const std::string_view key : {"true_token_id", "false_token_id"}) {
    const json::Value* id = m.config.find(key);
    if (id == nullptr || id->is_null()) continue;
    const auto number = id->is_number() ? id->as_int64() : std::nullopt;
    if (!number || *number < 0 || *number > INT32_MAX)
      return invalid_argument("{}/config.json: '{}' must be a token id", m.where, key);
    heads.answer_tokens.push_back(static_cast<int32_t>(*number));
  }
  const json::Value* const id = m.config.find("true_token_id");
  if (id == nullptr || id->is_null())
    return invalid_argument("{}/config.json: 'true_token_id' is missing", m.where);
  return {};
}

Status read_module(const std::string& type, const Module& m, PooledHead& head) {
  if (head.normalize) return unsupported("modules.json: '{}' behind Normalize", type);
  const std::string_view name = std::string_view(type).substr(type.rfind('.') + 1);
  if (name == "Transformer" || name == "Dropout") return {};
  if (name == "Normalize") {
    head.normalize = true;
    return {};
  }
  if (name == "Pooling") return read_pooling(m, head);
  if (name == "Dense") return read_dense(m, head);
  if (name == "LayerNorm") return read_layer_norm(m, head);
  return unsupported("modules.json: a module of type '{}' is not supported", type);
}

Result<json::Value> object_file(const std::string& path) {
  FRESHET_ASSIGN_OR_RETURN(json::Value value, json::parse_file(path));
  if (!value.is_object()) return invalid_argument("{}: not a JSON object", path);
  return value;
}

// Prompts; true: the pipeline is a cross-encoder's.
Result<bool> read_library_config(const std::string& folder, PooledHeads& heads) {
  const std::string path = folder + "/config_sentence_transformers.json";
  std::error_code error;
  if (!fs::exists(path, error)) return false;
  FRESHET_ASSIGN_OR_RETURN(const json::Value config, object_file(path));
  const json::Value* prompts = config.find("prompts");
  if (prompts != nullptr && prompts->is_object()) {
    for (const auto& [name, text] : prompts->as_object()) {
      if (text.is_string()) heads.prompts.emplace_back(name, text.as_string());
    }
  }
  const json::Value* name = config.find("default_prompt_name");
  if (name != nullptr && name->is_string()) heads.default_prompt = name->as_string();
  if (config.get_string("activation_fn", "").ends_with("Identity")) heads.sigmoid_default = false;
  return config.get_string("model_type", "") == "CrossEncoder";
}

}  // namespace

Result<HeadStage> linear_stage(const TensorSource& weight, const TensorSource* bias, int in) {
  if (weight.shape.size() != 2 || weight.shape[1] != in || weight.shape[0] <= 0 ||
      weight.shape[0] > kMaxFeatures) {
    return invalid_argument("tensor '{}' must have {} columns, as what it reads has features",
                            weight.name, in);
  }
  HeadStage stage;
  stage.in = in;
  stage.out = static_cast<int>(weight.shape[0]);
  FRESHET_ASSIGN_OR_RETURN(stage.weight, numbers(weight));
  FRESHET_ASSIGN_OR_RETURN(stage.bias, vector_of(bias, stage.out));
  return stage;
}

Result<HeadStage> norm_stage(const TensorSource& weight, const TensorSource* bias, int size,
                             float eps, HeadStage::Kind kind) {
  HeadStage stage;
  stage.kind = kind;
  stage.in = stage.out = size;
  stage.eps = eps;
  FRESHET_ASSIGN_OR_RETURN(stage.weight, vector_of(&weight, size));
  FRESHET_ASSIGN_OR_RETURN(stage.bias, vector_of(bias, size));
  return stage;
}

Status read_pipeline(const std::string& folder, int hidden, PooledHeads& heads) {
  FRESHET_ASSIGN_OR_RETURN(const bool scores, read_library_config(folder, heads));
  std::error_code error;
  const std::string list = folder + "/modules.json";
  if (!fs::exists(list, error)) return {};
  FRESHET_ASSIGN_OR_RETURN(const json::Value modules, json::parse_file(list));
  if (!modules.is_array()) return invalid_argument("{}: not a JSON array", list);
  PooledHead head;
  head.size = hidden;
  bool pools = false;
  for (const json::Value& one : modules.as_array()) {
    if (!one.is_object()) return invalid_argument("{}: a module is not an object", list);
    const std::string type = one.get_string("type", ""), path = one.get_string("path", "");
    if (path.find("..") != path.npos || path.starts_with('/'))
      return invalid_argument("{}: '{}' is not a folder of the model", list, path);
    Module m{folder + "/" + path, path, json::Value(json::Object())};
    if (!path.empty() && fs::exists(m.folder + "/config.json", error)) {
      FRESHET_ASSIGN_OR_RETURN(m.config, object_file(m.folder + "/config.json"));
    }
    if (type.ends_with(".LogitScore")) {
      FRESHET_RETURN_IF_ERROR(read_logit_score(m, heads));
      continue;
    }
    FRESHET_RETURN_IF_ERROR(read_module(type, m, head));
    pools = pools || type.ends_with("Pooling");
  }
  if (!pools) return {};
  if (scores) {
    heads.classifier = std::move(head);
    for (int i = 0; i < heads.classifier->size; ++i)
      heads.labels.push_back(fmt::format("LABEL_{}", i));
    return {};
  }
  heads.embedding = std::move(head);
  heads.own_embedding = true;
  return {};
}

void read_matryoshka(const json::Value& config, PooledHeads& heads) {
  const json::Value* sizes = config.find("matryoshka_dimensions");
  if (sizes != nullptr && sizes->is_array()) {
    for (const json::Value& v : sizes->as_array()) {
      const auto n = v.is_number() ? v.as_int64() : std::nullopt;
      if (n && *n > 0 && *n <= heads.embedding.size)
        heads.matryoshka.push_back(static_cast<int>(*n));
    }
  }
  const json::Value* any = config.find("is_matryoshka");
  heads.any_size = any != nullptr && any->is_bool() && any->as_bool() && heads.matryoshka.empty();
}

}  // namespace freshet::models

#include "models/pooled_heads.h"

#include <algorithm>
#include <filesystem>

#include "base/log.h"
#include "models/answer_head.h"
#include "models/sentence_pipeline.h"
#include "models/weight_reader.h"

namespace freshet::models {
namespace {

using loader::Checkpoint;
using loader::TensorSource;
using Act = HeadStage::Act;

Act act_by_name(std::string_view name) {
  if (name == "tanh") return Act::kTanh;
  if (name == "gelu") return Act::kGelu;
  if (name == "gelu_new" || name == "gelu_pytorch_tanh") return Act::kGeluTanh;
  if (name == "relu") return Act::kRelu;
  if (name == "silu" || name == "swish") return Act::kSilu;
  return Act::kNone;
}

// The first of the names that is there.
const TensorSource* find_any(const Checkpoint& checkpoint,
                             std::initializer_list<std::string_view> names) {
  for (const std::string_view name : names) {
    if (const TensorSource* found = find_tensor(checkpoint, std::string(name))) return found;
  }
  return nullptr;
}

// A linear layer, appended to the head.
Status add_linear(const Checkpoint& checkpoint, std::initializer_list<std::string_view> stems,
                  int in, Act act, PooledHead& head) {
  for (const std::string_view stem : stems) {
    const TensorSource* weight = find_tensor(checkpoint, std::string(stem) + ".weight");
    if (weight == nullptr) continue;
    const TensorSource* bias = find_tensor(checkpoint, std::string(stem) + ".bias");
    FRESHET_ASSIGN_OR_RETURN(HeadStage stage, linear_stage(*weight, bias, in));
    stage.act = act;
    head.size = stage.out;
    head.stages.push_back(std::move(stage));
    return {};
  }
  return invalid_argument("tensor '{}.weight' is missing: the classifier cannot run",
                          *stems.begin());
}

Status read_modernbert_head(const Checkpoint& checkpoint, const json::Value& config,
                            const ModelSpec& spec, PooledHead& head) {
  const std::string pooling = config.get_string("classifier_pooling", "cls");
  if (pooling != "cls" && pooling != "mean")
    return unsupported("classifier_pooling '{}': cls and mean are supported", pooling);
  head.pool = pooling == "mean" ? PoolKind::kMean : PoolKind::kFirst;
  const Act act = act_by_name(config.get_string("classifier_activation", "gelu"));
  FRESHET_RETURN_IF_ERROR(add_linear(checkpoint, {"head.dense"}, spec.hidden_size, act, head));
  const TensorSource* norm = find_any(checkpoint, {"head.norm.weight"});
  if (norm == nullptr) return invalid_argument("tensor 'head.norm.weight' is missing");
  FRESHET_ASSIGN_OR_RETURN(
      HeadStage stage,
      norm_stage(*norm, find_any(checkpoint, {"head.norm.bias"}), head.size,
                 spec.final_norm ? spec.final_norm->eps : 1e-5f, HeadStage::Kind::kLayerNorm));
  head.stages.push_back(std::move(stage));
  return add_linear(checkpoint, {"classifier"}, head.size, Act::kNone, head);
}

Status read_classifier(const Checkpoint& checkpoint, const ModelSpec& spec, PooledHead& head) {
  const json::Value& config = checkpoint.config();
  const std::string type = config.get_string("model_type", "");
  const int hidden = spec.hidden_size;
  if (!reads_both_ways(spec)) {
    head.pool = PoolKind::kLast;
    return add_linear(checkpoint, {"score"}, hidden, Act::kNone, head);
  }
  if (type == "modernbert") return read_modernbert_head(checkpoint, config, spec, head);
  head.pool = PoolKind::kFirst;
  const bool in_head = find_any(checkpoint, {"classifier.out_proj.weight"}) != nullptr;
  if (in_head) {
    FRESHET_RETURN_IF_ERROR(add_linear(checkpoint, {"classifier.dense"}, hidden, Act::kTanh, head));
    return add_linear(checkpoint, {"classifier.out_proj"}, head.size, Act::kNone, head);
  }
  FRESHET_RETURN_IF_ERROR(
      add_linear(checkpoint, {"bert.pooler.dense", "pooler.dense"}, hidden, Act::kTanh, head));
  return add_linear(checkpoint, {"classifier"}, head.size, Act::kNone, head);
}

// id2label, and whether cross-encoders pass their scores through a sigmoid.
void read_labels(const json::Value& config, PooledHeads& heads) {
  const json::Value* names = config.find("id2label");
  for (int i = 0; i < heads.classifier->size; ++i) {
    const std::string id = std::to_string(i);
    const bool named = names != nullptr && names->is_object();
    const std::string fallback = "LABEL_" + id;
    heads.labels.push_back(named ? names->get_string(id, fallback) : fallback);
  }
  const json::Value* by_library = config.find("sentence_transformers");
  const std::string act = by_library != nullptr && by_library->is_object()
                              ? by_library->get_string("activation_fn", "")
                              : config.get_string("sbert_ce_default_activation_function", "");
  heads.sigmoid_default = !act.ends_with("Identity");
}

Status read_gguf_classifier(const Checkpoint& checkpoint, const ModelSpec& spec,
                            PooledHeads& heads) {
  PooledHead& head = heads.classifier.emplace();
  const bool two_way = reads_both_ways(spec);
  head.pool = two_way ? PoolKind::kFirst : PoolKind::kLast;
  const bool modern = spec.architecture == "modernbert";
  if (modern) head.pool = PoolKind::kMean;
  if (checkpoint.find("cls.weight") != nullptr) {
    FRESHET_RETURN_IF_ERROR(
        add_linear(checkpoint, {"cls"}, spec.hidden_size, modern ? Act::kGelu : Act::kTanh, head));
    if (const TensorSource* norm = checkpoint.find("cls.norm.weight")) {
      FRESHET_ASSIGN_OR_RETURN(HeadStage stage, norm_stage(*norm, nullptr, head.size, 1e-5f,
                                                           HeadStage::Kind::kLayerNorm));
      head.stages.push_back(std::move(stage));
    }
  }
  const int in = head.stages.empty() ? spec.hidden_size : head.size;
  FRESHET_RETURN_IF_ERROR(add_linear(checkpoint, {"cls.output"}, in, Act::kNone, head));
  // Rows of a language model's head, for "yes" and "no".
  if (!two_way && head.size == 2 && head.stages.size() == 1) compare_answers(head);
  read_labels(json::Value(json::Object()), heads);
  return {};
}

Result<PooledHeads> read_gguf_heads(const Checkpoint& checkpoint, const ModelSpec& spec,
                                    PooledHeads heads) {
  const loader::GgufFile& gguf = *checkpoint.gguf();
  const std::string arch(gguf.get_string("general.architecture").value_or(""));
  switch (gguf.get_int(arch + ".pooling_type").value_or(-1)) {
    case 1:
      heads.embedding.pool = PoolKind::kMean;
      heads.own_embedding = true;
      break;
    case 2:
      heads.embedding.pool = PoolKind::kFirst;
      heads.own_embedding = true;
      break;
    case 3:
      heads.embedding.pool = PoolKind::kLast;
      heads.own_embedding = true;
      break;
    case 4:
      FRESHET_RETURN_IF_ERROR(read_gguf_classifier(checkpoint, spec, heads));
      break;
    default:
      break;
  }
  return heads;
}

// Published as a language model without a word about its use, as Qwen3-Reranker.
void warn_of_reranker(const std::string& path, const ModelSpec& spec) {
  std::string name;
  for (const char c : path) name += static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
  if (!spec.generates || name.find("reranker") == std::string::npos) return;
  log_warning(
      "{}: scores are cosines of embeddings; of a reranker that answers yes or no they are better "
      "with --hf-overrides '{{\"classifier_from_token\": [\"no\", \"yes\"]}}'",
      path);
}

}  // namespace

bool is_classifier(const json::Value& config) {
  if (config.find(kAnswerTokensKey) != nullptr) return true;
  const json::Value* classes = config.find("architectures");
  return classes != nullptr && classes->is_array() &&
         std::ranges::any_of(classes->as_array(), [](const json::Value& one) {
           return one.is_string() && one.as_string().ends_with("ForSequenceClassification");
         });
}

Result<PooledHeads> read_pooled_heads(const Checkpoint& checkpoint, const ModelSpec& spec,
                                      TokenId token_id) {
  PooledHeads heads;
  heads.embedding.pool = reads_both_ways(spec) ? PoolKind::kMean : PoolKind::kLast;
  heads.embedding.normalize = true;
  heads.embedding.size = spec.hidden_size;
  if (checkpoint.kind() == Checkpoint::Kind::kGguf)
    return read_gguf_heads(checkpoint, spec, std::move(heads));
  const json::Value& config = checkpoint.config();
  if (const Status read = read_pipeline(checkpoint.path(), spec.hidden_size, heads); !read.ok()) {
    if (!spec.generates) return read;
    log_warning("modules.json is not followed: {}", read.message());
  }
  read_matryoshka(config, heads);
  if (config.find(kAnswerTokensKey) != nullptr || !heads.answer_tokens.empty()) {
    FRESHET_RETURN_IF_ERROR(read_answer_head(checkpoint, spec, token_id, heads));
    return heads;
  }
  if (!is_classifier(config)) {
    warn_of_reranker(checkpoint.path(), spec);
    return heads;
  }
  PooledHead classifier;
  FRESHET_RETURN_IF_ERROR(read_classifier(checkpoint, spec, classifier));
  heads.classifier = std::move(classifier);
  read_labels(config, heads);
  return heads;
}

}  // namespace freshet::models

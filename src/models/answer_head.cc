#include "models/answer_head.h"

#include "models/architectures.h"
#include "models/finite.h"
#include "models/registry.h"
#include "models/weight_reader.h"

namespace freshet::models {
namespace {

constexpr size_t kMostAnswers = 4096;

// Ids of the tokens that the configuration names, by text or by number.
Result<std::vector<int32_t>> named_answers(const json::Value& config, const ModelSpec& spec,
                                           TokenId token_id) {
  const json::Value& list = *config.find(kAnswerTokensKey);
  if (!list.is_array() || list.as_array().empty() || list.as_array().size() > kMostAnswers)
    return invalid_argument("'{}' must be a list of tokens", kAnswerTokensKey);
  std::vector<int32_t> ids;
  for (const json::Value& one : list.as_array()) {
    if (one.is_string()) {
      const auto id = token_id(one.as_string());
      if (!id) {
        return invalid_argument("'{}': the vocabulary has no token '{}'", kAnswerTokensKey,
                                one.as_string().substr(0, 32));
      }
      ids.push_back(*id);
      continue;
    }
    const auto id = one.is_number() ? one.as_int64() : std::nullopt;
    if (!id || *id < 0 || *id >= spec.vocab_size)
      return invalid_argument("'{}' must be a list of tokens", kAnswerTokensKey);
    ids.push_back(static_cast<int32_t>(*id));
  }
  return ids;
}

// The matrix whose rows give logits.
Result<const loader::TensorSource*> head_matrix(const loader::Checkpoint& checkpoint,
                                                const ModelSpec& spec) {
  FRESHET_ASSIGN_OR_RETURN(const json::Value config, config_of(checkpoint));
  FRESHET_ASSIGN_OR_RETURN(const Architecture* architecture, find_architecture(config));
  const WeightNames names = WeightNames::safetensors(architecture->names);
  const loader::TensorSource* found = nullptr;
  for (const Role role : {Role::kHead, Role::kEmbedding}) {
    if (found != nullptr || (role == Role::kHead && spec.tied_embeddings)) continue;
    found = find_weight(checkpoint, names.stem(role));
  }
  if (found == nullptr)
    return invalid_argument("there is no {}.weight: its rows are the classifier",
                            names.stem(Role::kEmbedding));
  if (found->shape.size() != 2 || found->shape[1] != spec.hidden_size ||
      found->shape[0] < spec.vocab_size) {
    return unsupported("tensor '{}' is not the rows of {} features of a plain head", found->name,
                       spec.hidden_size);
  }
  return found;
}

}  // namespace

void compare_answers(PooledHead& head) {
  HeadStage& stage = head.stages.back();
  const auto in = static_cast<size_t>(stage.in);
  for (size_t i = 0; i < in; ++i) stage.weight[i] -= stage.weight[in + i];
  stage.weight.resize(in);
  if (!stage.bias.empty()) stage.bias = {stage.bias[0] - stage.bias[1]};
  stage.out = head.size = 1;
}

Status read_answer_head(const loader::Checkpoint& checkpoint, const ModelSpec& spec,
                        TokenId token_id, PooledHeads& heads) {
  const json::Value& config = checkpoint.config();
  std::vector<int32_t>& answers = heads.answer_tokens;
  bool compared = answers.size() == 2;
  if (config.find(kAnswerTokensKey) != nullptr) {
    FRESHET_ASSIGN_OR_RETURN(answers, named_answers(config, spec, token_id));
    const std::string method = config.get_string("method", "");
    if (!method.empty() && method != "from_2_way_softmax" && method != "no_post_processing")
      return unsupported("\"method\": \"{}\" of '{}'", method, kAnswerTokensKey);
    compared = method != "no_post_processing" && answers.size() == 2;
    if (method == "from_2_way_softmax" && !compared)
      return invalid_argument("'{}' must name two tokens to compare", kAnswerTokensKey);
    if (compared) std::swap(answers[0], answers[1]);  // the configuration has "no" first
  }
  FRESHET_ASSIGN_OR_RETURN(const loader::TensorSource* matrix, head_matrix(checkpoint, spec));
  FRESHET_ASSIGN_OR_RETURN(const quant::Format format, matrix->usable_format());
  PooledHead& head = heads.classifier.emplace();
  HeadStage stage;
  stage.in = spec.hidden_size;
  stage.out = static_cast<int>(answers.size());
  const size_t stride = quant::row_bytes(format, stage.in);
  stage.weight.resize(answers.size() * static_cast<size_t>(stage.in));
  float* to = stage.weight.data();
  for (const int32_t id : answers) {
    if (id < 0 || id >= spec.vocab_size)
      return invalid_argument("token {} of the classifier is not in the vocabulary", id);
    quant::info(format).decode(matrix->data + static_cast<size_t>(id) * stride, to, stage.in);
    to += stage.in;
    heads.labels.push_back(std::to_string(id));
  }
  if (!all_finite(stage.weight))
    return invalid_argument("tensor '{}' holds a NaN or an infinity", matrix->name);
  for (float& w : stage.weight) w *= spec.logits_scale;
  head.pool = PoolKind::kLast;
  head.size = stage.out;
  head.stages.push_back(std::move(stage));
  if (!compared) return {};
  compare_answers(head);
  heads.labels = {"LABEL_0"};
  return {};
}

}  // namespace freshet::models

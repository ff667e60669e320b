#include "models/draft_heads.h"

#include <algorithm>

#include "layers/decoder.h"
#include "models/assemble.h"
#include "models/decoder_config.h"
#include "models/draft_head_names.h"
#include "models/head_file.h"
#include "models/registry.h"

namespace freshet::models {

Result<int32_t> read_mask_token(const json::Value& config, int64_t known, const std::string& path) {
  for (const char* key : {"pard_token", "ptd_token_id", "mask_token_id"}) {
    const json::Value* const found = config.find(key);
    if (found == nullptr || !found->is_number()) continue;
    const auto id = found->as_int64();
    if (id && *id >= 0 && *id < known) return static_cast<int32_t>(*id);
    return invalid_argument("{}: {} is not a token of a vocabulary of {}", path, key, known);
  }
  return -1;
}

namespace {

using loader::Checkpoint;
using loader::TensorSource;

NormSpec norm_of_target(const ModelSpec& target) {
  NormSpec norm = target.final_norm.value_or(NormSpec());
  norm.bias = false;
  return norm;
}

// A Llama layer from a configuration, or, without one, of the target's shape.
Result<ModelSpec> head_spec(const Checkpoint& checkpoint, const json::Value& given,
                            const ModelSpec& target, std::string_view name) {
  ModelSpec spec;
  if (given.is_object()) {
    Config config(given);
    spec = decoder_spec(config, name, {});
    FRESHET_RETURN_IF_ERROR(config.status());
  } else {
    if (target.layers.front().find<AttentionSpec>() == nullptr ||
        target.layers.front().find<MlpSpec>() == nullptr) {
      return unsupported("{}: a bare head needs a target of Llama's kind", checkpoint.path());
    }
    spec.architecture = name;
    spec.hidden_size = target.hidden_size;
    spec.ropes = target.ropes;
    spec.max_context = target.max_context;
    AttentionSpec a = target.layers.front().attention();
    a.window = 0;
    spec.layers = {{{{{.in = norm_of_target(target)}, a},
                     {{.in = norm_of_target(target)}, target.layers.front().mlp()}}}};
  }
  return spec;
}

// EAGLE-1 and -2 feed a state back in a way that is defined for one layer.
Status take_one_layer(const Checkpoint& checkpoint, ModelSpec& spec) {
  if (spec.layers.size() > 1 &&
      find_weight(checkpoint, "model.layers.1.self_attn.q_proj") != nullptr) {
    return unsupported("{}: the head has {} layers; EAGLE heads of one layer are supported",
                       checkpoint.path(), spec.layers.size());
  }
  spec.layers.resize(1);
  return {};
}

Result<Head> plan_eagle(const Checkpoint& checkpoint, const ModelSpec& target) {
  Head head;
  const bool bare = find_weight(checkpoint, "layer.self_attn.q_proj") != nullptr;
  if (bare) {
    head.names.assign(std::begin(kBareEagle), std::end(kBareEagle));
  } else {
    head.names.assign(std::begin(kEagle), std::end(kEagle));
  }
  const HeadFile file(checkpoint, head.names);
  FRESHET_ASSIGN_OR_RETURN(const TensorSource* fc, file.matrix(Role::kFeatures));
  ModelSpec& spec = head.plan.spec;
  FRESHET_ASSIGN_OR_RETURN(spec, head_spec(checkpoint, checkpoint.config(), target, "eagle"));
  FRESHET_RETURN_IF_ERROR(check_width(checkpoint, spec, target));
  take_ends(spec, target);
  FRESHET_RETURN_IF_ERROR(take_one_layer(checkpoint, spec));
  FRESHET_RETURN_IF_ERROR(read_layers(file, spec));
  if (!file.has(Role::kAttentionIn)) spec.layers[0].branches[0].norms.in.reset();
  spec.final_norm.reset();
  FeatureSpec f;
  f.width = target.hidden_size;
  f.bias = file.has(Role::kFeatures, ".bias");
  if (fc->shape[1] != 2 * int64_t{f.width}) {
    return invalid_argument("{}: tensor '{}' has {} columns; an EAGLE head for this target has {}",
                            checkpoint.path(), fc->name, fc->shape[1], 2 * f.width);
  }
  spec.features = f;
  head.plan.reads_last = true;
  return head;
}

// The boundaries that a configuration names; by default those of EAGLE's code.
std::vector<int> boundaries_of(const json::Value& config, int layers) {
  const json::Value* ids = config.find("eagle_aux_hidden_state_layer_ids");
  if (const json::Value* eagle = config.find("eagle_config"); eagle != nullptr && ids == nullptr) {
    ids = eagle->find("eagle_aux_hidden_state_layer_ids");
  }
  if (ids == nullptr || !ids->is_array()) return {2, layers / 2, layers - 3};
  std::vector<int> boundaries;
  for (const json::Value& id : ids->as_array()) {
    const auto number = id.is_number() ? id.as_int64() : std::nullopt;
    boundaries.push_back(number && *number >= 0 && *number <= layers ? static_cast<int>(*number)
                                                                     : -1);
  }
  return boundaries;
}

std::string feature_norm_name(const Checkpoint& checkpoint, size_t feature) {
  return fmt::format("{}fc_norm.{}", checkpoint.gguf() != nullptr ? "" : "model.", feature);
}

bool flag_of(const json::Value& config, std::string_view key) {
  const json::Value* const eagle = config.find("eagle_config");
  return config.get_bool(key, eagle != nullptr && eagle->get_bool(key, false));
}

// The mask of a head that drafts in one pass, which has a tensor 'mask_hidden'. -1: it has none.
Result<int32_t> mask_token(const Checkpoint& checkpoint, const json::Value& config,
                           const ModelSpec& target) {
  if (find_tensor(checkpoint, "model.mask_hidden") == nullptr) return -1;
  const TensorSource* const own = find_weight(checkpoint, "model.embed_tokens");
  const bool sized = own != nullptr && !own->shape.empty();
  const int64_t known = sized ? own->shape.front() : target.vocab_size;
  FRESHET_ASSIGN_OR_RETURN(const int32_t token, read_mask_token(config, known, checkpoint.path()));
  if (token >= 0) return token;
  return invalid_argument(
      "{}: tensor 'mask_hidden' is for drafts in one pass, and config.json names no mask: none of "
      "pard_token, ptd_token_id and mask_token_id",
      checkpoint.path());
}

Result<Head> plan_eagle3(const Checkpoint& checkpoint, const ModelSpec& target) {
  Head head;
  FRESHET_ASSIGN_OR_RETURN(const json::Value config, head_config(checkpoint, target));
  if (!config.is_object()) {
    return invalid_argument("{}: an EAGLE-3 head is a folder with config.json, or a GGUF file",
                            checkpoint.path());
  }
  const bool midlayer = find_weight(checkpoint, "model.midlayer.self_attn.q_proj") != nullptr;
  if (checkpoint.gguf() != nullptr) {
    head.names.assign(std::begin(kGgufEagle3), std::end(kGgufEagle3));
    head.architecture.gguf_interleaves = true;
  } else if (midlayer) {
    head.names.assign(std::begin(kMidlayerEagle3), std::end(kMidlayerEagle3));
  } else {
    head.names.assign(std::begin(kLayersEagle3), std::end(kLayersEagle3));
  }
  const HeadFile file(checkpoint, head.names);
  FRESHET_ASSIGN_OR_RETURN(const TensorSource* fc, file.matrix(Role::kFeatures));
  ModelSpec& spec = head.plan.spec;
  FRESHET_ASSIGN_OR_RETURN(spec, head_spec(checkpoint, config, target, "eagle3"));
  const NormSpec norm = *spec.final_norm;
  FRESHET_RETURN_IF_ERROR(check_width(checkpoint, spec, target));
  take_ends(spec, target);
  // A configuration may have the target's number of layers.
  if (midlayer || !file.has(Role::kQuery, ".weight", 1)) spec.layers.resize(1);
  FRESHET_RETURN_IF_ERROR(read_layers(file, spec));
  spec.layers[0].branches[0].norms.in.reset();
  spec.layers[0].attention().input_size = 2 * spec.hidden_size;
  if (!file.has(Role::kFinalNorm)) spec.final_norm.reset();
  if (const TensorSource* own = file.find(Role::kHead, ".weight");
      own != nullptr && !own->shape.empty()) {
    spec.tied_embeddings = false;
    spec.vocab_size = static_cast<int>(std::min<int64_t>(own->shape.front(), 1 << 24));
  }
  head.plan.boundaries = boundaries_of(config, static_cast<int>(target.layers.size()));
  const auto& boundaries = head.plan.boundaries;
  const bool ascending =
      std::ranges::adjacent_find(boundaries, std::greater_equal()) == boundaries.end() &&
      !boundaries.empty() && boundaries.front() >= 0;
  const int64_t width = int64_t{target.hidden_size} * std::ssize(boundaries);
  if (!ascending || fc->shape[1] != width) {
    return invalid_argument(
        "{}: tensor '{}' has {} columns, which {} layers of this target ({} layers of {} numbers) "
        "do not give: the head is for another model",
        checkpoint.path(), fc->name, fc->shape[1], boundaries.size(), target.layers.size(),
        target.hidden_size);
  }
  FeatureSpec f;
  f.use = FeatureSpec::Use::kPaired;
  f.width = static_cast<int>(width);
  f.bias = file.has(Role::kFeatures, ".bias");
  head.plan.norms_each_feature =
      find_weight(checkpoint, feature_norm_name(checkpoint, 0)) != nullptr;
  if (head.plan.norms_each_feature || file.has(Role::kFeatureInputNorm)) f.input_norm = norm;
  if (file.has(Role::kFeatureNorm)) f.feature_norm = norm;
  if (file.has(Role::kFeatureEmbeddingNorm)) f.embedding_norm = norm;
  f.normed_residual = flag_of(config, "norm_before_residual") && f.feature_norm.has_value();
  f.raw_states = !flag_of(config, "norm_output");
  spec.features = f;
  FRESHET_ASSIGN_OR_RETURN(head.plan.mask_token, mask_token(checkpoint, config, target));
  return head;
}

Result<Head> plan_mtp(const Checkpoint& checkpoint, const ModelSpec& target) {
  Head head;
  const int layers = static_cast<int>(target.layers.size());
  const bool mimo = find_weight(checkpoint, "model.mtp_layers.0.input_proj") != nullptr;
  const bool qwen = find_weight(checkpoint, "mtp.fc") != nullptr;
  ModelSpec& spec = head.plan.spec;
  spec = target;
  spec.architecture = "mtp";
  spec.layers = {target.layers.back()};
  const NormSpec norm = norm_of_target(target);
  spec.final_norm = norm;
  if (mimo) {
    head.names.assign(std::begin(kMimoMtp), std::end(kMimoMtp));
  } else if (qwen) {
    // Always full attention, whatever the target's last layer is.
    const auto attends = std::ranges::find_if(
        target.layers, [](const LayerSpec& l) { return l.find<AttentionSpec>() != nullptr; });
    if (attends == target.layers.end()) {
      return unsupported("{}: an MTP layer of Qwen3-Next needs a target with attention layers",
                         checkpoint.path());
    }
    spec.layers = {*attends};
    head.architecture.norms_less_one = true;
    head.names.assign(std::begin(kQwen3NextMtp), std::end(kQwen3NextMtp));
  } else {
    FRESHET_ASSIGN_OR_RETURN(const Architecture* base, find_architecture(checkpoint.config()));
    head.architecture = *base;
    head.names.assign(base->names.begin(), base->names.end());
    head.names.insert(head.names.end(), std::begin(kDeepSeekMtp), std::end(kDeepSeekMtp));
    head.layer = layers;
  }
  const HeadFile file(checkpoint, head.names);
  const TensorSource* const fc = file.find(Role::kFeatures, ".weight", head.layer);
  if (fc == nullptr) {
    return invalid_argument(
        "{} has no MTP layer: none of model.layers.{}.eh_proj, model.mtp_layers.0.input_proj and "
        "mtp.fc",
        checkpoint.path(), layers);
  }
  FeatureSpec f;
  f.width = target.hidden_size;
  f.features_first = mimo;
  f.embedding_norm = f.feature_norm = norm;
  spec.features = f;
  head.plan.reads_last = true;
  return head;
}

Status override_plan(const HeadOverrides& o, const ModelSpec& target, HeadPlan& plan) {
  const int layers = static_cast<int>(target.layers.size());
  if (o.before_norm && plan.reads_last) {
    plan.reads_last = false;
    plan.boundaries = {layers};
  }
  for (int& boundary : plan.boundaries) {
    boundary += o.shift_layers;
    if (boundary < 0 || boundary > layers)
      return invalid_argument("the target has no state behind {} layers", boundary);
  }
  if (o.reverse_layers) std::ranges::reverse(plan.boundaries);
  FeatureSpec& f = *plan.spec.features;
  if (o.swap_inputs) f.features_first = !f.features_first;
  if (o.flip_residual_norm) f.normed_residual = !f.normed_residual && f.feature_norm.has_value();
  if (o.drop_bias) f.bias = false;
  return {};
}

Result<Head> plan(HeadKind kind, const Checkpoint& checkpoint, const ModelSpec& target,
                  const HeadOverrides& overrides) {
  if (checkpoint.kind() == Checkpoint::Kind::kGguf && kind != HeadKind::kEagle3) {
    return unsupported("{}: only EAGLE-3 heads are read from GGUF files", checkpoint.path());
  }
  const auto planned = [&] {
    switch (kind) {
      case HeadKind::kEagle:
        return plan_eagle(checkpoint, target);
      case HeadKind::kEagle3:
        return plan_eagle3(checkpoint, target);
      case HeadKind::kDFlash:
        return plan_dflash(checkpoint, target);
      case HeadKind::kMtp:
        break;
    }
    return plan_mtp(checkpoint, target);
  };
  FRESHET_ASSIGN_OR_RETURN(Head head, planned());
  FRESHET_RETURN_IF_ERROR(override_plan(overrides, target, head.plan));
  head.plan.kind = kind;
  if (kind != HeadKind::kMtp) head.plan.weight_bytes = checkpoint.total_bytes();
  FRESHET_RETURN_IF_ERROR(validate(head.plan.spec).with_context(checkpoint.path()));
  return head;
}

// The target's ids of the rows of a short list: row i stands for i + d2t[i], or, if `absolute`, for
// d2t[i].
Result<std::vector<int32_t>> read_target_ids(const Checkpoint& checkpoint, const ModelSpec& head,
                                             const ModelSpec& target, bool absolute) {
  std::vector<int32_t> ids;
  const TensorSource* d2t = find_tensor(checkpoint, "d2t");
  if (d2t == nullptr) d2t = find_tensor(checkpoint, "d2t.weight");
  if (d2t == nullptr) {
    if (head.vocab_size == target.vocab_size) return ids;
    return invalid_argument("{}: the head knows {} of {} tokens, and tensor 'd2t' is missing",
                            checkpoint.path(), head.vocab_size, target.vocab_size);
  }
  if (d2t->dtype != "I64" || d2t->shape != std::vector<int64_t>{head.vocab_size}) {
    return invalid_argument("{}: tensor 'd2t' must be I64 of {} numbers", checkpoint.path(),
                            head.vocab_size);
  }
  std::vector<int64_t> numbers(static_cast<size_t>(head.vocab_size));
  std::memcpy(numbers.data(), d2t->data, numbers.size() * sizeof(int64_t));
  // GGUF files of llama.cpp hold ids, those of others offsets. Ids grow from row to row; offsets
  // stay the same where two tokens are neighbours.
  if (checkpoint.gguf() != nullptr)
    absolute = std::ranges::adjacent_find(numbers, std::greater_equal()) == numbers.end();
  for (int64_t i = 0; i < head.vocab_size; ++i) {
    const int64_t offset = numbers[static_cast<size_t>(i)];
    const int64_t first = absolute ? 0 : i;
    if (offset < 0 || offset >= target.vocab_size - first) {
      return invalid_argument("{}: d2t[{}] is {}: not an {} in a vocabulary of {}",
                              checkpoint.path(), i, offset, absolute ? "id" : "offset",
                              target.vocab_size);
    }
    ids.push_back(static_cast<int32_t>(first + offset));
  }
  return ids;
}

// One norm for each of the features, side by side.
Status read_feature_norms(WeightReader& reader, const Checkpoint& checkpoint, const HeadPlan& plan,
                          NormWeights& out) {
  std::vector<float> all;
  const auto width = plan.spec.features->width / std::ssize(plan.boundaries);
  for (size_t i = 0; i < plan.boundaries.size(); ++i) {
    const std::string name = feature_norm_name(checkpoint, i);
    const TensorSource* const source = find_weight(checkpoint, name);
    if (source == nullptr) {
      return invalid_argument("{}: tensor '{}.weight' is missing", checkpoint.path(), name);
    }
    FRESHET_ASSIGN_OR_RETURN(const std::vector<float> values, reader.values(*source, width));
    all.insert(all.end(), values.begin(), values.end());
  }
  return reader.store(out.weight, all);
}

Status read_features(WeightReader& reader, const Checkpoint& checkpoint, const Head& head,
                     ModelWeights& out) {
  const ModelSpec& spec = head.plan.spec;
  const FeatureSpec& f = *spec.features;
  const bool joined = f.use == FeatureSpec::Use::kJoined;
  const int64_t cols = joined ? int64_t{spec.hidden_size} + f.width : f.width;
  FRESHET_RETURN_IF_ERROR(
      reader.linear(out.features, Role::kFeatures, head.layer, spec.hidden_size, cols, f.bias));
  const auto norm = [&](const std::optional<NormSpec>& wanted, Role role, int64_t size,
                        NormWeights& to) {
    return wanted ? reader.norm(to, role, *wanted, head.layer, size) : Status();
  };
  if (head.plan.norms_each_feature) {
    FRESHET_RETURN_IF_ERROR(read_feature_norms(reader, checkpoint, head.plan, out.input_norm));
  } else {
    FRESHET_RETURN_IF_ERROR(norm(f.input_norm, Role::kFeatureInputNorm, f.width, out.input_norm));
  }
  FRESHET_RETURN_IF_ERROR(
      norm(f.feature_norm, Role::kFeatureNorm, spec.hidden_size, out.feature_norm));
  FRESHET_RETURN_IF_ERROR(
      norm(f.embedding_norm, Role::kFeatureEmbeddingNorm, spec.hidden_size, out.embedding_norm));
  return norm(spec.final_norm, Role::kFinalNorm, spec.hidden_size, out.final_norm);
}

// The embedding and the head that the file brings; those of an MTP layer are copies of the
// target's.
Status read_ends(WeightReader& reader, const Head& head, const ModelSpec& target,
                 ModelWeights& out) {
  if (head.plan.kind != HeadKind::kEagle3 && head.plan.kind != HeadKind::kDFlash) return {};
  const ModelSpec& spec = head.plan.spec;
  if (const TensorSource* own = reader.find(Role::kHead, ".weight"); own != nullptr) {
    FRESHET_RETURN_IF_ERROR(
        reader.linear(out.head, Role::kHead, -1, spec.vocab_size, spec.hidden_size, false));
  }
  const TensorSource* const table =
      reader.find_name(reader.is_gguf() ? "token_embd.weight" : "model.embed_tokens.weight");
  if (table == nullptr) return {};
  // A mask token may lie behind the target's vocabulary.
  const int64_t known =
      std::max<int64_t>(target.vocab_size, table->shape.empty() ? 0 : table->shape.front());
  FRESHET_ASSIGN_OR_RETURN(const Rows rows, reader.rows(*table, known, spec.hidden_size));
  return reader.pack(out.embedding, table->name, rows, {}, ops::Use::kTable);
}

}  // namespace

void take_ends(ModelSpec& spec, const ModelSpec& target) {
  spec.vocab_size = target.vocab_size;
  spec.embedding_size = target.embedding_size;
  spec.embedding_scale = target.embedding_scale;
  spec.tied_embeddings = target.tied_embeddings;
  spec.logits_scale = target.logits_scale;
  spec.logits_softcap = target.logits_softcap;
}

Result<HeadPlan> plan_head(HeadKind kind, const Checkpoint& checkpoint, const ModelSpec& target,
                           const HeadOverrides& overrides) {
  FRESHET_ASSIGN_OR_RETURN(Head head, plan(kind, checkpoint, target, overrides));
  return std::move(head.plan);
}

Result<DraftHead> load_head(HeadKind kind, const Checkpoint& checkpoint, const Model& target,
                            ops::Ops& ops, const HeadOverrides& overrides) {
  const auto ends = target.share();
  if (ends == nullptr) return unsupported("this model shares no embedding with a draft head");
  FRESHET_ASSIGN_OR_RETURN(Head head, plan(kind, checkpoint, target.spec(), overrides));
  head.architecture.type = head.plan.spec.architecture;
  head.architecture.names = head.architecture.gguf_names = head.names;
  const Progress none;
  WeightReader reader(checkpoint, head.architecture, ops, none);
  ModelWeights weights;
  FRESHET_RETURN_IF_ERROR(read_features(reader, checkpoint, head, weights));
  const ModelSpec& spec = head.plan.spec;
  weights.layers.resize(spec.layers.size());
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    FRESHET_RETURN_IF_ERROR(assemble_layer(reader, spec.layers[i], spec.hidden_size,
                                           head.layer + static_cast<int>(i), weights.layers[i]));
  }
  FRESHET_RETURN_IF_ERROR(read_ends(reader, head, target.spec(), weights));
  DraftHead out;
  if (head.plan.mask_token >= 0 && head.plan.block == 0) {
    FRESHET_ASSIGN_OR_RETURN(
        out.mask_features,
        reader.values(*find_tensor(checkpoint, "model.mask_hidden"), spec.features->width));
  }
  FRESHET_ASSIGN_OR_RETURN(out.target_ids, read_target_ids(checkpoint, head.plan.spec,
                                                           target.spec(), overrides.absolute_ids));
  auto model = std::make_unique<Decoder>(head.plan.spec,
                                         std::make_shared<const ModelWeights>(std::move(weights)),
                                         ends, reader.take_infos(), ops);
  if (head.plan.norms_each_feature)
    model->split_input_norm(static_cast<int>(head.plan.boundaries.size()));
  out.model = std::move(model);
  out.plan = std::move(head.plan);
  return out;
}

}  // namespace freshet::models

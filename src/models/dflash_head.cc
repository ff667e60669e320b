// DFlash heads (arXiv:2602.06036), as z-lab/dflash, vLLM's "speculators" and ModelOpt save them.
//
// Published variants (DFlash2, Domino, DSpark and others) add parts under the same name. So a key
// of dflash_config or a tensor that is not known here is an error: to ignore it would draft badly.
#include <algorithm>
#include <array>

#include "models/decoder_config.h"
#include "models/head_file.h"

namespace freshet::models {
namespace {

using loader::Checkpoint;
using loader::TensorSource;

constexpr NameRule kDFlashNames[] = {
    {Role::kFeatures, "model.fc"},
    {Role::kFeatureNorm, "model.hidden_norm"},
};
constexpr int kLargestBlock = 64;

Status not_plain(const Checkpoint& checkpoint, std::string_view what) {
  return unsupported("{}: {}: this is another kind of head than DFlash (arXiv:2602.06036)",
                     checkpoint.path(), what);
}

// One object with the keys of dflash_config, which go first, and those around it.
Result<json::Value> dflash_config(const Checkpoint& checkpoint, const ModelSpec& target) {
  FRESHET_ASSIGN_OR_RETURN(json::Value config, head_config(checkpoint, target));
  if (!config.is_object()) {
    return invalid_argument("{}: a DFlash head is a folder with config.json", checkpoint.path());
  }
  if (const json::Value* const own = config.find("dflash_config");
      own != nullptr && own->is_object()) {
    constexpr std::array<std::string_view, 10> kKnown = {
        "target_layer_ids",        "mask_token_id",        "block_size",        "causal",
        "projector_type",          "attention_mode",       "num_target_layers", "output_multiplier",
        "final_logit_softcapping", "input_embedding_scale"};
    const json::Value copy = *own;
    for (const auto& [key, value] : copy.as_object()) {
      if (std::ranges::find(kKnown, key) == kKnown.end())
        return not_plain(checkpoint, fmt::format("key '{}' of dflash_config", key));
      config.as_object()[key] = value;
    }
  }
  const std::pair<std::string_view, std::string_view> texts[] = {
      {"speculators_model_type", "dflash"},
      {"projector_type", "dflash"},
      {"attention_mode", "gqa"}};
  for (const auto& [key, known] : texts) {
    const json::Value* const found = config.find(key);
    if (found == nullptr || found->is_null() || (found->is_string() && found->as_string() == known))
      continue;
    return not_plain(checkpoint, fmt::format("{} is {}", key, json::write(*found)));
  }
  for (const char* key : {"sample_from_anchor", "shift_label", "attention_sink_bias"}) {
    const json::Value* const found = config.find(key);
    if (found != nullptr && !found->is_null() && !(found->is_bool() && !found->as_bool()))
      return not_plain(checkpoint, fmt::format("{} is {}", key, json::write(*found)));
  }
  return config;
}

// Whether the reader knows what a tensor is for.
bool known_tensor(std::string_view name) {
  if (name.starts_with("model.")) name.remove_prefix(6);
  constexpr std::array<std::string_view, 8> kEnds = {"fc.",
                                                     "hidden_norm.",
                                                     "norm.",
                                                     "lm_head.",
                                                     "embed_tokens.",
                                                     "verifier_norm.",
                                                     "verifier_lm_head.",
                                                     "rotary_emb."};
  if (name == "d2t" || name == "t2d") return true;
  if (std::ranges::any_of(kEnds, [&](std::string_view end) { return name.starts_with(end); }))
    return true;
  if (!name.starts_with("layers.")) return false;
  name.remove_prefix(7);
  const size_t dot = name.find('.');
  if (dot == std::string_view::npos) return false;
  name.remove_prefix(dot + 1);
  constexpr std::array<std::string_view, 12> kParts = {
      "input_layernorm.",      "post_attention_layernorm.",
      "self_attn.q_proj.",     "self_attn.k_proj.",
      "self_attn.v_proj.",     "self_attn.o_proj.",
      "self_attn.q_norm.",     "self_attn.k_norm.",
      "self_attn.rotary_emb.", "mlp.gate_proj.",
      "mlp.up_proj.",          "mlp.down_proj."};
  return std::ranges::any_of(kParts, [&](std::string_view part) { return name.starts_with(part); });
}

// Layers that ran before the states that are read. z-lab counts layers from 0, "speculators"
// counts those that ran.
Result<std::vector<int>> read_boundaries(const Checkpoint& checkpoint, const json::Value& config,
                                         int layers) {
  const bool zero_based = config.find("target_layer_ids") != nullptr;
  const char* const key = zero_based ? "target_layer_ids" : "aux_hidden_state_layer_ids";
  const json::Value* const ids = config.find(key);
  if (ids == nullptr || !ids->is_array() || ids->as_array().empty()) {
    return invalid_argument(
        "{}: config.json names no layers of the target: none of dflash_config.target_layer_ids and "
        "aux_hidden_state_layer_ids",
        checkpoint.path());
  }
  std::vector<int> out;
  for (const json::Value& id : ids->as_array()) {
    const auto number = id.is_number() ? id.as_int64() : std::nullopt;
    const int64_t ran = number ? std::clamp<int64_t>(*number, -2, layers) + zero_based : -1;
    // Programs differ in whether the last layer's states are normalised.
    if (ran < 0 || ran >= layers || (!out.empty() && ran <= out.back())) {
      return invalid_argument(
          "{}: {} must list layers of the target in ascending order, before the last of its {}",
          checkpoint.path(), key, layers);
    }
    out.push_back(static_cast<int>(ran));
  }
  return out;
}

// What the rows of a block see beside the tokens before it: the whole block, or, where `causal`,
// only what is before them in it. Layers of sliding attention are causal unless the file says
// otherwise.
void read_attention(Config& config, ModelSpec& spec) {
  const bool qwen = config.text({"model_type"}, "") == "qwen3";
  const bool slides = config.flag({"use_sliding_window"}, !qwen);
  const auto sliding = local_layers(config, [](int) { return false; });
  set_windows(config, spec, slides ? config.count({"sliding_window"}, 0) : 0,
              [](int) { return false; });
  std::optional<bool> all;
  for (const char* key : {"causal", "is_causal"}) {
    if (!all && config.has(key)) all = config.flag({key}, false);
  }
  const bool non_causal = config.flag({"sliding_window_non_causal"}, false);
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    const bool causal = all.value_or(sliding(static_cast<int>(i)) && !non_causal);
    spec.layers[i].attention().spans = causal ? SpanUse::kNone : SpanUse::kAlso;
  }
}

// The embedding and the head are the target's; what is done to their numbers is the head's.
Status take_target_ends(const Checkpoint& checkpoint, const json::Value& config, Config& reader,
                        const ModelSpec& target, const HeadFile& file, ModelSpec& spec) {
  take_ends(spec, target);
  spec.embedding_scale = static_cast<float>(reader.number({"input_embedding_scale"}, 1.0));
  spec.logits_scale = static_cast<float>(reader.number({"output_multiplier"}, 1.0));
  spec.logits_softcap = static_cast<float>(reader.number({"final_logit_softcapping"}, 0.0));
  if (const TensorSource* own = file.find(Role::kHead, ".weight");
      own != nullptr && !own->shape.empty()) {
    spec.tied_embeddings = false;
    spec.vocab_size = static_cast<int>(std::min<int64_t>(own->shape.front(), 1 << 24));
  } else if (const int64_t known = config.get_int("draft_vocab_size", target.vocab_size);
             known != target.vocab_size) {
    return invalid_argument(
        "{}: the head knows {} of {} tokens, and tensor 'lm_head.weight' is "
        "missing",
        checkpoint.path(), known, target.vocab_size);
  }
  return {};
}

}  // namespace

Result<Head> plan_dflash(const Checkpoint& checkpoint, const ModelSpec& target) {
  FRESHET_ASSIGN_OR_RETURN(const json::Value config, dflash_config(checkpoint, target));
  Head head;
  head.names.assign(std::begin(kDFlashNames), std::end(kDFlashNames));
  const HeadFile file(checkpoint, head.names);
  FRESHET_ASSIGN_OR_RETURN(const TensorSource* fc, file.matrix(Role::kFeatures));
  if (!file.has(Role::kFeatureNorm)) {
    return invalid_argument("{}: tensor 'hidden_norm.weight' is missing: this is no DFlash head",
                            checkpoint.path());
  }
  for (const TensorSource& tensor : checkpoint.tensors()) {
    if (!known_tensor(tensor.name))
      return not_plain(checkpoint, fmt::format("tensor '{}'", tensor.name));
  }
  ModelSpec& spec = head.plan.spec;
  Config reader(config);
  spec = decoder_spec(reader, "dflash", {});
  FRESHET_RETURN_IF_ERROR(reader.status().with_context(checkpoint.path()));
  FRESHET_RETURN_IF_ERROR(check_width(checkpoint, spec, target));
  read_attention(reader, spec);
  FRESHET_RETURN_IF_ERROR(take_target_ends(checkpoint, config, reader, target, file, spec));
  FRESHET_RETURN_IF_ERROR(read_layers(file, spec));
  if (file.has(Role::kQueryNorm)) {
    for (LayerSpec& layer : spec.layers) layer.attention().qk_norm = QkNorm::kHead;
  }
  FRESHET_ASSIGN_OR_RETURN(
      head.plan.boundaries,
      read_boundaries(checkpoint, config, static_cast<int>(target.layers.size())));
  const int64_t width = int64_t{target.hidden_size} * std::ssize(head.plan.boundaries);
  if (fc->shape[1] != width) {
    return invalid_argument("{}: tensor '{}' has {} columns; {} layers of this target give {}",
                            checkpoint.path(), fc->name, fc->shape[1], head.plan.boundaries.size(),
                            width);
  }
  FeatureSpec f;
  f.use = FeatureSpec::Use::kStored;
  f.width = static_cast<int>(width);
  f.bias = file.has(Role::kFeatures, ".bias");
  f.feature_norm = spec.final_norm;
  f.normed_residual = true;
  spec.features = f;
  const int fallback = config.find("speculators_model_type") != nullptr ? 8 : 16;
  head.plan.block = reader.count({"block_size"}, fallback);
  FRESHET_RETURN_IF_ERROR(reader.status().with_context(checkpoint.path()));
  if (head.plan.block < 2 || head.plan.block > kLargestBlock) {
    return invalid_argument("{}: block_size {} is not from 2 to {}", checkpoint.path(),
                            head.plan.block, kLargestBlock);
  }
  for (const LayerSpec& layer : spec.layers) {
    const int window = layer.attention().window;
    if (window == 0 || window >= head.plan.block) continue;
    return invalid_argument("{}: sliding_window {} is smaller than a block of {} rows",
                            checkpoint.path(), window, head.plan.block);
  }
  const TensorSource* const own = find_weight(checkpoint, "model.embed_tokens");
  const bool sized = own != nullptr && !own->shape.empty();
  FRESHET_ASSIGN_OR_RETURN(
      head.plan.mask_token,
      read_mask_token(config, sized ? own->shape.front() : target.vocab_size, checkpoint.path()));
  if (head.plan.mask_token >= 0) return head;
  return invalid_argument("{}: config.json names no mask token (dflash_config.mask_token_id)",
                          checkpoint.path());
}

}  // namespace freshet::models

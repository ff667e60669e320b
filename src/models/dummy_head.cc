#include "models/dummy_head.h"

#include <algorithm>

#include "layers/decoder.h"
#include "models/branch_loading.h"
#include "models/decoder_config.h"
#include "models/dummy_maker.h"
#include "models/registry.h"

namespace freshet::models {
namespace {

constexpr int kDraftVocabulary = 32000;  // as published EAGLE-3 heads for Llama 3 have it

// The MLP of a layer; of models with experts, as wide as those that a token uses.
std::optional<MlpSpec> mlp_like(const ModelSpec& target) {
  for (const LayerSpec& layer : target.layers) {
    if (const MlpSpec* const mlp = layer.find<MlpSpec>()) return *mlp;
  }
  const MoeSpec* const moe = target.layers.front().find<MoeSpec>();
  if (moe == nullptr) return {};
  return MlpSpec{.ff = moe->expert_ff * moe->routing.top_k};
}

Result<ModelSpec> layer_like(const ModelSpec& target) {
  const auto attends = std::ranges::find_if(
      target.layers, [](const LayerSpec& l) { return l.find<AttentionSpec>() != nullptr; });
  const std::optional<MlpSpec> mlp = mlp_like(target);
  if (attends == target.layers.end() || !mlp || !target.final_norm) {
    return unsupported(
        "a random EAGLE-3 head is shaped like a layer of the target, which has none of Llama's "
        "kind: \"model\" may name a folder with the head's config.json");
  }
  AttentionSpec attention = *attends->find<AttentionSpec>();
  attention.window = 0;
  attention.output_gate = false;
  ModelSpec spec;
  spec.hidden_size = target.hidden_size;
  spec.ropes = target.ropes;
  spec.max_context = target.max_context;
  spec.final_norm = target.final_norm;
  spec.layers = {{{{{}, attention}, {{.in = target.final_norm}, *mlp}}}};
  return spec;
}

Result<ModelSpec> layer_of_config(const json::Value& json, const ModelSpec& target) {
  Config config(json);
  ModelSpec spec = decoder_spec(config, "eagle3", {});
  FRESHET_RETURN_IF_ERROR(config.status());
  if (spec.hidden_size != target.hidden_size) {
    return invalid_argument("a head with states of {} numbers does not fit a target of {}",
                            spec.hidden_size, target.hidden_size);
  }
  spec.layers.resize(1);
  spec.layers[0].branches[0].norms.in.reset();
  return spec;
}

Status make_weights(DummyMaker& make, const ModelSpec& spec, ModelWeights& w) {
  const FeatureSpec& f = *spec.features;
  const int64_t hidden = spec.hidden_size;
  FRESHET_RETURN_IF_ERROR(
      make.linear(w.features, "features", Role::kFeatures, hidden, f.width, false));
  FRESHET_RETURN_IF_ERROR(make.norm(w.feature_norm, f.feature_norm, hidden));
  FRESHET_RETURN_IF_ERROR(make.norm(w.embedding_norm, f.embedding_norm, hidden));
  LayerWeights& layer = w.layers.emplace_back();
  for (const BranchSpec& branch : spec.layers[0].branches) {
    BranchWeights& out = layer.branches.emplace_back();
    FRESHET_RETURN_IF_ERROR(make.norm(out.norms.in, branch.norms.in, hidden));
    FRESHET_RETURN_IF_ERROR(loading_of(branch).make(make, branch, hidden, out));
  }
  FRESHET_RETURN_IF_ERROR(make.norm(w.final_norm, spec.final_norm, hidden));
  return make.linear(w.head, "head", Role::kHead, spec.vocab_size, hidden, false);
}

}  // namespace

Result<HeadPlan> plan_dummy_head(const json::Value& config, const ModelSpec& target,
                                 DummyFormat format, ops::Ops& ops) {
  HeadPlan plan;
  plan.kind = HeadKind::kEagle3;
  FRESHET_ASSIGN_OR_RETURN(
      plan.spec, config.is_object() ? layer_of_config(config, target) : layer_like(target));
  ModelSpec& spec = plan.spec;
  spec.architecture = "eagle3";
  take_ends(spec, target);
  spec.vocab_size = std::min<int>(
      target.vocab_size,
      static_cast<int>(config.is_object() ? config.get_int("draft_vocab_size", target.vocab_size)
                                          : kDraftVocabulary));
  spec.tied_embeddings = false;
  spec.logits_bias = false;
  spec.layers[0].attention().input_size = 2 * spec.hidden_size;
  const int layers = static_cast<int>(target.layers.size());
  plan.boundaries =
      layers > 6 ? std::vector{2, layers / 2, layers - 3} : std::vector{0, layers / 2, layers};
  const auto repeated = std::ranges::unique(plan.boundaries);
  plan.boundaries.erase(repeated.begin(), repeated.end());
  FeatureSpec f;
  f.use = FeatureSpec::Use::kPaired;
  f.width = static_cast<int>(int64_t{target.hidden_size} * std::ssize(plan.boundaries));
  f.feature_norm = f.embedding_norm = spec.final_norm;
  f.raw_states = true;
  spec.features = f;
  FRESHET_RETURN_IF_ERROR(validate(spec));
  DummyMaker count(spec, format, ops, true);
  ModelWeights none;
  FRESHET_RETURN_IF_ERROR(make_weights(count, spec, none));
  plan.weight_bytes = count.bytes();
  return plan;
}

Result<DraftHead> dummy_head(const json::Value& config, const Model& target, DummyFormat format,
                             ops::Ops& ops) {
  const auto ends = target.share();
  if (ends == nullptr) return unsupported("this model shares no embedding with a draft head");
  DraftHead head;
  FRESHET_ASSIGN_OR_RETURN(head.plan, plan_dummy_head(config, target.spec(), format, ops));
  const ModelSpec& spec = head.plan.spec;
  DummyMaker make(spec, format, ops);
  ModelWeights weights;
  FRESHET_RETURN_IF_ERROR(make_weights(make, spec, weights));
  // At even distances in the target's vocabulary.
  const int64_t known = spec.vocab_size;
  for (int64_t i = 0; i < known; ++i)
    head.target_ids.push_back(static_cast<int32_t>(i * target.spec().vocab_size / known));
  head.model = std::make_unique<Decoder>(
      spec, std::make_shared<const ModelWeights>(std::move(weights)), ends, make.take_infos(), ops);
  return head;
}

}  // namespace freshet::models

#include "quantizer/gguf_families.h"

#include <algorithm>
#include <array>
#include <limits>
#include <span>
#include <vector>

namespace freshet::quantizer {
namespace {

using models::Role;

class FamilyKeys {
 public:
  FamilyKeys(const ModelSpec& spec, const std::string& architecture, loader::GgufWriter& out)
      : spec_(spec), architecture_(architecture), out_(out) {}

  // Which layers are local.
  void windows() {
    std::vector<uint8_t> local;
    for (const LayerSpec& layer : spec_.layers) {
      local.push_back(layer.attention().window > 0 ? 1 : 0);
    }
    if (std::ranges::count(local, 1) == 0) return;
    flags("attention.sliding_window_pattern", local);
  }

  Status experts() {
    size_t dense = 0;
    while (dense < spec_.layers.size() && spec_.layers[dense].find<MoeSpec>() == nullptr) ++dense;
    for (size_t i = dense; i < spec_.layers.size(); ++i) {
      if (spec_.layers[i].find<MoeSpec>() != nullptr) continue;
      return unsupported("converting dense layers behind ones with experts is not supported");
    }
    if (dense == spec_.layers.size()) return {};
    const MoeSpec& moe = *spec_.layers[dense].find<MoeSpec>();
    const ops::Routing& r = moe.routing;
    u32("leading_dense_block_count", static_cast<int64_t>(dense));
    u32("expert_shared_count", moe.shared_ff / moe.expert_ff);
    u32("expert_gating_func", r.score == ops::Routing::Score::kSigmoid ? 2 : 1);
    out_.add_bool(key("expert_weights_norm"), r.renormalize);
    out_.add_f32(key("expert_weights_scale"), r.scale);
    if (architecture_ == "ernie4_5-moe") u32("interleave_moe_layer_step", 1);
    if (r.groups == 1) return {};
    u32("expert_group_count", r.groups);
    u32("expert_group_used_count", r.top_groups);
    return {};
  }

  // Readers know every fourth layer to be without RoPE.
  Status ropes() const {
    for (size_t i = 0; i < spec_.layers.size(); ++i) {
      if ((spec_.layers[i].attention().rope >= 0) == ((i + 1) % 4 != 0)) continue;
      return unsupported(
          "'no_rope_layers' has no place in a GGUF file: only models in which every "
          "fourth layer is without RoPE are converted");
    }
    return {};
  }

  // Readers of Qwen's expect experts in every layer, and one way to weigh them.
  Status qwen_experts() const {
    const auto sparse = [](const LayerSpec& layer) { return layer.find<MoeSpec>() != nullptr; };
    const auto first = std::ranges::find_if(spec_.layers, sparse);
    if (first == spec_.layers.end()) return {};
    if (!std::ranges::all_of(spec_.layers, sparse))
      return unsupported(
          "'mlp_only_layers' and 'decoder_sparse_step' have no place in a GGUF file of this "
          "architecture: only models with experts in every layer are converted");
    const bool wanted = architecture_ != "qwen2moe";
    if (first->find<MoeSpec>()->routing.renormalize != wanted)
      return unsupported("'norm_topk_prob' has no place in a GGUF file: it must be {}", wanted);
    return {};
  }

  // Layers with states, which are all alike.
  Status states() {
    for (const LayerSpec& layer : spec_.layers) {
      if (const auto* conv = layer.find<ShortConvSpec>()) {
        u32("shortconv.l_cache", conv->taps);
        return {};
      }
      if (const auto* m = layer.find<MambaSpec>()) {
        ssm(m->taps, m->inner, m->state, m->dt_rank);
        if (architecture_ == "mamba")
          out_.add_bool(key("ssm.dt_b_c_rms"), m->inner_norm.has_value());
        return {};
      }
      if (const auto* m = layer.find<Mamba2Spec>()) {
        // Nemotron-H's least step size is its authors'; readers know another one from no key.
        const bool usual = architecture_ == "nemotron_h" && m->dt_min == 0.001f &&
                           m->dt_max == std::numeric_limits<float>::max();
        if (m->dt_max > 0 && !usual)
          return unsupported("'{}' has no place in a GGUF file of this architecture",
                             architecture_ == "nemotron_h" ? "time_step_min" : "time_step_limit");
        ssm(m->taps, m->inner(), m->state, m->heads);
        u32("ssm.group_count", m->groups);
        return {};
      }
      if (const auto* net = layer.find<DeltaNetSpec>()) {
        ssm(net->taps, net->values(), net->key_dim, net->value_heads);
        u32("ssm.group_count", net->key_heads);
        recurrent_layers();
        return {};
      }
    }
    return {};
  }

  // Readers of Qwen3.5 ask for the frequencies of each axis; in text, positions on all are equal.
  void sections() {
    if (spec_.ropes.empty() || !spec_.ropes.front().axes.empty()) return;
    constexpr std::array<int32_t, 4> kSections = {11, 11, 10, 0};
    out_.add_i32s(key("rope.dimension_sections"), kSections);
  }

 private:
  // By an interval, or one by one.
  void recurrent_layers() {
    std::vector<uint8_t> list;
    for (const LayerSpec& layer : spec_.layers)
      list.push_back(layer.find<DeltaNetSpec>() != nullptr ? 1 : 0);
    const auto interval = std::ranges::find(list, 0) - list.begin() + 1;
    u32("full_attention_interval", interval);
    for (int64_t i = 0; i < std::ssize(list); ++i) {
      if ((list[static_cast<size_t>(i)] == 0) == ((i + 1) % interval == 0)) continue;
      flags("attention.recurrent_layers", list);
      return;
    }
  }
  void flags(std::string_view name, std::span<const uint8_t> list) {
    loader::GgufValue value;
    value.type = loader::GgufType::kBool;
    value.is_array = true;
    value.count = list.size();
    value.raw = list;
    out_.add_value(key(name), value);
  }
  void ssm(int taps, int inner, int state, int rank) {
    u32("ssm.conv_kernel", taps);
    u32("ssm.inner_size", inner);
    u32("ssm.state_size", state);
    u32("ssm.time_step_rank", rank);
  }
  std::string key(std::string_view name) const { return architecture_ + "." + std::string(name); }
  void u32(std::string_view name, int64_t v) { out_.add_u32(key(name), static_cast<uint32_t>(v)); }

  const ModelSpec& spec_;
  const std::string& architecture_;
  loader::GgufWriter& out_;
};

}  // namespace

Status add_family(const json::Value& config, const ModelSpec& spec, const std::string& architecture,
                  loader::GgufWriter& out) {
  const auto is = [&](std::initializer_list<std::string_view> names) {
    return std::ranges::count(names, architecture) > 0;
  };
  FamilyKeys keys(spec, architecture, out);
  if (is({"olmo2", "cohere2", "exaone4"})) keys.windows();
  if (is({"glm4moe", "ernie4_5-moe", "minimax-m2", "olmoe", "lfm2moe"})) {
    FRESHET_RETURN_IF_ERROR(keys.experts());
  }
  if (architecture.starts_with("qwen")) FRESHET_RETURN_IF_ERROR(keys.qwen_experts());
  FRESHET_RETURN_IF_ERROR(keys.states());
  if (is({"qwen35", "qwen35moe"})) keys.sections();
  if (architecture == "smollm3") FRESHET_RETURN_IF_ERROR(keys.ropes());
  if (architecture == "falcon" && !spec.layers.front().parallel) {
    return unsupported("converting a falcon without 'parallel_attn' to GGUF is not supported");
  }
  if (architecture == "phimoe" && config.get_double("router_jitter_noise", 0.01) != 0.01) {
    return unsupported("'router_jitter_noise' has no place in a GGUF file: it must be 0.01");
  }
  return {};
}

std::string missed_by_readers(const ModelSpec& spec, const std::string& architecture) {
  if (architecture == "nemotron_h")
    return "llama.cpp has no least step size ('time_step_min'): its logits differ a little";
  for (const LayerSpec& layer : spec.layers) {
    const AttentionSpec* const a = layer.find<AttentionSpec>();
    if (architecture != "granitehybrid" || a == nullptr || a->rope < 0) continue;
    // Its converter interleaves the rows of whole heads, of which it rotates the first ones.
    if (spec.ropes[static_cast<size_t>(a->rope)].rotary_dim < a->head_dim)
      return "llama.cpp rotates other features of such heads: its logits differ from the model's";
  }
  return {};
}

Status add_xielu(const models::WeightReader& reader, const ModelSpec& spec,
                 loader::GgufWriter& out) {
  const MlpSpec* const first = spec.layers.front().find<MlpSpec>();
  if (first == nullptr || !first->xielu) return {};
  const std::pair<Role, const char*> lists[] = {{Role::kXieluPositive, "xielu.alpha_p"},
                                                {Role::kXieluNegative, "xielu.alpha_n"},
                                                {Role::kXieluBeta, "xielu.beta"},
                                                {Role::kXieluEps, "xielu.eps"}};
  for (const auto& [role, key] : lists) {
    std::vector<float> list;
    for (int layer = 0; layer < std::ssize(spec.layers); ++layer) {
      FRESHET_ASSIGN_OR_RETURN(const loader::TensorSource* t, reader.require(role, "", layer));
      FRESHET_ASSIGN_OR_RETURN(const std::vector<float> value, reader.values(*t, 1));
      list.push_back(value.front());
    }
    out.add_f32s(key, list);
  }
  return {};
}

}  // namespace freshet::quantizer

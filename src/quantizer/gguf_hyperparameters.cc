#include "quantizer/gguf_hyperparameters.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <span>
#include <utility>
#include <vector>

#include "quantizer/gguf_families.h"

namespace freshet::quantizer {
namespace {

constexpr std::pair<std::string_view, std::string_view> kArchitectures[] = {
    {"llama", "llama"},
    {"mistral", "llama"},
    {"mixtral", "llama"},
    {"qwen2", "qwen2"},
    {"qwen3", "qwen3"},
    {"qwen2_moe", "qwen2moe"},
    {"qwen3_moe", "qwen3moe"},
    {"gemma", "gemma"},
    {"gemma2", "gemma2"},
    {"gemma3_text", "gemma3"},
    {"gemma3", "gemma3"},
    {"phi3", "phi3"},
    {"gpt2", "gpt2"},
    {"gpt_neox", "gptneox"},
    {"olmo2", "olmo2"},
    {"granite", "granite"},
    {"starcoder2", "starcoder2"},
    {"stablelm", "stablelm"},
    {"cohere", "command-r"},
    {"glm4", "glm4"},
    {"smollm3", "smollm3"},
    {"olmo3", "olmo2"},
    {"olmoe", "olmoe"},
    {"cohere2", "cohere2"},
    {"exaone4", "exaone4"},
    {"glm4_moe", "glm4moe"},
    {"ernie4_5", "ernie4_5"},
    {"ernie4_5_moe", "ernie4_5-moe"},
    {"hunyuan_v1_dense", "hunyuan-dense"},
    {"seed_oss", "seed_oss"},
    {"apertus", "apertus"},
    {"arcee", "arcee"},
    {"nemotron", "nemotron"},
    {"phi", "phi2"},
    {"phimoe", "phimoe"},
    {"falcon", "falcon"},
    {"minimax_m2", "minimax-m2"},
    {"granitemoe", "granitemoe"},
    {"gpt_bigcode", "starcoder"},
    {"qwen2_vl_text", "qwen2vl"},
    {"qwen2_5_vl_text", "qwen2vl"},
    {"qwen3_vl_text", "qwen3vl"},
    {"lfm2", "lfm2"},
    {"lfm2_moe", "lfm2moe"},
    {"mamba", "mamba"},
    {"mamba2", "mamba2"},
    {"qwen3_next", "qwen3next"},
    {"qwen3_5_text", "qwen35"},
    {"qwen3_5_moe_text", "qwen35moe"},
    {"granitemoehybrid", "granitehybrid"},
    {"bamba", "granitehybrid"},
    {"nemotron_h", "nemotron_h"},
    {"falcon_h1", "falcon-h1"},
    {"jamba", "jamba"},
};

class Keys {
 public:
  Keys(const std::string& architecture, loader::GgufWriter& out)
      : prefix_(architecture + "."), out_(out) {}
  void u32(std::string_view key, int64_t v) { out_.add_u32(name(key), static_cast<uint32_t>(v)); }
  void f32(std::string_view key, double v) { out_.add_f32(name(key), static_cast<float>(v)); }
  void flag(std::string_view key, bool v) { out_.add_bool(name(key), v); }
  void text(std::string_view key, std::string_view v) { out_.add_string(name(key), v); }
  void i32s(std::string_view key, std::span<const int32_t> v) { out_.add_i32s(name(key), v); }

 private:
  std::string name(std::string_view key) const { return prefix_ + std::string(key); }
  std::string prefix_;
  loader::GgufWriter& out_;
};

void add_rope(const RopeSpec& rope, Keys& keys) {
  keys.f32("rope.freq_base", rope.theta);
  keys.u32("rope.dimension_count", rope.rotary_dim);
  if (!rope.axes.empty()) {
    // How many frequencies time, rows and columns have; the fourth axis is not used.
    std::array<int32_t, 4> sections{};
    for (const int axis : rope.axes) ++sections[static_cast<size_t>(axis)];
    keys.i32s("rope.dimension_sections", sections);
  }
  const auto scaling = [&](const char* type) {
    keys.text("rope.scaling.type", type);
    keys.f32("rope.scaling.factor", rope.factor);
    if (rope.original_context > 0)
      keys.u32("rope.scaling.original_context_length", static_cast<int64_t>(rope.original_context));
  };
  switch (rope.scaling) {
    case RopeSpec::Scaling::kLinear:
      scaling("linear");
      break;
    case RopeSpec::Scaling::kYarn:
      scaling("yarn");
      keys.f32("rope.scaling.yarn_beta_fast", rope.beta_fast);
      keys.f32("rope.scaling.yarn_beta_slow", rope.beta_slow);
      break;
    case RopeSpec::Scaling::kLongRope:
      keys.u32("rope.scaling.original_context_length", static_cast<int64_t>(rope.original_context));
      keys.f32("rope.scaling.attn_factor", static_cast<double>(rope.attention_factor));
      break;
    case RopeSpec::Scaling::kNone:
    case RopeSpec::Scaling::kDynamic:
    case RopeSpec::Scaling::kLlama3:
    case RopeSpec::Scaling::kFactors:
    case RopeSpec::Scaling::kTemperature:
      break;
  }
}

void add_experts(const ModelSpec& spec, Keys& keys) {
  for (const LayerSpec& layer : spec.layers) {
    const MoeSpec* const moe = layer.find<MoeSpec>();
    if (moe == nullptr) continue;
    keys.u32("expert_count", moe->routing.experts);
    keys.u32("expert_used_count", moe->routing.top_k);
    keys.u32("expert_feed_forward_length", moe->expert_ff);
    if (moe->shared_ff > 0) keys.u32("expert_shared_feed_forward_length", moe->shared_ff);
    return;
  }
}

const AttentionSpec* first_attention(const ModelSpec& spec) {
  for (const LayerSpec& layer : spec.layers) {
    if (const AttentionSpec* a = layer.find<AttentionSpec>()) return a;
  }
  return nullptr;
}

template <class Spec>
bool has_branch(const ModelSpec& spec) {
  return std::ranges::any_of(spec.layers,
                             [](const LayerSpec& layer) { return layer.find<Spec>() != nullptr; });
}

// In hybrids, layers without attention have no heads of keys. Readers of Qwen's know such layers
// from other keys, and want one number.
void add_attention(const ModelSpec& spec, const std::string& architecture, Keys& keys) {
  const AttentionSpec* const a = first_attention(spec);
  keys.u32("attention.head_count", a == nullptr ? 0 : a->heads);
  if (a == nullptr) return;
  std::vector<int32_t> kv_heads;
  bool all = true;
  for (const LayerSpec& layer : spec.layers) {
    const AttentionSpec* const own = layer.find<AttentionSpec>();
    kv_heads.push_back(own == nullptr ? 0 : own->kv_heads);
    all = all && own != nullptr;
  }
  if (all || architecture.starts_with("qwen3")) {
    keys.u32("attention.head_count_kv", a->kv_heads);
  } else {
    keys.i32s("attention.head_count_kv", kv_heads);
  }
  keys.u32("attention.key_length", a->head_dim);
  keys.u32("attention.value_length", a->value_dim);
}

// Where some layers have neither an MLP nor experts, one width for each layer, which is 0 there.
std::vector<int32_t> widths_by_layer(const ModelSpec& spec) {
  std::vector<int32_t> widths;
  for (const LayerSpec& layer : spec.layers) {
    const MlpSpec* const mlp = layer.find<MlpSpec>();
    const MoeSpec* const moe = layer.find<MoeSpec>();
    widths.push_back(mlp != nullptr ? mlp->ff : moe != nullptr ? moe->expert_ff : 0);
  }
  const auto without = std::ranges::count(widths, 0);
  return without > 0 && without < std::ssize(widths) ? widths : std::vector<int32_t>();
}

// The width of the model's MLPs; models with experts in every layer have this key as well.
int64_t mlp_width(const json::Value& config, const ModelSpec& spec) {
  int64_t experts = 0;
  for (const LayerSpec& layer : spec.layers) {
    if (const MlpSpec* mlp = layer.find<MlpSpec>()) return mlp->ff;
    if (const MoeSpec* moe = layer.find<MoeSpec>()) experts = moe->expert_ff;
  }
  if (experts == 0 && first_attention(spec) == nullptr) return 0;  // Mamba
  return config.get_int("intermediate_size", experts);
}

// Multipliers and caps under the names that readers of each architecture expect.
void add_scales(const json::Value& config, const std::string& architecture, const ModelSpec& spec,
                Keys& keys) {
  const auto copy = [&](const char* from, const char* to) {
    const json::Value* v = config.find(from);
    if (v != nullptr && v->is_number()) keys.f32(to, v->as_double());
  };
  if (architecture == "granite" || architecture == "granitemoe") {
    copy("embedding_multiplier", "embedding_scale");
    copy("residual_multiplier", "residual_scale");
    copy("attention_multiplier", "attention.scale");
    copy("logits_scaling", "logit_scale");
  }
  if (architecture == "granitehybrid") {
    const AttentionSpec* const a = first_attention(spec);
    keys.f32("embedding_scale", static_cast<double>(spec.embedding_scale));
    keys.f32("residual_scale", static_cast<double>(spec.residual_scale));
    keys.f32("logit_scale", config.get_double("logits_scaling", 1.0));
    if (a != nullptr) keys.f32("attention.scale", static_cast<double>(a->scale));
    keys.flag("rope.scaling.finetuned", a != nullptr && a->rope >= 0);
  }
  if (architecture == "command-r") copy("logit_scale", "logit_scale");
  if (architecture == "cohere2") keys.f32("logit_scale", static_cast<double>(spec.logits_scale));
  if (architecture == "gptneox")
    keys.flag("use_parallel_residual", config.get_bool("use_parallel_residual", true));
  const AttentionSpec* const a = first_attention(spec);
  if (a != nullptr && a->softcap > 0)
    keys.f32("attn_logit_softcapping", static_cast<double>(a->softcap));
  if (spec.logits_softcap > 0)
    keys.f32("final_logit_softcapping", static_cast<double>(spec.logits_softcap));
}

}  // namespace

Result<std::string> gguf_architecture(std::string_view model_type, const ModelSpec& spec) {
  // Granite 4 without layers of states is Granite.
  if (model_type == "granitemoehybrid" && !has_branch<Mamba2Spec>(spec)) {
    if (spec.ropes.empty())
      return unsupported("'position_embedding_type' has no place in a GGUF file of this model");
    return std::string(has_branch<MoeSpec>(spec) ? "granitemoe" : "granite");
  }
  for (const auto& [type, name] : kArchitectures) {
    if (type == model_type) return std::string(name);
  }
  return unsupported("converting '{}' to GGUF is not supported", model_type);
}

Status add_hyperparameters(const json::Value& config, const ModelSpec& spec,
                           const std::string& architecture, loader::GgufWriter& out) {
  if (spec.layers.empty()) return invalid_argument("the model has no layers");
  int window = 0, rope = -1;
  for (const LayerSpec& layer : spec.layers) {
    const AttentionSpec* const a = layer.find<AttentionSpec>();
    if (a == nullptr) continue;
    window = std::max(window, a->window);
    // If layers use different RoPE settings, the plain key describes full attention.
    if (a->rope >= 0 && (rope < 0 || a->window == 0)) rope = a->rope;
  }
  Keys keys(architecture, out);
  keys.u32("vocab_size", spec.vocab_size);
  keys.u32("context_length", spec.max_context);
  keys.u32("embedding_length", spec.hidden_size);
  keys.u32("block_count", std::ssize(spec.layers));
  if (const auto widths = widths_by_layer(spec); !widths.empty()) {
    keys.i32s("feed_forward_length", widths);
  } else {
    keys.u32("feed_forward_length", mlp_width(config, spec));
  }
  add_attention(spec, architecture, keys);
  const NormSpec norm = spec.final_norm.value_or(NormSpec{});
  keys.f32(norm.kind == ops::NormKind::kRms ? "attention.layer_norm_rms_epsilon"
                                            : "attention.layer_norm_epsilon",
           static_cast<double>(norm.eps));
  // Readers of this one ask for both.
  if (architecture == "nemotron_h")
    keys.f32("attention.layer_norm_epsilon", static_cast<double>(norm.eps));
  if (window > 0) keys.u32("attention.sliding_window", window);
  if (rope >= 0) add_rope(spec.ropes[static_cast<size_t>(rope)], keys);
  add_experts(spec, keys);
  add_scales(config, architecture, spec, keys);
  if (architecture == "qwen3vl" && spec.vision != nullptr)
    keys.u32("n_deepstack_layers", std::ssize(spec.vision->deep));
  return add_family(config, spec, architecture, out);
}

std::vector<float> llama3_divisors(const RopeSpec& rope) {
  std::vector<float> divisors;
  const double longest = rope.original_context / rope.low_freq_factor;
  const double shortest = rope.original_context / rope.high_freq_factor;
  for (int i = 0; i < rope.rotary_dim / 2; ++i) {
    const double frequency = std::pow(rope.theta, -2.0 * i / rope.rotary_dim);
    const double wavelength = 2.0 * std::numbers::pi / frequency;
    double divisor = 1.0;
    if (wavelength > longest) {
      divisor = rope.factor;
    } else if (wavelength > shortest) {
      const double smooth = (rope.original_context / wavelength - rope.low_freq_factor) /
                            (rope.high_freq_factor - rope.low_freq_factor);
      divisor = 1.0 / ((1.0 - smooth) / rope.factor + smooth);
    }
    divisors.push_back(static_cast<float>(divisor));
  }
  return divisors;
}

}  // namespace freshet::quantizer

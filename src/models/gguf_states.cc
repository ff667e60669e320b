#include "models/gguf_states.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "models/gguf_keys.h"

namespace freshet::models {
namespace {

// How an architecture's layers are described.
struct Hybrid {
  std::string_view name;
  bool scaled = false;  // has Granite's factors
};
constexpr Hybrid kHybrids[] = {
    {"qwen3next"},  {"qwen35"},    {"qwen35moe"}, {"granitehybrid", true},
    {"nemotron_h"}, {"falcon-h1"}, {"jamba"}};

class States : GgufKeys {
 public:
  using GgufKeys::GgufKeys;

  Result<std::string_view> complete() {
    const auto hybrid = std::ranges::find(kHybrids, architecture_, &Hybrid::name);
    FRESHET_RETURN_IF_ERROR(layers_without(hybrid != std::end(kHybrids)));
    if (architecture_.starts_with("lfm2")) short_convolutions();
    if (architecture_ == "mamba" || architecture_ == "mamba2") return mamba();
    if (hybrid == std::end(kHybrids)) return std::string_view();
    FRESHET_RETURN_IF_ERROR(honoured(hybrid->scaled));
    FRESHET_RETURN_IF_ERROR(biases());
    FRESHET_RETURN_IF_ERROR(sizes(architecture_ != "jamba"));
    if (architecture_.starts_with("qwen3")) FRESHET_RETURN_IF_ERROR(delta_nets());
    if (architecture_ == "granitehybrid") FRESHET_RETURN_IF_ERROR(granite());
    if (architecture_ == "nemotron_h") FRESHET_RETURN_IF_ERROR(nemotron());
    if (architecture_ == "falcon-h1") falcon();
    if (architecture_ == "jamba") FRESHET_RETURN_IF_ERROR(jamba());
    return std::string_view();
  }

 private:
  using GgufKeys::has;
  bool has(int64_t layer, std::string_view tensor) const {
    return has("blk." + std::to_string(layer) + "." + std::string(tensor));
  }
  void copy(std::string_view from, std::string_view to) {
    if (const auto value = get(from)) set(to, *value);
  }
  // The layers that are run.
  int64_t layers() const {
    return std::max<int64_t>(
        0, get("block_count").value_or(0) - get("nextn_predict_layers").value_or(0));
  }
  // One number for each layer, where the file may have one for all.
  std::vector<int64_t> per_layer(std::string_view key) const {
    std::vector<int64_t> list =
        gguf_.get_ints(prefix_ + std::string(key)).value_or(std::vector<int64_t>{});
    const auto count = static_cast<size_t>(layers());
    if (list.size() == 1) list.resize(count, list.front());
    list.resize(count, 0);
    return list;
  }

  // Other architectures run attention and an MLP in every layer.
  Status layers_without(bool hybrid) const {
    const auto zeros = [&](const char* key) {
      const auto list = gguf_.get_ints(prefix_ + key);
      return list && list->size() > 1 && std::ranges::count(*list, 0) > 0;
    };
    const bool states_only = architecture_ == "mamba" || architecture_ == "mamba2";
    if (zeros("attention.head_count_kv") && !hybrid && !states_only &&
        !architecture_.starts_with("lfm2"))
      return unsupported("GGUF: layers without attention in '{}' are not supported", architecture_);
    if (zeros("feed_forward_length") && architecture_ != "nemotron_h")
      return unsupported("GGUF: layers without an MLP in '{}' are not supported", architecture_);
    return {};
  }

  // What other models honour, and ours of these architectures do not.
  Status honoured(bool scaled) const {
    const auto refuse = [&](const char* key) {
      return unsupported("GGUF: '{}{}' is not supported in this architecture", prefix_, key);
    };
    for (const char* key : {"attn_logit_softcapping", "final_logit_softcapping",
                            "attention.sliding_window", "moe_latent_size"}) {
      if (gguf_.get_f32(prefix_ + key).value_or(0) != 0 || get(key).value_or(0) != 0)
        return refuse(key);
    }
    for (const char* key :
         {"attention.scale", "embedding_scale", "residual_scale", "logit_scale"}) {
      if (!scaled && gguf_.get_f32(prefix_ + key).value_or(0) != 0) return refuse(key);
    }
    const float weights = gguf_.get_f32(prefix_ + "expert_weights_scale").value_or(1);
    if (weights != 0 && weights != 1) return refuse("expert_weights_scale");
    if (get("expert_group_count").value_or(1) > 1) return refuse("expert_group_count");
    if (get("expert_gating_func").value_or(1) > 1) return refuse("expert_gating_func");
    const auto keys = get("attention.key_length");
    const auto values = get("attention.value_length");
    if (keys && values && *keys != *values) return refuse("attention.value_length");
    return {};
  }

  // All layers of a kind have biases, or none; the first layers are of different kinds.
  Status biases() {
    const auto any = [&](std::string_view tensor) {
      for (int64_t i = 0; i < layers(); ++i) {
        if (has(i, tensor)) return true;
      }
      return false;
    };
    const bool q = any("attn_q.bias"), out = any("attn_output.bias");
    if (q != out)
      return unsupported("GGUF: biases of some projections of attention are not supported in '{}'",
                         architecture_);
    if (any("ssm_in.bias") || any("ssm_out.bias"))
      return unsupported("GGUF: biases of the projections of states are not supported in '{}'",
                         architecture_);
    set("attention_bias", q);
    set("mlp_bias", any("ffn_down.bias"));
    conv_bias_ = any("ssm_conv1d.bias");
    return {};
  }

  Status sizes(bool groups) {
    for (const auto& [key, to] : {std::pair{"ssm.inner_size", &inner_},
                                  {"ssm.time_step_rank", &rank_},
                                  {"ssm.state_size", &state_},
                                  {"ssm.conv_kernel", &taps_},
                                  {"ssm.group_count", &groups_}}) {
      *to = get(key).value_or(0);
      if (*to <= 0 && (groups || to != &groups_))
        return invalid_argument("GGUF: '{}{}' is missing", prefix_, key);
    }
    if (groups && inner_ % rank_ != 0)
      return invalid_argument("GGUF: '{}ssm.inner_size' is {}, which {} heads do not divide",
                              prefix_, inner_, rank_);
    return {};
  }

  void short_convolutions() {
    const auto heads = gguf_.get_ints(prefix_ + "attention.head_count_kv");
    json::Array types;
    for (const int64_t count : heads.value_or(std::vector<int64_t>{}))
      types.emplace_back(count == 0 ? "conv" : "full_attention");
    if (types.size() > 1) set("layer_types", std::move(types));
    copy("shortconv.l_cache", "conv_L_cache");
    set("block_auto_adjust_ff_dim", false);  // the file has the width as it is
  }

  Result<std::string_view> mamba() {
    out_.erase("num_attention_heads");
    out_.erase("intermediate_size");
    const int64_t inner = get("ssm.inner_size").value_or(0);
    const int64_t rank = get("ssm.time_step_rank").value_or(0);
    if (inner <= 0 || rank <= 0)
      return invalid_argument("GGUF: '{}ssm.inner_size' and '{}ssm.time_step_rank' are missing",
                              prefix_, prefix_);
    copy("ssm.conv_kernel", "conv_kernel");
    copy("ssm.state_size", "state_size");
    copy("ssm.group_count", "n_groups");
    set("use_conv_bias", has(0, "ssm_conv1d.bias"));
    set("use_bias", has(0, "ssm_in.bias"));
    if (architecture_ == "mamba2") {
      set("num_heads", rank);
      set("head_dim", inner / rank);
      return std::string_view();
    }
    set("intermediate_size", inner);
    set("time_step_rank", rank);
    const bool normed = flag("ssm.dt_b_c_rms", false);
    return std::string_view(normed ? "falcon_mamba" : "");
  }

  // Their layers by a list, or by an interval. Qwen3.5's value heads are tiled over the key heads.
  Status delta_nets() {
    if (checkpoint_.tower() != nullptr)
      return unsupported("GGUF: pictures for '{}' are not supported: leave out --mmproj",
                         architecture_);
    set("linear_num_key_heads", groups_);
    set("linear_num_value_heads", rank_);
    set("linear_key_head_dim", state_);
    set("linear_value_head_dim", inner_ / rank_);
    set("linear_conv_kernel_dim", taps_);
    if (rank_ % groups_ != 0)
      return invalid_argument("GGUF: '{}ssm.time_step_rank' is {}, no multiple of {} groups",
                              prefix_, rank_, groups_);
    set("tiled_value_heads", architecture_ != "qwen3next" && rank_ > groups_);
    const std::vector<int64_t> listed = per_layer("attention.recurrent_layers");
    const bool has_list = gguf_.find(prefix_ + "attention.recurrent_layers") != nullptr;
    const int64_t interval = std::max<int64_t>(1, get("full_attention_interval").value_or(4));
    json::Array types;
    for (int64_t i = 0; i < layers(); ++i) {
      const bool state = has_list ? listed[static_cast<size_t>(i)] != 0 : (i + 1) % interval != 0;
      types.emplace_back(state ? "linear_attention" : "full_attention");
    }
    set("layer_types", std::move(types));
    if (!get("rope.dimension_count")) whole_rotation();
    if (get("expert_count").value_or(0) > 0 && !get("expert_shared_feed_forward_length"))
      return shared_width();
    return {};
  }

  // Readers take the whole head's size where a file does not say how much of it rotates.
  void whole_rotation() {
    if (const json::Value* dim = out_.find("head_dim")) {
      const json::Value copy = *dim;
      set("rotary_dim", copy);
    }
  }

  // The shared expert's width, where a file leaves it to the tensor.
  Status shared_width() {
    const loader::TensorSource* const up = checkpoint_.find("blk.0.ffn_up_shexp.weight");
    set("shared_expert_intermediate_size",
        up != nullptr && up->shape.size() == 2 ? up->shape.front() : int64_t{0});
    return {};
  }

  // Mamba-2 under the keys of read_mamba2().
  void mamba2() {
    set("mamba_n_heads", rank_);
    set("mamba_d_head", inner_ / rank_);
    set("mamba_d_ssm", inner_);
    set("mamba_n_groups", groups_);
    set("mamba_d_state", state_);
    set("mamba_d_conv", taps_);
    set("mamba_conv_bias", conv_bias_);
    set("mamba_proj_bias", false);
  }

  // Granite 4, and Bamba, which rotates queries and keys.
  Status granite() {
    mamba2();
    json::Array types;
    for (const int64_t heads : per_layer("attention.head_count_kv"))
      types.emplace_back(heads == 0 ? "linear_attention" : "full_attention");
    set("layer_types", std::move(types));
    const bool rotates = flag("rope.scaling.finetuned", true);
    set("position_embedding_type", rotates ? "rope" : "nope");
    if (!get("rope.dimension_count")) whole_rotation();
    const bool experts = get("expert_count").value_or(0) > 0;
    const char* const width = experts ? "expert_shared_feed_forward_length" : "feed_forward_length";
    if (get(width).value_or(0) <= 0)
      return invalid_argument("GGUF: '{}{}' is missing", prefix_, width);
    set("shared_intermediate_size", *get(width));
    set("num_local_experts", get("expert_count").value_or(0));
    if (out_.find("attention_multiplier") == nullptr) set("attention_multiplier", usual_scale());
    return {};
  }

  Status nemotron() {
    const std::vector<int64_t> heads = per_layer("attention.head_count_kv");
    const std::vector<int64_t> widths = per_layer("feed_forward_length");
    json::Array kinds;
    for (size_t i = 0; i < heads.size(); ++i) {
      if (heads[i] != 0 && widths[i] != 0)
        return unsupported("GGUF: layer {} has both attention and an MLP, which is not supported",
                           i);
      kinds.emplace_back(widths[i] != 0 ? "mlp" : heads[i] != 0 ? "attention" : "mamba");
    }
    set("layers_block_type", std::move(kinds));
    set("mamba_num_heads", rank_);
    set("mamba_head_dim", inner_ / rank_);
    set("n_groups", groups_);
    set("ssm_state_size", state_);
    set("conv_kernel", taps_);
    set("use_conv_bias", conv_bias_);
    return {};
  }

  // The multipliers are in the weights.
  void falcon() {
    mamba2();
    set("mamba_rms_norm", has(0, "ssm_norm.weight"));
    set("mamba_norm_before_gate", false);
  }

  Status jamba() {
    set("mamba_d_state", state_);
    set("mamba_d_conv", taps_);
    set("mamba_dt_rank", rank_);
    set("mamba_conv_bias", conv_bias_);
    const int64_t hidden = get("embedding_length").value_or(0);
    if (hidden <= 0 || inner_ % hidden != 0)
      return unsupported("GGUF: '{}ssm.inner_size' is {}, no multiple of the model's width {}",
                         prefix_, inner_, hidden);
    set("mamba_expand", inner_ / hidden);
    std::vector<bool> attends, sparse;
    for (const int64_t heads : per_layer("attention.head_count_kv")) {
      sparse.push_back(has(std::ssize(attends), "ffn_gate_inp.weight"));
      attends.push_back(heads != 0);
    }
    FRESHET_RETURN_IF_ERROR(period(attends, "attn_layer", "attention"));
    if (std::ranges::count(sparse, true) == 0) {
      set("num_experts", 1);
      return {};
    }
    return period(sparse, "expert_layer", "experts");
  }

  // Every how many layers one is of a kind, and the first of them.
  Status period(const std::vector<bool>& layers, const std::string& key, const char* what) {
    const auto count = std::ssize(layers);
    const auto first = std::ranges::find(layers, true) - layers.begin();
    int64_t next = first + 1;
    while (next < count && !layers[static_cast<size_t>(next)]) ++next;
    // One that comes once may come again behind the end.
    const int64_t every = next < count ? next - first : std::max<int64_t>(count, 1);
    for (int64_t i = 0; i < count; ++i) {
      const bool wanted = i >= first && (i - first) % every == 0;
      if (layers[static_cast<size_t>(i)] != wanted || first >= every)
        return unsupported("GGUF: {} in irregular layers is not supported in '{}'", what,
                           architecture_);
    }
    set(key + "_period", every);
    set(key + "_offset", first);
    return {};
  }

  int64_t inner_ = 0, rank_ = 0, state_ = 0, taps_ = 0, groups_ = 0;
  bool conv_bias_ = false;
};

}  // namespace

Result<std::string_view> complete_states(const loader::Checkpoint& checkpoint,
                                         std::string_view architecture, json::Object& config) {
  return States(checkpoint, architecture, config).complete();
}

}  // namespace freshet::models

#include "models/gguf_config.h"

#include <algorithm>
#include <string>
#include <utility>

#include "models/gguf_families.h"

namespace freshet::models {
namespace {

struct KeyName {
  std::string_view gguf;  // after "<architecture>."
  std::string_view config;
};

constexpr KeyName kWholeNumbers[] = {
    {"vocab_size", "vocab_size"},
    {"context_length", "max_position_embeddings"},
    {"embedding_length", "hidden_size"},
    {"block_count", "num_hidden_layers"},
    {"feed_forward_length", "intermediate_size"},
    {"attention.head_count", "num_attention_heads"},
    {"attention.head_count_kv", "num_key_value_heads"},
    {"attention.key_length", "head_dim"},
    {"attention.sliding_window", "sliding_window"},
    {"attention.q_lora_rank", "q_lora_rank"},
    {"attention.kv_lora_rank", "kv_lora_rank"},
    {"rope.dimension_count", "rotary_dim"},
    {"expert_count", "num_experts"},
    {"expert_used_count", "num_experts_per_tok"},
    {"expert_feed_forward_length", "moe_intermediate_size"},
    {"expert_shared_feed_forward_length", "shared_expert_intermediate_size"},
    {"expert_shared_count", "n_shared_experts"},
    {"expert_group_count", "n_group"},
    {"expert_group_used_count", "topk_group"},
    {"leading_dense_block_count", "first_k_dense_replace"},
    {"interleave_moe_layer_step", "interleave_moe_layer_step"},
};

constexpr KeyName kNumbers[] = {
    {"attention.layer_norm_rms_epsilon", "rms_norm_eps"},
    {"attention.layer_norm_epsilon", "layer_norm_eps"},
    {"attention.scale", "attention_multiplier"},
    {"attn_logit_softcapping", "attn_logit_softcapping"},
    {"final_logit_softcapping", "final_logit_softcapping"},
    {"rope.freq_base", "rope_theta"},
    {"rope.freq_base_swa", "rope_local_base_freq"},
    {"embedding_scale", "embedding_multiplier"},
    {"residual_scale", "residual_multiplier"},
    {"logit_scale", "logit_scale"},
    {"expert_weights_scale", "routed_scaling_factor"},
};

constexpr KeyName kFlags[] = {
    {"expert_weights_norm", "norm_topk_prob"},
    {"use_parallel_residual", "use_parallel_residual"},
};

class Translator {
 public:
  Translator(const loader::Checkpoint& checkpoint, std::string_view architecture)
      : checkpoint_(checkpoint),
        gguf_(*checkpoint.gguf()),
        prefix_(std::string(architecture) + ".") {}

  Result<json::Value> translate(std::string_view architecture) {
    for (const KeyName& key : kWholeNumbers) FRESHET_RETURN_IF_ERROR(whole_number(key));
    for (const KeyName& key : kNumbers) {
      // By the shortest decimal, so that 1e-5 stays 1e-5 and does not become its nearest float.
      if (const auto n = gguf_.get_f32(prefix_ + std::string(key.gguf))) {
        out_[key.config] = json::Value(shortest(*n));
      }
    }
    for (const KeyName& key : kFlags) {
      if (const auto flag = gguf_.get_bool(prefix_ + std::string(key.gguf))) {
        out_[key.config] = json::Value(*flag);
      }
    }
    what_tensors_show();
    FRESHET_RETURN_IF_ERROR(complete_family(checkpoint_, architecture, out_));
    rope_scaling(architecture);
    return json::Value(std::move(out_));
  }

 private:
  static double shortest(float f) { return std::stod(fmt::format("{}", f)); }
  bool has(std::string_view tensor) const { return checkpoint_.find(tensor) != nullptr; }
  std::optional<int64_t> get(std::string_view key) const {
    return gguf_.get_int(prefix_ + std::string(key));
  }
  std::optional<float> number(std::string_view key) const {
    return gguf_.get_f32(prefix_ + std::string(key));
  }

  // Some writers store one value for each layer; we run models in which they agree.
  Status whole_number(const KeyName& key) {
    const std::string name = prefix_ + std::string(key.gguf);
    const auto values = gguf_.get_ints(name);
    if (!values || values->empty()) return {};
    // Layers without attention have no heads of keys, and those without an MLP no width
    // (models/gguf_states.h).
    const bool absent = key.gguf == "attention.head_count_kv" || key.gguf == "feed_forward_length";
    int64_t value = values->front();
    for (const int64_t v : *values) value = absent ? std::max(value, v) : value;
    for (const int64_t v : *values) {
      if (v != value && !(absent && v == 0)) {
        return unsupported("GGUF: '{}' differs between layers, which is not supported", name);
      }
    }
    out_[key.config] = json::Value(value);
    return {};
  }

  void what_tensors_show() {
    out_["tie_word_embeddings"] = json::Value(!has("output.weight"));
    const bool qkv_bias =
        has("blk.0.attn_q.bias") || has("blk.0.attn_qkv.bias") || has("blk.0.attn_kv_a_mqa.bias");
    for (const char* key : {"attention_bias", "use_qkv_bias", "qkv_bias"})
      out_[key] = json::Value(qkv_bias);
    out_["attention_out_bias"] = json::Value(has("blk.0.attn_output.bias"));
    const bool mlp_bias = has("blk.0.ffn_down.bias");
    for (const char* key : {"mlp_bias", "use_bias"}) out_[key] = json::Value(mlp_bias);
    const bool qk_norm = has("blk.0.attn_q_norm.weight");
    for (const char* key : {"use_qk_norm", "qk_layernorm"}) out_[key] = json::Value(qk_norm);
    if (out_.find("use_parallel_residual") == nullptr) {
      out_["use_parallel_residual"] = json::Value(!has("blk.0.ffn_norm.weight"));
    }
    const loader::TensorSource* embedding = checkpoint_.find("token_embd.weight");
    if (embedding != nullptr && embedding->shape.size() == 2) {
      out_["vocab_size"] = json::Value(embedding->shape[0]);
    }
  }

  void rope_scaling(std::string_view architecture) {
    json::Object rope;
    const auto sections = gguf_.get_ints(prefix_ + "rope.dimension_sections");
    if (checkpoint_.tower() != nullptr && sections && sections->size() >= 3) {
      // Time, rows and columns; a fourth axis is not used.
      rope["rope_type"] = json::Value("default");
      rope["mrope_section"] =
          json::Value(json::Array{(*sections)[0], (*sections)[1], (*sections)[2]});
    }
    if (const auto factors = factors_of("rope_freqs.weight")) {
      rope["rope_type"] = json::Value("factors");
      rope["short_factor"] = *factors;
    }
    const auto type = gguf_.get_string(prefix_ + "rope.scaling.type");
    const auto factor = number("rope.scaling.factor");
    if (type && *type == "linear" && factor) {
      rope["rope_type"] = json::Value("linear");
      rope["factor"] = json::Value(shortest(*factor));
    }
    if (type && *type == "yarn" && factor) yarn(rope, *factor, architecture);
    const auto long_factors = factors_of("rope_factors_long.weight");
    const auto short_factors = factors_of("rope_factors_short.weight");
    if (long_factors && short_factors) {
      rope["rope_type"] = json::Value("longrope");
      rope["long_factor"] = *long_factors;
      rope["short_factor"] = *short_factors;
      if (const auto f = number("rope.scaling.attn_factor"))
        rope["attention_factor"] = json::Value(*f);
    }
    if (rope.empty()) return;
    if (const auto original = get("rope.scaling.original_context_length")) {
      rope["original_max_position_embeddings"] = json::Value(*original);
    }
    out_["rope_scaling"] = json::Value(std::move(rope));
  }

  void yarn(json::Object& rope, float factor, std::string_view architecture) {
    rope["rope_type"] = json::Value("yarn");
    rope["factor"] = json::Value(shortest(factor));
    if (architecture == "gpt-oss") rope["truncate"] = json::Value(false);
    if (const auto f = number("rope.scaling.yarn_beta_fast"))
      rope["beta_fast"] = json::Value(shortest(*f));
    if (const auto f = number("rope.scaling.yarn_beta_slow"))
      rope["beta_slow"] = json::Value(shortest(*f));
    // 0.1 * mscale_all_dim, which equals mscale in the models that have it.
    if (const auto f = number("rope.scaling.yarn_log_multiplier"); f && *f != 0) {
      rope["mscale"] = rope["mscale_all_dim"] = json::Value(10 * shortest(*f));
    }
  }

  std::optional<json::Value> factors_of(std::string_view tensor) const {
    const loader::TensorSource* source = checkpoint_.find(tensor);
    if (source == nullptr) source = checkpoint_.find("blk.0." + std::string(tensor));
    if (source == nullptr || !source->format || source->elements() > 4096) return std::nullopt;
    const quant::FormatInfo& info = quant::info(*source->format);
    if (source->elements() % info.block_size != 0) return std::nullopt;
    std::vector<float> values(static_cast<size_t>(source->elements()));
    info.decode(source->data, values.data(), source->elements());
    json::Array list;
    for (const float v : values) list.emplace_back(static_cast<double>(v));
    return json::Value(std::move(list));
  }

  const loader::Checkpoint& checkpoint_;
  const loader::GgufFile& gguf_;
  std::string prefix_;
  json::Object out_;
};

}  // namespace

Result<json::Value> gguf_config(const loader::Checkpoint& checkpoint) {
  FRESHET_CHECK(checkpoint.gguf() != nullptr, "not a GGUF checkpoint");
  const auto architecture = checkpoint.gguf()->get_string("general.architecture");
  if (!architecture) return invalid_argument("GGUF: 'general.architecture' is missing");
  if (*architecture == "clip") {
    return invalid_argument(
        "{} is a tower for pictures: give the model's own file, and this one with --mmproj",
        checkpoint.path());
  }
  return Translator(checkpoint, *architecture).translate(*architecture);
}

}  // namespace freshet::models

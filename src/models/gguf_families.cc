#include "models/gguf_families.h"

#include <string>
#include <utility>

#include "models/gguf_keys.h"
#include "models/gguf_states.h"

namespace freshet::models {
namespace {

// Architectures that are not called as the model type is. Those in the second part are other
// families of the same form.
constexpr std::pair<std::string_view, std::string_view> kTypes[] = {
    {"qwen2moe", "qwen2_moe"},
    {"qwen3moe", "qwen3_moe"},
    {"gemma3", "gemma3_text"},
    {"gptneox", "gpt_neox"},
    {"command-r", "cohere"},
    {"gpt-oss", "gpt_oss"},
    {"deepseek2", "deepseek_v2"},
    {"llama4", "llama4_text"},
    {"glm4moe", "glm4_moe"},
    {"ernie4_5-moe", "ernie4_5_moe"},
    {"hunyuan-dense", "hunyuan_v1_dense"},
    {"minimax-m2", "minimax_m2"},
    {"phi2", "phi"},
    {"starcoder", "gpt_bigcode"},
    {"nomic-bert", "nomic_bert"},
    {"modern-bert", "modernbert"},
    {"lfm2moe", "lfm2_moe"},
    {"qwen3next", "qwen3_next"},
    {"qwen35", "qwen3_5_text"},
    {"qwen35moe", "qwen3_5_moe_text"},
    {"granitehybrid", "granitemoehybrid"},
    {"falcon-h1", "falcon_h1"},

    {"internlm2", "llama"},
    {"xverse", "llama"},
    {"minicpm", "granite"},
    {"qwen", "qwen2"},
    {"qwen2vl", "qwen2"},
    {"qwen3vl", "qwen3"},
    {"qwen3vlmoe", "qwen3_moe"},
};

class Family : GgufKeys {
 public:
  using GgufKeys::GgufKeys;

  Status complete() {
    FRESHET_RETURN_IF_ERROR(counts());
    type_ = architecture_;
    for (const auto& [gguf, type] : kTypes) {
      if (gguf == architecture_) type_ = type;
    }
    layers();
    if (architecture_ == "llama" && get("attention.sliding_window")) type_ = "mistral";
    if (architecture_ == "llama" && get("expert_count").value_or(0) > 0) type_ = "mixtral";
    if (architecture_ == "olmo2" && get("attention.sliding_window")) type_ = "olmo3";
    if (architecture_ == "deepseek2") deepseek();
    // With pictures, tokens have positions on three axes.
    if (checkpoint_.tower() != nullptr && architecture_ == "qwen2vl") type_ = "qwen2_vl_text";
    if (checkpoint_.tower() != nullptr && architecture_ == "qwen3vl") type_ = "qwen3_vl_text";
    if (checkpoint_.tower() != nullptr && architecture_ == "qwen3vlmoe")
      type_ = "qwen3_vl_moe_text";
    if (architecture_ == "gemma2" || architecture_ == "gemma3") query_scale();
    FRESHET_RETURN_IF_ERROR(experts());
    FRESHET_RETURN_IF_ERROR(attention());
    encoders();
    FRESHET_ASSIGN_OR_RETURN(const std::string_view stateful,
                             complete_states(checkpoint_, architecture_, out_));
    if (!stateful.empty()) type_ = stateful;
    if (architecture_ == "qwen") halve_mlp();
    if (architecture_ == "minicpm") FRESHET_RETURN_IF_ERROR(scales());
    out_["model_type"] = json::Value(type_);
    return {};
  }

 private:
  // Every layer costs work before its tensors are looked for. What layers have of their own has one
  // number for each.
  Status counts() const {
    constexpr int64_t kMostBlocks = 4096;
    const int64_t blocks = get("block_count").value_or(0);
    if (blocks < 1 || blocks > kMostBlocks)
      return invalid_argument("GGUF: '{}block_count' must be a number from 1 to {}", prefix_,
                              kMostBlocks);
    const auto behind = get("nextn_predict_layers");
    if (behind && (*behind < 0 || *behind >= blocks))
      return invalid_argument("GGUF: '{}nextn_predict_layers' is {}, of {} blocks", prefix_,
                              *behind, blocks);
    for (const char* key : {"attention.head_count", "attention.head_count_kv",
                            "feed_forward_length", "attention.recurrent_layers"}) {
      const loader::GgufValue* const list = gguf_.find(prefix_ + key);
      if (list != nullptr && list->is_array && list->count != static_cast<uint64_t>(blocks))
        return invalid_argument("GGUF: '{}{}' has {} numbers for {} blocks", prefix_, key,
                                list->count, blocks);
    }
    return {};
  }

  // The layers behind the last one predict further tokens; and which layers are local.
  void layers() {
    const int64_t all = get("block_count").value_or(0);
    const int64_t decoder = all - get("nextn_predict_layers").value_or(0);
    if (decoder > 0) set("num_hidden_layers", decoder);
    const auto pattern = gguf_.get_ints(prefix_ + "attention.sliding_window_pattern");
    if (!pattern || pattern->empty()) return;
    if (pattern->size() == 1) return set("sliding_window_pattern", pattern->front());
    json::Array types;
    for (const int64_t local : *pattern) {
      types.emplace_back(local != 0 ? "sliding_attention" : "full_attention");
    }
    set("layer_types", std::move(types));
  }

  void deepseek() {
    latent_attention();
    // Scores by sigmoid (2) and their correction came with V3.
    const std::string first = std::to_string(get("leading_dense_block_count").value_or(0));
    if (get("expert_gating_func").value_or(1) == 2 || has("blk." + first + ".exp_probs_b.bias")) {
      type_ = "deepseek_v3";
    }
    if (type_ == "deepseek_v2" && get("expert_group_count").value_or(1) > 1) {
      set("topk_method", "group_limited_greedy");
    }
  }

  // Files made for the absorbed form give the latent's size as the key length, and the heads' own
  // sizes under other names.
  void latent_attention() {
    const int64_t rope = get("rope.dimension_count").value_or(64);
    const int64_t key =
        get("attention.key_length_mla").value_or(get("attention.key_length").value_or(0));
    const auto value = get("attention.value_length_mla");
    set("qk_rope_head_dim", rope);
    if (key > rope) set("qk_nope_head_dim", key - rope);
    if (const auto v = value ? value : get("attention.value_length")) set("v_head_dim", *v);
    if (out_.find("q_lora_rank") == nullptr) set("q_lora_rank", nullptr);
    if (const json::Value* heads = out_.find("num_attention_heads")) {
      const json::Value copy = *heads;
      set("num_key_value_heads", copy);
    }
    out_.erase("head_dim");
  }

  // The file does not give the scale of queries: the 27B models divide by the square root of hidden
  // / heads, and all others by that of the head's size.
  void query_scale() {
    const int64_t layers = get("block_count").value_or(0);
    const int64_t heads = get("attention.head_count").value_or(0);
    const int64_t hidden = get("embedding_length").value_or(0);
    const int64_t head_dim = get("attention.key_length").value_or(0);
    const bool large = (layers == 46 || layers == 62) && heads > 0;
    const int64_t scale = large ? hidden / heads : head_dim;
    if (scale > 0) set("query_pre_attn_scalar", scale);
  }

  Status experts() {
    if (architecture_.starts_with("qwen3")) {  // llama.cpp always normalises these
      if (!flag("expert_weights_norm", true))
        return unsupported("GGUF: '{}expert_weights_norm' = false is not supported", prefix_);
      set("norm_topk_prob", true);
    }
    if (architecture_ == "gpt-oss" && out_.find("moe_intermediate_size") != nullptr) {
      const json::Value copy = *out_.find("moe_intermediate_size");
      set("intermediate_size", copy);
    }
    if (type_ == "phimoe") set("lm_head_bias", has("output.bias"));
    // Maverick, with 128 experts, has no norms on queries and keys.
    if (type_ == "llama4_text") set("use_qk_norm", get("expert_count").value_or(0) != 128);
    return {};
  }

  Status attention() {
    // This key tells whether a Granite rotates queries and keys.
    const bool granite = architecture_ == "granite" || architecture_ == "granitemoe";
    if (granite && !flag("rope.scaling.finetuned", true))
      return unsupported("GGUF: '{}rope.scaling.finetuned' = false (no RoPE) is not supported",
                         prefix_);
    const bool bias = has("blk.0.attn_qkv.bias");
    if (type_ == "falcon") {
      set("new_decoder_architecture", true);
      set("num_ln_in_parallel_attn", has("blk.0.attn_norm_2.weight") ? 2 : 1);
      set("bias", bias);
    }
    if (type_ == "gpt_bigcode") set("multi_query", get("attention.head_count_kv").value_or(1) == 1);
    if (type_ == "exaone4" && !get("attention.sliding_window")) set("sliding_window", nullptr);
    return {};
  }

  // In ModernBERT both kinds of layers have a rope of their own, and the window counts both sides.
  void encoders() {
    if (const loader::TensorSource* types = checkpoint_.find("token_types.weight"))
      set("type_vocab_size", types->shape.size() == 2 ? types->shape.front() : int64_t{1});
    if (type_ != "modernbert") return;
    const auto base = [&](const char* key, double fallback) {
      const auto given = gguf_.get_f32(prefix_ + key);
      return given ? static_cast<double>(*given) : fallback;
    };
    set("global_rope_theta", base("rope.freq_base", 160000.0));
    set("local_rope_theta", base("rope.freq_base_swa", 10000.0));
    set("local_attention", get("attention.sliding_window").value_or(128));
    for (const char* key : {"rope_theta", "rope_local_base_freq", "sliding_window"})
      out_.erase(key);
  }

  // feed_forward_length counts gate and up together.
  void halve_mlp() {
    const loader::TensorSource* up = checkpoint_.find("blk.0.ffn_up.weight");
    if (up != nullptr && up->shape.size() == 2) set("intermediate_size", up->shape[0]);
  }

  // MiniCPM is Granite with the usual scale of queries.
  Status scales() {
    for (const char* key : {"embedding_scale", "residual_scale", "logit_scale"}) {
      if (gguf_.find(prefix_ + key) == nullptr) {
        return unsupported("GGUF: '{}{}' is missing: convert the model with a newer converter",
                           prefix_, key);
      }
    }
    set("attention_multiplier", usual_scale());
    return {};
  }

  std::string_view type_;
};

}  // namespace

Status complete_family(const loader::Checkpoint& checkpoint, std::string_view architecture,
                       json::Object& config) {
  return Family(checkpoint, architecture, config).complete();
}

}  // namespace freshet::models

#include "models/decoder_config.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace freshet::models {

ModelSpec decoder_spec(Config& c, std::string_view name, const DecoderDefaults& d) {
  ModelSpec spec;
  spec.architecture = name;
  spec.vocab_size = c.size({"vocab_size"}, d.vocab);
  spec.hidden_size = c.size({"n_embd", "hidden_size"}, d.hidden);
  spec.embedding_size = spec.hidden_size;
  spec.max_context = c.length({"n_positions", "max_position_embeddings"}, d.context);
  spec.tied_embeddings = c.flag({"tie_word_embeddings"}, d.tied);

  NormSpec norm;
  norm.kind = d.norm;
  norm.bias = d.norm_bias;
  norm.eps = static_cast<float>(c.number(
      {"rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"}, d.eps));
  spec.final_norm = norm;

  AttentionSpec a;
  a.heads = c.size({"n_head", "num_attention_heads"}, d.heads);
  a.kv_heads = c.size({"num_key_value_heads"}, d.kv_heads > 0 ? d.kv_heads : a.heads);
  a.head_dim = c.size({"head_dim"}, d.head_dim > 0 ? d.head_dim : spec.hidden_size / a.heads);
  a.value_dim = a.head_dim;
  a.scale = static_cast<float>(1.0 / std::sqrt(a.head_dim));
  a.qk_norm_spec = norm;
  if (d.rotary) {
    RopeDefaults rope = d.rope;
    rope.max_context = spec.max_context;
    spec.ropes.push_back(read_rope(c, a.head_dim, rope));
    a.rope = 0;
  }
  MlpSpec mlp;
  mlp.gated = d.gated;
  mlp.ff = c.size({"n_inner", "ffn_dim", "intermediate_size"}, d.ff);
  const Keys activation = {"hidden_activation", "hidden_act", "activation_function"};
  mlp.xielu = c.text(activation, d.activation) == "xielu";
  if (mlp.xielu && d.gated) c.fail(unsupported("xIELU in a gated MLP is not supported"));
  if (!mlp.xielu) mlp.activation = c.activation(activation, d.activation);
  int layers = c.size({"n_layer", "num_hidden_layers"}, d.layers);
  if (layers > 4096) {
    c.fail(invalid_argument("the configuration asks for {} layers", layers));
    layers = 1;  // architectures read the first one before errors are checked
  }
  spec.layers.assign(static_cast<size_t>(layers), {{{{.in = norm}, a}, {{.in = norm}, mlp}}});
  return spec;
}

void set_windows(Config& c, ModelSpec& spec, int window, const std::function<bool(int)>& sliding) {
  if (window >= spec.max_context) window = 0;
  const std::vector<std::string> types = c.texts({"layer_types"});
  if (!types.empty() && types.size() < spec.layers.size()) {
    c.fail(invalid_argument("the configuration's 'layer_types' lists {} of {} layers", types.size(),
                            spec.layers.size()));
    return;
  }
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    bool slides = types.empty() && sliding(static_cast<int>(i));
    if (!types.empty()) {
      slides = types[i] == "sliding_attention";
      if (!slides && types[i] != "full_attention") {
        c.fail(unsupported("unsupported kind of layer '{}'", types[i]));
        return;
      }
    }
    spec.layers[i].attention().window = slides ? window : 0;
  }
}

std::function<bool(int)> local_layers(Config& c, std::function<bool(int)> local) {
  std::vector<std::string> types = c.texts({"layer_types"});
  if (types.empty()) return local;
  return [types = std::move(types)](int layer) {
    return static_cast<size_t>(layer) < types.size() &&
           types[static_cast<size_t>(layer)] != "full_attention";
  };
}

std::function<bool(int)> rotating_layers(Config& c, const ModelSpec& spec) {
  std::vector<float> list = c.floats({"no_rope_layers"});
  const int interval = c.size({"no_rope_layer_interval"}, 4);
  if (list.empty()) return [interval](int layer) { return (layer + 1) % interval != 0; };
  if (list.size() < spec.layers.size()) {
    c.fail(invalid_argument("the configuration's 'no_rope_layers' lists {} of {} layers",
                            list.size(), spec.layers.size()));
    list.resize(spec.layers.size());
  }
  return [list = std::move(list)](int layer) { return list[static_cast<size_t>(layer)] != 0; };
}

void set_local_ropes(Config& c, ModelSpec& spec, double theta,
                     const std::function<bool(int)>& local) {
  const int head_dim = spec.layers.front().attention().head_dim;
  const int64_t context = spec.max_context;
  const RopeSpec full = read_rope(
      c, head_dim, {.theta = theta, .layer_type = "full_attention", .max_context = context});
  RopeSpec near;
  near.theta = full.theta;
  near.rotary_dim = full.rotary_dim;
  const json::Value* parameters = c.find({"rope_parameters"});
  if (parameters != nullptr && parameters->find("sliding_attention") != nullptr) {
    near = read_rope(c, head_dim,
                     {.theta = theta, .layer_type = "sliding_attention", .max_context = context});
  }
  spec.ropes = {full, near};
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    spec.layers[i].attention().rope = local(static_cast<int>(i)) ? 1 : 0;
  }
}

std::vector<bool> attention_layers(Config& c, const ModelSpec& spec, Keys attention, Keys states) {
  std::vector<bool> attends(spec.layers.size(), true);
  const std::vector<std::string> types = c.texts({"layer_types", "layers_block_type"});
  if (types.empty()) return attends;
  if (types.size() < spec.layers.size()) {
    c.fail(invalid_argument("the configuration's 'layer_types' lists {} of {} layers", types.size(),
                            spec.layers.size()));
    return attends;
  }
  for (size_t i = 0; i < attends.size(); ++i) {
    attends[i] = std::ranges::find(attention, types[i]) != attention.end();
    if (attends[i] || std::ranges::find(states, types[i]) != states.end()) continue;
    c.fail(unsupported("unsupported kind of layer '{}'", types[i]));
    return attends;
  }
  return attends;
}

std::vector<float> alibi_slopes(int heads, double max_bias) {
  const int whole = static_cast<int>(std::bit_floor(static_cast<unsigned>(heads)));
  std::vector<float> slopes;
  for (int h = 0; h < heads; ++h) {
    const double step = h < whole ? (h + 1.0) / whole : (2.0 * (h - whole) + 1.0) / (2.0 * whole);
    slopes.push_back(static_cast<float>(std::exp2(-max_bias * step)));
  }
  return slopes;
}

namespace {

// Branches of one kind become another; their norms stay.
template <class From>
void replace(LayerSpec& layer, const BranchBody& to) {
  for (BranchSpec& branch : layer.branches) {
    if (std::holds_alternative<From>(branch.body)) branch.body = to;
  }
}

}  // namespace

void set_experts(ModelSpec& spec, const MoeSpec& moe, const std::function<bool(int)>& sparse) {
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    if (sparse(static_cast<int>(i))) replace<MlpSpec>(spec.layers[i], moe);
  }
}

void set_latent_attention(Config& c, ModelSpec& spec, int q_rank) {
  const AttentionSpec& plain = spec.layers.front().attention();
  MlaSpec a;
  a.heads = plain.heads;
  a.rope = plain.rope;
  a.latent_norm = plain.qk_norm_spec;
  // A null rank means that queries are projected directly; only an absent key has the default.
  const json::Value* rank = c.find({"q_lora_rank"});
  a.q_rank = rank != nullptr || c.has_null("q_lora_rank") ? c.count({"q_lora_rank"}, 0) : q_rank;
  a.kv_rank = c.size({"kv_lora_rank"}, 512);
  a.nope_dim = c.size({"qk_nope_head_dim"}, 128);
  a.rope_dim = c.size({"qk_rope_head_dim"}, 64);
  a.value_dim = c.size({"v_head_dim"}, 128);
  a.scale = static_cast<float>(yarn_score_scale(c) / std::sqrt(a.head_dim()));
  a.qkv_bias = a.out_bias = c.flag({"attention_bias"}, false);
  // The rope was read for whole heads; only the rotated part has one.
  RopeDefaults rope;
  rope.interleaved = c.flag({"rope_interleave"}, true);
  rope.max_context = spec.max_context;
  spec.ropes = {read_rope(c, a.rope_dim, rope)};
  for (LayerSpec& layer : spec.layers) replace<AttentionSpec>(layer, a);
}

}  // namespace freshet::models

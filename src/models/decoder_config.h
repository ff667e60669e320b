// The part of a configuration that nearly all decoders share, read with an architecture's defaults.
// An architecture's file starts from it and changes the result.
#pragma once

#include <functional>
#include <string_view>

#include "layers/spec.h"
#include "models/config.h"
#include "models/rope_config.h"

namespace freshet::models {

// transformers' defaults of a model type.
struct DecoderDefaults {
  int vocab = 32000;
  int hidden = 4096;
  int layers = 32;
  int heads = 32;
  int kv_heads = 0;  // 0: as many as heads
  int head_dim = 0;  // 0: hidden / heads
  int ff = 11008;
  int64_t context = 2048;
  bool tied = false;
  ops::NormKind norm = ops::NormKind::kRms;
  bool norm_bias = false;
  double eps = 1e-6;
  bool gated = true;
  std::string_view activation = "silu";
  bool rotary = true;
  RopeDefaults rope;
};

// Layers of attention and an MLP, each behind a norm: full attention, one rope for all, no biases.
ModelSpec decoder_spec(Config& config, std::string_view name, const DecoderDefaults& defaults);

// Windows by `layer_types`, or by `sliding(layer)` if the list is absent. A window of 0 (no
// sliding_window) or one that no context exceeds means full attention.
void set_windows(Config& config, ModelSpec& spec, int window,
                 const std::function<bool(int)>& sliding);

// Whether a layer is local: by `layer_types`, or by `local(layer)` if the list is absent. Unlike a
// window, this does not depend on the context.
std::function<bool(int)> local_layers(Config& config, std::function<bool(int)> local);

// Whether a layer rotates queries and keys: by `no_rope_layers`, where 1 means that it does, or all
// but each `no_rope_layer_interval`-th (4).
std::function<bool(int)> rotating_layers(Config& config, const ModelSpec& spec);

// Two ropes, of full layers (index 0) and of local ones (1). A scaling applies to full ones only,
// unless `rope_parameters` has a part for each type.
void set_local_ropes(Config& config, ModelSpec& spec, double theta,
                     const std::function<bool(int)>& local);

// Which layers attend, in models whose other layers keep states: by `layer_types`, whose entries
// must be in one of the lists. All of them attend if the key is absent.
std::vector<bool> attention_layers(Config& config, const ModelSpec& spec, Keys attention,
                                   Keys states);

// ALiBi's slopes (arXiv:2108.12409): 2^(-max_bias (h + 1) / heads) for powers of two; other numbers
// of heads take those of the next lower power, and then every other one of twice as many.
std::vector<float> alibi_slopes(int heads, double max_bias = 8.0);

// Replaces the MLP of the layers for which `sparse(layer)` holds by experts.
void set_experts(ModelSpec& spec, const MoeSpec& moe, const std::function<bool(int)>& sparse);

// Latent attention in every layer (DeepSeek V2 and V3), with the ranks and sizes of the
// configuration. `q_rank` is the default.
void set_latent_attention(Config& config, ModelSpec& spec, int q_rank);

}  // namespace freshet::models

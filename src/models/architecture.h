// An architecture: how its configuration becomes a ModelSpec, and the names and layout of its
// weights. One source file each; architectures.h declares them, registry.cc lists them.
#pragma once

#include <span>
#include <string_view>

#include "layers/spec.h"
#include "models/config.h"
#include "models/weight_names.h"

namespace freshet::models {

// How one matrix holds the projections to queries, keys and values.
enum class FusedQkv {
  kStacked,   // all queries, all keys, all values
  kPerGroup,  // one key-value head after the other: its queries, its key, its value
};

struct Architecture {
  std::string_view type;  // config.json's model_type
  ModelSpec (*spec)(Config& config);
  std::span<const NameRule> names;               // in safetensors, if they differ from Llama's
  std::span<const NameRule> encoder_names = {};  // of an encoder-decoder's encoder
  std::span<const NameRule> gguf_names;          // in GGUF, if they differ from the common ones
  // Peculiarities of the published safetensors; GGUF has none of these.
  bool norms_less_one = false;       // norm weights are stored as w - 1
  bool transposed = false;           // linear layers are stored [in, out]
  bool experts_transposed = false;   // stacked experts are stored [in, out] ...
  bool experts_interleaved = false;  // ... and have a gate column before each up column
  bool up_before_gate = false;       // a fused gate and up projection begins with the up rows
  FusedQkv fused_qkv = FusedQkv::kStacked;
  // GGUF files have the rows of q and k in the order of interleaved rotation.
  bool gguf_interleaves = false;
};

}  // namespace freshet::models

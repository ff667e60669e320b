// A model's description as GGUF metadata.
//
// Keys are those of the GGUF specification and, for what it leaves open, of llama.cpp. Pure.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "layers/spec.h"
#include "loader/gguf_writer.h"

namespace freshet::quantizer {

// GGUF's name for a config.json model_type; an error where no GGUF layout is known for it.
Result<std::string> gguf_architecture(std::string_view model_type);

Status add_hyperparameters(const json::Value& config, const ModelSpec& spec,
                           const std::string& architecture, loader::GgufWriter& out);

// Llama 3's frequency divisors [rotary_dim / 2], which GGUF stores as a tensor.
std::vector<float> llama3_divisors(const RopeSpec& rope);

}  // namespace freshet::quantizer

// A model's hyperparameters as GGUF metadata.
//
// The keys are those of the GGUF specification or, if it defines none, those of llama.cpp. Pure.
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

// GGUF's architecture name for a config.json model_type; an error if no GGUF layout is known for
// it.
Result<std::string> gguf_architecture(std::string_view model_type, const ModelSpec& spec);

Status add_hyperparameters(const json::Value& config, const ModelSpec& spec,
                           const std::string& architecture, loader::GgufWriter& out);

// Llama 3's frequency divisors [rotary_dim / 2], which GGUF stores as a tensor.
std::vector<float> llama3_divisors(const RopeSpec& rope);

}  // namespace freshet::quantizer

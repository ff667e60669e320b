// How weights are quantised, as config.json says it. Pure.
#pragma once

#include <string>
#include <string_view>

#include "base/json.h"

namespace freshet::models {

// The "quantization_config" of the model, or of the text part of a multimodal one; nullptr if there
// is none.
const json::Value* quantization_config(const json::Value& config);

// A text in it, in lower case; `otherwise` if it has none.
std::string quantization_text(const json::Value& quantization, const std::string& key,
                              std::string_view otherwise);

// The values of "quant_method" whose weights are read, for errors.
inline constexpr std::string_view kQuantMethods =
    "gptq, awq, auto-round, compressed-tensors, fp8, modelopt, mxfp4 and bitsandbytes";

// The bits of integers that are packed into words; 4 if it does not say one of 2 to 8.
int quantization_bits(const json::Value& config);

}  // namespace freshet::models

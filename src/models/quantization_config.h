// What config.json says of how weights are quantised. Pure.
#pragma once

#include <string>
#include <string_view>

#include "base/json.h"

namespace freshet::models {

// "quantization_config" of the model, or of the text part of one of several kinds of input; nullptr
// where there is none.
const json::Value* quantization_config(const json::Value& config);

// A text in it, in lower case; `otherwise` where it has none.
std::string quantization_text(const json::Value& quantization, const std::string& key,
                              std::string_view otherwise);

// The bits of whole numbers that are packed into words; 4 where it does not say.
int quantization_bits(const json::Value& config);

}  // namespace freshet::models

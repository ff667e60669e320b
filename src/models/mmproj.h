// Towers in files of their own, as llama.cpp splits them off GGUF models ("mmproj"): their metadata
// as the configuration that towers.h reads, and as the settings of a picture processor.
//
// The keys are llama.cpp's, "clip.vision.*". Where these say too little (the width of MLPs in some
// files, biases), the tensors tell the rest. Pure; thread-safe.
#pragma once

#include "base/json.h"
#include "base/status.h"
#include "loader/checkpoint.h"

namespace freshet::models {

// The whole configuration of a model that may have a tower: config.json, or for GGUF files one with
// `model_type`, `vision_config` and the token of pictures; null without a tower. Errors: a tower of
// an unknown kind, or a vocabulary without a token for pictures.
Result<json::Value> whole_config(const loader::Checkpoint& checkpoint);

// What preprocessor_config.json would say. REQUIRES: checkpoint.tower().
Result<json::Value> mmproj_preprocessor(const loader::Checkpoint& checkpoint);

}  // namespace freshet::models

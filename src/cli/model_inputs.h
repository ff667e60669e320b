// Reads what a model is to be run on from a .safetensors file.
//
// Input i is the tensors ids_i (whole numbers, [tokens]) and token_type_ids_i, if there; i counts
// from 0 without gaps. Other tensors are left alone: files of reference outputs can be given as
// they are. Errors name the tensor.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace freshet::cli {

struct ModelInput {
  std::vector<int32_t> ids;
  std::vector<int32_t> token_type_ids;  // empty, or one for each id
};

Result<std::vector<ModelInput>> read_model_inputs(const std::string& path);

}  // namespace freshet::cli

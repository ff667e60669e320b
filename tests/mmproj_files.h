// A folder of a model that reads pictures as two GGUF files, in the form of llama.cpp's converter:
// the language model, and the tower ("mmproj"). The converter's rules are written out here, apart
// from the reader's: names of tensors, split projections and frames, norms as plain multipliers.
#pragma once

#include <string>

#include "base/status.h"

namespace freshet {

struct MmprojFiles {
  std::string model, tower;
};

// `folder` holds config.json, preprocessor_config.json and F32 or BF16 safetensors. All numbers are
// written as F32. The vocabulary has a name for the image token alone. `swapped`: as older
// converters wrote them, the MLPs' two matrices have each other's name.
Result<MmprojFiles> write_mmproj_files(const std::string& folder, const std::string& out,
                                       bool swapped = false);

}  // namespace freshet

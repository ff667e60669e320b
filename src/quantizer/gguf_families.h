// Metadata of GGUF files that only some families have, in the form that llama.cpp's own converter
// gives it; models/gguf_families.h is how it is read. Pure; thread-safe.
#pragma once

#include <string>

#include "base/json.h"
#include "base/status.h"
#include "layers/spec.h"
#include "loader/gguf_writer.h"
#include "models/weight_reader.h"

namespace freshet::quantizer {

// `architecture`: general.architecture. Errors: a form of the family for which the format has no
// place.
Status add_family(const json::Value& config, const ModelSpec& spec, const std::string& architecture,
                  loader::GgufWriter& out);

// In what llama.cpp, which reads the file, computes something else than the model; empty: nothing.
std::string missed_by_readers(const ModelSpec& spec, const std::string& architecture);

// The slopes of xIELU, which are tensors in safetensors and lists in GGUF's metadata.
Status add_xielu(const models::WeightReader& reader, const ModelSpec& spec,
                 loader::GgufWriter& out);

}  // namespace freshet::quantizer

// The list of architectures, and reading a specification from a bare configuration.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "layers/model.h"
#include "loader/checkpoint.h"
#include "models/architecture.h"

namespace freshet::models {

std::span<const Architecture> architectures();
// Their model_types, sorted, for people.
std::vector<std::string> architecture_names();

// An error names a type that is not in the list.
Result<const Architecture*> find_architecture(const json::Value& config);
// config: config.json's contents, or what gguf_config() makes.
Result<ModelSpec> read_spec(const json::Value& config);

// The configuration of a checkpoint's decoder, as read_spec() takes it.
Result<json::Value> config_of(const loader::Checkpoint& checkpoint);

// A checkpoint's architecture and specification.
struct Description {
  const Architecture* architecture = nullptr;
  ModelSpec spec;
};
Result<Description> describe(const loader::Checkpoint& checkpoint);

// load_model() for a device: `host` runs the ends of a tower for pictures, whose layers run on
// `ops`. It must outlive the model.
Result<std::unique_ptr<Model>> load_model_on(const loader::Checkpoint& checkpoint, ops::Ops& ops,
                                             ops::Ops& host, const Progress& progress,
                                             const std::string& weight_cache);

// Whether the model's embedding and the weights of its first and last layer are in the files,
// without reading them. The error names what is missing.
Status check_weights_present(const loader::Checkpoint& checkpoint);

}  // namespace freshet::models

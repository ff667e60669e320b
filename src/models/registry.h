// The list of architectures, and reading a specification from a bare configuration.
#pragma once

#include <span>
#include <string>
#include <vector>

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

// Whether the model's embedding and the weights of its first and last layer are in the files,
// without reading them. The error names what is missing.
Status check_weights_present(const loader::Checkpoint& checkpoint);

}  // namespace freshet::models

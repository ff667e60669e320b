// For a checkpoint of an unknown architecture: which known one is nearest to it, and what differs.
//
// A diagnosis for people, from names alone: the tensors that an architecture has a place for, those
// that it needs, and the keys that it reads. It says nothing about the arithmetic. Pure.
#pragma once

#include <string>

#include "loader/checkpoint.h"

namespace freshet::models {

// A line such as "nearest is llama: no place for model.layers.#.self_attn.g_proj; it lacks ...", in
// which # is any number; or that none is near. Empty if the configuration cannot be read as that of
// any architecture.
std::string nearest_architecture(const loader::Checkpoint& checkpoint);

}  // namespace freshet::models

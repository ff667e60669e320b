// What the readers of draft heads (draft_heads.cc, dflash_head.cc) share: names, sizes and the
// configuration of a head's files. Reads metadata only. Errors name the file.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "models/draft_heads.h"
#include "models/weight_names.h"
#include "models/weight_reader.h"

namespace freshet::models {

// Where a head's weights are and how it is built.
struct Head {
  HeadPlan plan;
  std::vector<NameRule> names;
  Architecture architecture;
  int layer = 0;  // its number in the names
};

// Finds a head's tensors by role. `checkpoint` must outlive it.
class HeadFile {
 public:
  HeadFile(const loader::Checkpoint& checkpoint, std::span<const NameRule> names);

  // nullptr: absent.
  const loader::TensorSource* find(Role role, std::string_view suffix, int layer = 0) const;
  bool has(Role role, std::string_view suffix = ".weight", int layer = 0) const {
    return find(role, suffix, layer) != nullptr;
  }
  Result<const loader::TensorSource*> matrix(Role role, int layer = 0) const;

 private:
  const loader::Checkpoint& checkpoint_;
  WeightNames names_;
};

// A head's configuration: of a GGUF file its metadata, of a "speculators" folder with the keys of
// its layer beside the others.
Result<json::Value> head_config(const loader::Checkpoint& checkpoint, const ModelSpec& target);
// Whether the head's states are as wide as the target's.
Status check_width(const loader::Checkpoint& checkpoint, const ModelSpec& head,
                   const ModelSpec& target);
// Sizes and biases that the tensors tell.
Status read_layers(const HeadFile& file, ModelSpec& spec);

// dflash_head.cc
Result<Head> plan_dflash(const loader::Checkpoint& checkpoint, const ModelSpec& target);

}  // namespace freshet::models

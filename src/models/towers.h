// Towers for pictures: how the parts of a configuration that are not the language model become a
// VisionSpec, and the names of their weights. tower_<family>.cc has a family each.
//
// Pure, but for assemble_tower(), which reads weights as models/weight_reader.h says.
#pragma once

#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/thread_pool.h"
#include "layers/spec.h"
#include "layers/weights.h"
#include "models/config.h"
#include "models/weight_names.h"
#include "models/weight_reader.h"

namespace freshet::models {

struct TowerFamily {
  std::string_view type;  // the model_type of the whole configuration
  // `vision`: its vision_config. `text`: the language model, which may be changed. Returns false,
  // with `out` unspecified, if the tower is of a kind that is not read.
  bool (*spec)(Config& whole, Config& vision, ModelSpec& text, VisionSpec& out);
  std::span<const NameRule> names;
  bool connector_norm_less_one = false;        // its weight is stored as w - 1
  std::span<const NameRule> later_names = {};  // of VisionSpec::later
};

TowerFamily llava_tower();
TowerFamily qwen2_vl_tower();
TowerFamily qwen2_5_vl_tower();
TowerFamily qwen3_vl_tower();
TowerFamily qwen3_vl_moe_tower();
TowerFamily qwen3_5_tower();
TowerFamily qwen3_5_moe_tower();
TowerFamily llava_next_tower();
TowerFamily mistral3_tower();
TowerFamily gemma3_tower();
TowerFamily idefics3_tower();
TowerFamily smolvlm_tower();
TowerFamily mllama_tower();

// nullptr: the configuration is of no family with a tower.
const TowerFamily* tower_of(const json::Value& config);

// Adds the tower of `config`, the whole configuration, to its language model. A tower of an unknown
// kind is left out: such models read text.
Status add_tower(const json::Value& config, ModelSpec& text);

// Whether the files hold the tower's weights. Those of GGUF files (models/mmproj.h) have the same
// names in all families.
bool has_tower(const loader::Checkpoint& checkpoint, const TowerFamily& family);
// Reads it with the family's names; `make` makes a reader that has them, for what runs the layers
// or for what runs the ends of the tower.
using MakeReader = FunctionRef<WeightReader(std::span<const NameRule> names, bool layers)>;
Result<VisionWeights> assemble_tower(MakeReader make, const TowerFamily& family,
                                     const loader::Checkpoint& checkpoint, const VisionSpec& spec,
                                     std::vector<Model::WeightInfo>& infos);
// Parts of it (tower_mllama.cc): the tables of tiles; and output projections of attention times
// the tanh of a weight.
Status assemble_tiles(WeightReader& reader, const VisionSpec& spec, TileWeights& out);
Status gate_attention(WeightReader& reader, const ModelSpec& spec, ModelWeights& out);

// For families.

// Layers of two-way attention and an MLP, each behind a norm: the defaults of a tower.
struct TowerDefaults {
  int hidden = 768;
  int layers = 12;
  int heads = 12;
  int ff = 3072;
  NormSpec norm;
  bool gated = false;
  std::string_view activation = "gelu_pytorch_tanh";
  bool bias = true;
};
ModelSpec tower_blocks(Config& vision, const TowerDefaults& defaults);
// A tower of CLIP's or SigLIP's kind, which reads squares, without its connector. False if
// `vision` is of another kind. `siglip`: it is of SigLIP's, whatever its type says.
bool read_square_tower(Config& vision, VisionSpec& out, bool siglip = false);
// A tower of Pixtral's kind, which reads pictures of any size: patches with rotations by row and
// column. False if `vision` is of another kind.
bool read_pixtral_tower(Config& vision, VisionSpec& out);
// The names of both kinds below "vision_tower.", and a family's own ones.
std::vector<NameRule> square_tower_names(std::span<const NameRule> own);

}  // namespace freshet::models

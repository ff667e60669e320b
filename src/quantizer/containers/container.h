// Containers: how a folder in Hugging Face's layout stores quantised matrices, so that other
// engines load it.
//
// A container is a row of functions; containers() lists them. The order of calls for a checkpoint:
// supports() for each scheme, loaders() for the report before the work, settle() for each matrix
// after its codes are chosen, pack() for its tensors, quantization_config() and side_files() at the
// end. pack() refuses scales that it cannot store exactly, so what was evaluated is what is stored.
// Pure; thread-safe.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "quantizer/coded_matrix.h"

namespace freshet::quantizer {

// A tensor as safetensors stores it. `bytes` is little-endian and row-major.
struct StoredTensor {
  std::string name;
  std::string dtype;  // "I32", "F8_E4M3", ...
  std::vector<int64_t> shape;
  std::vector<uint8_t> bytes;
};

struct LayerShape {
  std::string name;  // of the module: "model.layers.0.mlp.down_proj"
  int64_t rows = 0, cols = 0;
};

struct ModelFacts {
  std::string dtype = "bfloat16";  // config.json's dtype: what engines compute in
  std::vector<LayerShape> layers;  // the matrices to quantise
};

// A scheme and the modules that have it. No names: all that no other group and `ignore` name.
struct SchemeGroup {
  Scheme scheme;
  std::vector<std::string> modules;
};

struct ConfigRequest {
  std::vector<SchemeGroup> groups;  // not empty; the first one is the default
  std::vector<std::string> ignore;  // linear layers that stay as they were, e.g. "lm_head"
  bool act_order = false;           // some matrix has a group_of_column
  bool kv_cache_fp8 = false;        // k_scale and v_scale are stored
  std::string dtype = "bfloat16";
  std::string producer;  // "freshet 0.4.0"
  // Settings of GPTQ for its config: damp_percent, true_sequential, static_groups.
  json::Object settings;
};

// What an engine makes of a checkpoint.
struct Loader {
  std::string engine;
  bool loads = false;
  std::string note;  // why not, or what to know; may be empty
};
// "vLLM: loads (...)" or "vLLM: does not load: ...".
std::string describe(const Loader& loader);

// Factors of an FP8 cache: of the attention ("self_attn.k_scale"), or of the projections
// ("self_attn.k_proj.k_scale").
enum class KvScaleNames { kNone, kAttention, kProjection };

struct Container {
  std::string_view name;  // of --format and, but for variants, of quant_method
  // ok, or why this container cannot hold the scheme.
  Status (*supports)(const Scheme& scheme);
  // The scheme with the type of scales that engines which compute in `dtype` keep as they are.
  Scheme (*fit)(Scheme scheme, std::string_view dtype);
  // Changes scales to the nearest ones that can be stored where a type alone does not say which
  // (double quantisation, reciprocals). Codes stay.
  Status (*settle)(CodedMatrix& matrix, const Scheme& scheme);
  // The tensors of module `stem`. REQUIRES: supports(scheme).
  Result<std::vector<StoredTensor>> (*pack)(const std::string& stem, const CodedMatrix& matrix,
                                            const Scheme& scheme, const ModelFacts& facts);
  Result<json::Value> (*quantization_config)(const ConfigRequest& request);
  // Further files of the folder: a name and its contents.
  std::vector<std::pair<std::string, json::Value>> (*side_files)(
      const json::Value& quantization_config);
  // What each engine makes of it, in the order of the report.
  std::vector<Loader> (*loaders)(const Scheme& scheme, const ModelFacts& facts);
  // Where a layer's k_scale and v_scale are.
  KvScaleNames kv_scales = KvScaleNames::kNone;
};

std::span<const Container> containers();
// An unknown name is an error with the nearest one and the list.
Result<const Container*> container_by_name(std::string_view name);
// The first container that can hold the scheme: compressed-tensors where it can.
Result<const Container*> container_for(const Scheme& scheme);

}  // namespace freshet::quantizer

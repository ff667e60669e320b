// Factors of keys and values for an FP8 cache, measured once and kept in a file of their own.
//
// A safetensors file with a scalar F32 for each name, "model.layers.0.self_attn.k_scale" and
// ".v_scale" as compressed-tensors names them: max / 448 of what a calibration text put into the
// cache. As kv_scales.safetensors in a model's folder it is read with the model. Plain data; errors
// name the file.
#pragma once

#include <map>
#include <string>

#include "base/status.h"
#include "models/parts.h"
#include "models/registry.h"
#include "quantizer/containers/container.h"

namespace freshet::quantizer {

struct KvScaleFile {
  std::map<std::string, float> scales;

  static Result<KvScaleFile> load(const std::string& path);
  Status save(const std::string& path) const;
  // Takes the larger one of two factors, so that the texts of both files are covered.
  void merge(const KvScaleFile& other);
};

// The factor that makes `most`, the largest magnitude, the largest number of E4M3.
float kv_scale_for(float most);
// Whether the part keeps keys and values that an FP8 cache may have factors for.
bool keeps_keys_and_values(const ModelSpec& spec, const models::Part& part);

struct KvScalePair {
  std::string key, value;
};
// The names of a layer's factors.
KvScalePair kv_scale_names(const models::WeightReader& reader, int layer, KvScaleNames names);

}  // namespace freshet::quantizer

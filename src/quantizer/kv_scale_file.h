// Factors of keys and values, measured once and kept in a file of their own.
//
// A safetensors file of F32. For an FP8 cache a scalar for each name, "model.layers.0.self_attn.
// k_scale" and ".v_scale" as compressed-tensors names them: max / 448 of what a calibration text
// put into the cache. For caches of integers ".k_channel_scale", [kv_heads * head_dim], for the
// channels of rotated keys: the root of their standard magnitude over that of the queries that read
// them. Such keys and queries, divided and multiplied by it, have equal magnitudes in every
// channel, which makes the error of their products least among all factors if codes err alike in
// all channels, as they do behind a Hadamard transform. As kv_scales.safetensors in a model's
// folder the file is read with the model. Plain data; errors name the file.
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "models/parts.h"
#include "models/registry.h"
#include "quantizer/containers/container.h"

namespace freshet::quantizer {

struct KvScaleFile {
  std::map<std::string, std::vector<float>> scales;

  static Result<KvScaleFile> load(const std::string& path);
  Status save(const std::string& path) const;
  // Takes the larger one of two scalars, so that the texts of both files are covered, and the
  // geometric mean of two factors of a channel. Fails if the files are of different models.
  Status merge(const KvScaleFile& other);
};

// The factor that makes `most`, the largest magnitude, the largest number of E4M3.
float kv_scale_for(float most);
// The factors of the channels of keys, [kv_heads * head_dim], from sums of squares over tokens:
// queries [heads * head_dim], keys [kv_heads * head_dim]. Their geometric mean in a head is 1.
std::vector<float> key_channel_scales(std::span<const double> queries, std::span<const double> keys,
                                      int64_t head_dim);
// Whether the part keeps keys and values that a cache may have factors for.
bool keeps_keys_and_values(const ModelSpec& spec, const models::Part& part);

struct KvScaleNameSet {
  std::string key, value, key_channels;
};
// The names of a layer's factors.
KvScaleNameSet kv_scale_names(const models::WeightReader& reader, int layer, KvScaleNames names);

}  // namespace freshet::quantizer

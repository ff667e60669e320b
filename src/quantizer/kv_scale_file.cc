#include "quantizer/kv_scale_file.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "loader/safetensors.h"
#include "quantizer/stored_file.h"

namespace freshet::quantizer {

Result<KvScaleFile> KvScaleFile::load(const std::string& path) {
  FRESHET_ASSIGN_OR_RETURN(const auto file, loader::SafetensorsFile::open(path));
  KvScaleFile out;
  for (const loader::TensorSource& t : file.tensors()) {
    const bool named = t.name.ends_with(".k_scale") || t.name.ends_with(".v_scale");
    float value = 0.0f;
    if (!named || t.dtype != "F32" || t.bytes != sizeof value)
      return invalid_argument("{}: tensor '{}' is no factor of keys or values", path, t.name);
    std::memcpy(&value, t.data, sizeof value);
    if (!(value > 0.0f) || !std::isfinite(value))
      return invalid_argument("{}: '{}' is {}: a factor is a positive number", path, t.name, value);
    out.scales[t.name] = value;
  }
  return out;
}

Status KvScaleFile::save(const std::string& path) const {
  std::vector<StoredTensor> tensors;
  for (const auto& [name, value] : scales) {
    StoredTensor t{name, "F32", {1}, {}};
    t.bytes.resize(sizeof value);
    std::memcpy(t.bytes.data(), &value, sizeof value);
    tensors.push_back(std::move(t));
  }
  json::Object metadata;
  metadata["format"] = "pt";
  return write_tensors(path, tensors, std::move(metadata));
}

void KvScaleFile::merge(const KvScaleFile& other) {
  for (const auto& [name, value] : other.scales) {
    float& mine = scales[name];
    mine = std::max(mine, value);
  }
}

float kv_scale_for(float most) {
  return most > 0.0f ? most / 448.0f : 1.0f;
}

bool keeps_keys_and_values(const ModelSpec& spec, const models::Part& part) {
  if (part.layer < 0) return false;
  const auto& branches = spec.layers[static_cast<size_t>(part.layer)].branches;
  const auto first = branches.begin() + part.first_branch;
  return std::any_of(first, first + part.branches, [](const BranchSpec& b) {
    return std::holds_alternative<AttentionSpec>(b.body);
  });
}

KvScalePair kv_scale_names(const models::WeightReader& reader, int layer, KvScaleNames names) {
  using models::Role;
  const bool fused = reader.find(Role::kKey, ".weight", layer) == nullptr;
  const auto stem = [&](Role role) {
    std::string out = reader.stem(fused ? Role::kQkv : role, layer);
    if (names == KvScaleNames::kAttention) out.resize(out.rfind('.'));
    return out;
  };
  return {stem(Role::kKey) + ".k_scale", stem(Role::kValue) + ".v_scale"};
}

}  // namespace freshet::quantizer

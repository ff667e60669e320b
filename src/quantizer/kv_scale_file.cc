#include "quantizer/kv_scale_file.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "loader/checkpoint.h"
#include "loader/safetensors.h"
#include "quantizer/stored_file.h"

namespace freshet::quantizer {
namespace {

bool is_channels(const std::string& name) {
  return name.ends_with(".k_channel_scale");
}

}  // namespace

Result<KvScaleFile> KvScaleFile::load(const std::string& path) {
  FRESHET_ASSIGN_OR_RETURN(const auto file, loader::SafetensorsFile::open(path));
  KvScaleFile out;
  for (const loader::TensorSource& t : file.tensors()) {
    std::vector<float> values(t.bytes / sizeof(float));
    const bool sized = is_channels(t.name) ? !values.empty() : values.size() == 1;
    if (!loader::is_kv_factor(t.name) || t.dtype != "F32" || !sized)
      return invalid_argument("{}: tensor '{}' is no factor of keys or values", path, t.name);
    std::memcpy(values.data(), t.data, values.size() * sizeof(float));
    for (const float value : values) {
      if (!(value > 0.0f) || !std::isfinite(value))
        return invalid_argument("{}: '{}' is {}: a factor is a positive number", path, t.name,
                                value);
    }
    out.scales[t.name] = std::move(values);
  }
  return out;
}

Status KvScaleFile::save(const std::string& path) const {
  std::vector<StoredTensor> tensors;
  for (const auto& [name, values] : scales)
    tensors.push_back(stored_array(name, "F32", {std::ssize(values)}, values));
  json::Object metadata;
  metadata["format"] = "pt";
  return write_tensors(path, tensors, std::move(metadata));
}

Status KvScaleFile::merge(const KvScaleFile& other) {
  for (const auto& [name, values] : other.scales) {
    const auto [mine, added] = scales.try_emplace(name, values);
    if (added) continue;
    if (mine->second.size() != values.size())
      return invalid_argument("'{}' has {} factors in one file and {} in another", name,
                              mine->second.size(), values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      float& m = mine->second[i];
      m = is_channels(name) ? std::sqrt(m) * std::sqrt(values[i]) : std::max(m, values[i]);
    }
  }
  return {};
}

float kv_scale_for(float most) {
  return most > 0.0f ? most / 448.0f : 1.0f;
}

std::vector<float> key_channel_scales(std::span<const double> queries, std::span<const double> keys,
                                      int64_t head_dim) {
  // A channel that is nearly always 0 takes no precision from others; a bounded factor keeps its
  // rare values, and those of others, within F16.
  constexpr double kLeast = 1.0 / 256, kMost = 256;
  const auto dim = static_cast<size_t>(head_dim);
  const size_t group =
      queries.size() / std::max<size_t>(keys.size(), 1);  // query heads of a KV head
  std::vector<float> out(keys.size());
  for (size_t head = 0; head < keys.size(); head += dim) {
    std::vector<double> logs(dim);
    double sum = 0.0;
    for (size_t c = 0; c < dim; ++c) {
      double asked = 0.0;
      for (size_t g = 0; g < group; ++g) asked += queries[head * group + g * dim + c];
      asked /= static_cast<double>(group);
      if (keys[head + c] > 0.0 && asked > 0.0) logs[c] = std::log(keys[head + c] / asked) / 4;
      sum += logs[c];
    }
    const double mean = sum / static_cast<double>(dim);
    for (size_t c = 0; c < dim; ++c)
      out[head + c] = static_cast<float>(std::clamp(std::exp(logs[c] - mean), kLeast, kMost));
  }
  return out;
}

bool keeps_keys_and_values(const ModelSpec& spec, const models::Part& part) {
  if (part.layer < 0 || part.shared) return false;
  const auto& branches = spec.layers[static_cast<size_t>(part.layer)].branches;
  const auto first = branches.begin() + part.first_branch;
  return std::any_of(first, first + part.branches, [](const BranchSpec& b) {
    return std::holds_alternative<AttentionSpec>(b.body);
  });
}

KvScaleNameSet kv_scale_names(const models::WeightReader& reader, int layer, KvScaleNames names) {
  using models::Role;
  // A layer that shares the tensors of another has neither.
  const bool fused = reader.find(Role::kKey, ".weight", layer) == nullptr &&
                     reader.find(Role::kQkv, ".weight", layer) != nullptr;
  const auto stem = [&](Role role) {
    std::string out = reader.stem(fused ? Role::kQkv : role, layer);
    if (names == KvScaleNames::kAttention) out.resize(out.rfind('.'));
    return out;
  };
  return {stem(Role::kKey) + ".k_scale", stem(Role::kValue) + ".v_scale",
          stem(Role::kKey) + ".k_channel_scale"};
}

}  // namespace freshet::quantizer

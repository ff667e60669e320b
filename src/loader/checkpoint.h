// A model's weights on disk, whatever their container; models are assembled from a Checkpoint.
//
// open() accepts a directory with config.json and safetensors (a single file before the shards of
// model.safetensors.index.json; the tensors of kv_scales.safetensors are added, or replace those of
// their names), one .gguf file (or a shard of a split one), or a directory with one GGUF model,
// whose tower for pictures is a file of its own (llama.cpp's "mmproj"). The mapped files live as
// long as the Checkpoint; TensorSource pointers survive moving it. Only replace() and
// override_config() change it after opening, so it is safe to read from many threads.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "loader/gguf.h"
#include "loader/safetensors.h"
#include "loader/tensor_source.h"

namespace freshet::loader {

// Whether a tensor of this name is a factor for the cache of keys and values: "k_scale", "v_scale"
// or "k_channel_scale".
bool is_kv_factor(std::string_view name);

class Checkpoint {
 public:
  enum class Kind { kHuggingFace, kGguf };

  // `tower`: the GGUF file of a GGUF model's tower; "": none.
  static Result<Checkpoint> open(const std::string& path, const std::string& tower = "");
  // A file by itself: .safetensors, e.g. of a draft head, or config.json without its weights.
  static Result<Checkpoint> open_bare(const std::string& path);

  Kind kind() const { return kind_; }
  const std::string& path() const { return path_; }      // as given to open()
  const json::Value& config() const { return config_; }  // config.json; null for GGUF
  const json::Value& generation_config() const { return generation_config_; }  // null if absent
  // The (first shard of the) GGUF file, whose metadata applies to all shards; nullptr for Hugging
  // Face.
  const GgufFile* gguf() const { return gguf_.empty() ? nullptr : &gguf_.front(); }
  const GgufFile* tower() const { return has_tower_ ? &gguf_.back() : nullptr; }

  const std::vector<TensorSource>& tensors() const { return tensors_; }
  const TensorSource* find(std::string_view name) const;  // nullptr if absent
  size_t total_bytes() const { return total_bytes_; }     // of all tensors
  std::vector<const MappedFile*> files() const;           // files that contain tensors
  // Asks the kernel to read all weights ahead.
  void prefetch() const;

  // Members of `overrides` replace those of the same name in config(); objects in both are merged
  // in the same way. Not safe with concurrent readers.
  Status override_config(const json::Value& overrides);

  // Replaces the tensor of the same name, which must exist. Its data must live as long as the
  // checkpoint, or until it is replaced again. Not safe with concurrent readers.
  void replace(const TensorSource& tensor);

 private:
  static Result<Checkpoint> open_model(const std::string& path);
  Status open_hugging_face(const std::string& directory);
  Status open_weights(const std::string& directory);
  Status open_files(const std::vector<std::string>& files);
  Status open_index(const std::string& directory, const json::Value& index);
  Status open_gguf(const std::string& path);
  Status open_tower(const std::string& path);
  Status add(const TensorSource& tensor);

  Kind kind_ = Kind::kHuggingFace;
  std::string path_;
  json::Value config_;
  json::Value generation_config_;
  std::vector<SafetensorsFile> safetensors_;
  std::vector<GgufFile> gguf_;
  bool has_tower_ = false;  // the last of them
  std::vector<TensorSource> tensors_;
  std::unordered_map<std::string, size_t> index_;
  size_t total_bytes_ = 0;
};

}  // namespace freshet::loader

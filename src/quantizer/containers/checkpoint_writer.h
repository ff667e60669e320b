// Writes a model as a folder in Hugging Face's layout: shards of safetensors with an index,
// config.json, and the files of the source that a model needs besides (tokenizer, chat template,
// generation_config.json, licence ...).
//
// Tensors are added one after the other and are not held: memory is bounded by kHeldBytes plus the
// tensors whose sizes are no multiple of eight bytes, which come last in a shard so that all others
// stay aligned. Everything goes to a folder beside the output; finish() syncs it and renames it, so
// there is never half a checkpoint, and dropping the writer (an error, Ctrl-C) removes it. Every
// error of the file system is returned, a full disk included. Not thread-safe.
#pragma once

#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "quantizer/containers/container.h"

namespace freshet::quantizer {

// A shard's bytes before its header is written for good.
inline constexpr int64_t kHeldBytes = int64_t{16} << 20;

struct CheckpointOptions {
  std::string output;
  std::string source;  // the folder whose other files are copied; empty: none
  bool force = false;  // replace an output that is a checkpoint
  int64_t shard_bytes = int64_t{5'000'000'000};
};

class CheckpointWriter {
 public:
  // Errors: the output exists (and `force` is not set, or it is no checkpoint of ours: a folder
  // with config.json and without further folders), or one of it and the source holds the other.
  static Status check(const CheckpointOptions& options);  // before the work
  static Result<std::unique_ptr<CheckpointWriter>> create(const CheckpointOptions& options);
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  // A tensor as it is. A name that was added before is an error.
  Status add(const std::string& name, const std::string& dtype, const std::vector<int64_t>& shape,
             std::span<const uint8_t> bytes);
  Status add(const StoredTensor& tensor);

  // `config` is written as config.json. The folder exists from now on.
  Status finish(const json::Value& config,
                std::span<const std::pair<std::string, json::Value>> side_files = {});

  // Of all tensors so far.
  int64_t total_bytes() const { return total_bytes_; }

 private:
  struct Placed {
    std::string name, dtype;
    std::vector<int64_t> shape;
    int64_t bytes = 0;
    std::vector<uint8_t> held;  // of a tensor that comes last
  };

  explicit CheckpointWriter(CheckpointOptions options) : options_(std::move(options)) {}
  Status begin_shard();
  Status append(std::span<const uint8_t> bytes);
  Status write_out(std::span<const uint8_t> bytes);
  Status end_shard();
  Status write_json(const std::string& name, const json::Value& value);
  Status copy_source();
  Status name_shards();
  Status publish();
  Status failed(const std::string& path) const;

  CheckpointOptions options_;
  std::string folder_;  // where the files are until finish(); empty: nothing to remove
  std::unordered_set<std::string> names_;
  int64_t total_bytes_ = 0;

  // The shard being written.
  std::FILE* file_ = nullptr;
  std::string path_;
  std::vector<Placed> placed_, last_;
  std::vector<uint8_t> begun_;  // its first bytes, until there are kHeldBytes
  bool spilled_ = false;        // its bytes go to the file, behind room for the header
  int64_t header_bytes_ = 0;    // about what the header takes
  int64_t data_bytes_ = 0;

  std::vector<std::vector<std::string>> shards_;  // the names in each one
};

// config.json of a quantised model: `config` with its keys in their order, "quantization_config"
// replaced or added (also that of a "text_config" is taken away) and, unless it is null,
// `provenance` under "freshet".
json::Value config_with(const json::Value& config, json::Value quantization_config,
                        json::Value provenance);

// Whether a file of a checkpoint's folder is copied to a quantised one: everything but weights, the
// files that the writer makes, and hidden files.
bool is_copied(std::string_view name);

}  // namespace freshet::quantizer

// What the readers of GGUF families share: the metadata of one architecture, by keys without its
// prefix, and the configuration that they make of it, in the names of transformers. Not
// thread-safe: set() writes to the object that was given.
#pragma once

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/json.h"
#include "loader/checkpoint.h"

namespace freshet::models {

class GgufKeys {
 public:
  // All must outlive this.
  GgufKeys(const loader::Checkpoint& checkpoint, std::string_view architecture, json::Object& out)
      : checkpoint_(checkpoint),
        gguf_(*checkpoint.gguf()),
        architecture_(architecture),
        prefix_(std::string(architecture) + "."),
        out_(out) {}

 protected:
  bool has(std::string_view tensor) const { return checkpoint_.find(tensor) != nullptr; }
  std::optional<int64_t> get(std::string_view key) const {
    return gguf_.get_int(prefix_ + std::string(key));
  }
  bool flag(std::string_view key, bool fallback) const {
    return gguf_.get_bool(prefix_ + std::string(key)).value_or(fallback);
  }
  void set(std::string_view key, json::Value value) { out_[key] = std::move(value); }
  // One over the root of the head size: for families whose config.json names the scale of scores,
  // where the file does not.
  double usual_scale() const {
    const int64_t heads = std::max<int64_t>(1, get("attention.head_count").value_or(1));
    const int64_t hidden = get("embedding_length").value_or(1);
    const int64_t dim = get("attention.key_length").value_or(hidden / heads);
    return 1.0 / std::sqrt(static_cast<double>(dim));
  }

  const loader::Checkpoint& checkpoint_;
  const loader::GgufFile& gguf_;
  const std::string_view architecture_;
  const std::string prefix_;
  json::Object& out_;
};

}  // namespace freshet::models

// Reads model configurations: the keys of config.json, with the defaults that transformers applies
// if a published file leaves a key out.
//
// Config looks keys up and remembers the first error (a key of the wrong type or size), so that an
// architecture reads all its keys and asks status() once. A null member counts as absent. If
// several keys are given, the first present one is used: GGUF metadata arrive here under the names
// of gguf_config.h. Not thread-safe.
#pragma once

#include <initializer_list>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "ops/ops.h"

namespace freshet::models {

using Keys = std::initializer_list<std::string_view>;

class Config {
 public:
  // `root` must outlive the Config. `where` begins error messages ("rope_scaling.").
  explicit Config(const json::Value& root, std::string where = {})
      : root_(root), where_(std::move(where)) {}

  const json::Value* find(Keys keys) const;  // nullptr: absent or null
  bool has(std::string_view key) const { return find({key}) != nullptr; }
  bool has_null(std::string_view key) const;  // present, and null

  int size(Keys keys, int fallback);            // in [1, 2^24]
  int count(Keys keys, int fallback);           // in [0, 2^24]
  int64_t length(Keys keys, int64_t fallback);  // in [1, 2^40]
  double number(Keys keys, double fallback);
  bool flag(Keys keys, bool fallback);
  std::string text(Keys keys, std::string_view fallback);
  std::vector<float> floats(Keys keys);       // empty when absent
  std::vector<std::string> texts(Keys keys);  // empty when absent
  ops::Activation activation(Keys keys, std::string_view fallback);

  // From now on, the keys that are looked up are added to `asked`.
  void record(std::set<std::string>* asked) { asked_ = asked; }

  void fail(Status status);  // keeps the first
  const Status& status() const { return status_; }

 private:
  int64_t integer(Keys keys, int64_t fallback, int64_t least, int64_t most);
  void wrong(std::string_view key, std::string_view wanted);
  std::optional<std::pair<std::string_view, const json::Value*>> entry(Keys keys) const;

  const json::Value& root_;
  std::string where_;
  Status status_;
  std::set<std::string>* asked_ = nullptr;
};

}  // namespace freshet::models

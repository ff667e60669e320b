// Typed reading of a request's JSON fields, with one message per mistake.
//
// Fields reads members of one object. A member that is absent or null leaves the target
// unchanged. A member of the wrong type or out of range records the first error; later reads do
// nothing. So a parser is a list of reads and one check at the end. `defaults` replace members that
// are absent or null. Not synchronised; keeps references to the objects.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "server/api_error.h"

namespace freshet::server {

class Fields {
 public:
  explicit Fields(const json::Value& object, const json::Object* defaults = nullptr)
      : object_(object), defaults_(defaults) {}

  const json::Value* get(std::string_view name) const;  // nullptr if absent or null
  // Whether the object itself has the member (not only `defaults`).
  bool has(std::string_view name) const {
    const json::Value* v = object_.find(name);
    return v != nullptr && !v->is_null();
  }

  void read(std::string_view name, bool& out);
  void read(std::string_view name, std::string& out, size_t max_bytes = 1 << 20);
  void read(std::string_view name, float& out, double low, double high);
  void read(std::string_view name, double& out, double low, double high);
  void read(std::string_view name, int& out, int64_t low, int64_t high);
  void read(std::string_view name, std::vector<int32_t>& out, size_t max_count);

  void fail(std::string_view name, std::string message);
  const std::optional<ApiError>& error() const { return error_; }
  bool ok() const { return !error_; }

 private:
  const json::Value& object_;
  const json::Object* defaults_;
  std::optional<ApiError> error_;
};

}  // namespace freshet::server

#include "server/fields.h"

#include <cmath>
#include <utility>

#include <fmt/format.h>

namespace freshet::server {

const json::Value* Fields::get(std::string_view name) const {
  const json::Value* v = object_.find(name);
  if (v != nullptr && !v->is_null()) return v;
  return defaults_ != nullptr ? defaults_->find(name) : nullptr;
}

void Fields::fail(std::string_view name, std::string message) {
  if (!error_) error_ = bad_request(std::string(name), std::move(message));
}

void Fields::read(std::string_view name, bool& out) {
  const json::Value* v = get(name);
  if (v == nullptr || error_) return;
  if (!v->is_bool()) return fail(name, fmt::format("'{}' must be true or false", name));
  out = v->as_bool();
}

void Fields::read(std::string_view name, std::string& out, size_t max_bytes) {
  const json::Value* v = get(name);
  if (v == nullptr || error_) return;
  if (!v->is_string()) return fail(name, fmt::format("'{}' must be a string", name));
  if (v->as_string().size() > max_bytes) {
    return fail(name, fmt::format("'{}' is longer than {} bytes", name, max_bytes));
  }
  out = v->as_string();
}

void Fields::read(std::string_view name, double& out, double low, double high) {
  const json::Value* v = get(name);
  if (v == nullptr || error_) return;
  const double d = v->is_number() ? v->as_double() : NAN;
  if (!(d >= low && d <= high)) {
    return fail(name, fmt::format("'{}' must be a number from {} to {}", name, low, high));
  }
  out = d;
}

void Fields::read(std::string_view name, float& out, double low, double high) {
  double d = out;
  read(name, d, low, high);
  out = static_cast<float>(d);
}

void Fields::read(std::string_view name, int& out, int64_t low, int64_t high) {
  const json::Value* v = get(name);
  if (v == nullptr || error_) return;
  const std::optional<int64_t> i = v->is_number() ? v->as_int64() : std::nullopt;
  if (!i || *i < low || *i > high) {
    return fail(name, fmt::format("'{}' must be an integer from {} to {}", name, low, high));
  }
  out = static_cast<int>(*i);
}

void Fields::read(std::string_view name, std::vector<int32_t>& out, size_t max_count) {
  const json::Value* v = get(name);
  if (v == nullptr || error_) return;
  if (!v->is_array() || v->as_array().size() > max_count) {
    return fail(name, fmt::format("'{}' must be an array of at most {} integers", name, max_count));
  }
  std::vector<int32_t> ids;
  ids.reserve(v->as_array().size());
  for (const json::Value& e : v->as_array()) {
    const auto i = e.is_number() ? e.as_int64() : std::nullopt;
    if (!i || *i < 0 || *i > std::numeric_limits<int32_t>::max()) {
      return fail(name, fmt::format("'{}' must hold token ids", name));
    }
    ids.push_back(static_cast<int32_t>(*i));
  }
  out = std::move(ids);
}

}  // namespace freshet::server

#include "models/config.h"

#include <cmath>
#include <utility>

namespace freshet::models {

std::optional<std::pair<std::string_view, const json::Value*>> Config::entry(Keys keys) const {
  if (asked_ != nullptr) asked_->insert(keys.begin(), keys.end());
  for (const std::string_view key : keys) {
    const json::Value* value = root_.find(key);
    if (value != nullptr && !value->is_null()) return std::pair(key, value);
  }
  return std::nullopt;
}

const json::Value* Config::find(Keys keys) const {
  const auto found = entry(keys);
  return found ? found->second : nullptr;
}

bool Config::has_null(std::string_view key) const {
  const json::Value* value = root_.find(key);
  return value != nullptr && value->is_null();
}

void Config::fail(Status status) {
  if (status_.ok()) status_ = std::move(status);
}

void Config::wrong(std::string_view key, std::string_view wanted) {
  fail(invalid_argument("the configuration's '{}{}' must be {}", where_, key, wanted));
}

int64_t Config::integer(Keys keys, int64_t fallback, int64_t least, int64_t most) {
  const auto found = entry(keys);
  if (!found) return fallback;
  const auto [key, value] = *found;
  const std::optional<int64_t> n = value->is_number() ? value->as_int64() : std::nullopt;
  if (!n || *n < least || *n > most) {
    wrong(key, fmt::format("a whole number from {} to {}", least, most));
    return fallback;
  }
  return *n;
}

int Config::size(Keys keys, int fallback) {
  return static_cast<int>(integer(keys, fallback, 1, 1 << 24));
}

int Config::count(Keys keys, int fallback) {
  return static_cast<int>(integer(keys, fallback, 0, 1 << 24));
}

int64_t Config::length(Keys keys, int64_t fallback) {
  return integer(keys, fallback, 1, int64_t{1} << 40);
}

double Config::number(Keys keys, double fallback) {
  const auto found = entry(keys);
  if (!found) return fallback;
  if (!found->second->is_number() || !std::isfinite(found->second->as_double())) {
    wrong(found->first, "a number");
    return fallback;
  }
  return found->second->as_double();
}

bool Config::flag(Keys keys, bool fallback) {
  const auto found = entry(keys);
  if (!found) return fallback;
  if (!found->second->is_bool()) {
    wrong(found->first, "true or false");
    return fallback;
  }
  return found->second->as_bool();
}

std::string Config::text(Keys keys, std::string_view fallback) {
  const auto found = entry(keys);
  if (!found) return std::string(fallback);
  if (!found->second->is_string()) {
    wrong(found->first, "a string");
    return std::string(fallback);
  }
  return found->second->as_string();
}

std::vector<float> Config::floats(Keys keys) {
  std::vector<float> out;
  const auto found = entry(keys);
  if (!found) return out;
  if (!found->second->is_array()) {
    wrong(found->first, "a list of numbers");
    return out;
  }
  for (const json::Value& v : found->second->as_array()) {
    if (!v.is_number()) {
      wrong(found->first, "a list of numbers");
      return {};
    }
    out.push_back(static_cast<float>(v.as_double()));
  }
  return out;
}

std::vector<std::string> Config::texts(Keys keys) {
  std::vector<std::string> out;
  const auto found = entry(keys);
  if (!found) return out;
  if (!found->second->is_array()) {
    wrong(found->first, "a list of strings");
    return out;
  }
  for (const json::Value& v : found->second->as_array()) {
    if (!v.is_string()) {
      wrong(found->first, "a list of strings");
      return {};
    }
    out.push_back(v.as_string());
  }
  return out;
}

ops::Activation Config::activation(Keys keys, std::string_view fallback) {
  using A = ops::Activation;
  static constexpr std::pair<std::string_view, A> kNames[] = {
      {"silu", A::kSilu},
      {"swish", A::kSilu},
      {"gelu", A::kGelu},
      {"swiglu", A::kSilu},
      {"geglu", A::kGelu},
      {"gelu_new", A::kGeluTanh},
      {"gelu_fast", A::kGeluTanh},
      {"gelu_pytorch_tanh", A::kGeluTanh},
      {"relu", A::kRelu},
      {"relu2", A::kRelu2},
      {"quick_gelu", A::kQuickGelu},
  };
  const std::string name = text(keys, fallback);
  for (const auto& [known, activation] : kNames) {
    if (name == known) return activation;
  }
  fail(unsupported("unsupported activation function '{}'", name));
  return A::kSilu;
}

}  // namespace freshet::models

#include <algorithm>
#include <array>
#include <numeric>

#include "base/json.h"
#include "kv_cache/retention/retention.h"

namespace freshet::kv_cache {
namespace {

constexpr std::array kKinds = {&kStreaming, &kSnapKv, &kPyramidKv, &kH2o,
                               &kTova,      &kRkv,    &kKeyDiff,   &kMikv};
constexpr int32_t kMostSlots = 1 << 24;

struct WholeKey {
  std::string_view name;
  int32_t RetentionConfig::* to;
  int32_t least;
};
constexpr WholeKey kWholeKeys[] = {
    {"budget", &RetentionConfig::budget, 16}, {"sinks", &RetentionConfig::sinks, 0},
    {"window", &RetentionConfig::window, 1},  {"interval", &RetentionConfig::interval, 1},
    {"kernel", &RetentionConfig::kernel, 1},  {"recent", &RetentionConfig::recent, 1},
};
struct RealKey {
  std::string_view name;
  double RetentionConfig::* to;
  double low, high;
};
constexpr RealKey kRealKeys[] = {{"beta", &RetentionConfig::beta, 1.0, 1000.0},
                                 {"decay", &RetentionConfig::decay, 0.5, 1.0},
                                 {"lambda", &RetentionConfig::lambda, 0.0, 1.0}};

bool lists(std::string_view keys, std::string_view key) {
  while (!keys.empty()) {
    const size_t end = std::min(keys.find(' '), keys.size());
    if (keys.substr(0, end) == key) return true;
    keys.remove_prefix(std::min(end + 1, keys.size()));
  }
  return false;
}

Status read_key(std::string_view key, const json::Value& value, RetentionConfig& config) {
  for (const WholeKey& k : kWholeKeys) {
    if (k.name != key) continue;
    const auto number = value.is_number() ? value.as_int64() : std::nullopt;
    if (!number || *number < k.least || *number > kMostSlots) {
      return invalid_argument("kv_eviction: \"{}\" must be a whole number from {} to {}", key,
                              k.least, kMostSlots);
    }
    config.*k.to = static_cast<int32_t>(*number);
  }
  for (const RealKey& k : kRealKeys) {
    if (k.name != key) continue;
    if (!value.is_number() || !(value.as_double() >= k.low && value.as_double() <= k.high)) {
      return invalid_argument("kv_eviction: \"{}\" must be a number from {} to {}", key, k.low,
                              k.high);
    }
    config.*k.to = value.as_double();
  }
  return {};
}

Status check_sizes(const RetentionConfig& c) {
  if (c.budget == 0) return invalid_argument("kv_eviction: \"budget\" is missing");
  const int64_t pinned = int64_t{c.sinks} + std::max(c.window, c.recent);
  if (pinned >= c.budget) {
    return invalid_argument(
        "kv_eviction: {} tokens are always kept, so \"budget\" must be {} or more, not {}", pinned,
        pinned + 1, c.budget);
  }
  return {};
}

}  // namespace

int32_t RetentionPolicy::budget(int, int) const {
  return config_.budget;
}

void RetentionPolicy::keep_best(std::span<const int64_t> scores, int32_t first, int32_t last,
                                std::span<int32_t> kept) {
  const auto slots = static_cast<int32_t>(scores.size());
  const auto count = static_cast<int32_t>(kept.size());
  const int32_t chosen = std::max(0, count - first - last);
  std::vector<int32_t> between(static_cast<size_t>(slots - first - last));
  std::iota(between.begin(), between.end(), first);
  std::ranges::nth_element(between, between.begin() + chosen, [&](int32_t a, int32_t b) {
    const int64_t x = scores[static_cast<size_t>(a)], y = scores[static_cast<size_t>(b)];
    return x != y ? x > y : a < b;
  });
  auto out = kept.begin();
  for (int32_t i = 0; i < first; ++i) *out++ = i;
  out = std::copy_n(between.begin(), chosen, out);
  std::sort(out - chosen, out);
  for (int32_t i = slots - last; i < slots; ++i) *out++ = i;
}

Result<Retention> make_retention(std::string_view text) {
  auto parsed = json::parse(text);
  if (!parsed.ok() || !parsed->is_object()) {
    return invalid_argument(
        "kv_eviction must be a JSON object such as {{\"policy\": \"snapkv\", \"budget\": 1024}}{}",
        parsed.ok() ? "" : fmt::format(": {}", parsed.status().message()));
  }
  const json::Value* const name = parsed->find("policy");
  if (name == nullptr || !name->is_string())
    return invalid_argument("kv_eviction: \"policy\" must name a policy");
  const bool none = name->as_string() == "none";
  const auto kind = std::ranges::find(kKinds, name->as_string(), &RetentionKind::name);
  if (!none && kind == kKinds.end()) {
    std::string known = "none";
    for (const RetentionKind* k : kKinds) known += fmt::format(" {}", k->name);
    return invalid_argument("kv_eviction: unknown policy \"{}\"; known: {}", name->as_string(),
                            known);
  }
  RetentionConfig config;
  if (!none) config = (*kind)->defaults;
  config.policy = none ? "none" : (*kind)->name;
  for (const auto& [key, value] : parsed->as_object()) {
    if (key == "policy") continue;
    if (none || (key != "budget" && !lists((*kind)->keys, key))) {
      return invalid_argument("kv_eviction: {} has no \"{}\"{}", config.policy, key,
                              none ? "" : fmt::format("; it has budget {}", (*kind)->keys));
    }
    FRESHET_RETURN_IF_ERROR(read_key(key, value, config));
  }
  if (none) return Retention{};
  FRESHET_RETURN_IF_ERROR(check_sizes(config));
  return (*kind)->make(config);
}

}  // namespace freshet::kv_cache

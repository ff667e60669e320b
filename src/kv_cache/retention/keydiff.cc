// KeyDiff (arXiv:2504.15364): keeps the keys whose direction differs most from the mean of all
// normalised keys.
#include <cmath>

#include "kv_cache/retention/retention.h"

namespace freshet::kv_cache {
namespace {

constexpr double kKeyDiffUnits = 0x1p40;  // of a cosine of 1

class KeyDiffPolicy final : public RetentionPolicy {
 public:
  using RetentionPolicy::RetentionPolicy;
  RetentionRules rules() const override {
    return {.interval = config().interval, .reads_keys = true};
  }
  void keep(const StoredKeys& keys, int head, std::span<int32_t> kept) const override {
    const auto slots = static_cast<size_t>(keys.slots), dim = static_cast<size_t>(keys.key_dim);
    std::vector<float> key(slots * dim);
    keys.read(head, key.data());
    std::vector<double> mean(dim), norms(slots);
    for (size_t i = 0; i < slots; ++i) {
      double square = 0.0;
      for (size_t d = 0; d < dim; ++d) square += double{key[i * dim + d]} * key[i * dim + d];
      norms[i] = std::sqrt(square) + 1e-12;
      for (size_t d = 0; d < dim; ++d) mean[d] += key[i * dim + d] / norms[i];
    }
    double square = 0.0;
    for (const double m : mean) square += m * m;
    const double norm = std::sqrt(square) + 1e-12;
    std::vector<int64_t> scores(slots);
    for (size_t i = 0; i < slots; ++i) {
      double product = 0.0;
      for (size_t d = 0; d < dim; ++d) product += mean[d] * key[i * dim + d];
      const double cosine = product / (norms[i] * norm);
      scores[i] = std::isfinite(cosine) ? -std::llrint(cosine * kKeyDiffUnits) : 0;
    }
    keep_best(scores, config().sinks, config().recent, kept);
  }
};

}  // namespace

constinit const RetentionKind kKeyDiff = {
    "keydiff", "recent sinks interval", {.interval = 128}, [](const RetentionConfig& c) {
      return Retention(std::make_shared<KeyDiffPolicy>(c));
    }};

}  // namespace freshet::kv_cache

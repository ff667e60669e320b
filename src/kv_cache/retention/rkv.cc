// R-KV (arXiv:2505.24133): keeps keys that have large weights in the last queries and are not
// redundant. The redundancy of a key is the softmax, over keys, of its mean cosine similarity to
// all keys, except that the newest similar key is spared.
#include <algorithm>
#include <cmath>

#include "kv_cache/retention/pooled.h"
#include "kv_cache/retention/retention.h"
#include "ops/attention.h"

namespace freshet::kv_cache {
namespace {

constexpr double kSimilar = 0.5;  // cosine from which keys count as similar
constexpr double kRkvUnits = 0x1p40;

class RkvPolicy final : public RetentionPolicy {
 public:
  using RetentionPolicy::RetentionPolicy;
  RetentionRules rules() const override {
    return {.interval = config().interval, .window = config().window, .reads_keys = true};
  }

  void keep(const StoredKeys& keys, int head, std::span<int32_t> kept) const override {
    const std::vector<int64_t> weights = max_pooled(keys.scores(head), config().kernel);
    const std::vector<double> redundant = redundancy(keys, head);
    // Means over the window and the query heads: all weights of a query head and query add to one.
    double total = 0.0;
    for (const int64_t w : keys.scores(head)) total += static_cast<double>(w);
    const double lambda = config().lambda;
    std::vector<int64_t> scores(weights.size());
    for (size_t i = 0; i < scores.size(); ++i) {
      const double score = lambda * static_cast<double>(weights[i]) / std::max(total, 1.0) -
                           (1.0 - lambda) * redundant[i];
      scores[i] = std::isfinite(score) ? std::llrint(score * kRkvUnits) : 0;
    }
    keep_best(scores, config().sinks, config().window, kept);
  }

 private:
  static std::vector<double> redundancy(const StoredKeys& keys, int head) {
    const auto slots = static_cast<size_t>(keys.slots), dim = static_cast<size_t>(keys.key_dim);
    std::vector<float> key(slots * dim);
    keys.read(head, key.data());
    for (size_t i = 0; i < slots; ++i) {
      double square = 0.0;
      for (size_t d = 0; d < dim; ++d) square += double{key[i * dim + d]} * key[i * dim + d];
      const auto inverse = static_cast<float>(1.0 / (std::sqrt(square) + 1e-12));
      for (size_t d = 0; d < dim; ++d) key[i * dim + d] *= inverse;
    }
    std::vector<double> mean(slots);
    std::vector<float> cosine(slots);
    for (size_t j = 0; j < slots; ++j) {
      size_t newest = slots;
      for (size_t i = 0; i < slots; ++i) {
        float product = 0.0f;
        for (size_t d = 0; d < dim; ++d) product += key[j * dim + d] * key[i * dim + d];
        cosine[i] = i == j ? 0.0f : product;
        if (cosine[i] > kSimilar) newest = i;
      }
      if (newest < slots) cosine[newest] = 0.0f;
      for (size_t i = 0; i < slots; ++i) mean[i] += cosine[i];
    }
    double most = -1.0, sum = 0.0;
    for (double& m : mean) most = std::max(most, m /= static_cast<double>(slots));
    for (double& m : mean) sum += m = std::exp(m - most);
    for (double& m : mean) m /= sum;
    return mean;
  }
};

}  // namespace

constinit const RetentionKind kRkv = {
    "rkv",
    "window kernel lambda sinks interval",
    {.window = 8, .interval = 128, .kernel = 7, .lambda = 0.1},
    [](const RetentionConfig& c) { return Retention(std::make_shared<RkvPolicy>(c)); }};

}  // namespace freshet::kv_cache

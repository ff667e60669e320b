#include "eval/divergence.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/status.h"

namespace freshet::eval {
namespace {

// NaN if any logit is.
struct Top {
  float value = -std::numeric_limits<float>::infinity();
  size_t at = 0;
};
Top top_logit(std::span<const float> row) {
  Top top{row[0], 0};
  for (size_t i = 1; i < row.size(); ++i) {
    if (row[i] > top.value || std::isnan(row[i])) top = {row[i], i};
  }
  return top;
}

}  // namespace

Divergence divergence(std::span<const float> base, std::span<const float> model, int32_t token) {
  FRESHET_CHECK(base.size() == model.size() && token >= 0 &&
                static_cast<size_t>(token) < base.size());
  const Top base_top = top_logit(base), model_top = top_logit(model);
  const double base_max = base_top.value, model_max = model_top.value;
  double base_sum = 0.0, model_sum = 0.0, weighted = 0.0;
  for (size_t i = 0; i < base.size(); ++i) {
    const double b = base[i] - base_max, m = model[i] - model_max;
    const double weight = std::exp(b);
    base_sum += weight;
    model_sum += std::exp(m);
    // A token that the base rules out contributes nothing, whatever the model says.
    if (weight > 0.0) weighted += weight * (b - m);
  }
  const double base_log = std::log(base_sum), model_log = std::log(model_sum);
  const auto at = static_cast<size_t>(token);
  Divergence d;
  d.base_nats = base_log - (base[at] - base_max);
  d.model_nats = model_log - (model[at] - model_max);
  // sum p (ln p - ln q) = sum p (b - m) - (ln sum exp b - ln sum exp m); rounding may take a
  // divergence of almost nothing below 0. The comparison keeps a NaN.
  d.kl = weighted / base_sum - (base_log - model_log);
  if (d.kl < 0.0) d.kl = 0.0;
  d.same_top = base_top.at == model_top.at;
  return d;
}

}  // namespace freshet::eval

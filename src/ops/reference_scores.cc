// The inner loops of Ops::key_scores() and Ops::selected_attention() in double.
#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/reference.h"
#include "tensor/dtype.h"

namespace freshet::ops {
namespace {

void dots(const float* q, int rows, const float* keys, int key_dim, float* out, int64_t stride) {
  for (int r = 0; r < rows; ++r, q += key_dim, out += stride) {
    for (int t = 0; t < kBlockTokens; ++t) {
      double sum = 0.0;
      for (int d = 0; d < key_dim; ++d) sum += double{q[d]} * double{keys[d * kBlockTokens + t]};
      out[t] = static_cast<float>(sum);
    }
  }
}

void add_weights(float* scores, int64_t n, const float* sink, int64_t* sums) {
  double most = sink != nullptr ? double{*sink} : double{scores[0]};
  for (int64_t i = 0; i < n; ++i) most = std::max(most, double{scores[i]});
  double sum = sink != nullptr ? std::exp(double{*sink} - most) : 0.0;
  for (int64_t i = 0; i < n; ++i) sum += std::exp(double{scores[i]} - most);
  for (int64_t i = 0; i < n; ++i) {
    sums[i] += std::llrint(std::exp(double{scores[i]} - most) / sum * double{kScoreUnits});
  }
}

float promise(const float* q, int rows, const uint16_t* least, const uint16_t* greatest,
              int key_dim, float spread) {
  double sum = 0.0;
  for (int r = 0; r < rows; ++r, q += key_dim) {
    for (int d = 0; d < key_dim; ++d) {
      const double low = double{bf16_to_f32(least[d])}, high = double{bf16_to_f32(greatest[d])};
      sum += double{q[d]} * (high + low) + double{spread} * std::abs(double{q[d]}) * (high - low);
    }
  }
  return std::isnan(sum) ? std::numeric_limits<float>::infinity() : static_cast<float>(sum);
}

constexpr ScoreKernel kScoreRows[] = {
    {"scores.reference", CpuIsa::kScalar, dots, add_weights, promise}};

}  // namespace

std::span<const ScoreKernel> reference_scores() {
  return kScoreRows;
}

}  // namespace freshet::ops

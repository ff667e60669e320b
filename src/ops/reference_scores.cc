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

float bound(const float* q, int rows, const uint16_t* least, const uint16_t* greatest,
            int key_dim) {
  double most = -std::numeric_limits<double>::infinity();
  for (int r = 0; r < rows; ++r, q += key_dim) {
    double sum = 0.0;
    for (int d = 0; d < key_dim; ++d) {
      sum += std::max(double{q[d]} * double{bf16_to_f32(least[d])},
                      double{q[d]} * double{bf16_to_f32(greatest[d])});
    }
    most = std::isnan(sum) ? std::numeric_limits<double>::infinity() : std::max(most, sum);
  }
  return static_cast<float>(most);
}

constexpr ScoreKernel kScoreRows[] = {
    {"scores.reference", CpuIsa::kScalar, dots, add_weights, bound}};

}  // namespace

std::span<const ScoreKernel> reference_scores() {
  return kScoreRows;
}

}  // namespace freshet::ops

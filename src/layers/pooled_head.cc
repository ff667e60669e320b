#include "layers/pooled_head.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

#include "base/status.h"

namespace freshet {
namespace {

// Sixteen partial sums, which compilers keep in registers.
float dot_product(const float* a, const float* b, int n) {
  constexpr int kLanes = 16;
  std::array<float, kLanes> sums{};
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) sums[static_cast<size_t>(l)] += a[i + l] * b[i + l];
  }
  float rest = 0.0f;
  for (; i < n; ++i) rest += a[i] * b[i];
  for (const float s : sums) rest += s;
  return rest;
}

float activated(HeadStage::Act act, float x) {
  using A = HeadStage::Act;
  switch (act) {
    case A::kNone:
      return x;
    case A::kTanh:
      return std::tanh(x);
    case A::kGelu:
      return 0.5f * x * (1.0f + std::erf(x * static_cast<float>(std::numbers::sqrt2 / 2)));
    case A::kGeluTanh: {
      const auto c = static_cast<float>(std::sqrt(2.0 / std::numbers::pi));
      return 0.5f * x * (1.0f + std::tanh(c * (x + 0.044715f * x * x * x)));
    }
    case A::kRelu:
      return std::max(x, 0.0f);
    case A::kSilu:
      return x / (1.0f + std::exp(-x));
    case A::kSigmoid:
      return 1.0f / (1.0f + std::exp(-x));
  }
  return x;
}

std::vector<float> run_norm(const HeadStage& stage, std::vector<float> x) {
  const auto count = static_cast<double>(x.size());
  double mean = 0.0, squares = 0.0;
  if (stage.kind == HeadStage::Kind::kLayerNorm) {
    for (const float v : x) mean += static_cast<double>(v) / count;
  }
  for (const float v : x) squares += (v - mean) * (v - mean) / count;
  const double scale = 1.0 / std::sqrt(squares + static_cast<double>(stage.eps));
  for (size_t i = 0; i < x.size(); ++i) {
    auto v = static_cast<float>((x[i] - mean) * scale);
    if (!stage.weight.empty()) v *= stage.weight[i];
    if (!stage.bias.empty()) v += stage.bias[i];
    x[i] = activated(stage.act, v);
  }
  return x;
}

std::vector<float> run_linear(const HeadStage& stage, const std::vector<float>& x) {
  std::vector<float> out(static_cast<size_t>(stage.out));
  for (size_t r = 0; r < out.size(); ++r) {
    const float* row = stage.weight.data() + r * static_cast<size_t>(stage.in);
    const float v = dot_product(row, x.data(), stage.in);
    out[r] = activated(stage.act, stage.bias.empty() ? v : v + stage.bias[r]);
  }
  return out;
}

}  // namespace

std::vector<float> PooledHead::run(std::vector<float> x) const {
  for (const HeadStage& stage : stages) {
    FRESHET_CHECK(std::ssize(x) == stage.in, "{} features for a layer of {}", x.size(), stage.in);
    x = stage.kind == HeadStage::Kind::kLinear ? run_linear(stage, x)
                                               : run_norm(stage, std::move(x));
  }
  return x;
}

void PoolState::add(std::span<const float> state) {
  const bool first = count_++ == 0;
  if (kind_ == PoolKind::kFirst && !first) return;
  if (first || kind_ == PoolKind::kLast) {
    sum_.assign(state.begin(), state.end());
    return;
  }
  for (size_t k = 0; k < state.size(); ++k) {
    const auto v = static_cast<double>(state[k]);
    sum_[k] = kind_ == PoolKind::kMax ? std::max(sum_[k], v) : sum_[k] + v;
  }
}

std::vector<float> PoolState::result() const {
  double divisor = 1.0;
  if (kind_ == PoolKind::kMean) divisor = static_cast<double>(std::max<int64_t>(1, count_));
  if (kind_ == PoolKind::kMeanSqrt)
    divisor = std::sqrt(static_cast<double>(std::max<int64_t>(1, count_)));
  std::vector<float> out;
  out.reserve(sum_.size());
  for (const double v : sum_) out.push_back(static_cast<float>(v / divisor));
  return out;
}

void normalize_vector(std::vector<float>& v) {
  double squares = 0.0;
  for (const float x : v) squares += static_cast<double>(x) * x;
  if (squares <= 0.0) return;
  const double length = std::sqrt(squares);
  for (float& x : v) x = static_cast<float>(x / length);
}

}  // namespace freshet

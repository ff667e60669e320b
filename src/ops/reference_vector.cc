// Row-wise ops in double, rounded once.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "ops/ops.h"
#include "ops/reference.h"

namespace freshet::ops {
namespace {

void affine(float* out, const float* x, const float* weight, const float* bias, int64_t n,
            double mean, double scale) {
  for (int64_t i = 0; i < n; ++i) {
    double v = (x[i] - mean) * scale;
    if (weight != nullptr) v *= weight[i];
    if (bias != nullptr) v += bias[i];
    out[i] = static_cast<float>(v);
  }
}

void rms_norm(float* out, const float* x, const float* weight, const float* bias, int64_t n,
              float eps) {
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) sum += double{x[i]} * x[i];
  affine(out, x, weight, bias, n, 0.0, 1.0 / std::sqrt(sum / static_cast<double>(n) + eps));
}

void layer_norm(float* out, const float* x, const float* weight, const float* bias, int64_t n,
                float eps) {
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) sum += x[i];
  const double mean = sum / static_cast<double>(n);
  double squares = 0.0;
  for (int64_t i = 0; i < n; ++i) squares += (x[i] - mean) * (x[i] - mean);
  affine(out, x, weight, bias, n, mean, 1.0 / std::sqrt(squares / static_cast<double>(n) + eps));
}

void rope(float* head, const float* cos_sin, int rotary_dim, bool interleaved) {
  const int half = rotary_dim / 2;
  for (int i = 0; i < half; ++i) {
    float& a = head[interleaved ? 2 * i : i];
    float& b = head[interleaved ? 2 * i + 1 : i + half];
    const double c = cos_sin[i], s = cos_sin[half + i], x = a, y = b;
    a = static_cast<float>(x * c - y * s);
    b = static_cast<float>(y * c + x * s);
  }
}

double sigmoid(double x) {
  return 1.0 / (1.0 + std::exp(-x));
}

double activate(double x, Activation kind) {
  switch (kind) {
    case Activation::kNone:
      return x;
    case Activation::kSilu:
      return x * sigmoid(x);
    case Activation::kGelu:
      return 0.5 * x * std::erfc(-x / std::numbers::sqrt2);
    case Activation::kGeluTanh: {
      // 0.5 (1 + tanh u) = sigmoid(2 u)
      const double u = std::sqrt(2.0 / std::numbers::pi) * (x + 0.044715 * x * x * x);
      return x * sigmoid(2.0 * u);
    }
    case Activation::kRelu:
      return std::max(x, 0.0);
    case Activation::kRelu2:
      return x > 0.0 ? x * x : 0.0;
    case Activation::kQuickGelu:
      return x * sigmoid(1.702 * x);
  }
  return x;
}

void glu(float* out, const float* gate, const float* up, int64_t n, int kind, float limit,
         float alpha) {
  for (int64_t i = 0; i < n; ++i) {
    if (limit > 0.0f) {
      const double g = std::min(gate[i], limit);
      const double u = std::clamp(up[i], -limit, limit);
      out[i] = static_cast<float>((u + 1.0) * g * sigmoid(double{alpha} * g));
    } else {
      out[i] = static_cast<float>(activate(gate[i], static_cast<Activation>(kind)) * up[i]);
    }
  }
}

void activation(float* x, int64_t n, int kind) {
  for (int64_t i = 0; i < n; ++i) {
    x[i] = static_cast<float>(activate(x[i], static_cast<Activation>(kind)));
  }
}

void add(float* out, const float* x, int64_t n, float factor) {
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(out[i] + double{factor} * x[i]);
}

void scale(float* x, int64_t n, float factor) {
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

void softcap(float* x, int64_t n, float cap) {
  for (int64_t i = 0; i < n; ++i) {
    x[i] = static_cast<float>(cap * std::tanh(double{x[i]} / double{cap}));
  }
}

constexpr VectorKernels kKernels[] = {{"vector.reference", CpuIsa::kScalar, rms_norm, layer_norm,
                                       rope, glu, activation, add, scale, softcap}};

}  // namespace

std::span<const VectorKernels> reference_vector() {
  return kKernels;
}

const KernelTable& reference_kernels() {
  static const KernelTable kTable{"reference",           reference_matmul(), {},
                                  reference_attention(), reference_vector(), reference_scores()};
  return kTable;
}

}  // namespace freshet::ops

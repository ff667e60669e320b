#include "quantizer/methods/lanes.h"

#include <algorithm>

#include "base/vector_clones.h"

namespace freshet::quantizer {
namespace {

// Vectors of 64 bytes: the compiler makes them of what the instruction set has.
using F16 = float __attribute__((vector_size(64), aligned(4), may_alias));
using F8 = float __attribute__((vector_size(32), aligned(4), may_alias));
using D8 = double __attribute__((vector_size(64), aligned(8), may_alias));

// Four vectors at a time stay in registers while the rows pass. Always inlined, so that each clone
// of its caller has its own.
template <class V, int kStep = 1, class T, class RowOf>
[[gnu::always_inline]] inline void add_all(T* out, int64_t n, const T* a, const RowOf& row,
                                           int64_t count) {
  constexpr int64_t kWidth = sizeof(V) / sizeof(T);
  int64_t i = 0;
  for (; i + 4 * kWidth <= n; i += 4 * kWidth) {
    auto* const to = reinterpret_cast<V*>(out + i);
    V sum0 = to[0], sum1 = to[1], sum2 = to[2], sum3 = to[3];
    for (int64_t k = 0; k < count; ++k) {
      const auto* const from = reinterpret_cast<const V*>(row(k) + i);
      const T by = a[k * kStep];
      sum0 += by * from[0];
      sum1 += by * from[1];
      sum2 += by * from[2];
      sum3 += by * from[3];
    }
    to[0] = sum0, to[1] = sum1, to[2] = sum2, to[3] = sum3;
  }
  for (; i + kWidth <= n; i += kWidth) {
    V sum = *reinterpret_cast<V*>(out + i);
    for (int64_t k = 0; k < count; ++k)
      sum += a[k * kStep] * *reinterpret_cast<const V*>(row(k) + i);
    *reinterpret_cast<V*>(out + i) = sum;
  }
  for (; i < n; ++i) {
    T sum = out[i];
    for (int64_t k = 0; k < count; ++k) sum += a[k * kStep] * row(k)[i];
    out[i] = sum;
  }
}

}  // namespace

FRESHET_VECTOR_CLONES void add_products(float* out, int64_t n, const float* a, const float* b,
                                        int64_t stride, int64_t count) {
  add_all<F16>(out, n, a, [=](int64_t k) { return b + k * stride; }, count);
}

FRESHET_VECTOR_CLONES void add_products(double* out, int64_t n, const double* a, const double* b,
                                        int64_t stride, int64_t count) {
  add_all<D8>(out, n, a, [=](int64_t k) { return b + k * stride; }, count);
}

FRESHET_VECTOR_CLONES void add_products_back(float* out, int64_t n, const float* a, const float* b,
                                             int64_t stride, int64_t count) {
  add_all<F16, -1>(out, n, a, [=](int64_t k) { return b + k * stride; }, count);
}

FRESHET_VECTOR_CLONES void add_products_back(double* out, int64_t n, const double* a,
                                             const double* b, int64_t stride, int64_t count) {
  add_all<D8, -1>(out, n, a, [=](int64_t k) { return b + k * stride; }, count);
}

FRESHET_VECTOR_CLONES void add_rows(float* out, int64_t n, const float* a, const int32_t* rows,
                                    const float* b, int64_t stride, int64_t count) {
  add_all<F16>(out, n, a, [=](int64_t k) { return b + rows[k] * stride; }, count);
}

FRESHET_VECTOR_CLONES void add_multiple(float* out, int64_t n, float by, const float* from) {
  for (int64_t i = 0; i < n; ++i) out[i] += by * from[i];
}

FRESHET_VECTOR_CLONES void add_multiple(double* out, int64_t n, double by, const double* from) {
  for (int64_t i = 0; i < n; ++i) out[i] += by * from[i];
}

// Eight by eight numbers at a time: three rounds of exchanges between rows.
FRESHET_VECTOR_CLONES void transpose(const float* from, int64_t stride, int64_t rows, int64_t cols,
                                     float* to, int64_t to_stride) {
  constexpr int64_t kEdge = 8;
  const int64_t whole_rows = rows / kEdge * kEdge;
  const int64_t whole_cols = cols / kEdge * kEdge;
  for (int64_t i = 0; i < whole_rows; i += kEdge) {
    for (int64_t j = 0; j < whole_cols; j += kEdge) {
      F8 a[kEdge], b[kEdge];
      for (int64_t k = 0; k < kEdge; ++k)
        a[k] = *reinterpret_cast<const F8*>(from + (i + k) * stride + j);
      for (int64_t k = 0; k < kEdge; k += 2) {
        b[k] = __builtin_shufflevector(a[k], a[k + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        b[k + 1] = __builtin_shufflevector(a[k], a[k + 1], 1, 9, 3, 11, 5, 13, 7, 15);
      }
      for (int64_t k = 0; k < kEdge; ++k) {
        const int64_t low = k / 4 * 4 + k % 2;
        a[k] = k % 4 < 2
                   ? __builtin_shufflevector(b[low], b[low + 2], 0, 1, 8, 9, 4, 5, 12, 13)
                   : __builtin_shufflevector(b[low], b[low + 2], 2, 3, 10, 11, 6, 7, 14, 15);
      }
      for (int64_t k = 0; k < kEdge / 2; ++k) {
        b[k] = __builtin_shufflevector(a[k], a[k + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        b[k + 4] = __builtin_shufflevector(a[k], a[k + 4], 4, 5, 6, 7, 12, 13, 14, 15);
      }
      for (int64_t k = 0; k < kEdge; ++k)
        *reinterpret_cast<F8*>(to + (j + k) * to_stride + i) = b[k];
    }
  }
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = i < whole_rows ? whole_cols : 0; j < cols; ++j)
      to[j * to_stride + i] = from[i * stride + j];
  }
}

// From the upper triangle: the diagonal once, the rest twice.
double quadratic_form(const float* moments, const float* x, int64_t n) {
  constexpr int64_t kWidth = 64;
  double total = 0.0;
  for (int64_t first = 0; first < n; first += kWidth) {
    const int64_t width = std::min(kWidth, n - first);
    float sum[kWidth] = {};
    add_products(sum, width, x, moments + first, n, first);
    for (int64_t j = first; j < first + width; ++j) {
      double tail = 2.0 * sum[j - first] + double{x[j]} * moments[j * (n + 1)];
      for (int64_t i = first; i < j; ++i) tail += 2.0 * x[i] * moments[i * n + j];
      total += x[j] * tail;
    }
  }
  return total;
}

}  // namespace freshet::quantizer

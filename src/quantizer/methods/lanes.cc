#include "quantizer/methods/lanes.h"

#include "base/vector_clones.h"

namespace freshet::quantizer {
namespace {

// Always inlined, so that each clone of its caller has its own.
template <class T, int kTile, class RowOf>
[[gnu::always_inline]] inline int64_t add_tiles(T* out, int64_t i, int64_t n, const T* a,
                                                const RowOf& row, int64_t count) {
  for (; i + kTile <= n; i += kTile) {
    T sum[kTile];
    for (int lane = 0; lane < kTile; ++lane) sum[lane] = out[i + lane];
    for (int64_t k = 0; k < count; ++k) {
      const T* const from = row(k) + i;
      const T by = a[k];
      for (int lane = 0; lane < kTile; ++lane) sum[lane] += by * from[lane];
    }
    for (int lane = 0; lane < kTile; ++lane) out[i + lane] = sum[lane];
  }
  return i;
}

template <class T, int kTile, class RowOf>
[[gnu::always_inline]] inline void add_all(T* out, int64_t n, const T* a, const RowOf& row,
                                           int64_t count) {
  int64_t i = add_tiles<T, kTile>(out, 0, n, a, row, count);
  i = add_tiles<T, 8>(out, i, n, a, row, count);
  add_tiles<T, 1>(out, i, n, a, row, count);
}

}  // namespace

FRESHET_VECTOR_CLONES void add_products(float* out, int64_t n, const float* a, const float* b,
                                        int64_t stride, int64_t count) {
  add_all<float, 64>(
      out, n, a, [=](int64_t k) { return b + k * stride; }, count);
}

FRESHET_VECTOR_CLONES void add_products(double* out, int64_t n, const double* a, const double* b,
                                        int64_t stride, int64_t count) {
  add_all<double, 32>(
      out, n, a, [=](int64_t k) { return b + k * stride; }, count);
}

FRESHET_VECTOR_CLONES void add_rows(float* out, int64_t n, const float* a, const int32_t* rows,
                                    const float* b, int64_t stride, int64_t count) {
  add_all<float, 64>(
      out, n, a, [=](int64_t k) { return b + rows[k] * stride; }, count);
}

FRESHET_VECTOR_CLONES void add_multiple(float* out, int64_t n, float by, const float* from) {
  for (int64_t i = 0; i < n; ++i) out[i] += by * from[i];
}

FRESHET_VECTOR_CLONES void add_multiple(double* out, int64_t n, double by, const double* from) {
  for (int64_t i = 0; i < n; ++i) out[i] += by * from[i];
}

}  // namespace freshet::quantizer

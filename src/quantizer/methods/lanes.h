// The inner loop of all that is quadratic here: adding multiples of matrix rows to a vector.
//
// Sums of one element run over the rows in their order, whatever the tile, so results depend
// neither on vector widths nor on threads. Pure; thread-safe.
#pragma once

#include <cstdint>

namespace freshet::quantizer {

// out[i] += sum over k of a[k] * b[k * stride + i], for i in [0, n), k in [0, count).
void add_products(float* out, int64_t n, const float* a, const float* b, int64_t stride,
                  int64_t count);
void add_products(double* out, int64_t n, const double* a, const double* b, int64_t stride,
                  int64_t count);
// out[i] += sum over k of a[-k] * b[k * stride + i].
void add_products_back(float* out, int64_t n, const float* a, const float* b, int64_t stride,
                       int64_t count);
void add_products_back(double* out, int64_t n, const double* a, const double* b, int64_t stride,
                       int64_t count);
// The first for the rows b + rows[k] * stride.
void add_rows(float* out, int64_t n, const float* a, const int32_t* rows, const float* b,
              int64_t stride, int64_t count);
// out[i] += by * from[i]
void add_multiple(float* out, int64_t n, float by, const float* from);
void add_multiple(double* out, int64_t n, double by, const double* from);
// to[j * to_stride + i] = from[i * stride + j], for i in [0, rows), j in [0, cols).
void transpose(const float* from, int64_t stride, int64_t rows, int64_t cols, float* to,
               int64_t to_stride);
// x M x^T for a symmetric matrix [n, n].
double quadratic_form(const float* moments, const float* x, int64_t n);

}  // namespace freshet::quantizer

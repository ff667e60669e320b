// The second moments of a linear layer's inputs, prepared for error feedback.
//
// One Hessian serves all linears that read the same inputs. The factor is upper triangular, U with
// U^T U = H^-1, for columns in the order in which they are visited; H is damped by a share of its
// mean diagonal, ten times more after each failure of the factorisation. Columns that no token used
// keep only the damping: they are rounded to the nearest and disturb no other. Immutable after
// prepare_hessian(); the result does not depend on the number of threads.
//
// Memory: one F32 matrix [cols, cols], whose two triangles hold moments and factor. While it is
// prepared, up to 8,192 columns, a second one in F64; and for each thread 64 columns of the factor.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "quantizer/methods/input_stats.h"

namespace freshet::quantizer {

struct HessianOptions {
  float damping = 0.01f;      // a share of the mean diagonal
  bool falling_order = true;  // visit the columns with the largest moments first
};

struct Hessian {
  int64_t cols = 0;
  // [cols, cols]: under the diagonal the moments; on it and above the factor, in visiting order.
  std::vector<float> triangles;
  std::vector<float> diagonal;  // [cols]: of the moments, damped
  float added = 0.0f;           // what damping added to the diagonal
  float damping = 0.0f;         // the share that was needed
  int64_t dead_columns = 0;
  std::vector<int32_t> order;  // visited columns

  float moment(int64_t i, int64_t j) const {
    if (i == j) return diagonal[static_cast<size_t>(i)];
    return triangles[static_cast<size_t>(i > j ? i * cols + j : j * cols + i)];
  }
  // Copies the moments of rows [row, row + rows) and columns [column, column + width).
  void copy_moments(int64_t row, int64_t rows, int64_t column, int64_t width, float* to,
                    int64_t stride) const;
};

// `gram`: InputStats::gram for `cols` inputs; only its lower triangle is read. nullopt if it holds
// no usable moments: none were collected, or some are not finite; `why` says which.
std::optional<Hessian> prepare_hessian(std::vector<float> gram, int64_t cols,
                                       const HessianOptions& options, ThreadPool& pool,
                                       std::string& why);

}  // namespace freshet::quantizer

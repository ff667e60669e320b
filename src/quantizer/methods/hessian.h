// The second moments of a linear layer's inputs, prepared for error feedback.
//
// One Hessian serves all linears that read the same inputs. The factor is upper triangular, U with
// U^T U = H^-1, for columns in the order in which they are visited; H is damped by a share of its
// mean diagonal, ten times more after each failure of the factorisation. Columns that no token used
// keep only the damping: they are rounded to the nearest and disturb no other. Immutable after
// prepare_hessian(); the result does not depend on the number of threads. Memory: three F32
// matrices [cols, cols] while it is prepared (F64 for the factor up to 8,192 columns), two
// afterwards.
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
  std::vector<float> moments;  // [cols, cols], damped
  float added = 0.0f;          // what damping added to the diagonal
  float damping = 0.0f;        // the share that was needed
  int64_t dead_columns = 0;
  std::vector<int32_t> order;  // visited columns
  std::vector<float> factor;   // [cols, cols] in visiting order; empty: no factorisation succeeded
};

// nullopt if the statistics hold no usable moments: none were collected, or some are not finite;
// `why` says which.
std::optional<Hessian> prepare_hessian(const InputStats& stats, const HessianOptions& options,
                                       ThreadPool& pool, std::string& why);

}  // namespace freshet::quantizer

// Quantising one linear layer: the mathematics, without files or models.
//
// Everything works on an F32 matrix [rows, cols] and statistics of its inputs. Results depend on
// neither the number of threads nor the instruction set. Weights that are not numbers become zero,
// infinite ones the largest finite magnitude of the matrix; the report counts them. No function
// keeps state; the thread pool must be free.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/thread_pool.h"
#include "quantizer/coded_matrix.h"
#include "quantizer/methods/grid.h"
#include "quantizer/methods/hessian.h"

namespace freshet::quantizer {

enum class Rounding {
  kNearest,
  // GPTQ: the error of a column is made up for by those that follow; then codes and scales are
  // improved in turn until nothing changes the output for the better.
  kFeedback,
};

struct MethodOptions {
  Rounding rounding = Rounding::kNearest;
  // Ranges with the least squared error; false: those that cover the extreme values.
  bool search_ranges = true;
  // Ranges and codes weigh the error of a column by its inputs' mean square (an imatrix does this).
  bool weighted = true;
  int sweeps = 4;  // rounds of improvement after feedback; 0: plain GPTQ
  // NVFP4 of fused parts: the largest magnitude of all of them; 0: this matrix's own.
  float tensor_max = 0.0f;
};

// What the methods know of the inputs, prepared once for all linears that share them.
struct Inputs {
  int64_t cols = 0;
  std::vector<float> mean_square;  // [cols]; empty: unknown
  std::optional<Hessian> hessian;
  std::string note;  // why there is no Hessian although one was wanted
};
// With `feedback`, factorises `gram`: InputStats::gram, which becomes part of the result.
Inputs prepare_inputs(const InputStats& stats, std::vector<float> gram, bool feedback,
                      const HessianOptions& options, ThreadPool& pool);

struct LinearReport {
  // Error of the output over its energy: tr(dW H dW^T) / tr(W H W^T), with the damped moments H
  // where they are known, else with their mean squares, else without weights.
  double relative_error = 0.0;
  double error = 0.0;    // the numerator
  double energy = 0.0;   // the denominator
  float damping = 0.0f;  // that feedback needed; 0: no feedback
  int64_t dead_columns = 0;
  int64_t non_finite = 0;  // weights that were no finite numbers
  std::string note;        // what happened other than asked for; empty: nothing
};

struct Quantised {
  QuantisedMatrix matrix;
  LinearReport report;
};

Result<Quantised> quantise_linear(const float* w, int64_t rows, int64_t cols, const Target& target,
                                  const Inputs& inputs, const MethodOptions& options,
                                  ThreadPool& pool);

// Takes columns out of a matrix [rows, cols], before it is quantised: zeros take their place, which
// cost no error. `type`: of the stored numbers, kBF16 or kF16.
OutlierNumbers take_columns(float* w, int64_t rows, int64_t cols, std::vector<int32_t> columns,
                            ScaleType type);
// Gives the quantised matrix its columns back. Their codes become the nearest ones.
void give_columns(CodedMatrix& matrix, const Scheme& scheme, OutlierNumbers columns);

// The numbers that readers of the matrix compute.
std::vector<float> dequantise(const CodedMatrix& matrix, const Scheme& scheme);
std::vector<float> dequantise(const QuantisedMatrix& matrix, const Scheme* scheme);

}  // namespace freshet::quantizer

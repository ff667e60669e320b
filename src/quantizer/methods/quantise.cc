#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "quantizer/methods/methods.h"
#include "quantizer/methods/solver.h"

namespace freshet::quantizer {
namespace {

int64_t count_non_finite(const float* w, int64_t count, ThreadPool& pool) {
  constexpr int64_t kPiece = 65536;
  std::vector<int64_t> found(static_cast<size_t>((count + kPiece - 1) / kPiece));
  pool.parallel_for(std::ssize(found), [&](int64_t i, int) {
    const float* const end = w + std::min(count, (i + 1) * kPiece);
    found[static_cast<size_t>(i)] =
        std::count_if(w + i * kPiece, end, [](float v) { return !std::isfinite(v); });
  });
  return std::accumulate(found.begin(), found.end(), int64_t{0});
}

// A copy of the matrix that holds finite numbers.
std::vector<float> usable_weights(const float* w, int64_t count) {
  std::vector<float> out(w, w + count);
  float most = 0.0f;
  for (const float v : out) {
    if (std::isfinite(v)) most = std::max(most, std::abs(v));
  }
  for (float& v : out) {
    if (std::isnan(v)) v = 0.0f;
    v = std::clamp(v, -most, most);
  }
  return out;
}

// A GGUF type with an encoder of its own: rows go through it, weighted but without feedback.
Quantised encode_rows(const float* w, int64_t rows, int64_t cols, quant::Format format,
                      const float* weights, ThreadPool& pool) {
  EncodedRows out{format, rows, cols, {}};
  const size_t bytes = quant::row_bytes(format, cols);
  out.bytes.resize(static_cast<size_t>(rows) * bytes);
  pool.parallel_for(rows, [&](int64_t r, int) {
    quant::info(format).encode(w + r * cols, out.bytes.data() + static_cast<size_t>(r) * bytes,
                               cols, weights);
  });
  return {std::move(out), {}};
}

}  // namespace

Inputs prepare_inputs(const InputStats& stats, std::vector<float> gram, bool feedback,
                      const HessianOptions& options, ThreadPool& pool) {
  Inputs in;
  in.cols = stats.cols;
  const auto n = static_cast<size_t>(stats.cols);
  if (stats.mean_square.size() == n) {
    in.mean_square = stats.mean_square;
  } else if (gram.size() == n * n) {
    for (size_t j = 0; j < n; ++j) in.mean_square.push_back(gram[j * (n + 1)]);
  }
  for (float& v : in.mean_square) {
    if (!(v >= 0.0f) || !std::isfinite(v)) v = 0.0f;
  }
  if (feedback) in.hessian = prepare_hessian(std::move(gram), in.cols, options, pool, in.note);
  return in;
}

Result<Quantised> quantise_linear(const float* w, int64_t rows, int64_t cols, const Target& target,
                                  const Inputs& inputs, const MethodOptions& options,
                                  ThreadPool& pool) {
  if (inputs.cols != 0 && inputs.cols != cols) {
    return invalid_argument("statistics of {} inputs for a matrix of {} columns", inputs.cols,
                            cols);
  }
  FRESHET_ASSIGN_OR_RETURN(
      auto grid, make_grid(target, rows, cols, {options.search_ranges, options.tensor_max}));
  LinearReport report;
  report.non_finite = count_non_finite(w, rows * cols, pool);
  std::vector<float> usable;
  if (report.non_finite > 0) {
    usable = usable_weights(w, rows * cols);
    w = usable.data();
  }
  const float* const mean_square = inputs.mean_square.empty() ? nullptr : inputs.mean_square.data();
  const float* const weights = options.weighted ? mean_square : nullptr;
  const bool wanted = options.rounding == Rounding::kFeedback;
  const Hessian* const hessian = inputs.hessian ? &*inputs.hessian : nullptr;
  if (grid == nullptr) {
    const auto format = std::get<quant::Format>(target);
    if (quant::info(format).encode == nullptr) {
      return unsupported("{} can be read, but not written", quant::info(format).name);
    }
    Quantised out = encode_rows(w, rows, cols, format, weights, pool);
    out.report = report;
    if (wanted) out.report.note = "this type has no error feedback: rounded to the nearest";
    return out;
  }
  if (wanted && hessian == nullptr) report.note = inputs.note + ": rounded to the nearest";
  if (hessian != nullptr) {
    report.dead_columns = hessian->dead_columns;
    if (wanted) report.damping = hessian->damping;
  }
  grid->prepare(w, weights);
  const int panel_rows = PanelSolver::rows_for(rows, cols, pool.size());
  std::vector<QuadraticError> errors(static_cast<size_t>(rows));
  pool.parallel_for((rows + panel_rows - 1) / panel_rows, [&](int64_t panel, int) {
    const int64_t first = panel * panel_rows;
    const auto count = static_cast<int>(std::min<int64_t>(panel_rows, rows - first));
    PanelSolver solver(*grid, hessian, weights, count);
    solver.load(w, first, count);
    solver.fit();
    if (wanted && hessian != nullptr) {
      solver.feedback();
      for (int sweep = 0; sweep < options.sweeps; ++sweep) solver.improve();
    } else {
      solver.round();
    }
    solver.measure(mean_square, errors.data() + first);
    solver.store(*grid);
  });
  // Rows are added 32 at a time, however many a panel has.
  for (int64_t first = 0; first < rows; first += 32) {
    QuadraticError sum;
    for (int64_t r = first; r < std::min(rows, first + 32); ++r) {
      sum.error += errors[static_cast<size_t>(r)].error;
      sum.energy += errors[static_cast<size_t>(r)].energy;
    }
    report.error += sum.error;
    report.energy += sum.energy;
  }
  report.relative_error = report.energy > 0.0 ? report.error / report.energy : 0.0;
  return Quantised{grid->take(), std::move(report)};
}

std::vector<float> dequantise(const QuantisedMatrix& matrix, const Scheme* scheme) {
  if (const auto* rows = std::get_if<EncodedRows>(&matrix)) {
    std::vector<float> out(static_cast<size_t>(rows->rows * rows->cols));
    const quant::FormatInfo& info = quant::info(rows->format);
    const size_t bytes = quant::row_bytes(rows->format, rows->cols);
    for (int64_t r = 0; r < rows->rows; ++r) {
      info.decode(rows->bytes.data() + static_cast<size_t>(r) * bytes, out.data() + r * rows->cols,
                  rows->cols);
    }
    return out;
  }
  FRESHET_CHECK(scheme != nullptr, "codes mean nothing without their scheme");
  return dequantise(std::get<CodedMatrix>(matrix), *scheme);
}

std::vector<float> dequantise(const CodedMatrix& m, const Scheme& scheme) {
  const int64_t group = scheme.group == 0 ? m.cols : scheme.group;
  const int64_t groups = (m.cols + group - 1) / group;
  const int64_t group_rows = scheme.group_rows == 0 ? m.rows : scheme.group_rows;
  std::array<float, 256> level{};
  if (const CodeTable* table = code_table(scheme.levels)) {
    for (int i = 0; i < table->size; ++i) level[table->codes[i]] = table->levels[i];
  } else {
    for (int i = 0; i < 256; ++i) {
      level[static_cast<size_t>(i)] = scheme.levels == Levels::kE4M3
                                          ? quant::e4m3_to_f32(static_cast<uint8_t>(i))
                                          : static_cast<float>(i);
    }
  }
  const float middle = scheme.levels == Levels::kInteger && scheme.symmetric
                           ? static_cast<float>(1 << (scheme.bits - 1))
                           : 0.0f;
  std::vector<float> out(m.codes.size());
  for (int64_t r = 0; r < m.rows; ++r) {
    for (int64_t j = 0; j < m.cols; ++j) {
      const int64_t g =
          m.group_of_column.empty() ? j / group : m.group_of_column[static_cast<size_t>(j)];
      const float scale =
          m.global_scale * m.scales[static_cast<size_t>(r / group_rows * groups + g)];
      const float zero = m.zeros.empty()
                             ? middle
                             : static_cast<float>(m.zeros[static_cast<size_t>(r * groups + g)]);
      const auto at = static_cast<size_t>(r * m.cols + j);
      out[at] = scale * (level[m.codes[at]] - zero);
    }
  }
  if (!m.outliers) return out;
  const std::vector<int32_t>& columns = m.outliers->columns;
  for (size_t i = 0; i < m.outliers->values.size(); ++i) {
    const size_t row = i / columns.size();
    out[row * static_cast<size_t>(m.cols) + static_cast<size_t>(columns[i % columns.size()])] =
        m.outliers->values[i];
  }
  return out;
}

OutlierNumbers take_columns(float* w, int64_t rows, int64_t cols, std::vector<int32_t> columns,
                            ScaleType type) {
  OutlierNumbers out{std::move(columns), {}};
  out.values.reserve(static_cast<size_t>(rows) * out.columns.size());
  for (int64_t r = 0; r < rows; ++r) {
    for (const int32_t c : out.columns) {
      const float v = std::exchange(w[r * cols + c], 0.0f);
      out.values.push_back(type == ScaleType::kBF16
                               ? bf16_to_f32(f32_to_bf16(v))
                               : f16_to_f32(f32_to_f16(std::clamp(v, -65504.0f, 65504.0f))));
    }
  }
  return out;
}

void give_columns(CodedMatrix& m, const Scheme& scheme, OutlierNumbers columns) {
  FRESHET_CHECK(scheme.levels == Levels::kInteger && scheme.symmetric && scheme.group == 0 &&
                    scheme.group_rows == 1,
                "outlier columns in {}", scheme.name);
  const auto middle = static_cast<float>(1 << (scheme.bits - 1));
  const size_t count = columns.columns.size();
  for (size_t i = 0; i < columns.values.size(); ++i) {
    const size_t row = i / count;
    const float scale = m.scales[row];
    const float code = scale > 0.0f ? std::nearbyint(columns.values[i] / scale) : 0.0f;
    m.codes[row * static_cast<size_t>(m.cols) + static_cast<size_t>(columns.columns[i % count])] =
        static_cast<uint8_t>(std::clamp(code, -middle, middle - 1.0f) + middle);
  }
  m.outliers = std::move(columns);
}

}  // namespace freshet::quantizer

#include "quantizer/planned_reader.h"

#include <algorithm>
#include <atomic>
#include <cmath>

namespace freshet::quantizer {
namespace {

// The numbers of a source as F32, `cols` of them from the start of row `row`.
void read_row(const loader::TensorSource& t, int64_t row, int64_t cols, float* out) {
  const quant::FormatInfo& info = quant::info(*t.format);
  info.decode(t.data + static_cast<size_t>(row) * quant::row_bytes(*t.format, cols), out, cols);
}

void gather_vector(const Planned::Part& part, float* to) {
  std::vector<float> all(static_cast<size_t>(part.rows));
  read_row(*part.source, 0, part.rows, all.data());
  for (size_t i = 0; i < all.size(); ++i) to[i] = all[static_cast<size_t>(part.order[i])];
}

// Transposes from [cols, rows].
void gather_columns(const Planned::Part& part, int64_t cols, float* to) {
  std::vector<float> line(static_cast<size_t>(part.rows));
  for (int64_t c = 0; c < cols; ++c) {
    read_row(*part.source, c, part.rows, line.data());
    for (int64_t r = 0; r < part.rows; ++r) to[r * cols + c] = line[static_cast<size_t>(r)];
  }
}

void release(const Planned::Part& part) {
  if (part.source->file != nullptr)
    part.source->file->release(part.source->file_offset, part.source->bytes);
}

}  // namespace

Status PlannedReader::gather(const Planned& p) {
  const int64_t cols = p.cols();
  if (!p.values.empty()) {
    numbers_ = p.values;
    return {};
  }
  numbers_.resize(static_cast<size_t>(p.rows() * cols));
  float* to = numbers_.data();
  for (const Planned::Part& part : p.parts) {
    FRESHET_RETURN_IF_ERROR(part.source->usable_format().status());
    float* const begin = to;
    const bool vector = p.shape.size() == 1 && part.rows > 1;
    if (vector) {
      gather_vector(part, to);
    } else if (p.transposed) {
      gather_columns(part, cols, to);
    } else {
      pool_.parallel_for(part.rows, [&](int64_t r, int) {
        read_row(*part.source, part.source_row(r), cols, to + r * cols);
      });
    }
    to += part.rows * (vector ? 1 : cols);
    for (float* x = begin; part.factor != 1.0f && x < to; ++x) *x *= part.factor;
    release(part);
  }
  return {};
}

Status PlannedReader::finish(const Planned& p, int64_t rows) {
  const int64_t cols = p.cols();
  std::atomic<bool> finite = true;
  pool_.parallel_for(rows, [&](int64_t r, int) {
    float* row = numbers_.data() + r * cols;
    if (!p.columns.empty()) {
      const std::vector<float> own(row, row + cols);
      for (int64_t i = 0; i < cols; ++i)
        row[i] = own[static_cast<size_t>(p.columns[static_cast<size_t>(i)])];
    }
    for (int64_t i = 0; i < cols; ++i) {
      row[i] += p.offset;
      if (!std::isfinite(row[i])) finite = false;
    }
  });
  if (!finite) return invalid_argument("tensor '{}' holds a NaN or an infinity", p.name);
  return {};
}

Result<std::span<const float>> PlannedReader::read(const Planned& p) {
  FRESHET_RETURN_IF_ERROR(gather(p));
  FRESHET_RETURN_IF_ERROR(finish(p, p.rows()));
  return std::span<const float>(numbers_);
}

Result<std::span<const float>> PlannedReader::read_rows(const Planned& p,
                                                        std::span<const int64_t> rows) {
  const int64_t cols = p.cols();
  if (p.transposed || !p.values.empty() || p.shape.size() == 1) {
    FRESHET_RETURN_IF_ERROR(gather(p));
    std::vector<float> some;
    for (const int64_t r : rows)
      some.insert(some.end(), numbers_.begin() + r * cols, numbers_.begin() + (r + 1) * cols);
    numbers_ = std::move(some);
  } else {
    numbers_.resize(rows.size() * static_cast<size_t>(cols));
    for (const Planned::Part& part : p.parts)
      FRESHET_RETURN_IF_ERROR(part.source->usable_format().status());
    pool_.parallel_for(std::ssize(rows), [&](int64_t i, int) {
      int64_t row = rows[static_cast<size_t>(i)];
      auto part = p.parts.begin();
      while (row >= part->rows) row -= (part++)->rows;
      float* const to = numbers_.data() + i * cols;
      read_row(*part->source, part->source_row(row), cols, to);
      for (int64_t c = 0; part->factor != 1.0f && c < cols; ++c) to[c] *= part->factor;
    });
    for (const Planned::Part& part : p.parts) release(part);
  }
  FRESHET_RETURN_IF_ERROR(finish(p, std::ssize(rows)));
  return std::span<const float>(numbers_);
}

}  // namespace freshet::quantizer

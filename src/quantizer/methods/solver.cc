#include "quantizer/methods/solver.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "quantizer/methods/lanes.h"

namespace freshet::quantizer {
namespace {

constexpr int64_t kFeedbackBlock = 128;

float inverse_of(float scale) {
  const float inverse = 1.0f / scale;
  return std::isfinite(inverse) ? inverse : 0.0f;
}

// A tile of a row-major matrix, copied: rows at the stride of a wide matrix would evict each other
// from the cache.
constexpr int64_t kTile = 64;
class Tile {
 public:
  const float* take(const float* from, int64_t stride, int64_t rows, int64_t width) {
    for (int64_t k = 0; k < rows; ++k) std::copy_n(from + k * stride, width, copy_ + k * kTile);
    return copy_;
  }
  // Of the moments: rows [row, row + rows), columns [column, column + width).
  const float* take(const Hessian& h, int64_t row, int64_t rows, int64_t column, int64_t width) {
    h.copy_moments(row, rows, column, width, copy_, kTile);
    return copy_;
  }

 private:
  alignas(64) float copy_[256 * kTile];
};

template <class F>
void for_kind(const Alphabet& a, const F& f) {
  switch (a.kind()) {
    case Alphabet::Kind::kInteger:
      return f(std::integral_constant<Alphabet::Kind, Alphabet::Kind::kInteger>());
    case Alphabet::Kind::kTable:
      return f(std::integral_constant<Alphabet::Kind, Alphabet::Kind::kTable>());
    case Alphabet::Kind::kE4M3:
      return f(std::integral_constant<Alphabet::Kind, Alphabet::Kind::kE4M3>());
  }
}

}  // namespace

int PanelSolver::rows_for(int64_t rows, int64_t cols, int threads) {
  constexpr int64_t kNumbers = 2 << 20;  // of a panel
  int64_t most = std::clamp<int64_t>(kNumbers / cols, 32, 128);
  most = std::min(most, rows / (int64_t{4} * threads));
  return static_cast<int>(std::max<int64_t>(most / 32, 1) * 32);
}

PanelSolver::PanelSolver(const Grid& grid, const Hessian* hessian, const float* weights,
                         int most_rows)
    : grid_(grid),
      alphabet_(grid.alphabet()),
      hessian_(hessian),
      weights_(weights),
      cols_(grid.shape().cols),
      block_(grid.shape().block),
      unit_(grid.shape().unit),
      units_in_block_(block_ / unit_),
      blocks_in_row_((cols_ + block_ - 1) / block_),
      units_in_row_((cols_ + unit_ - 1) / unit_),
      w_(static_cast<size_t>(most_rows * cols_)),
      codes_(w_.size()),
      blocks_(static_cast<size_t>(most_rows * blocks_in_row_)),
      units_(static_cast<size_t>(most_rows * units_in_row_)) {}

void PanelSolver::load(const float* w, int64_t first_row, int rows) {
  first_row_ = first_row;
  rows_ = rows;
  descending_ = false;
  std::copy_n(w + first_row * cols_, rows * cols_, w_.begin());
}

void PanelSolver::read_units(int r, int64_t block) {
  const int64_t first = block * units_in_block_;
  const int64_t end = std::min(units_in_row_, first + units_in_block_);
  for (int64_t u = first; u < end; ++u) {
    units(r)[u] = grid_.unit(blocks(r)[block], static_cast<int>(u - first));
  }
}

void PanelSolver::fit() {
  for (int r = 0; r < rows_; ++r) {
    for (int64_t b = 0; b < blocks_in_row_; ++b) {
      const int64_t column = b * block_;
      grid_.fit(first_row_ + r, column, w(r) + column,
                weights_ != nullptr ? weights_ + column : nullptr, std::min(block_, cols_ - column),
                blocks(r)[b]);
      read_units(r, b);
    }
  }
}

void PanelSolver::round() {
  for_kind(alphabet_, [this](auto kind) { round_as<kind>(); });
}

template <Alphabet::Kind kKind>
void PanelSolver::round_as() {
  for (int r = 0; r < rows_; ++r) {
    for (int64_t u = 0; u < units_in_row_; ++u) {
      const Unit unit = units(r)[u];
      const float inverse = inverse_of(unit.scale);
      const int64_t end = std::min(cols_, (u + 1) * unit_);
      for (int64_t j = u * unit_; j < end; ++j) {
        codes(r)[j] = alphabet_.nearest<kKind>((w(r)[j] + unit.offset) * inverse);
      }
    }
  }
}

void PanelSolver::feedback() {
  for_kind(alphabet_, [this](auto kind) { feedback_as<kind>(); });
}

// The columns in visiting order: each is rounded, and its error, in proportion to the factor's row,
// is taken from the columns that follow. Later blocks are corrected a block at a time.
template <Alphabet::Kind kKind>
void PanelSolver::feedback_as() {
  const int32_t* const order = hessian_->order.data();
  const float* const factor = hessian_->triangles.data();
  std::vector<float> left(static_cast<size_t>(rows_ * cols_));
  std::vector<float> errors(static_cast<size_t>(rows_ * kFeedbackBlock));
  const auto tile = std::make_unique<Tile>();
  for (int r = 0; r < rows_; ++r) {
    for (int64_t j = 0; j < cols_; ++j) left[static_cast<size_t>(r * cols_ + j)] = w(r)[order[j]];
  }
  for (int64_t first = 0; first < cols_; first += kFeedbackBlock) {
    const int64_t end = std::min(cols_, first + kFeedbackBlock);
    for (int r = 0; r < rows_; ++r) {
      float* const x = left.data() + r * cols_;
      float* const e = errors.data() + r * kFeedbackBlock;
      for (int64_t j = first; j < end; ++j) {
        const int64_t column = order[j];
        const Unit unit = units(r)[column / unit_];
        const uint8_t code =
            alphabet_.nearest<kKind>((x[j] + unit.offset) * inverse_of(unit.scale));
        codes(r)[column] = code;
        const float* const row = factor + j * cols_;
        const float off = (unit.scale * alphabet_.level(code) - unit.offset - x[j]) / row[j];
        e[j - first] = off;
        add_multiple(x + j + 1, end - j - 1, off, row + j + 1);
      }
    }
    // Tiles of columns outside, rows inside: a tile of the factor serves the whole panel.
    for (int64_t column = end; column < cols_; column += kTile) {
      const int64_t width = std::min(kTile, cols_ - column);
      const float* const from =
          tile->take(factor + first * cols_ + column, cols_, end - first, width);
      for (int r = 0; r < rows_; ++r) {
        add_products(left.data() + r * cols_ + column, width, errors.data() + r * kFeedbackBlock,
                     from, kTile, end - first);
      }
    }
  }
}

// The gradient of the error: (W - decoded) H.
void PanelSolver::start_descent() {
  // A span is whole blocks, unless a block is a whole row.
  span_ = block_ > 256 ? 128 : std::max<int64_t>(block_, 128 / block_ * block_);
  gradient_.assign(w_.size(), 0.0f);
  moved_.assign(w_.size() / static_cast<size_t>(cols_) * static_cast<size_t>(span_), 0.0f);
  moments_.resize(static_cast<size_t>(span_ * span_));
  std::vector<float> off(w_.size());
  const auto tile = std::make_unique<Tile>();
  for (int r = 0; r < rows_; ++r) {
    for (int64_t j = 0; j < cols_; ++j) {
      off[static_cast<size_t>(r * cols_ + j)] = w(r)[j] - value(r, j);
    }
  }
  for (int64_t first = 0; first < cols_; first += kFeedbackBlock) {
    const int64_t count = std::min(kFeedbackBlock, cols_ - first);
    for (int64_t column = 0; column < cols_; column += kTile) {
      const int64_t width = std::min(kTile, cols_ - column);
      const float* const from = tile->take(*hessian_, first, count, column, width);
      for (int r = 0; r < rows_; ++r) {
        add_products(gradient(r) + column, width, off.data() + r * cols_ + first, from, kTile,
                     count);
      }
    }
  }
  descending_ = true;
}

double PanelSolver::improve() {
  if (!descending_) start_descent();
  removed_ = 0.0;
  for (int64_t first = 0; first < cols_; first += span_) {
    const int64_t end = std::min(cols_, first + span_);
    hessian_->copy_moments(first, end - first, first, end - first, moments_.data(), span_);
    for_kind(alphabet_, [&](auto kind) { improve_span<kind>(first, end); });
    spread(first, end);
  }
  return removed_;
}

template <Alphabet::Kind kKind>
void PanelSolver::improve_span(int64_t first, int64_t end) {
  const Grid::Shape& shape = grid_.shape();
  const bool whole = block_ <= span_;
  for (int r = 0; r < rows_; ++r) {
    std::fill_n(moved(r), span_, 0.0f);
    if (shape.super_blocks) {
      for (int64_t b = first; b < end; b += block_) refit_block(r, first, end, b);
    }
    for (int64_t column = first; column < end; column += unit_) {
      if (shape.refits && whole) refit_unit(r, first, end, column);
      improve_codes<kKind>(r, first, end, column, std::min(end, column + unit_));
    }
  }
}

// The decoded number of a column grows by `by`: the gradient within [first, end) follows at once.
void PanelSolver::move(int r, int64_t first, int64_t end, int64_t column, float by) {
  moved(r)[column - first] += by;
  add_multiple(gradient(r) + first, end - first, -by, moments_.data() + (column - first) * span_);
}

// Takes the level that is best while all other columns stay; the error never grows.
template <Alphabet::Kind kKind>
void PanelSolver::improve_codes(int r, int64_t first, int64_t end, int64_t from, int64_t to) {
  for (int64_t j = from; j < to; ++j) {
    const Unit unit = units(r)[j / unit_];
    const float h = hessian_->diagonal[static_cast<size_t>(j)];
    const float now = unit.scale * alphabet_.level(codes(r)[j]) - unit.offset;
    const float wanted = now + gradient(r)[j] / h;
    const uint8_t code = alphabet_.nearest<kKind>((wanted + unit.offset) * inverse_of(unit.scale));
    if (code == codes(r)[j]) continue;
    const float by = unit.scale * alphabet_.level(code) - unit.offset - now;
    // With h d^2 - 2 g d the change of the error; rounding may make it useless.
    const float gain = by * (2.0f * gradient(r)[j] - h * by);
    if (!(gain > 0.0f)) continue;
    removed_ += gain;
    codes(r)[j] = code;
    move(r, first, end, j, by);
  }
}

namespace {

// The error's change for a move of da * level - dm in some columns: a quadratic form.
struct MoveCost {
  double ga = 0.0, gm = 0.0, aa = 0.0, am = 0.0, mm = 0.0;
  double gain(double da, double dm) const {
    return 2.0 * (ga * da - gm * dm) - aa * da * da + 2.0 * am * da * dm - mm * dm * dm;
  }
  void best(bool offsets, double& da, double& dm) const {
    da = aa > 0.0 ? ga / aa : 0.0;
    dm = 0.0;
    const double determinant = aa * mm - am * am;
    if (offsets && determinant > 1e-9 * aa * mm) {
      da = (ga * mm - gm * am) / determinant;
      dm = (ga * am - gm * aa) / determinant;
    }
  }
};

MoveCost cost_of(const float* g, const float* moments, int64_t stride, const float* a,
                 const float* m, int64_t n) {
  MoveCost c;
  float ha[256] = {};
  float hm[256] = {};
  add_products(ha, n, a, moments, stride, n);
  if (m != nullptr) add_products(hm, n, m, moments, stride, n);
  for (int64_t j = 0; j < n; ++j) {
    c.ga += double{g[j]} * a[j];
    c.aa += double{ha[j]} * a[j];
    if (m == nullptr) continue;
    c.gm += double{g[j]} * m[j];
    c.am += double{ha[j]} * m[j];
    c.mm += double{hm[j]} * m[j];
  }
  return c;
}

}  // namespace

// Moves the scale and offset of the unit at `column` to the best that can be stored.
void PanelSolver::refit_unit(int r, int64_t first, int64_t end, int64_t column) {
  const int64_t n = std::min(unit_, end - column);
  BlockParameters& block = blocks(r)[column / block_];
  const int u = static_cast<int>(column % block_ / unit_);
  const Unit now = units(r)[column / unit_];
  float level[256], ones[256];
  for (int64_t i = 0; i < n; ++i) {
    level[i] = alphabet_.level(codes(r)[column + i]);
    ones[i] = 1.0f;
  }
  const bool offsets = grid_.shape().offsets;
  const MoveCost cost =
      cost_of(gradient(r) + column, moments_.data() + (column - first) * (span_ + 1), span_, level,
              offsets ? ones : nullptr, n);
  double da, dm;
  cost.best(offsets, da, dm);
  BlockParameters tried = block;
  grid_.set_unit(tried, u,
                 {static_cast<float>(now.scale + da), static_cast<float>(now.offset + dm)});
  const Unit then = grid_.unit(tried, u);
  const float by_scale = then.scale - now.scale;
  const float by_offset = then.offset - now.offset;
  const double gain = cost.gain(by_scale, by_offset);
  if (!(gain > 0.0)) return;
  removed_ += gain;
  block = tried;
  units(r)[column / unit_] = then;
  float by[256];
  for (int64_t i = 0; i < n; ++i) {
    by[i] = -(by_scale * level[i] - by_offset);
    moved(r)[column - first + i] -= by[i];
  }
  add_products(gradient(r) + first, end - first, by, moments_.data() + (column - first) * span_,
               span_, n);
}

// Moves the two factors of a super-block.
void PanelSolver::refit_block(int r, int64_t first, int64_t end, int64_t column) {
  const int64_t n = block_;
  BlockParameters& block = blocks(r)[column / block_];
  float a[256], m[256];
  for (int64_t i = 0; i < n; ++i) {
    const int64_t u = i / unit_;
    a[i] = alphabet_.level(codes(r)[column + i]) * static_cast<float>(block.scales[u]);
    m[i] = static_cast<float>(block.mins[u]);
  }
  const bool offsets = grid_.shape().offsets;
  const MoveCost cost =
      cost_of(gradient(r) + column, moments_.data() + (column - first) * (span_ + 1), span_, a,
              offsets ? m : nullptr, n);
  double da, dm;
  cost.best(offsets, da, dm);
  BlockParameters tried = block;
  grid_.set_block(tried, static_cast<float>(block.d + da), static_cast<float>(block.dmin + dm));
  const float by_d = tried.d - block.d;
  const float by_dmin = offsets ? tried.dmin - block.dmin : 0.0f;
  const double gain = cost.gain(by_d, by_dmin);
  if (!(gain > 0.0)) return;
  removed_ += gain;
  block = tried;
  read_units(r, column / block_);
  float by[256];
  for (int64_t i = 0; i < n; ++i) {
    by[i] = -(by_d * a[i] - by_dmin * m[i]);
    moved(r)[column - first + i] -= by[i];
  }
  add_products(gradient(r) + first, end - first, by, moments_.data() + (column - first) * span_,
               span_, n);
}

// Corrects the gradient of all other columns for what moved in [first, end).
void PanelSolver::spread(int64_t first, int64_t end) {
  std::vector<std::vector<float>> by(static_cast<size_t>(rows_));
  std::vector<std::vector<int32_t>> which(static_cast<size_t>(rows_));
  for (int r = 0; r < rows_; ++r) {
    for (int64_t j = first; j < end; ++j) {
      const float d = moved(r)[j - first];
      if (d == 0.0f) continue;
      by[static_cast<size_t>(r)].push_back(-d);
      which[static_cast<size_t>(r)].push_back(static_cast<int32_t>(j - first));
    }
  }
  const auto tile = std::make_unique<Tile>();
  const auto add = [&](int64_t from, int64_t to) {
    for (int64_t column = from; column < to; column += kTile) {
      const int64_t width = std::min(kTile, to - column);
      const float* const rows = tile->take(*hessian_, first, end - first, column, width);
      for (int r = 0; r < rows_; ++r) {
        const std::vector<float>& b = by[static_cast<size_t>(r)];
        add_rows(gradient(r) + column, width, b.data(), which[static_cast<size_t>(r)].data(), rows,
                 kTile, static_cast<int64_t>(b.size()));
      }
    }
  };
  add(0, first);
  add(end, cols_);
}

void PanelSolver::measure(const float* mean_square, QuadraticError* rows) const {
  std::vector<float> off(static_cast<size_t>(rows_ * cols_));
  for (int r = 0; r < rows_; ++r) {
    for (int64_t j = 0; j < cols_; ++j)
      off[static_cast<size_t>(r * cols_ + j)] = w(r)[j] - value(r, j);
  }
  if (hessian_ != nullptr) {
    const std::vector<double> errors = quadratic_forms(off.data());
    const std::vector<double> energies = quadratic_forms(w(0));
    for (size_t r = 0; r < errors.size(); ++r) rows[r] = {errors[r], energies[r]};
    return;
  }
  const auto form = [&](const float* x) {
    double total = 0.0;
    for (int64_t j = 0; j < cols_; ++j) {
      total += double{x[j]} * x[j] * (mean_square != nullptr ? mean_square[j] : 1.0f);
    }
    return total;
  };
  for (int r = 0; r < rows_; ++r) rows[r] = {form(off.data() + r * cols_), form(w(r))};
}

// x H x^T of the panel's rows of x: the diagonal once, the moments above it twice.
std::vector<double> PanelSolver::quadratic_forms(const float* x) const {
  std::vector<double> totals(static_cast<size_t>(rows_));
  std::vector<float> sums(static_cast<size_t>(rows_ * kTile));
  const auto tile = std::make_unique<Tile>();
  for (int64_t first = 0; first < cols_; first += kTile) {
    const int64_t width = std::min(kTile, cols_ - first);
    std::ranges::fill(sums, 0.0f);
    for (int64_t k = 0; k < first; k += kFeedbackBlock) {
      const int64_t count = std::min(kFeedbackBlock, first - k);
      const float* const from = tile->take(*hessian_, k, count, first, width);
      for (int r = 0; r < rows_; ++r)
        add_products(sums.data() + r * kTile, width, x + r * cols_ + k, from, kTile, count);
    }
    const float* const from = tile->take(*hessian_, first, width, first, width);
    for (int r = 0; r < rows_; ++r) {
      const float* const v = x + r * cols_ + first;
      const float* const sum = sums.data() + r * kTile;
      for (int64_t j = 0; j < width; ++j) {
        double tail = 2.0 * sum[j] + double{v[j]} * from[j * (kTile + 1)];
        for (int64_t i = 0; i < j; ++i) tail += 2.0 * v[i] * from[i * kTile + j];
        totals[static_cast<size_t>(r)] += v[j] * tail;
      }
    }
  }
  return totals;
}

void PanelSolver::store(Grid& to) const {
  for (int r = 0; r < rows_; ++r) to.store(first_row_ + r, blocks(r), codes(r));
}

}  // namespace freshet::quantizer

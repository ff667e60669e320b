// Chooses codes and parameters for a few rows of a matrix at a time.
//
// Rows are independent; a panel shares the traffic of the Hessian between its rows. Each step takes
// the state that the one before left: fit() and then round() or feedback(), then any number of
// improve(). Not synchronised: one object per thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "quantizer/methods/grid.h"
#include "quantizer/methods/hessian.h"

namespace freshet::quantizer {

struct QuadraticError {  // of a row
  double error = 0.0;    // d H d^T
  double energy = 0.0;   // w H w^T
};

class PanelSolver {
 public:
  // How many rows a panel should have: as many as a few megabytes hold, and fewer where there would
  // not be some panels for each thread.
  static int rows_for(int64_t rows, int64_t cols, int threads);

  // Takes up to `most_rows` rows at a time. `weights`: the weight of each column's error in fits;
  // nullptr: equal. `hessian` may be nullptr: then round() is the only step.
  PanelSolver(const Grid& grid, const Hessian* hessian, const float* weights, int most_rows);

  void load(const float* w, int64_t first_row, int rows);
  void fit();
  void round();
  void feedback();
  // One round of descent on the exact error: the parameters of each unit, then its codes, then the
  // factors of super-blocks. Returns the share of the error that it removed.
  double improve();
  // The rows' errors, by the Hessian, else by `mean_square`, which may be nullptr.
  void measure(const float* mean_square, QuadraticError* rows) const;
  void store(Grid& to) const;

 private:
  struct Row;
  template <Alphabet::Kind kKind>
  void round_as();
  template <Alphabet::Kind kKind>
  void feedback_as();
  template <Alphabet::Kind kKind>
  void improve_span(int64_t first, int64_t end);
  template <Alphabet::Kind kKind>
  void improve_codes(int r, int64_t first, int64_t end, int64_t from, int64_t to);
  std::vector<double> quadratic_forms(const float* x) const;
  void start_descent();
  void refit_unit(int r, int64_t first, int64_t end, int64_t column);
  void refit_block(int r, int64_t first, int64_t end, int64_t column);
  void spread(int64_t first, int64_t end);
  void move(int r, int64_t first, int64_t end, int64_t column, float by);

  float* w(int r) { return w_.data() + r * cols_; }
  const float* w(int r) const { return w_.data() + r * cols_; }
  uint8_t* codes(int r) { return codes_.data() + r * cols_; }
  const uint8_t* codes(int r) const { return codes_.data() + r * cols_; }
  float* gradient(int r) { return gradient_.data() + r * cols_; }
  float* moved(int r) { return moved_.data() + r * span_; }
  BlockParameters* blocks(int r) { return blocks_.data() + r * blocks_in_row_; }
  const BlockParameters* blocks(int r) const { return blocks_.data() + r * blocks_in_row_; }
  Unit* units(int r) { return units_.data() + r * units_in_row_; }
  const Unit* units(int r) const { return units_.data() + r * units_in_row_; }
  void read_units(int r, int64_t block);
  float value(int r, int64_t j) const {
    const Unit& u = units(r)[j / unit_];
    return u.scale * alphabet_.level(codes(r)[j]) - u.offset;
  }

  const Grid& grid_;
  const Alphabet& alphabet_;
  const Hessian* hessian_;
  const float* weights_;
  int64_t cols_, block_, unit_, units_in_block_, blocks_in_row_, units_in_row_;
  int64_t span_ = 0;  // columns that descent works on before it corrects the others
  int64_t first_row_ = 0;
  int rows_ = 0;
  bool descending_ = false;
  double removed_ = 0.0;
  std::vector<float> w_, gradient_, moved_;
  std::vector<float> moments_;  // [span, span]: of the columns that descent works on
  std::vector<uint8_t> codes_;
  std::vector<BlockParameters> blocks_;
  std::vector<Unit> units_;
};

}  // namespace freshet::quantizer

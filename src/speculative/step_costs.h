// How long a step of the target takes, by its rows and its context: the cost side of speculation.
//
// The rows' part is a table measured when the model is loaded, the context's part two coefficients:
// keys and values are read once for each sequence and worked on once for each row. Each step of
// the engine corrects both the level, which follows the machine's load, and the entries near its
// own number of rows. Not thread-safe. Times are in seconds.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "kv_cache/kv_storage.h"
#include "layers/model.h"
#include "speculative/draft_lengths.h"

namespace freshet::speculative {

class StepCosts {
 public:
  struct Point {
    int64_t rows = 0;
    double seconds = 0.0;
  };
  // `points`: in ascending order of rows, at least one. The others: seconds for each token of
  // context, of a sequence and of a row.
  explicit StepCosts(std::vector<Point> points, double per_context = 0.0,
                     double per_row_context = 0.0);

  double seconds(const StepShape& shape) const;
  // A step of this shape took `seconds`. weight: of the correction for its number of rows, above 1
  // for steps that are rare.
  void correct(const StepShape& shape, double seconds, double weight = 1.0);

 private:
  double of_rows(int64_t rows) const;

  std::vector<Point> points_;
  double per_context_, per_row_context_;
  double level_ = 0.0;  // logarithms of factors
  int64_t levels_ = 0;  // that were seen
  struct Correction {
    double factor = 0.0;
    int64_t seen = 0;
  };
  std::array<Correction, 40> corrections_;  // two for each doubling of rows
};

struct MeasuredSteps {
  int64_t max_rows = 0;     // of a step
  int64_t max_context = 0;  // of a sequence; its blocks may be fewer
  double budget = 0.0;      // seconds, after which no other step is started
};
// Runs steps of one sequence. Keys and values go to blocks of `cache`, which must hold nothing that
// matters. memory: where the host's results lie. REQUIRES: the model has reserved such steps.
Result<StepCosts> measure_steps(Model& model, const KvStorage& cache, const MeasuredSteps& limits,
                                Memory* memory);

}  // namespace freshet::speculative

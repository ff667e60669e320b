#include "speculative/step_costs.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>

namespace freshet::speculative {
namespace {

// A step of one more row, where nothing else is known: dearer than on any machine with GEMM units.
constexpr double kUnknownRow = 0.2;
constexpr double kLargestSurprise = 0.4;  // of a single step, as a logarithm: others run as well
constexpr double kLevelRate = 0.1;
constexpr double kEntryRate = 0.05;
constexpr int64_t kShortContext = 16;
constexpr int64_t kLongContext = 2048;

size_t entry_of(int64_t rows) {
  return static_cast<size_t>(std::lround(2.0 * std::log2(static_cast<double>(rows))));
}

double seconds_now() {
  const auto t = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(t).count();
}

}  // namespace

StepCosts::StepCosts(std::vector<Point> points, double per_context, double per_row_context)
    : points_(std::move(points)), per_context_(per_context), per_row_context_(per_row_context) {
  FRESHET_CHECK(!points_.empty());
  for (size_t i = 1; i < points_.size(); ++i)
    points_[i].seconds = std::max(points_[i].seconds, points_[i - 1].seconds);
}

double StepCosts::of_rows(int64_t rows) const {
  const auto above = std::ranges::lower_bound(points_, rows, {}, &Point::rows);
  if (above == points_.begin()) return above->seconds;
  Point a, b;
  if (above != points_.end()) {
    a = *(above - 1), b = *above;
  } else if (points_.size() == 1) {
    a = points_.back();
    b = {a.rows + 1, a.seconds * (1.0 + kUnknownRow)};
  } else {
    a = *(points_.end() - 2), b = points_.back();
  }
  const double share = static_cast<double>(rows - a.rows) / static_cast<double>(b.rows - a.rows);
  return a.seconds + share * (b.seconds - a.seconds);
}

double StepCosts::seconds(const StepShape& s) const {
  const int64_t rows = std::max<int64_t>(1, s.rows);
  const double raw = of_rows(rows) + per_context_ * static_cast<double>(s.context) +
                     per_row_context_ * static_cast<double>(s.row_context);
  const double at = 2.0 * std::log2(static_cast<double>(rows));
  const auto low = static_cast<size_t>(at);
  const double share = at - static_cast<double>(low);
  const double entry = low + 1 < corrections_.size() ? corrections_[low].factor * (1.0 - share) +
                                                           corrections_[low + 1].factor * share
                                                     : corrections_.back().factor;
  return raw * std::exp(level_ + entry);
}

void StepCosts::correct(const StepShape& s, double seconds, double weight) {
  if (s.rows <= 0 || seconds <= 0.0) return;
  const double surprise = std::log(seconds / this->seconds(s));
  // The first steps tell how far the engine's steps are from bare ones.
  const double limit = levels_ < 4 ? 3.0 : kLargestSurprise;
  const double seen = std::clamp(surprise, -limit, limit);
  const double rate = std::max(kLevelRate, 1.0 / static_cast<double>(1 + levels_++));
  level_ += rate * seen;
  const size_t at = std::min(entry_of(s.rows), corrections_.size() - 1);
  Correction& entry = corrections_[at];
  entry.factor += std::max(kEntryRate * weight, 0.5 / static_cast<double>(1 + entry.seen)) *
                  (1.0 - rate) * seen;
  ++entry.seen;
}

// ---- measurement -----------------------------------------------------------------------------

namespace {

class StepTimer {
 public:
  StepTimer(Model& model, const KvStorage& cache) : model_(model), cache_(cache) {}

  Status allocate(int64_t max_rows, Memory* memory) {
    const auto rows = static_cast<size_t>(max_rows);
    const auto vocab = static_cast<size_t>(model_.spec().vocab_size);
    FRESHET_ASSIGN_OR_RETURN(logits_, Buffer::allocate(rows * vocab * sizeof(float), memory));
    FRESHET_ASSIGN_OR_RETURN(best_, Buffer::allocate(rows * sizeof(int32_t), memory));
    return {};
  }

  double run(int64_t rows, int64_t before) {
    ForwardBatch b;
    b.token_ids.resize(static_cast<size_t>(rows));
    for (size_t i = 0; i < b.token_ids.size(); ++i) {
      b.token_ids[i] =
          static_cast<int32_t>((i * 7919 + 11) % static_cast<size_t>(model_.spec().vocab_size));
    }
    b.positions.resize(b.token_ids.size());
    std::iota(b.positions.begin(), b.positions.end(), static_cast<int32_t>(before));
    b.query_start = {0, static_cast<int32_t>(rows)};
    b.context_len = {static_cast<int32_t>(before + rows)};
    b.logit_rows.resize(b.token_ids.size());
    std::iota(b.logit_rows.begin(), b.logit_rows.end(), 0);
    b.best_only.assign(b.token_ids.size(), 1);
    const int64_t blocks = (before + rows + ops::kBlockTokens - 1) / ops::kBlockTokens;
    b.tables.resize(cache_.spec().groups.size());
    for (size_t g = 0; g < b.tables.size(); ++g) {
      BlockTables& t = b.tables[g];
      const int32_t pool = cache_.blocks(static_cast<int>(g));
      t.stride = (blocks + kTablePiece - 1) / kTablePiece * kTablePiece;
      t.ids.assign(static_cast<size_t>(t.stride), -1);
      for (int64_t i = 0; i < blocks; ++i)
        t.ids[static_cast<size_t>(i)] = static_cast<int32_t>(i % pool);
      // Steps without pictures.
      if (cache_.spec().groups[g].cross > 0) t.context_len = {0};
    }
    const double from = seconds_now();
    model_.forward(b, cache_, {logits_.as<float>(), nullptr, best_.as<int32_t>(), {}});
    return seconds_now() - from;
  }

 private:
  Model& model_;
  const KvStorage& cache_;
  Buffer logits_, best_;
};

}  // namespace

Result<StepCosts> measure_steps(Model& model, const KvStorage& cache, const MeasuredSteps& limits,
                                Memory* memory) {
  const auto [max_rows, max_context, budget] = limits;
  // The order says what matters most if a step takes long.
  constexpr int64_t kRows[] = {1, 4, 16, 2, 8, 64, 32, 3, 6, 128, 24, 12, 48};
  const int64_t context = std::min(kShortContext, max_context / 2);
  const double until = seconds_now() + budget;
  StepTimer timer(model, cache);
  FRESHET_RETURN_IF_ERROR(timer.allocate(max_rows, memory));
  std::vector<StepCosts::Point> points;
  timer.run(1, context);
  // Once to prepare each shape (pages, graphs), then the least of several: others run as well.
  for (const int64_t rows : kRows) {
    if (rows > max_rows || context + rows > max_context) continue;
    // Assuming the worst, that each row takes as long as in a smaller step.
    double expected = 0.0;
    for (const StepCosts::Point& p : points) {
      const double as_before = p.seconds * static_cast<double>(rows) / static_cast<double>(p.rows);
      if (p.rows <= rows && (expected == 0.0 || as_before < expected)) expected = as_before;
    }
    if (seconds_now() + 2.0 * expected > until && !points.empty()) continue;
    if (rows > 1) timer.run(rows, context);
    points.push_back({rows, timer.run(rows, context)});
  }
  double near = 0.0, far = 0.0, far_rows = 0.0;
  const int64_t rows = std::min<int64_t>({8, max_rows, max_context / 4});
  const int64_t late = std::min(kLongContext, max_context - rows);
  for (int turn = 0; turn < 4 && seconds_now() < until; ++turn) {
    for (StepCosts::Point& p : points) {
      if (seconds_now() > until) break;
      p.seconds = std::min(p.seconds, timer.run(p.rows, context));
    }
    if (seconds_now() > until || late < 4 * context) continue;
    const auto least = [](double& to, double t) { to = to > 0.0 ? std::min(to, t) : t; };
    least(near, timer.run(rows, context));
    least(far, timer.run(1, late));
    least(far_rows, timer.run(rows, late));
  }
  std::ranges::sort(points, {}, &StepCosts::Point::rows);
  if (far_rows <= 0.0 || rows < 2) return StepCosts(std::move(points));
  const auto span = static_cast<double>(late - context);
  const double one = std::max(0.0, far - points.front().seconds) / span;
  const double several = std::max(0.0, far_rows - near) / span;
  // one = a + b, several = a + b * rows
  const double b = std::max(0.0, several - one) / static_cast<double>(rows - 1);
  return StepCosts(std::move(points), std::max(0.0, one - b), b);
}

}  // namespace freshet::speculative

#include "quantizer/size_target.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "quantizer/allocation.h"
#include "quantizer/methods/grid.h"
#include "quantizer/planned_reader.h"

namespace freshet::quantizer {
namespace {

using quant::Format;

constexpr int64_t kSampledNumbers = 32768;
// What error feedback leaves of the loss of weighted rounding in K-quants (docs/quantisation.md).
constexpr double kLeftByFeedback = 0.82;

Result<bool> has_grid(Format format) {
  if (quant::info(format).plain()) return false;
  FRESHET_ASSIGN_OR_RETURN(const auto grid,
                           make_gguf_grid(format, 1, quant::info(format).block_size));
  return grid != nullptr;
}

std::vector<int64_t> sampled_rows(const Planned& p) {
  const int64_t rows = p.rows();
  const int64_t n = std::min(rows, std::max<int64_t>(8, kSampledNumbers / p.cols()));
  std::vector<int64_t> out;
  for (int64_t i = 0; i < n; ++i) out.push_back((2 * i + 1) * rows / (2 * n));
  return out;
}

// Measures one tensor after the other.
class ErrorMeter {
 public:
  ErrorMeter(const SizeSearch& search, ThreadPool& pool)
      : search_(search), pool_(pool), reader_(pool) {}

  Status load(const Planned& p) {
    rows_ = sampled_rows(p);
    planned_ = &p;
    FRESHET_ASSIGN_OR_RETURN(numbers_, reader_.read_rows(p, rows_));
    total_ = 0;
    for (size_t i = 0; i < rows_.size(); ++i) total_ += weighted(i, row(i).data(), nullptr);
    return {};
  }

  // The relative error of the loaded tensor in a format.
  double error(Format format) {
    const quant::FormatInfo& f = quant::info(format);
    const int64_t cols = planned_->cols();
    std::vector<double> errors(rows_.size());
    pool_.parallel_for(std::ssize(rows_), [&](int64_t i, int) {
      const auto at = static_cast<size_t>(i);
      std::vector<uint8_t> encoded(quant::row_bytes(format, cols));
      std::vector<float> decoded(static_cast<size_t>(cols));
      const auto w = weights(at);
      f.encode(row(at).data(), encoded.data(), cols, w.empty() ? nullptr : w.data());
      f.decode(encoded.data(), decoded.data(), cols);
      errors[at] = weighted(at, row(at).data(), decoded.data());
    });
    double sum = 0;
    for (const double e : errors) sum += e;
    return total_ > 0 ? sum / total_ : 0;
  }

 private:
  std::span<const float> row(size_t i) const {
    const auto cols = static_cast<size_t>(planned_->cols());
    return numbers_.subspan(i * cols, cols);
  }
  std::span<const float> weights(size_t i) const {
    if (search_.importance == nullptr || !search_.overrides->uses_importance(planned_->name))
      return {};
    return search_.importance->of(planned_->name, planned_->expert_of(rows_[i]), planned_->cols());
  }
  // sum w (x - y)^2; y = nullptr: 0.
  double weighted(size_t i, const float* x, const float* y) const {
    const auto w = weights(i);
    double sum = 0;
    for (size_t c = 0; c < static_cast<size_t>(planned_->cols()); ++c) {
      const double d = static_cast<double>(x[c]) - (y != nullptr ? static_cast<double>(y[c]) : 0.0);
      sum += d * d * (w.empty() ? 1.0 : static_cast<double>(w[c]));
    }
    return sum;
  }

  const SizeSearch& search_;
  ThreadPool& pool_;
  PlannedReader reader_;
  const Planned* planned_ = nullptr;
  std::vector<int64_t> rows_;
  std::span<const float> numbers_;
  double total_ = 0;
};

// A tensor whose format is free, and the formats that it may have.
struct FreeTensor {
  size_t index = 0;  // in the plan
  std::vector<Format> formats;
  AllocationItem item;
};

std::vector<Format> candidates(const Planned& p, bool weighted) {
  std::vector<Format> out;
  for (const Format f : writable_types()) {
    if (f == Format::kF32 || f == Format::kBF16 || p.cols() % quant::info(f).block_size != 0)
      continue;
    if (weighted || !Recipe().needs_importance(p.name, f)) out.push_back(f);
  }
  return out;
}

// The choices that equal a recipe; nullopt if it has a format that is no candidate.
Result<std::optional<std::vector<int>>> choice_of(const Recipe& recipe,
                                                  const std::vector<Planned>& plan,
                                                  const std::vector<FreeTensor>& tensors,
                                                  const SizeSearch& search) {
  std::vector<RecipeTensor> named;
  for (const Planned& p : plan) named.push_back({p.name, p.shape});
  FRESHET_ASSIGN_OR_RETURN(const auto formats,
                           recipe.formats(search.model, named, *search.overrides));
  std::vector<int> choice;
  for (const FreeTensor& t : tensors) {
    const auto at = std::find(t.formats.begin(), t.formats.end(), formats[t.index]);
    if (at == t.formats.end()) return std::optional<std::vector<int>>();
    choice.push_back(static_cast<int>(at - t.formats.begin()));
  }
  return std::optional(std::move(choice));
}

Result<std::vector<FreeTensor>> measure(const std::vector<Planned>& plan, const SizeSearch& search,
                                        ThreadPool& pool) {
  ErrorMeter meter(search, pool);
  std::vector<FreeTensor> out;
  for (size_t i = 0; i < plan.size(); ++i) {
    const Planned& p = plan[i];
    if (!is_quantised({p.name, p.shape}) || search.overrides->fixes(p.name, search.model.tied))
      continue;
    if (search.go_on && !search.go_on()) return cancelled("interrupted");
    const bool weighted = search.importance != nullptr &&
                          search.overrides->uses_importance(p.name) &&
                          !search.importance->of(p.name, 0, p.cols()).empty();
    FRESHET_RETURN_IF_ERROR(meter.load(p));
    FreeTensor t{i, candidates(p, weighted), {}};
    const bool head =
        p.name == "output.weight" || (p.name == "token_embd.weight" && search.model.tied);
    const double share = head ? 2.0 * search.model.layers : 1.0;
    const double weight = search.losses != nullptr ? search.losses->of(p.name) : share;
    for (const Format f : t.formats) {
      FRESHET_ASSIGN_OR_RETURN(const bool grid, has_grid(f));
      const double left = search.feedback && grid ? kLeftByFeedback : 1.0;
      t.item.push_back({padded_bytes(p, f), weight * left * meter.error(f)});
    }
    out.push_back(std::move(t));
  }
  return out;
}

}  // namespace

int64_t padded_bytes(const Planned& p, Format format) {
  const int64_t bytes = p.rows() * static_cast<int64_t>(quant::row_bytes(format, p.cols()));
  return (bytes + 31) / 32 * 32;
}

int64_t tensor_budget(const SizeTarget& target, const std::vector<Planned>& plan,
                      int64_t other_bytes) {
  if (target.file_bytes > 0) return target.file_bytes - other_bytes;
  double weights = 0;
  for (const Planned& p : plan) weights += static_cast<double>(p.rows() * p.cols());
  return static_cast<int64_t>(weights * target.bits_per_weight / 8);
}

Result<Recipe> choose_by_size(std::vector<Planned>& plan, const SizeSearch& search,
                              ThreadPool& pool) {
  FRESHET_ASSIGN_OR_RETURN(const std::vector<FreeTensor> tensors, measure(plan, search, pool));
  std::vector<AllocationItem> items;
  int64_t budget = search.budget;
  for (const Planned& p : plan) budget -= padded_bytes(p, p.format);
  for (const FreeTensor& t : tensors) {
    budget += padded_bytes(plan[t.index], plan[t.index].format);
    items.push_back(t.item);
  }
  std::vector<std::vector<int>> known;
  std::optional<Recipe> within, smallest;
  int64_t within_bytes = -1, smallest_bytes = 0;
  for (const Recipe& recipe : Recipe::all()) {
    FRESHET_ASSIGN_OR_RETURN(const auto choice, choice_of(recipe, plan, tensors, search));
    if (!choice) continue;
    int64_t bytes = 0;
    for (size_t i = 0; i < items.size(); ++i)
      bytes += items[i][static_cast<size_t>((*choice)[i])].bytes;
    if (bytes <= budget && bytes > within_bytes) {
      within = recipe;
      within_bytes = bytes;
    }
    if (!smallest || bytes < smallest_bytes) {
      smallest = recipe;
      smallest_bytes = bytes;
    }
    known.push_back(*choice);
  }
  FRESHET_ASSIGN_OR_RETURN(const Allocation best, allocate(items, budget, known));
  for (size_t i = 0; i < tensors.size(); ++i)
    plan[tensors[i].index].format = tensors[i].formats[static_cast<size_t>(best.choice[i])];
  return within ? *within : smallest.value_or(Recipe());
}

}  // namespace freshet::quantizer

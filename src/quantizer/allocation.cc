#include "quantizer/allocation.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

namespace freshet::quantizer {
namespace {

constexpr int64_t kMostUnits = 1 << 15;
constexpr double kNever = std::numeric_limits<double>::infinity();

// The options that are not worse than another one in both bytes and loss, by rising bytes.
std::vector<int> useful_options(const AllocationItem& item) {
  std::vector<int> order(item.size());
  std::iota(order.begin(), order.end(), 0);
  const auto at = [&](int i) -> const AllocationOption& { return item[static_cast<size_t>(i)]; };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return std::pair(at(a).bytes, at(a).loss) < std::pair(at(b).bytes, at(b).loss);
  });
  std::vector<int> out;
  for (const int i : order) {
    if (out.empty() || at(i).loss < at(out.back()).loss) out.push_back(i);
  }
  return out;
}

Allocation summed(std::span<const AllocationItem> items, std::vector<int> choice) {
  Allocation out;
  for (size_t i = 0; i < items.size(); ++i) {
    const AllocationOption& o = items[i][static_cast<size_t>(choice[i])];
    out.bytes += o.bytes;
    out.loss += o.loss;
  }
  out.choice = std::move(choice);
  return out;
}

// The best choice for items whose options take whole units, `spare` of them in all beyond the
// smallest options.
class UnitSearch {
 public:
  UnitSearch(std::span<const AllocationItem> items, std::span<const std::vector<int>> options,
             int64_t unit, int64_t spare)
      : items_(items), options_(options), unit_(unit), width_(static_cast<size_t>(spare) + 1) {}

  std::vector<int> best() {
    std::vector<std::vector<uint8_t>> taken;
    std::vector<double> losses(width_, 0.0);
    for (size_t i = 0; i < items_.size(); ++i) {
      std::vector<double> next(width_, kNever);
      std::vector<uint8_t> by(width_, 0);
      for (size_t k = 0; k < options_[i].size(); ++k) {
        const size_t units = units_of(i, k);
        const double loss = option(i, k).loss;
        for (size_t u = units; u < width_; ++u) {
          const double sum = losses[u - units] + loss;
          if (sum < next[u]) {
            next[u] = sum;
            by[u] = static_cast<uint8_t>(k);
          }
        }
      }
      losses.swap(next);
      taken.push_back(std::move(by));
    }
    std::vector<int> choice(items_.size());
    size_t u = width_ - 1;  // losses do not rise with units
    for (size_t i = items_.size(); i-- > 0;) {
      const size_t k = taken[i][u];
      choice[i] = options_[i][k];
      u -= units_of(i, k);
    }
    return choice;
  }

 private:
  const AllocationOption& option(size_t i, size_t k) const {
    return items_[i][static_cast<size_t>(options_[i][k])];
  }
  size_t units_of(size_t i, size_t k) const {
    return static_cast<size_t>((option(i, k).bytes - option(i, 0).bytes + unit_ - 1) / unit_);
  }

  std::span<const AllocationItem> items_;
  std::span<const std::vector<int>> options_;
  int64_t unit_;
  size_t width_;
};

// Takes, again and again, the change of one item that lowers the loss most and still fits.
void improve(std::span<const AllocationItem> items, std::span<const std::vector<int>> options,
             int64_t budget, Allocation& a) {
  for (;;) {
    double most = 0;
    size_t item = 0;
    int to = -1;
    for (size_t i = 0; i < items.size(); ++i) {
      const AllocationOption& now = items[i][static_cast<size_t>(a.choice[i])];
      for (const int k : options[i]) {
        const AllocationOption& o = items[i][static_cast<size_t>(k)];
        if (a.bytes - now.bytes + o.bytes > budget || now.loss - o.loss <= most) continue;
        most = now.loss - o.loss;
        item = i;
        to = k;
      }
    }
    if (to < 0) return;
    std::vector<int> choice = a.choice;
    choice[item] = to;
    Allocation next = summed(items, std::move(choice));
    if (next.loss >= a.loss) return;
    a = std::move(next);
  }
}

}  // namespace

Result<Allocation> allocate(std::span<const AllocationItem> items, int64_t budget,
                            std::span<const std::vector<int>> known) {
  std::vector<std::vector<int>> options;
  int64_t smallest = 0, divisor = 0;
  for (const AllocationItem& item : items) {
    FRESHET_CHECK(!item.empty() && item.size() < 256);
    options.push_back(useful_options(item));
    const int64_t first = item[static_cast<size_t>(options.back().front())].bytes;
    smallest += first;
    for (const int k : options.back())
      divisor = std::gcd(divisor, item[static_cast<size_t>(k)].bytes - first);
  }
  if (smallest > budget)
    return invalid_argument(
        "the target size is too small: it leaves {} bytes where at least {} are "
        "needed",
        budget, smallest);
  const int64_t spare = budget - smallest;
  int64_t unit = std::max<int64_t>(1, divisor);
  if (spare / unit > kMostUnits) unit = (spare + kMostUnits - 1) / kMostUnits;
  Allocation best = summed(items, UnitSearch(items, options, unit, spare / unit).best());
  improve(items, options, budget, best);
  for (const std::vector<int>& choice : known) {
    Allocation other = summed(items, choice);
    if (other.bytes > budget) continue;
    improve(items, options, budget, other);
    if (other.loss < best.loss) best = std::move(other);
  }
  return best;
}

}  // namespace freshet::quantizer

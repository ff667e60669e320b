#include "quantizer/methods/hessian.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <type_traits>
#include <utility>

#include <fmt/format.h>

#include "quantizer/methods/lanes.h"

namespace freshet::quantizer {
namespace {

constexpr int64_t kFactorTile = 64;
constexpr int64_t kMostDouble = 8192;  // columns; wider factors are F32, for their size

// The factor of a tile on the diagonal, in place.
template <class T>
bool factorise_tile(T* tile, int64_t stride, int64_t width) {
  for (int64_t j = 0; j < width; ++j) {
    T pivot = tile[j * stride + j];
    for (int64_t k = 0; k < j; ++k) pivot -= tile[j * stride + k] * tile[j * stride + k];
    if (!(pivot > T{0}) || !std::isfinite(pivot)) return false;
    const T root = std::sqrt(pivot);
    tile[j * stride + j] = root;
    for (int64_t i = j + 1; i < width; ++i) {
      T v = tile[i * stride + j];
      for (int64_t k = 0; k < j; ++k) v -= tile[i * stride + k] * tile[j * stride + k];
      tile[i * stride + j] = v / root;
    }
  }
  return true;
}

// Lower Cholesky factor in place, by tiles; false if a is not positive definite.
template <class T>
bool factorise(std::vector<T>& a, int64_t n, ThreadPool& pool) {
  T* const m = a.data();
  std::vector<T> across(
      static_cast<size_t>(kFactorTile * n));  // the row of tiles, transposed, negative
  std::vector<T> below(
      static_cast<size_t>(kFactorTile * kFactorTile));  // the tile on the diagonal, transposed
  for (int64_t j0 = 0; j0 < n; j0 += kFactorTile) {
    const int64_t width = std::min(kFactorTile, n - j0);
    for (int64_t j = 0; j < width; ++j) {
      for (int64_t k = 0; k < j0; ++k) {
        across[static_cast<size_t>(k * kFactorTile + j)] = -m[(j0 + j) * n + k];
      }
    }
    const int64_t tiles = (n - j0 + kFactorTile - 1) / kFactorTile;
    pool.parallel_for(tiles, [&](int64_t t, int) {
      const int64_t end = std::min(n, j0 + (t + 1) * kFactorTile);
      for (int64_t i = j0 + t * kFactorTile; i < end; ++i) {
        add_products(m + i * n + j0, width, m + i * n, across.data(), kFactorTile, j0);
      }
    });
    if (!factorise_tile(m + j0 * (n + 1), n, width)) return false;
    for (int64_t j = 0; j < width; ++j) {
      for (int64_t k = 0; k < j; ++k) {
        below[static_cast<size_t>(k * kFactorTile + j)] = m[(j0 + j) * n + j0 + k];
      }
    }
    pool.parallel_for(tiles - 1, [&](int64_t t, int) {
      const int64_t end = std::min(n, j0 + (t + 2) * kFactorTile);
      for (int64_t i = j0 + (t + 1) * kFactorTile; i < end; ++i) {
        T* const row = m + i * n + j0;
        for (int64_t k = 0; k < width; ++k) {
          row[k] /= m[(j0 + k) * (n + 1)];
          add_multiple(row + k + 1, width - k - 1, -row[k], below.data() + k * kFactorTile + k + 1);
        }
      }
    });
  }
  return true;
}

// The inverse of a lower triangular matrix in place. Column tiles are independent.
template <class T>
void invert_lower(std::vector<T>& a, int64_t n, ThreadPool& pool) {
  std::vector<T> inverse(a.size(), T{0});
  const T* const m = a.data();
  T* const to = inverse.data();
  pool.parallel_for((n + kFactorTile - 1) / kFactorTile, [&](int64_t t, int) {
    const int64_t j0 = t * kFactorTile;
    const int64_t width = std::min(kFactorTile, n - j0);
    std::vector<T> left(static_cast<size_t>(n));
    for (int64_t i = j0; i < n; ++i) {
      T* const row = to + i * n + j0;
      for (int64_t k = j0; k < i; ++k) left[static_cast<size_t>(k - j0)] = -m[i * n + k];
      if (i < j0 + width) row[i - j0] = T{1};
      add_products(row, width, left.data(), to + j0 * n + j0, n, i - j0);
      const T scale = T{1} / m[i * n + i];
      for (int64_t j = 0; j < width; ++j) row[j] *= scale;
    }
  });
  a.swap(inverse);
}

// U for the visiting order: with R R^T = H and R upper triangular, U = R^-1. R is the factor of the
// matrix with rows and columns in reverse.
template <class T>
bool upper_factor(const Hessian& h, std::vector<float>& out, ThreadPool& pool) {
  const int64_t n = h.cols;
  const auto at = [&](int64_t i) { return h.order[static_cast<size_t>(n - 1 - i)]; };
  std::vector<T> a(static_cast<size_t>(n * n), T{0});
  for (int64_t i = 0; i < n; ++i) {
    const float* const from = h.moments.data() + int64_t{at(i)} * n;
    for (int64_t j = 0; j <= i; ++j) a[static_cast<size_t>(i * n + j)] = from[at(j)];
  }
  if (!factorise(a, n, pool)) return false;
  invert_lower(a, n, pool);
  if constexpr (std::is_same_v<T, float>) {
    // Reversed in place: a copy of a wide factor takes gigabytes.
    std::reverse(a.begin(), a.end());
    out = std::move(a);
    const bool finite =
        std::all_of(out.begin(), out.end(), [](float v) { return std::isfinite(v); });
    bool positive = true;
    for (int64_t i = 0; i < n; ++i) positive &= out[static_cast<size_t>(i * (n + 1))] > 0.0f;
    return finite && positive;
  }
  out.assign(static_cast<size_t>(n * n), 0.0f);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = i; j < n; ++j) {
      const auto v = static_cast<float>(a[static_cast<size_t>((n - 1 - i) * n + n - 1 - j)]);
      if (!std::isfinite(v)) return false;
      out[static_cast<size_t>(i * n + j)] = v;
    }
    if (!(out[static_cast<size_t>(i * n + i)] > 0.0f)) return false;
  }
  return true;
}

}  // namespace

std::optional<Hessian> prepare_hessian(const InputStats& stats, const HessianOptions& options,
                                       ThreadPool& pool, std::string& why) {
  const int64_t n = stats.cols;
  if (stats.gram.size() != static_cast<size_t>(n * n) || n == 0) {
    why = "no second moments of the inputs were collected";
    return std::nullopt;
  }
  Hessian h;
  h.cols = n;
  double trace = 0.0;
  for (int64_t j = 0; j < n; ++j) {
    const float d = stats.gram[static_cast<size_t>(j * n + j)];
    trace += d;
    if (!(d > 0.0f)) ++h.dead_columns;
  }
  const bool finite =
      std::all_of(stats.gram.begin(), stats.gram.end(), [](float v) { return std::isfinite(v); });
  if (!finite || !(trace > 0.0) || !std::isfinite(trace)) {
    why = finite ? "the inputs are zero" : "the inputs' second moments are not finite";
    return std::nullopt;
  }
  h.order.resize(static_cast<size_t>(n));
  std::iota(h.order.begin(), h.order.end(), 0);
  if (options.falling_order) {
    std::stable_sort(h.order.begin(), h.order.end(), [&](int32_t a, int32_t b) {
      return stats.gram[static_cast<size_t>(a * (n + 1))] >
             stats.gram[static_cast<size_t>(b * (n + 1))];
    });
  }
  const auto mean = static_cast<float>(trace / static_cast<double>(n));
  h.damping = std::max(options.damping, 1e-6f);
  for (int attempt = 0; attempt < 4; ++attempt, h.damping *= 10.0f) {
    h.moments = stats.gram;
    h.added = h.damping * mean;
    for (int64_t j = 0; j < n; ++j) h.moments[static_cast<size_t>(j * (n + 1))] += h.added;
    const bool done = n <= kMostDouble ? upper_factor<double>(h, h.factor, pool)
                                       : upper_factor<float>(h, h.factor, pool);
    if (done) return h;
    h.factor.clear();
  }
  why = fmt::format("the inputs' second moments cannot be factorised, even with damping of {}",
                    h.damping / 10.0f);
  return std::nullopt;
}

}  // namespace freshet::quantizer

#include "quantizer/methods/hessian.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "quantizer/methods/lanes.h"

namespace freshet::quantizer {
namespace {

constexpr int64_t kFactorTile = 64;
// Rows of a panel that products go through at a time, for all rows of a tile: they stay in cache.
constexpr int64_t kFactorDepth = 128;
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

// The Cholesky factor R of H = R R^T, upper triangular, in place; `m` holds H on and above its
// diagonal, [n, n], and nothing under it is touched. Tiles go from the last row to the first:
// "place" p is row or column n - 1 - p. False if H is not positive definite.
template <class T>
bool factorise(T* m, int64_t n, ThreadPool& pool) {
  // The row of tiles, transposed, negative; the tile on the diagonal, and the same transposed.
  std::vector<T> across(static_cast<size_t>(kFactorTile * n));
  std::vector<T> tile(static_cast<size_t>(kFactorTile * kFactorTile));
  std::vector<T> below(tile.size());
  const auto row_end = [=](int64_t place) { return m + (n - 1 - place) * n + n - 1; };
  for (int64_t p0 = 0; p0 < n; p0 += kFactorTile) {
    const int64_t width = std::min(kFactorTile, n - p0);
    pool.parallel_for((p0 + kFactorDepth - 1) / kFactorDepth, [&](int64_t t, int) {
      for (int64_t j = 0; j < width; ++j) {
        const T* const row = row_end(p0 + j);
        for (int64_t k = t * kFactorDepth; k < std::min(p0, (t + 1) * kFactorDepth); ++k)
          across[static_cast<size_t>(k * kFactorTile + j)] = -row[-k];
      }
    });
    const int64_t tiles = (n - p0 + kFactorTile - 1) / kFactorTile;
    pool.parallel_for(tiles, [&](int64_t t, int) {
      const int64_t from = p0 + t * kFactorTile;
      const int64_t end = std::min(n, from + kFactorTile);
      T out[kFactorTile][kFactorTile] = {};
      const auto count = [=](int64_t p) { return std::min(width, p - p0 + 1); };
      for (int64_t p = from; p < end; ++p) {
        for (int64_t j = 0; j < count(p); ++j) out[p - from][j] = row_end(p)[-p0 - j];
      }
      for (int64_t k = 0; k < p0; k += kFactorDepth) {
        const int64_t depth = std::min(kFactorDepth, p0 - k);
        for (int64_t p = from; p < end; ++p) {
          add_products_back(out[p - from], width, row_end(p) - k, across.data() + k * kFactorTile,
                            kFactorTile, depth);
        }
      }
      for (int64_t p = from; p < end; ++p) {
        const T* const found = out[p - from];
        if (t == 0) {
          std::copy_n(found, count(p), tile.data() + (p - p0) * kFactorTile);
        } else {
          for (int64_t j = 0; j < count(p); ++j) row_end(p)[-p0 - j] = found[j];
        }
      }
    });
    if (!factorise_tile(tile.data(), kFactorTile, width)) return false;
    for (int64_t j = 0; j < width; ++j) {
      for (int64_t k = 0; k < j; ++k) {
        below[static_cast<size_t>(k * kFactorTile + j)] =
            tile[static_cast<size_t>(j * kFactorTile + k)];
      }
      T* const row = row_end(p0 + j) - p0;
      for (int64_t k = 0; k <= j; ++k) row[-k] = tile[static_cast<size_t>(j * kFactorTile + k)];
    }
    pool.parallel_for(tiles - 1, [&](int64_t t, int) {
      const int64_t end = std::min(n, p0 + (t + 2) * kFactorTile);
      for (int64_t p = p0 + (t + 1) * kFactorTile; p < end; ++p) {
        T* const row = row_end(p) - p0;
        T v[kFactorTile];
        for (int64_t k = 0; k < width; ++k) v[k] = row[-k];
        for (int64_t k = 0; k < width; ++k) {
          v[k] /= tile[static_cast<size_t>(k * (kFactorTile + 1))];
          add_multiple(v + k + 1, width - k - 1, -v[k], below.data() + k * kFactorTile + k + 1);
        }
        for (int64_t k = 0; k < width; ++k) row[-k] = v[k];
      }
    });
  }
  return true;
}

// The inverse of what factorise() made, in place. A tile of 64 places reads only what is left of
// the factor from its first place on: so as many as there are threads are computed aside, and then
// take their place.
template <class T>
void invert(T* m, int64_t n, ThreadPool& pool) {
  const auto row_end = [=](int64_t place) { return m + (n - 1 - place) * n + n - 1; };
  const int64_t tiles = (n + kFactorTile - 1) / kFactorTile;
  const int64_t at_once = std::min<int64_t>(tiles, pool.size());
  std::vector<std::vector<T>> panels(static_cast<size_t>(at_once));  // [places, kFactorTile]
  for (int64_t first = 0; first < tiles; first += at_once) {
    const int64_t count = std::min(at_once, tiles - first);
    pool.parallel_for(count, [&](int64_t t, int) {
      const int64_t p0 = (first + t) * kFactorTile;
      const int64_t width = std::min(kFactorTile, n - p0);
      std::vector<T>& panel = panels[static_cast<size_t>(t)];
      panel.assign(static_cast<size_t>((n - p0) * kFactorTile), T{0});
      std::vector<T> left(static_cast<size_t>(kFactorDepth));
      for (int64_t from = p0; from < n; from += kFactorTile) {
        const int64_t end = std::min(n, from + kFactorTile);
        // Takes the products with rows [k, k + depth) of the panel from row p.
        const auto take = [&](int64_t p, int64_t k, int64_t depth, T* negative) {
          const T* const factor = row_end(p);
          for (int64_t i = 0; i < depth; ++i) negative[i] = -factor[-k - i];
          add_products(panel.data() + (p - p0) * kFactorTile, width, negative,
                       panel.data() + (k - p0) * kFactorTile, kFactorTile, depth);
        };
        if (from == p0) {
          for (int64_t p = p0; p < end; ++p)
            panel[static_cast<size_t>((p - p0) * (kFactorTile + 1))] = T{1};
        }
        for (int64_t k = p0; k < from; k += kFactorDepth) {
          for (int64_t p = from; p < end; ++p)
            take(p, k, std::min(kFactorDepth, from - k), left.data());
        }
        for (int64_t p = from; p < end; ++p) {
          take(p, from, p - from, left.data());
          T* const row = panel.data() + (p - p0) * kFactorTile;
          const T scale = T{1} / row_end(p)[-p];
          for (int64_t j = 0; j < width; ++j) row[j] *= scale;
        }
      }
    });
    pool.parallel_for(count, [&](int64_t t, int) {
      const int64_t p0 = (first + t) * kFactorTile;
      for (int64_t p = p0; p < n; ++p) {
        const T* const row = panels[static_cast<size_t>(t)].data() + (p - p0) * kFactorTile;
        T* const to = row_end(p) - p0;
        const int64_t width = std::min(kFactorTile, p - p0 + 1);
        for (int64_t j = 0; j < width; ++j) to[-j] = row[j];
      }
    });
  }
}

// U for the visiting order, on and above the diagonal of `m`, [cols, cols]: with R R^T = H and R
// upper triangular, U = R^-1.
template <class T>
bool upper_factor(const Hessian& h, T* m, ThreadPool& pool) {
  const int64_t n = h.cols;
  const int32_t* const order = h.order.data();
  pool.parallel_for(n, [&](int64_t i, int) {
    for (int64_t j = i; j < n; ++j) m[i * n + j] = T{h.moment(order[i], order[j])};
  });
  if (!factorise(m, n, pool)) return false;
  invert(m, n, pool);
  return true;
}

// The factor in the upper triangle; false: there is none.
bool add_factor(Hessian& h, ThreadPool& pool) {
  const int64_t n = h.cols;
  float* const to = h.triangles.data();
  if (n > kMostDouble) {
    if (!upper_factor(h, to, pool)) return false;
  } else {
    std::vector<double> wide(static_cast<size_t>(n * n));
    if (!upper_factor(h, wide.data(), pool)) return false;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = i; j < n; ++j)
        to[i * n + j] = static_cast<float>(wide[static_cast<size_t>(i * n + j)]);
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    if (!(to[i * (n + 1)] > 0.0f)) return false;
    if (!std::all_of(to + i * (n + 1), to + (i + 1) * n, [](float v) { return std::isfinite(v); }))
      return false;
  }
  return true;
}

}  // namespace

void Hessian::copy_moments(int64_t row, int64_t rows, int64_t column, int64_t width, float* to,
                           int64_t stride) const {
  const float* const from = triangles.data();
  if (column + width <= row) {
    for (int64_t k = 0; k < rows; ++k)
      std::copy_n(from + (row + k) * cols + column, width, to + k * stride);
    return;
  }
  if (row + rows <= column) {
    transpose(from + column * cols + row, cols, width, rows, to, stride);
    return;
  }
  for (int64_t k = 0; k < rows; ++k) {
    for (int64_t j = 0; j < width; ++j) to[k * stride + j] = moment(row + k, column + j);
  }
}

std::optional<Hessian> prepare_hessian(std::vector<float> gram, int64_t cols,
                                       const HessianOptions& options, ThreadPool& pool,
                                       std::string& why) {
  const int64_t n = cols;
  if (gram.size() != static_cast<size_t>(n * n) || n == 0) {
    why = "no second moments of the inputs were collected";
    return std::nullopt;
  }
  Hessian h;
  h.cols = n;
  double trace = 0.0;
  std::vector<float> diagonal;
  for (int64_t j = 0; j < n; ++j) {
    const float d = gram[static_cast<size_t>(j * n + j)];
    diagonal.push_back(d);
    trace += d;
    if (!(d > 0.0f)) ++h.dead_columns;
  }
  const bool finite =
      std::all_of(gram.begin(), gram.end(), [](float v) { return std::isfinite(v); });
  if (!finite || !(trace > 0.0) || !std::isfinite(trace)) {
    why = finite ? "the inputs are zero" : "the inputs' second moments are not finite";
    return std::nullopt;
  }
  h.order.resize(static_cast<size_t>(n));
  std::iota(h.order.begin(), h.order.end(), 0);
  if (options.falling_order) {
    std::stable_sort(h.order.begin(), h.order.end(), [&](int32_t a, int32_t b) {
      return diagonal[static_cast<size_t>(a)] > diagonal[static_cast<size_t>(b)];
    });
  }
  h.triangles = std::move(gram);
  const auto mean = static_cast<float>(trace / static_cast<double>(n));
  h.damping = std::max(options.damping, 1e-6f);
  for (int attempt = 0; attempt < 4; ++attempt, h.damping *= 10.0f) {
    h.added = h.damping * mean;
    h.diagonal = diagonal;
    for (float& d : h.diagonal) d += h.added;
    if (add_factor(h, pool)) return h;
  }
  why = fmt::format("the inputs' second moments cannot be factorised, even with damping of {}",
                    h.damping / 10.0f);
  return std::nullopt;
}

}  // namespace freshet::quantizer

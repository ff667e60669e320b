#include "quantizer/methods/scales.h"

#include <algorithm>
#include <cmath>

#include "quantizer/methods/lanes.h"

namespace freshet::quantizer {
namespace {

constexpr int64_t kTestedRows = 256;  // of each linear in a search
constexpr int64_t kTestedTokens = 128;

// Rows spread evenly over the matrix.
std::vector<float> tested_rows(const LinearWeights& l, int64_t cols) {
  const int64_t count = std::min(l.rows, kTestedRows);
  std::vector<float> out(static_cast<size_t>(count * cols));
  for (int64_t i = 0; i < count; ++i) {
    std::copy_n(l.w + i * l.rows / count * cols, cols, out.begin() + i * cols);
  }
  return out;
}

void scale_columns(std::vector<float>& w, std::span<const float> scales) {
  for (size_t i = 0; i < w.size(); ++i) w[i] *= scales[i % scales.size()];
}

// Divided by the root of the extremes' product, so that scales lie about 1.
void centre(std::vector<float>& s) {
  for (float& v : s) v = std::isfinite(v) ? std::max(v, 1e-4f) : 1.0f;
  const auto [least, most] = std::minmax_element(s.begin(), s.end());
  const float by = std::sqrt(*least) * std::sqrt(*most);
  for (float& v : s) v /= by;
}

// The error of rows quantised with scales, in the metric of the unscaled inputs.
Result<double> scaled_error(const std::vector<float>& rows, const Target& target,
                            std::span<const float> scales, const InputStats& stats,
                            ThreadPool& pool) {
  const auto cols = static_cast<int64_t>(scales.size());
  const auto count = static_cast<int64_t>(rows.size()) / cols;
  std::vector<float> scaled = rows;
  scale_columns(scaled, scales);
  MethodOptions plain;
  plain.search_ranges = false;
  FRESHET_ASSIGN_OR_RETURN(const Quantised q,
                           quantise_linear(scaled.data(), count, cols, target, {}, plain, pool));
  const std::vector<float> decoded = dequantise(q.matrix, std::get_if<Scheme>(&target));
  std::vector<double> errors(static_cast<size_t>(count));
  pool.parallel_for(count, [&](int64_t r, int) {
    std::vector<float> off(scales.size());
    for (size_t j = 0; j < off.size(); ++j) {
      const size_t at = static_cast<size_t>(r * cols) + j;
      off[j] = (scaled[at] - decoded[at]) / scales[j];
    }
    errors[static_cast<size_t>(r)] = quadratic_form(stats.gram.data(), off.data(), cols);
  });
  double total = 0.0;
  for (const double e : errors) total += e;
  return total;
}

// The mean over all rows of |w| as a share of the largest of its group.
std::vector<double> mean_shares(std::span<const LinearWeights> linears, int64_t cols,
                                int64_t group) {
  std::vector<double> mean(static_cast<size_t>(cols));
  double rows = 0.0;
  for (const LinearWeights& l : linears) {
    rows += static_cast<double>(l.rows);
    for (int64_t r = 0; r < l.rows; ++r) {
      for (int64_t first = 0; first < cols; first += group) {
        const int64_t end = std::min(cols, first + group);
        const float* const w = l.w + r * cols;
        float most = 0.0f;
        for (int64_t j = first; j < end; ++j) most = std::max(most, std::abs(w[j]));
        if (!(most > 0.0f) || !std::isfinite(most)) continue;
        for (int64_t j = first; j < end; ++j) {
          mean[static_cast<size_t>(j)] += std::abs(w[j]) / most;
        }
      }
    }
  }
  for (double& v : mean) v /= std::max(rows, 1.0);
  return mean;
}

int64_t group_of(const Target& target, int64_t cols) {
  if (const auto* scheme = std::get_if<Scheme>(&target)) {
    return scheme->group == 0 ? cols : scheme->group;
  }
  return 32;
}

Status check_stats(const InputStats& stats, bool gram) {
  const auto n = static_cast<size_t>(stats.cols);
  if (n == 0 || stats.mean_abs.size() != n || stats.max_abs.size() != n) {
    return invalid_argument("statistics of {} inputs without their magnitudes", stats.cols);
  }
  if (gram && stats.gram.size() != n * n) {
    return invalid_argument("AWQ needs the second moments of the inputs");
  }
  return {};
}

}  // namespace

Result<InputScales> awq_search(std::span<const LinearWeights> linears, const Target& target,
                               const InputStats& stats, ThreadPool& pool) {
  FRESHET_RETURN_IF_ERROR(check_stats(stats, true));
  const auto n = static_cast<size_t>(stats.cols);
  std::vector<std::vector<float>> rows;
  for (const LinearWeights& l : linears) rows.push_back(tested_rows(l, stats.cols));
  const auto loss = [&](std::span<const float> scales) -> Result<double> {
    double total = 0.0;
    for (const std::vector<float>& r : rows) {
      FRESHET_ASSIGN_OR_RETURN(const double e, scaled_error(r, target, scales, stats, pool));
      total += e;
    }
    return total;
  };
  InputScales best;
  best.scales.assign(n, 1.0f);
  FRESHET_ASSIGN_OR_RETURN(best.error_before, loss(best.scales));
  best.error = best.error_before;
  const std::vector<double> shares = mean_shares(linears, stats.cols, group_of(target, stats.cols));
  for (int step = 0; step <= 20; ++step) {
    const double alpha = 0.05 * step;
    std::vector<float> s(n, 1.0f);
    for (size_t j = 0; j < n; ++j) {
      const double x = stats.mean_abs[j];
      if (!(x > 0.0) || !std::isfinite(x)) continue;
      s[j] = static_cast<float>(std::pow(x, alpha) / (std::pow(shares[j], 1.0 - alpha) + 1e-4));
    }
    centre(s);
    for (size_t j = 0; j < n; ++j) {
      if (!(stats.mean_abs[j] > 0.0f)) s[j] = 1.0f;
    }
    FRESHET_ASSIGN_OR_RETURN(const double error, loss(s));
    if (!(error < best.error)) continue;
    best.error = error;
    best.alpha = static_cast<float>(alpha);
    best.scales = std::move(s);
  }
  return best;
}

namespace {

// Rounds a vector to 255 levels about zero, by its largest magnitude.
void round_int8(float* x, int64_t n) {
  float most = 0.0f;
  for (int64_t i = 0; i < n; ++i) most = std::max(most, std::abs(x[i]));
  if (!(most > 0.0f)) return;
  const float scale = most / 127.0f;
  for (int64_t i = 0; i < n; ++i) x[i] = std::nearbyint(x[i] / scale) * scale;
}

// The squared error of the INT8 product of tested tokens and rows.
double product_error(const std::vector<float>& tokens, const std::vector<float>& rows,
                     std::span<const float> scales, ThreadPool& pool) {
  const auto cols = static_cast<int64_t>(scales.size());
  const auto count = static_cast<int64_t>(rows.size()) / cols;
  const auto samples = static_cast<int64_t>(tokens.size()) / cols;
  std::vector<float> x = tokens;
  for (size_t i = 0; i < x.size(); ++i) x[i] /= scales[i % scales.size()];
  for (int64_t t = 0; t < samples; ++t) round_int8(x.data() + t * cols, cols);
  // Transposed, for sums over tokens in lanes.
  std::vector<float> exact_across(x.size()), across(x.size());
  for (int64_t t = 0; t < samples; ++t) {
    for (int64_t j = 0; j < cols; ++j) {
      exact_across[static_cast<size_t>(j * samples + t)] =
          tokens[static_cast<size_t>(t * cols + j)];
      across[static_cast<size_t>(j * samples + t)] = x[static_cast<size_t>(t * cols + j)];
    }
  }
  std::vector<double> errors(static_cast<size_t>(count));
  pool.parallel_for(count, [&](int64_t r, int) {
    const float* const w = rows.data() + r * cols;
    std::vector<float> rounded(w, w + cols);
    scale_columns(rounded, scales);
    round_int8(rounded.data(), cols);
    for (float& v : rounded) v = -v;
    std::vector<float> off(static_cast<size_t>(samples), 0.0f);
    add_products(off.data(), samples, w, exact_across.data(), samples, cols);
    add_products(off.data(), samples, rounded.data(), across.data(), samples, cols);
    double e = 0.0;
    for (const float v : off) e += double{v} * v;
    errors[static_cast<size_t>(r)] = e;
  });
  double total = 0.0;
  for (const double e : errors) total += e;
  return total;
}

std::vector<float> smooth_for(const InputStats& stats, const std::vector<float>& largest,
                              double alpha) {
  std::vector<float> s(largest.size(), 1.0f);
  for (size_t j = 0; j < s.size(); ++j) {
    const double x = stats.max_abs[j];
    if (!(x > 0.0) || !std::isfinite(x) || !(largest[j] > 0.0f)) continue;
    s[j] = static_cast<float>(
        std::max(std::pow(x, alpha) / std::pow(double{largest[j]}, 1.0 - alpha), 1e-5));
  }
  return s;
}

}  // namespace

Result<InputScales> smooth_scales(std::span<const LinearWeights> linears, const InputStats& stats,
                                  float alpha, std::span<const float> samples, ThreadPool& pool) {
  FRESHET_RETURN_IF_ERROR(check_stats(stats, false));
  const int64_t cols = stats.cols;
  if (samples.size() % static_cast<size_t>(cols) != 0) {
    return invalid_argument("sampled inputs are not rows of {} numbers", cols);
  }
  std::vector<float> largest(static_cast<size_t>(cols));
  std::vector<float> rows;
  for (const LinearWeights& l : linears) {
    for (int64_t i = 0; i < l.rows * cols; ++i) {
      float& most = largest[static_cast<size_t>(i % cols)];
      const float v = std::abs(l.w[i]);
      if (std::isfinite(v)) most = std::max(most, v);
    }
    const std::vector<float> some = tested_rows(l, cols);
    rows.insert(rows.end(), some.begin(), some.end());
  }
  const int64_t tokens = static_cast<int64_t>(samples.size()) / cols;
  const int64_t count = std::min(tokens, kTestedTokens);
  std::vector<float> x(static_cast<size_t>(count * cols));
  for (int64_t i = 0; i < count; ++i) {
    std::copy_n(samples.data() + i * tokens / count * cols, cols, x.begin() + i * cols);
  }
  InputScales best;
  const std::vector<float> ones(static_cast<size_t>(cols), 1.0f);
  if (count > 0) best.error_before = product_error(x, rows, ones, pool);
  const bool search = alpha <= 0.0f && count > 0;
  for (int step = search ? 6 : 0; step <= (search ? 19 : 0); ++step) {
    const float a = search ? 0.05f * static_cast<float>(step) : alpha > 0.0f ? alpha : 0.8f;
    std::vector<float> s = smooth_for(stats, largest, a);
    const double error = count > 0 ? product_error(x, rows, s, pool) : 0.0;
    if (!best.scales.empty() && !(error < best.error)) continue;
    best.scales = std::move(s);
    best.alpha = a;
    best.error = error;
  }
  // A search may find that the inputs are best as they are.
  if (search && !(best.error < best.error_before)) {
    best = {ones, 0.0f, best.error_before, best.error_before};
  }
  return best;
}

InputStats scaled_stats(InputStats out, std::span<const float> scales) {
  const size_t n = scales.size();
  for (size_t j = 0; j < n; ++j) {
    if (!out.mean_abs.empty()) out.mean_abs[j] /= scales[j];
    if (!out.max_abs.empty()) out.max_abs[j] /= scales[j];
    if (!out.mean_square.empty()) out.mean_square[j] /= scales[j] * scales[j];
  }
  for (size_t i = 0; i < out.gram.size(); ++i) out.gram[i] /= scales[i / n] * scales[i % n];
  return out;
}

}  // namespace freshet::quantizer

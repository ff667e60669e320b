#include "quant/search.h"

#include "quant/search_fit.h"

namespace freshet::quant {

using namespace fit;

namespace {
constexpr float kCap = 1e12f;  // keeps squares and their sums finite
}  // namespace

void prepare_block(const float* in, const float* importance, int n, float* x, float* w) {
  float top = 0;
  for (int i = 0; i < n; ++i) {
    x[i] = std::isnan(in[i]) ? 0.0f : std::clamp(in[i], -kCap, kCap);
    w[i] = importance != nullptr && importance[i] > 0 ? std::min(importance[i], 1e30f) : 0.0f;
    top = std::max(top, w[i]);
  }
  for (int i = 0; i < n; ++i) w[i] = top > 0 ? w[i] / top : 1.0f;
}

template <int N>
uint16_t fit_symmetric_block(const float* x, const float* w, int lo, int hi, int8_t* q) {
  return fit_block<N>(x, w, LinearLevels({lo, hi}), q);
}

template <int N>
uint16_t fit_table_block(const float* x, const float* w, const int8_t* levels, int8_t* q) {
  return fit_block<N>(x, w, TableLevels({levels}), q);
}

template <int N>
int fit_power_block(const float* x, const float* w, const int8_t* table, int e_lo, int e_hi,
                    int8_t* q) {
  const TableLevels levels({table});
  const float max = std::abs(largest<N>(x));
  int best = e_lo;
  if (max > 0) {
    // The smallest power of two that clips nothing, and the next two below it, which clip the
    // largest values.
    int cover = 0;
    if (std::frexp(max / levels.hi(), &cover) == 0.5f) --cover;
    float best_error = std::numeric_limits<float>::max();
    for (int e = cover - 2; e <= cover; ++e) {
      const int bounded = std::clamp(e, e_lo, e_hi);
      const float error = error_of<N>(x, w, levels, std::ldexp(1.0f, bounded), 0);
      if (error < best_error) {
        best_error = error;
        best = bounded;
      }
    }
  }
  quantize<N>(x, levels, std::ldexp(1.0f, best), 0, q);
  return best;
}

template <int N>
void fit_affine_block(const float* x, const float* w, int top, int8_t* q, uint16_t& d,
                      uint16_t& m) {
  const LinearLevels levels({0, top});
  const Line line = fit_line<N>(x, w, top, false);
  const auto [low, high] = std::minmax_element(x, x + N);
  float best = std::numeric_limits<float>::max();
  // Rounding m shifts every value, so d is refitted afterwards. The plain range comes first, so
  // that it wins if errors are equal.
  const Line starts[] = {{(*high - *low) / static_cast<float>(top), *low}, line};
  for (const Line& start : starts) {
    const uint16_t m16 = to_f16(start.m);
    const float base = f16_to_f32(m16);
    float y[N];
    for (int i = 0; i < N; ++i) y[i] = x[i] - base;
    const ScaleSums s = scale_sums<N>(y, w, levels, inverse(start.d));
    const float fitted[] = {start.d, s.qq > 0 ? s.qx / s.qq : start.d};
    for (const float scale : fitted) {
      const uint16_t d16 = to_f16(std::max(scale, 0.0f));
      const float e = error_of<N>(x, w, levels, f16_to_f32(d16), base);
      if (e < best) {
        best = e;
        d = d16;
        m = m16;
      }
    }
  }
  quantize<N>(x, levels, f16_to_f32(d), f16_to_f32(m), q);
}

template uint16_t fit_symmetric_block<32>(const float*, const float*, int, int, int8_t*);
template uint16_t fit_table_block<32>(const float*, const float*, const int8_t*, int8_t*);
template int fit_power_block<32>(const float*, const float*, const int8_t*, int, int, int8_t*);
template void fit_affine_block<32>(const float*, const float*, int, int8_t*, uint16_t&, uint16_t&);

}  // namespace freshet::quant

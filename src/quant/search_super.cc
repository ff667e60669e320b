#include "quant/search.h"
#include "quant/search_fit.h"

namespace freshet::quant {

using namespace fit;

template <int G, class Grid>
void fit_symmetric_super_block(const float* x, const float* w, Grid grid, int scale_lo,
                               int scale_hi, SymmetricSuperBlock<G>& out) {
  constexpr int kN = 256 / G;
  const auto levels = levels_of(grid);
  float ideal[G];
  for (int g = 0; g < G; ++g) ideal[g] = fit_scale<kN>(x + g * kN, w + g * kN, levels);
  float best = std::numeric_limits<float>::max();
  uint16_t d16 = to_f16(largest<G>(ideal) / static_cast<float>(scale_lo));
  for (int round = 0; round < 3; ++round) {
    const float d = f16_to_f32(d16);
    SymmetricSuperBlock<G> now;
    now.d = d16;
    float total = 0;
    double up = 0;  // numerator of the least-squares d for these scales and levels
    double down = 0;
    for (int g = 0; g < G; ++g) {
      const float* xg = x + g * kN;
      const float* wg = w + g * kN;
      const int middle =
          static_cast<int>(std::lround(std::clamp(ideal[g] * inverse(d), -1000.f, 1000.f)));
      float group_best = std::numeric_limits<float>::max();
      for (int step = -1; step <= 1; ++step) {
        const int scale = std::clamp(middle + step, scale_lo, scale_hi);
        const float e = error_of<kN>(xg, wg, levels, d * static_cast<float>(scale), 0);
        if (e < group_best) {
          group_best = e;
          now.scale[g] = scale;
        }
      }
      total += group_best;
      const float dl = d * static_cast<float>(now.scale[g]);
      quantize<kN>(xg, levels, dl, 0, now.q + g * kN);
      const ScaleSums s = scale_sums<kN>(xg, wg, levels, inverse(dl));
      up += static_cast<double>(s.qx) * now.scale[g];
      down += static_cast<double>(s.qq) * now.scale[g] * now.scale[g];
    }
    if (!(total < best)) break;
    best = total;
    out = now;
    if (!(down > 0)) break;
    d16 = to_f16(static_cast<float>(up / down));
  }
}

namespace {

// Chooses the group's scale and minimum for given d and dmin; returns the error.
template <int N>
float choose_scale_min(const float* x, const float* w, const LinearLevels& levels, Line ideal,
                       float d, float dmin, int scale_top, uint8_t& scale, uint8_t& min) {
  const Moments s = moments_of<N>(x, w);
  const auto ratio = [scale_top](float a, float b) {
    return std::clamp(static_cast<int>(std::lround(std::min(a * inverse(b), 1000.0f))), 0,
                      scale_top);
  };
  const int middle = ratio(ideal.d, d);
  const int first_min = ratio(-ideal.m, dmin);
  float best = std::numeric_limits<float>::max();
  for (int step = -1; step <= 1; ++step) {
    const int sc = std::clamp(middle + step, 0, scale_top);
    const float dl = d * static_cast<float>(sc);
    // Two passes: with the ideal minimum, and with the minimum that fits the resulting levels.
    int mi = first_min;
    for (int look = 0; look < 2; ++look) {
      const float ml = dmin * static_cast<float>(mi);
      const float e = error_of<N>(x, w, levels, dl, -ml);
      if (e < best) {
        best = e;
        scale = static_cast<uint8_t>(sc);
        min = static_cast<uint8_t>(mi);
      }
      if (look == 1) break;
      int8_t q[N];
      quantize<N>(x, levels, dl, -ml, q);
      float sq = 0;
      for (int i = 0; i < N; ++i) sq += w[i] * static_cast<float>(q[i]);
      const int next = s.w > 0 ? ratio((dl * sq - s.x) / s.w, dmin) : mi;
      if (next == mi) break;
      mi = next;
    }
  }
  return best;
}

// Normal equations of x ~ d * (scale q) - dmin * min over a super block.
struct SuperLine {
  double aa = 0, ab = 0, bb = 0, ax = 0, bx = 0;
  void add(float w, float x, float a, float b) {
    const double wa = double{w} * a;
    const double wb = double{w} * b;
    aa += wa * a;
    ab += wa * b;
    bb += wb * b;
    ax += wa * x;
    bx += wb * x;
  }
  bool solve(float& d, float& dmin) const {
    const double determinant = aa * bb - ab * ab;
    if (determinant > 1e-12 * aa * bb) {
      d = static_cast<float>((ax * bb - bx * ab) / determinant);
      dmin = static_cast<float>((ab * ax - aa * bx) / determinant);
    } else if (aa > 0) {
      d = static_cast<float>(ax / aa);
    } else {
      return false;
    }
    return d >= 0 && dmin >= 0;
  }
};

}  // namespace

template <int G>
void fit_affine_super_block(const float* x, const float* w, int top, int scale_top,
                            AffineSuperBlock<G>& out) {
  constexpr int kN = 256 / G;
  const LinearLevels levels({0, top});
  Line ideal[G];
  float d = 0;
  float dmin = 0;
  for (int g = 0; g < G; ++g) {
    ideal[g] = fit_line<kN>(x + g * kN, w + g * kN, top, true);
    d = std::max(d, ideal[g].d / static_cast<float>(scale_top));
    dmin = std::max(dmin, -ideal[g].m / static_cast<float>(scale_top));
  }
  float best = std::numeric_limits<float>::max();
  for (int round = 0; round < 3; ++round) {
    AffineSuperBlock<G> now;
    now.d = to_f16(d);
    now.dmin = to_f16(dmin);
    d = f16_to_f32(now.d);
    dmin = f16_to_f32(now.dmin);
    float total = 0;
    SuperLine line;
    for (int g = 0; g < G; ++g) {
      const float* xg = x + g * kN;
      const float* wg = w + g * kN;
      total += choose_scale_min<kN>(xg, wg, levels, ideal[g], d, dmin, scale_top, now.scale[g],
                                    now.min[g]);
      int8_t* q = now.q + g * kN;
      const auto scale = static_cast<float>(now.scale[g]);
      const auto min = static_cast<float>(now.min[g]);
      quantize<kN>(xg, levels, d * scale, -dmin * min, q);
      for (int i = 0; i < kN; ++i) line.add(wg[i], xg[i], scale * static_cast<float>(q[i]), -min);
    }
    if (!(total < best)) break;
    best = total;
    out = now;
    if (!line.solve(d, dmin)) break;
  }
}

template void fit_symmetric_super_block<16, LinearGrid>(const float*, const float*, LinearGrid, int,
                                                        int, SymmetricSuperBlock<16>&);
template void fit_symmetric_super_block<8, TableGrid>(const float*, const float*, TableGrid, int,
                                                      int, SymmetricSuperBlock<8>&);
template void fit_affine_super_block<8>(const float*, const float*, int, int, AffineSuperBlock<8>&);
template void fit_affine_super_block<16>(const float*, const float*, int, int,
                                         AffineSuperBlock<16>&);

}  // namespace freshet::quant

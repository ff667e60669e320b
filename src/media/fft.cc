#include "media/fft.h"

#include <cmath>
#include <numbers>

#include "base/status.h"

namespace freshet::media {
namespace {

using Complex = std::complex<double>;

// Without the checks for infinities that the library's product makes.
Complex product(Complex a, Complex b) {
  return {a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real()};
}

std::vector<Complex> roots_of_unity(int count, int size) {
  std::vector<Complex> roots;
  for (int k = 0; k < count; ++k) {
    const double angle = -2 * std::numbers::pi * k / size;
    roots.emplace_back(std::cos(angle), std::sin(angle));
  }
  return roots;
}

}  // namespace

RealFft::RealFft(int size)
    : half_(size / 2),
      roots_(roots_of_unity(half_, half_)),
      twists_(roots_of_unity(half_ + 1, size)) {
  FRESHET_CHECK(size >= 2 && size % 2 == 0);
  int rest = half_;
  for (int factor = 2; rest > 1; ++factor) {
    for (; rest % factor == 0; rest /= factor) factors_.push_back(factor);
  }
}

// Stockham's step: transforms of n numbers, of which `stride` are interleaved, become transforms of
// n / radix.
void RealFft::stage(const Complex* in, Complex* out, int n, int stride, int radix) const {
  const int m = n / radix;
  for (int p = 0; p < m; ++p) {
    for (int j = 0; j < radix; ++j) {
      const Complex twist = roots_[static_cast<size_t>(stride * p * j) % roots_.size()];
      Complex* to = out + stride * (radix * p + j);
      for (int q = 0; q < stride; ++q) {
        const Complex* from = in + q + stride * p;
        Complex sum = from[0];
        for (int k = 1; k < radix; ++k) {
          sum += product(from[stride * m * k],
                         roots_[static_cast<size_t>(half_ / radix * (j * k % radix))]);
        }
        to[q] = product(sum, twist);
      }
    }
  }
}

void RealFft::power(const double* x, double* out, Workspace& space) const {
  const auto half = static_cast<size_t>(half_);
  space.a.resize(half);
  space.b.resize(half);
  // Even numbers as real and odd ones as imaginary parts: one transform of half the size.
  for (size_t i = 0; i < half; ++i) space.a[i] = {x[2 * i], x[2 * i + 1]};
  int n = half_;
  int stride = 1;
  for (const int radix : factors_) {
    stage(space.a.data(), space.b.data(), n, stride, radix);
    std::swap(space.a, space.b);
    n /= radix;
    stride *= radix;
  }
  for (size_t k = 0; k <= half; ++k) {
    const Complex z = space.a[k % half];
    const Complex mirrored = std::conj(space.a[(half - k) % half]);
    const Complex even = (z + mirrored) * 0.5;
    const Complex odd = product((z - mirrored) * 0.5, {0, -1});
    out[k] = std::norm(even + product(odd, twists_[k]));
  }
}

}  // namespace freshet::media

// A Fourier transform of real numbers, of any even size; fast where half the size has small factors
// only (400 = 2 * 2^3 * 5^2). In double precision. Const methods are safe to call from many
// threads, each with a workspace of its own.
#pragma once

#include <complex>
#include <vector>

namespace freshet::media {

class RealFft {
 public:
  // REQUIRES: size is even and at least 2.
  explicit RealFft(int size);

  struct Workspace {
    std::vector<std::complex<double>> a, b;
  };
  // |X_k|^2 of k = 0 ... size / 2, for x of `size` numbers.
  void power(const double* x, double* out, Workspace& space) const;

 private:
  void stage(const std::complex<double>* in, std::complex<double>* out, int n, int stride,
             int radix) const;
  int half_;
  std::vector<int> factors_;
  std::vector<std::complex<double>> roots_;   // e^(-2 pi i k / half)
  std::vector<std::complex<double>> twists_;  // e^(-2 pi i k / size)
};

}  // namespace freshet::media

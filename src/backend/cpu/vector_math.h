// Elementary functions over the lanes of a Simd type, within two units in the last place if the
// result is a normal number. The polynomials are weighted minimax fits (Lawson's iteration on
// Chebyshev nodes). The errors given are relative and cover only the polynomial. NaN stays NaN.
#pragma once

namespace freshet::cpu {
namespace {

#define FRESHET_MATH static inline __attribute__((always_inline))

template <class S>
struct Math {
  using F = typename S::F;

  // e^x; 0 below -87.3; infinity from the end of F32's range, or slightly below it.
  FRESHET_MATH F exp(F x) {
    const F low = S::set(-87.3f);
    const F clamped = S::min(S::set(88.9f), S::max(low, x));
    const F n = S::round(S::mul(clamped, S::set(1.44269504f)));
    F r = S::fnma(n, S::set(0.693359375f), clamped);
    r = S::fnma(n, S::set(-2.12194440e-4f), r);
    F q = S::set(0.00139506f);  // 3.1e-9 for |r| <= ln(2) / 2
    q = S::fma(q, r, S::set(0.00836895f));
    q = S::fma(q, r, S::set(0.0416662f));
    q = S::fma(q, r, S::set(0.16666518f));
    q = S::fma(q, r, S::set(0.50000001f));
    const F p = S::add(S::fma(S::mul(r, r), q, r), S::set(1.0f));
    return S::if_less(x, low, S::zero(), S::scale_by_power(p, n));
  }

  // 2^x for x <= 0; 0 below -126.
  FRESHET_MATH F power_of_two(F x) {
    const F low = S::set(-126.0f);
    const F clamped = S::max(low, x);
    const F n = S::round(clamped);
    const F f = S::sub(clamped, n);
    F p = S::set(0.00132647273f);  // 1.1e-7 for |f| <= 0.5, 1 at 0
    p = S::fma(p, f, S::set(0.00967151299f));
    p = S::fma(p, f, S::set(0.0555073358f));
    p = S::fma(p, f, S::set(0.240222424f));
    p = S::fma(p, f, S::set(0.693147004f));
    p = S::fma(p, f, S::set(1.0f));
    return S::if_less(x, low, S::zero(), S::scale_by_power(p, n));
  }

  FRESHET_MATH F sigmoid(F x) {
    return S::div(S::set(1.0f), S::add(S::set(1.0f), exp(S::sub(S::zero(), x))));
  }

  FRESHET_MATH F tanh(F x) {
    const F a = S::abs(x);
    const F z = S::mul(a, a);
    F q = S::set(-0.00571704f);  // 4.1e-9 for a <= 0.625
    q = S::fma(q, z, S::set(0.02065058f));
    q = S::fma(q, z, S::set(-0.0537435f));
    q = S::fma(q, z, S::set(0.13331491f));
    q = S::fma(q, z, S::set(-0.33333284f));
    const F small = S::fma(S::mul(q, z), a, a);
    const F e = exp(S::add(a, a));
    const F large = S::sub(S::set(1.0f), S::div(S::set(2.0f), S::add(e, S::set(1.0f))));
    return S::copy_sign(S::if_less(a, S::set(0.625f), small, large), x);
  }

  // The cumulative normal distribution. For a >= 0, its value at -a is e^(-a^2 / 2) q(1 / (1 + 0.3
  // a)).
  FRESHET_MATH F phi(F x) {
    const F a = S::min(S::set(14.0f), S::abs(x));
    const F t = S::div(S::set(1.0f), S::fma(a, S::set(0.3f), S::set(1.0f)));
    F q = S::set(-0.020019467f);  // 3.0e-9
    q = S::fma(q, t, S::set(0.108888767f));
    q = S::fma(q, t, S::set(-0.219084315f));
    q = S::fma(q, t, S::set(0.178248613f));
    q = S::fma(q, t, S::set(-0.0666475467f));
    q = S::fma(q, t, S::set(0.0881530994f));
    q = S::fma(q, t, S::set(0.0817529083f));
    q = S::fma(q, t, S::set(0.109301229f));
    q = S::fma(q, t, S::set(0.119735684f));
    q = S::fma(q, t, S::set(0.11967032f));
    q = S::fma(q, t, S::set(7.06684906e-7f));
    // Compensates the rounding of a^2, which the exponential would magnify.
    const F square = S::mul(a, a);
    const F lost = S::fms(a, a, square);
    const F e = exp(S::mul(square, S::set(-0.5f)));
    const F tail = S::mul(S::fnma(S::mul(lost, S::set(0.5f)), e, e), q);
    return S::if_less(x, S::zero(), tail, S::sub(S::set(1.0f), tail));
  }
};

#undef FRESHET_MATH

}  // namespace
}  // namespace freshet::cpu

// The row-wise kernels over a Simd type; vector_<isa>.cc instantiates a set of them.
//
// Sums use four vectors of partial sums, which are added in a fixed order: a result depends only on
// the row and its length.
#pragma once

#include "backend/cpu/vector_math.h"
#include "ops/ops.h"

namespace freshet::cpu {
namespace {

template <class S>
struct VectorOps {
  using F = typename S::F;
  using M = Math<S>;
  static constexpr int kLanes = S::kLanes;

  // out[i] = f(a[i]) for whole vectors and the rest of the row.
  template <class Body>
  static __attribute__((always_inline)) void each(int64_t n, Body body) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) body(i, kLanes);
    if (i < n) body(i, static_cast<int>(n - i));
  }
  static __attribute__((always_inline)) F get(const float* p, int n) {
    return n == kLanes ? S::load(p) : S::load_n(p, n);
  }
  static __attribute__((always_inline)) void put(float* p, F v, int n) {
    if (n == kLanes) {
      S::store(p, v);
    } else {
      S::store_n(p, v, n);
    }
  }

  // Sum over the row of term(i, lanes); term must give zero in lanes past the end of the row.
  template <class Term>
  static __attribute__((always_inline)) float sum(int64_t n, Term term) {
    F s[4] = {S::zero(), S::zero(), S::zero(), S::zero()};
    int64_t i = 0;
    for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) s[j] = S::add(s[j], term(i + j * kLanes, kLanes));
    }
    for (; i < n; i += kLanes) {
      s[0] = S::add(s[0], term(i, n - i < kLanes ? static_cast<int>(n - i) : kLanes));
    }
    return S::reduce_add(S::add(S::add(s[0], s[1]), S::add(s[2], s[3])));
  }

  static void affine(float* out, const float* x, const float* weight, const float* bias, int64_t n,
                     float mean, float scale) {
    const F m = S::set(mean), s = S::set(scale);
    each(n, [&](int64_t i, int lanes) {
      F v = S::mul(S::sub(get(x + i, lanes), m), s);
      if (weight != nullptr) v = S::mul(v, get(weight + i, lanes));
      if (bias != nullptr) v = S::add(v, get(bias + i, lanes));
      put(out + i, v, lanes);
    });
  }

  static float inverse_root(float v) { return 1.0f / __builtin_sqrtf(v); }

  static void rms_norm(float* out, const float* x, const float* weight, const float* bias,
                       int64_t n, float eps) {
    const float squares = sum(n, [&](int64_t i, int lanes) {
      const F v = get(x + i, lanes);
      return S::mul(v, v);
    });
    affine(out, x, weight, bias, n, 0.0f, inverse_root(squares / static_cast<float>(n) + eps));
  }

  static void layer_norm(float* out, const float* x, const float* weight, const float* bias,
                         int64_t n, float eps) {
    const float mean =
        sum(n, [&](int64_t i, int lanes) { return get(x + i, lanes); }) / static_cast<float>(n);
    const F m = S::set(mean);
    const float squares = sum(n, [&](int64_t i, int lanes) {
      const F v = S::keep_range(S::sub(get(x + i, lanes), m), 0, lanes, S::zero());
      return S::mul(v, v);
    });
    affine(out, x, weight, bias, n, mean, inverse_root(squares / static_cast<float>(n) + eps));
  }

  static __attribute__((always_inline)) void rotate(F& a, F& b, F c, F s) {
    const F x = a, y = b;
    a = S::fnma(y, s, S::mul(x, c));
    b = S::fma(x, s, S::mul(y, c));
  }

  static void rope(float* head, const float* cos_sin, int rotary_dim, bool interleaved) {
    const int half = rotary_dim / 2;
    if (!interleaved) {
      each(half, [&](int64_t i, int lanes) {
        F a = get(head + i, lanes), b = get(head + half + i, lanes);
        rotate(a, b, get(cos_sin + i, lanes), get(cos_sin + half + i, lanes));
        put(head + i, a, lanes);
        put(head + half + i, b, lanes);
      });
      return;
    }
    each(half, [&](int64_t i, int lanes) {
      alignas(64) float pairs[2 * kLanes];
      const bool whole = lanes == kLanes;
      float* p = whole ? head + 2 * i : pairs;
      if (!whole) {
        for (int j = 0; j < 2 * kLanes; ++j) pairs[j] = j < 2 * lanes ? head[2 * i + j] : 0.0f;
      }
      F a, b;
      S::load_pairs(p, a, b);
      rotate(a, b, get(cos_sin + i, lanes), get(cos_sin + half + i, lanes));
      S::store_pairs(p, a, b);
      if (!whole) {
        for (int j = 0; j < 2 * lanes; ++j) head[2 * i + j] = pairs[j];
      }
    });
  }

  // Calls body with the activation as a function on vectors, so that it is chosen once per row.
  template <class Body>
  static __attribute__((always_inline)) void with_activation(int kind, Body body) {
    const F zero = S::zero();
    switch (static_cast<ops::Activation>(kind)) {
      case ops::Activation::kNone:
        return body([](F x) { return x; });
      case ops::Activation::kSilu:
        return body([](F x) { return S::mul(x, M::sigmoid(x)); });
      case ops::Activation::kGelu:
        return body([](F x) { return S::mul(x, M::phi(x)); });
      case ops::Activation::kGeluTanh:
        return body([](F x) {
          // 0.5 (1 + tanh u) = sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
          const F cubic = S::fma(S::mul(x, x), S::set(0.044715f), S::set(1.0f));
          const F u2 = S::mul(S::mul(x, cubic), S::set(1.59576912f));
          return S::mul(x, M::sigmoid(u2));
        });
      case ops::Activation::kRelu:
        return body([zero](F x) { return S::max(x, zero); });
      case ops::Activation::kRelu2:
        return body([zero](F x) {
          const F r = S::max(x, zero);
          return S::mul(r, r);
        });
      case ops::Activation::kQuickGelu:
        return body([](F x) { return S::mul(x, M::sigmoid(S::mul(x, S::set(1.702f)))); });
    }
  }

  static void glu(float* out, const float* gate, const float* up, int64_t n, int kind, float limit,
                  float alpha) {
    if (limit > 0.0f) {
      const F most = S::set(limit), least = S::set(-limit), a = S::set(alpha);
      each(n, [&](int64_t i, int lanes) {
        const F g = S::min(get(gate + i, lanes), most);
        const F u = S::min(S::max(get(up + i, lanes), least), most);
        const F act = S::mul(g, M::sigmoid(S::mul(a, g)));
        put(out + i, S::mul(S::add(u, S::set(1.0f)), act), lanes);
      });
      return;
    }
    with_activation(kind, [&](auto act) {
      each(n, [&](int64_t i, int lanes) {
        put(out + i, S::mul(act(get(gate + i, lanes)), get(up + i, lanes)), lanes);
      });
    });
  }

  static void activation(float* x, int64_t n, int kind) {
    with_activation(kind, [&](auto act) {
      each(n, [&](int64_t i, int lanes) { put(x + i, act(get(x + i, lanes)), lanes); });
    });
  }

  static void add(float* out, const float* x, int64_t n, float factor) {
    const F f = S::set(factor);
    each(n, [&](int64_t i, int lanes) {
      put(out + i, S::fma(get(x + i, lanes), f, get(out + i, lanes)), lanes);
    });
  }

  static void scale(float* x, int64_t n, float factor) {
    const F f = S::set(factor);
    each(n, [&](int64_t i, int lanes) { put(x + i, S::mul(get(x + i, lanes), f), lanes); });
  }

  static void softcap(float* x, int64_t n, float cap) {
    const F c = S::set(cap);
    each(n, [&](int64_t i, int lanes) {
      put(x + i, S::mul(c, M::tanh(S::div(get(x + i, lanes), c))), lanes);
    });
  }

  static constexpr ops::VectorKernels table(const char* name, ops::CpuIsa isa) {
    return {name, isa, rms_norm, layer_norm, rope, glu, activation, add, scale, softcap};
  }
};

}  // namespace
}  // namespace freshet::cpu

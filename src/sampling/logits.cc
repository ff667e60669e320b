#include "sampling/logits.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>

#include "base/status.h"
#include "base/wide.h"

namespace freshet {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr int kLanes = 8;
using Floats = float __attribute__((vector_size(4 * kLanes)));

FRESHET_INLINE_BODY void load(Floats& v, const float* p) {
  std::memcpy(&v, p, sizeof v);
}

FRESHET_INLINE_BODY void maxima_body(const float* x, int64_t blocks, float* block_max) {
  for (int64_t b = 0; b < blocks; ++b, x += kLogitBlock) {
    Floats best = Floats{} + kNone;
    for (int64_t i = 0; i < kLogitBlock; i += kLanes) {
      Floats v;
      load(v, x + i);
      best = v > best ? v : best;  // false for a NaN, which is skipped
    }
    float m = kNone;
    for (int j = 0; j < kLanes; ++j) m = best[j] > m ? best[j] : m;
    block_max[b] = m;
  }
}

void maxima_plain(const float* x, int64_t blocks, float* out) {
  maxima_body(x, blocks, out);
}
FRESHET_TARGET_AVX2 void maxima_avx2(const float* x, int64_t blocks, float* out) {
  maxima_body(x, blocks, out);
}

// exp(x) for x <= 0: 2^n e^r with |r| <= ln(2)/2 and e^r by its Taylor polynomial of degree 7
// (relative error below 1e-7). Below -87 the result would not be a normal number and is 0. For
// scalars and for vectors. Several are interleaved, because one alone is a chain of dependent
// operations that is too long for out-of-order execution to hide.
template <class F, class I, int kCount>
FRESHET_INLINE_BODY void exp_of(F (&x)[kCount]) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  constexpr float kTaylor[] = {1.0f / 5040.0f, 1.0f / 720.0f, 1.0f / 120.0f, 1.0f / 24.0f,
                               1.0f / 6.0f,    0.5f,          1.0f,          1.0f};
  F shifted[kCount], r[kCount], p[kCount];
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) shifted[i] = x[i] * 1.44269504f + kRound;
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) {
    const F n = shifted[i] - kRound;
    r[i] = (x[i] - n * 0.693359375f) + n * 2.12194440e-4f;
    p[i] = r[i] * kTaylor[0] + kTaylor[1];
  }
#pragma GCC unroll 8
  for (int k = 2; k < 8; ++k) {
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) p[i] = p[i] * r[i] + kTaylor[k];
  }
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) {
    I bits, power;
    std::memcpy(&bits, &p[i], sizeof bits);
    std::memcpy(&power, &shifted[i], sizeof power);
    bits += (power - std::bit_cast<uint32_t>(kRound)) << 23;  // modulo 2^32: far values are 0
    F result;
    std::memcpy(&result, &bits, sizeof result);
    x[i] = x[i] > -87.0f ? result : F{};  // NaN: 0
  }
}

// Adding 2^52 leaves the nearest integer in the low bits.
constexpr double kUnits = static_cast<double>(Weight{1} << kWeightBits), kWhole = 0x1p52;

// A register of floats, and one of as many bytes of doubles: sums of wider ones would be kept in
// memory. (Sizes that depend on a parameter are ignored by GCC 12.)
struct Lanes4 {
  using Floats = float __attribute__((vector_size(16)));
  using Ints = uint32_t __attribute__((vector_size(16)));
  using Doubles = double __attribute__((vector_size(16)));
  using Weights = Weight __attribute__((vector_size(16)));
  static FRESHET_INLINE_BODY void widen(const Floats& v, Doubles& low, Doubles& high) {
    low = __builtin_convertvector(__builtin_shufflevector(v, v, 0, 1), Doubles);
    high = __builtin_convertvector(__builtin_shufflevector(v, v, 2, 3), Doubles);
  }
};
struct Lanes8 {
  using Floats = float __attribute__((vector_size(32)));
  using Ints = uint32_t __attribute__((vector_size(32)));
  using Doubles = double __attribute__((vector_size(32)));
  using Weights = Weight __attribute__((vector_size(32)));
  static FRESHET_INLINE_BODY void widen(const Floats& v, Doubles& low, Doubles& high) {
    freshet::widen(__builtin_shufflevector(v, v, 0, 1, 2, 3), low);
    freshet::widen(__builtin_shufflevector(v, v, 4, 5, 6, 7), high);
  }
};
struct Lanes16 {
  using Floats = float __attribute__((vector_size(64)));
  using Ints = uint32_t __attribute__((vector_size(64)));
  using Doubles = double __attribute__((vector_size(64)));
  using Weights = Weight __attribute__((vector_size(64)));
  static FRESHET_INLINE_BODY void widen(const Floats& v, Doubles& low, Doubles& high) {
    freshet::widen(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7), low);
    freshet::widen(__builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15), high);
  }
};

// The bits of 2^52 are added too, once per number.
template <class L>
FRESHET_INLINE_BODY void add_whole(typename L::Weights& sum, typename L::Doubles units) {
  units = units + kWhole;
  typename L::Weights bits;
  std::memcpy(&bits, &units, sizeof bits);
  sum += bits;
}

// weight may be null: sums only. (GCC 12 spills several registers that are copied at once.)
template <class L>
FRESHET_INLINE_BODY void exp_body(const float* x, int64_t blocks, float maximum, float scale,
                                  float* weight, Weight* block_sum) {
  constexpr int kWide = sizeof(typename L::Floats) / sizeof(float), kCount = 4;
  for (int64_t b = 0; b < blocks; ++b) {
    typename L::Weights low{}, high{};
    for (int64_t i = b * kLogitBlock; i < (b + 1) * kLogitBlock; i += kWide * kCount) {
      typename L::Floats v[kCount];
#pragma GCC unroll 8
      for (int j = 0; j < kCount; ++j) {
        std::memcpy(&v[j], x + i + j * kWide, sizeof v[j]);
        v[j] = (v[j] - maximum) * scale;
      }
      exp_of<typename L::Floats, typename L::Ints>(v);
#pragma GCC unroll 8
      for (int j = 0; j < kCount; ++j) {
        if (weight != nullptr) std::memcpy(weight + i + j * kWide, &v[j], sizeof v[j]);
        typename L::Doubles d, e;
        L::widen(v[j] * static_cast<float>(kUnits), d, e);  // exact: a power of two
        add_whole<L>(low, d);
        add_whole<L>(high, e);
      }
    }
    Weight total = Weight{0} - kLogitBlock * std::bit_cast<Weight>(kWhole);
    for (int j = 0; j < kWide / 2; ++j) total += low[j] + high[j];
    block_sum[b] = total;
  }
}

void exp_plain(const float* x, int64_t blocks, float maximum, float scale, float* weight,
               Weight* sum) {
  exp_body<Lanes4>(x, blocks, maximum, scale, weight, sum);
}
FRESHET_TARGET_AVX2 void exp_avx2(const float* x, int64_t blocks, float maximum, float scale,
                                  float* weight, Weight* sum) {
  exp_body<Lanes8>(x, blocks, maximum, scale, weight, sum);
}
FRESHET_TARGET_AVX512 void exp_avx512(const float* x, int64_t blocks, float maximum, float scale,
                                      float* weight, Weight* sum) {
  exp_body<Lanes16>(x, blocks, maximum, scale, weight, sum);
}
auto exp_here() {
  return cpu_has_avx512() ? exp_avx512 : cpu_has_avx2() ? exp_avx2 : exp_plain;
}

// The tail of a row that is not a multiple of the block, padded with impossible logits.
struct Tail {
  float values[kLogitBlock];
  Tail(std::span<const float> logits, int64_t first) {
    std::fill(std::begin(values), std::end(values), kNone);
    std::copy(logits.begin() + first, logits.end(), values);
  }
};

int64_t whole_blocks(std::span<const float> logits) {
  return static_cast<int64_t>(logits.size()) / kLogitBlock;
}

Weight exp_row(std::span<const float> logits, float maximum, float scale, float* weight,
               LogitScratch& s) {
  static const auto run = exp_here();
  const int64_t blocks = whole_blocks(logits);
  run(logits.data(), blocks, maximum, scale, weight, s.block_sum.data());
  if (const int64_t first = blocks * kLogitBlock; first < std::ssize(logits)) {
    const Tail tail(logits, first);
    run(tail.values, 1, maximum, scale, weight == nullptr ? nullptr : weight + first,
        s.block_sum.data() + blocks);
  }
  return std::accumulate(s.block_sum.begin(), s.block_sum.end(), Weight{0});
}

}  // namespace

LogitScratch::LogitScratch(int64_t vocab) {
  FRESHET_CHECK(vocab <= kMostVocab, "a vocabulary of {}", vocab);
  const auto blocks = static_cast<size_t>((vocab + kLogitBlock - 1) / kLogitBlock);
  block_max.resize(blocks);
  block_order.resize(blocks);
  block_sum.resize(blocks);
  weight.resize(blocks * kLogitBlock);
  candidates.reserve(2 * static_cast<size_t>(vocab) + 1);
}

float find_maxima(std::span<const float> logits, LogitScratch& s) {
  static const auto maxima = cpu_has_avx2() ? maxima_avx2 : maxima_plain;
  const int64_t blocks = whole_blocks(logits);
  maxima(logits.data(), blocks, s.block_max.data());
  if (const int64_t first = blocks * kLogitBlock; first < std::ssize(logits)) {
    const Tail tail(logits, first);
    maxima(tail.values, 1, s.block_max.data() + blocks);
  }
  return s.block_max.empty() ? kNone : *std::max_element(s.block_max.begin(), s.block_max.end());
}

int32_t argmax(std::span<const float> logits, const LogitScratch& s) {
  const auto best = std::max_element(s.block_max.begin(), s.block_max.end());
  if (best == s.block_max.end() || *best == kNone) return -1;
  int64_t i = (best - s.block_max.begin()) * kLogitBlock;
  while (logits[static_cast<size_t>(i)] != *best) ++i;
  return static_cast<int32_t>(i);
}

float exp_fraction(float x) {
  float y[] = {x};
  exp_of<float, uint32_t>(y);
  return y[0];
}

Weight whole(float fraction) {
  const double units = static_cast<double>(fraction) * kUnits + kWhole;
  return std::bit_cast<Weight>(units) - std::bit_cast<Weight>(kWhole);
}

Weight exponentials(std::span<const float> logits, float maximum, float scale, LogitScratch& s) {
  return exp_row(logits, maximum, scale, s.weight.data(), s);
}

void exponentials_of_blocks(float maximum, float scale, LogitScratch& s) {
  exp_row(s.block_max, maximum, scale, s.weight.data(), s);
}

Weight exponential_sums(std::span<const float> logits, float maximum, float scale,
                        LogitScratch& s) {
  return exp_row(logits, maximum, scale, nullptr, s);
}

void gather_above(std::span<const float> logits, float threshold, LogitScratch& s) {
  auto& c = s.candidates;
  c.clear();
  for (size_t b = 0; b < s.block_max.size(); ++b) {
    if (!(s.block_max[b] >= threshold) || s.block_max[b] == kNone) continue;
    const size_t first = b * kLogitBlock, end = std::min(logits.size(), first + kLogitBlock);
    size_t at = c.size();
    c.resize(at + (end - first));
    for (size_t i = first; i < end; ++i) {  // branch-free: the branch would be unpredictable
      c[at] = {static_cast<int32_t>(i), logits[i], 0};
      at += logits[i] >= threshold && logits[i] != kNone ? 1 : 0;
    }
    c.resize(at);
  }
}

void gather_best(std::span<const float> logits, int64_t count, LogitScratch& s) {
  // The count-th largest block maximum is a lower bound of the count-th largest logit, because
  // `count` blocks contain a logit at least as large.
  float threshold = kNone;
  if (count <= std::ssize(s.block_max)) {
    s.block_order = s.block_max;
    const auto nth = s.block_order.begin() + (count - 1);
    std::nth_element(s.block_order.begin(), nth, s.block_order.end(), std::greater<>());
    threshold = *nth;
  }
  gather_above(logits, threshold, s);
  auto& c = s.candidates;
  if (count < std::ssize(c)) {
    std::nth_element(c.begin(), c.begin() + (count - 1), c.end(), better);
    c.resize(static_cast<size_t>(count));
  }
  std::sort(c.begin(), c.end(), better);
}

double log_sum_exp(std::span<const float> logits, float maximum, LogitScratch& s) {
  const auto sum = static_cast<double>(exponential_sums(logits, maximum, 1.0f, s));
  return static_cast<double>(maximum) + std::log(sum / kUnits);
}

}  // namespace freshet

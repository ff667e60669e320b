// The operations on states against their definitions in double, in any cut of the sequences.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>

#include <gtest/gtest.h>

#include "ops/ops.h"

namespace freshet::ops {
namespace {

constexpr int kSequences = 3;
constexpr int64_t kLengths[kSequences] = {1, 9, 30};
constexpr int64_t kTokens = 40;

std::vector<float> numbers(int64_t count, uint32_t seed, float scale = 1.0f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> out(static_cast<size_t>(count));
  for (float& v : out) v = normal(random);
  return out;
}

double softplus(double x) {
  return std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x)));
}

// Three sequences, with columns of numbers for their tokens one sequence after the other.
class StateOps : public ::testing::Test {
 protected:
  StateOps() : pool_(2, false) {
    auto ops = Ops::create(pool_, reference_kernels(), Capabilities{}, OpsOptions{});
    EXPECT_TRUE(ops.ok());
    ops_ = std::move(*ops);
  }

  // Runs op(tokens of the step, state) for steps that take `chunk` tokens of each sequence (0: all
  // at once), with states of `floats` numbers. Returns the rows of `out` in order of the tokens.
  // `saved`: the state after the fifth token of the longest sequence.
  template <class Op>
  std::vector<float> run(int chunk, int64_t floats, int64_t cols, const Op& op,
                         std::vector<float>* saved = nullptr) {
    std::vector<float> memory(static_cast<size_t>((kSequences + 2) * floats), 1e30f);
    const StateView view{reinterpret_cast<uint8_t*>(memory.data()),
                         static_cast<size_t>(floats) * sizeof(float), kSequences + 2};
    std::vector<float> all(static_cast<size_t>(kTokens * cols));
    std::vector<int64_t> done(kSequences, 0);
    while (true) {
      std::vector<int32_t> start{0}, context, slots, saves;
      std::vector<int64_t> rows;
      int64_t first = 0;
      for (int s = 0; s < kSequences; first += kLengths[s++]) {
        const int64_t left = kLengths[s] - done[static_cast<size_t>(s)];
        const int64_t count = chunk == 0 ? left : std::min<int64_t>(chunk, left);
        if (count == 0) continue;
        for (int64_t i = 0; i < count; ++i) {
          const int64_t at = done[static_cast<size_t>(s)] + i;
          rows.push_back(first + at);
          saves.push_back(s == kSequences - 1 && at == 4 ? kSequences + 1 : -1);
        }
        done[static_cast<size_t>(s)] += count;
        start.push_back(static_cast<int32_t>(rows.size()));
        context.push_back(static_cast<int32_t>(done[static_cast<size_t>(s)]));
        slots.push_back(kSequences - s);
      }
      if (rows.empty()) break;
      const StateRef state{view, 0, {start, context, slots.data(), 1, saves}};
      const std::vector<float> out = op(rows, state);
      for (size_t i = 0; i < rows.size(); ++i)
        std::copy_n(out.begin() + static_cast<int64_t>(i) * cols, cols,
                    all.begin() + rows[i] * cols);
    }
    if (saved != nullptr) saved->assign(memory.end() - floats, memory.end());
    return all;
  }

  // Whole, in chunks and token by token: the same bits, and near the definition.
  template <class Op>
  void expect(int64_t floats, int64_t cols, const Op& op, const std::vector<double>& want) {
    std::vector<float> saved;
    const std::vector<float> whole = run(0, floats, cols, op, &saved);
    for (const int chunk : {1, 4, 16}) {
      std::vector<float> kept;
      EXPECT_EQ(run(chunk, floats, cols, op, &kept), whole) << "in chunks of " << chunk;
      EXPECT_EQ(kept, saved);
    }
    ASSERT_EQ(whole.size(), want.size());
    for (size_t i = 0; i < want.size(); ++i)
      ASSERT_NEAR(whole[i], want[i], 2e-5 * (1 + std::fabs(want[i]))) << "number " << i;
  }

  static std::vector<float> pick(const std::vector<float>& all, std::span<const int64_t> rows,
                                 int64_t cols) {
    std::vector<float> out;
    for (const int64_t r : rows)
      out.insert(out.end(), all.begin() + r * cols, all.begin() + (r + 1) * cols);
    return out;
  }
  static Matrix view(std::vector<float>& v, int64_t cols) {
    return {v.data(), static_cast<int64_t>(v.size()) / cols, cols, cols};
  }
  // Calls body(first token, length) for each sequence.
  template <class Body>
  static void each_sequence(const Body& body) {
    int64_t first = 0;
    for (const int64_t length : kLengths) {
      body(first, length);
      first += length;
    }
  }

  ThreadPool pool_;
  std::unique_ptr<Ops> ops_;
};

TEST_F(StateOps, CausalConvIsItsDefinition) {
  constexpr int64_t kChannels = 37;
  constexpr int kTaps = 4;
  const auto x = numbers(kTokens * kChannels, 1), w = numbers(kTaps * kChannels, 2),
             bias = numbers(kChannels, 3);
  std::vector<double> want;
  each_sequence([&](int64_t first, int64_t length) {
    for (int64_t t = 0; t < length; ++t) {
      for (int64_t c = 0; c < kChannels; ++c) {
        double sum = bias[static_cast<size_t>(c)];
        for (int i = 0; i < kTaps; ++i) {
          const int64_t at = t - kTaps + 1 + i;
          if (at >= 0) {
            sum += double{w[static_cast<size_t>(i * kChannels + c)]} *
                   x[static_cast<size_t>((first + at) * kChannels + c)];
          }
        }
        want.push_back(sum / (1 + std::exp(-sum)));
      }
    }
  });
  expect((kTaps - 1) * kChannels, kChannels,
         [&](const std::vector<int64_t>& rows, const StateRef& state) {
           std::vector<float> own = pick(x, rows, kChannels);
           const Matrix m = view(own, kChannels);
           ops_->causal_conv({m, m, w.data(), bias.data(), kTaps, true, state});
           return own;
         },
         want);
}

TEST_F(StateOps, SelectiveScanIsItsDefinition) {
  constexpr int64_t kChannels = 21, kN = 5;
  const auto x = numbers(kTokens * kChannels, 1), dt = numbers(kTokens * kChannels, 2, 3.0f),
             b = numbers(kTokens * kN, 3), c = numbers(kTokens * kN, 4), d = numbers(kChannels, 5);
  auto a = numbers(kN * kChannels, 6);
  for (float& v : a) v = -std::fabs(v);
  std::vector<double> want;
  each_sequence([&](int64_t first, int64_t length) {
    std::vector<double> h(kN * kChannels, 0.0);
    for (int64_t t = first; t < first + length; ++t) {
      for (int64_t k = 0; k < kChannels; ++k) {
        const auto at = static_cast<size_t>(t * kChannels + k);
        const double step = softplus(dt[at]);
        double sum = double{d[static_cast<size_t>(k)]} * x[at];
        for (int64_t n = 0; n < kN; ++n) {
          double& s = h[static_cast<size_t>(n * kChannels + k)];
          s = std::exp(step * a[static_cast<size_t>(n * kChannels + k)]) * s +
              step * x[at] * b[static_cast<size_t>(t * kN + n)];
          sum += s * c[static_cast<size_t>(t * kN + n)];
        }
        want.push_back(sum);
      }
    }
  });
  expect(
      kN * kChannels, kChannels,
      [&](const std::vector<int64_t>& rows, const StateRef& state) {
        std::vector<float> own = pick(x, rows, kChannels), steps = pick(dt, rows, kChannels),
                           own_b = pick(b, rows, kN), own_c = pick(c, rows, kN);
        const Matrix m = view(own, kChannels);
        ops_->selective_scan({m, view(steps, kChannels), m, view(own_b, kN), view(own_c, kN),
                              nullptr, a.data(), d.data(), state});
        return own;
      },
      want);
}

TEST_F(StateOps, LinearScanIsItsDefinition) {
  constexpr int kHeads = 4, kDim = 20, kGroups = 2, kN = 7;
  const auto x = numbers(kTokens * kHeads * kDim, 1), b = numbers(kTokens * kGroups * kN, 2),
             c = numbers(kTokens * kGroups * kN, 3), dt = numbers(kTokens * kHeads, 4, 3.0f),
             bias = numbers(kHeads, 5), d = numbers(kHeads, 6);
  const std::vector<float> a = {-0.1f, -1.0f, -0.5f, -3.0f};
  std::vector<double> want;
  each_sequence([&](int64_t first, int64_t length) {
    std::vector<double> h(kHeads * kN * kDim, 0.0);
    for (int64_t t = first; t < first + length; ++t) {
      for (int head = 0; head < kHeads; ++head) {
        const auto i = static_cast<size_t>(head);
        const double step = std::clamp(
            softplus(double{dt[static_cast<size_t>(t * kHeads + head)]} + bias[i]), 0.01, 2.5);
        for (int p = 0; p < kDim; ++p) {
          const double v = x[static_cast<size_t>((t * kHeads + head) * kDim + p)];
          double sum = d[i] * v;
          for (int n = 0; n < kN; ++n) {
            const auto bc = static_cast<size_t>((t * kGroups + head / 2) * kN + n);
            double& s = h[static_cast<size_t>((head * kN + n) * kDim + p)];
            s = std::exp(step * a[i]) * s + b[bc] * step * v;
            sum += c[bc] * s;
          }
          want.push_back(sum);
        }
      }
    }
  });
  expect(
      kHeads * kN * kDim, kHeads * kDim,
      [&](const std::vector<int64_t>& rows, const StateRef& state) {
        std::vector<float> own = pick(x, rows, kHeads * kDim), own_b = pick(b, rows, kGroups * kN),
                           own_c = pick(c, rows, kGroups * kN), steps = pick(dt, rows, kHeads);
        LinearScan scan;
        scan.x = scan.out = view(own, kHeads * kDim);
        scan.b = view(own_b, kGroups * kN);
        scan.c = view(own_c, kGroups * kN);
        scan.dt = view(steps, kHeads);
        scan.dt_bias = bias.data();
        scan.dt_min = 0.01f;
        scan.dt_max = 2.5f;
        scan.a = a.data();
        scan.d = d.data();
        scan.heads = kHeads;
        scan.head_dim = kDim;
        scan.groups = kGroups;
        scan.n = kN;
        scan.state = state;
        ops_->linear_scan(scan);
        return own;
      },
      want);
}

// `tiled`: value head h uses key head h % 2 rather than h / 2.
class DeltaScanOps : public StateOps, public testing::WithParamInterface<bool> {};

TEST_P(DeltaScanOps, IsItsDefinition) {
  const bool tiled = GetParam();
  constexpr int kKeyHeads = 2, kHeads = 4, kKey = 10, kDim = 18;
  const auto q = numbers(kTokens * kKeyHeads * kKey, 1), k = numbers(kTokens * kKeyHeads * kKey, 2),
             v = numbers(kTokens * kHeads * kDim, 3), b = numbers(kTokens * kHeads, 4),
             alpha = numbers(kTokens * kHeads, 5), bias = numbers(kHeads, 6);
  const std::vector<float> a = {-0.1f, -1.0f, -0.5f, -2.0f};
  std::vector<double> want;
  each_sequence([&](int64_t first, int64_t length) {
    std::vector<double> state(kHeads * kKey * kDim, 0.0);
    for (int64_t t = first; t < first + length; ++t) {
      for (int head = 0; head < kHeads; ++head) {
        const auto at = static_cast<size_t>(t * kHeads + head);
        const int key_head = tiled ? head % kKeyHeads : head / (kHeads / kKeyHeads);
        const auto row = static_cast<size_t>((t * kKeyHeads + key_head) * kKey);
        double qq = 1e-6, kk = 1e-6;
        for (size_t i = 0; i < kKey; ++i) {
          qq += double{q[row + i]} * q[row + i];
          kk += double{k[row + i]} * k[row + i];
        }
        const double decay =
            std::exp(a[static_cast<size_t>(head)] *
                     softplus(double{alpha[at]} + bias[static_cast<size_t>(head)]));
        const double write = 1 / (1 + std::exp(-double{b[at]}));
        for (int p = 0; p < kDim; ++p) {
          const auto s = [&](size_t i) -> double& {
            return state[(static_cast<size_t>(head) * kKey + i) * kDim + static_cast<size_t>(p)];
          };
          double seen = 0, sum = 0;
          for (size_t i = 0; i < kKey; ++i) {
            s(i) *= decay;
            seen += s(i) * k[row + i] / std::sqrt(kk);
          }
          const double delta = write * (v[at * kDim + static_cast<size_t>(p)] - seen);
          for (size_t i = 0; i < kKey; ++i) {
            s(i) += delta * k[row + i] / std::sqrt(kk);
            sum += s(i) * q[row + i] / std::sqrt(qq * kKey);
          }
          want.push_back(sum);
        }
      }
    }
  });
  expect(
      kHeads * kKey * kDim, kHeads * kDim,
      [&](const std::vector<int64_t>& rows, const StateRef& state) {
        std::vector<float> own_q = pick(q, rows, kKeyHeads * kKey),
                           own_k = pick(k, rows, kKeyHeads * kKey),
                           own = pick(v, rows, kHeads * kDim), own_b = pick(b, rows, kHeads),
                           own_a = pick(alpha, rows, kHeads);
        DeltaScan scan;
        scan.q = view(own_q, kKeyHeads * kKey);
        scan.k = view(own_k, kKeyHeads * kKey);
        scan.v = scan.out = view(own, kHeads * kDim);
        scan.b = view(own_b, kHeads);
        scan.alpha = view(own_a, kHeads);
        scan.a = a.data();
        scan.dt_bias = bias.data();
        scan.key_heads = kKeyHeads;
        scan.value_heads = kHeads;
        scan.key_dim = kKey;
        scan.value_dim = kDim;
        scan.state = state;
        scan.tiled = tiled;
        ops_->delta_scan(scan);
        return own;
      },
      want);
}

INSTANTIATE_TEST_SUITE_P(HeadsOfKeys, DeltaScanOps, testing::Bool(),
                         [](const auto& info) { return info.param ? "Tiled" : "Neighbours"; });

}  // namespace
}  // namespace freshet::ops

// Operations on sequences with states on a GPU: near the host's, and bit-identical in any cut of
// the sequences. Skipped without a GPU.
#include <algorithm>
#include <functional>
#include <span>

#include "tests/cuda_fixture.h"

namespace freshet {
namespace {

using test::DeviceFloats;
using test::random_floats;

constexpr int kSequences = 3;
constexpr int64_t kLengths[kSequences] = {1, 9, 70};
constexpr int64_t kTokens = 80;

class CudaStates : public test::CudaTest {
 protected:
  struct Outcome {
    std::vector<float> out, states;  // rows in order of the tokens; all slots
    bool operator==(const Outcome&) const = default;
  };
  // What an operation returns for some tokens.
  using Op = std::function<std::vector<float>(ops::Ops& o, std::span<const int64_t> rows,
                                              const ops::StateRef& state)>;

  // Steps take `chunk` tokens of each sequence (0: all). A slot keeps the state behind the fifth
  // token of the longest sequence. Slots hold numbers that must not be read before they are
  // written.
  static Outcome run(ops::Ops& o, int chunk, int64_t floats, int64_t cols, const Op& op) {
    constexpr int kSlots = kSequences + 2;
    const auto bytes = static_cast<size_t>(floats) * sizeof(float);
    DeviceFloats memory(o, std::vector<float>(static_cast<size_t>(kSlots * floats), 1e30f));
    const ops::StateView view{reinterpret_cast<uint8_t*>(memory.data()), bytes, kSlots};
    Outcome all;
    all.out.resize(static_cast<size_t>(kTokens * cols));
    int64_t done[kSequences] = {};
    for (;;) {
      std::vector<int32_t> start{0}, context, slots, saves;
      std::vector<int64_t> rows;
      int64_t first = 0;
      for (int s = 0; s < kSequences; first += kLengths[s++]) {
        const int64_t left = kLengths[s] - done[s];
        const int64_t count = chunk == 0 ? left : std::min<int64_t>(chunk, left);
        if (count == 0) continue;
        for (int64_t at = done[s]; at < done[s] + count; ++at) {
          rows.push_back(first + at);
          saves.push_back(s == kSequences - 1 && at == 4 ? kSequences + 1 : -1);
        }
        done[s] += count;
        start.push_back(static_cast<int32_t>(rows.size()));
        context.push_back(static_cast<int32_t>(done[s]));
        slots.push_back(kSequences - s);
      }
      if (rows.empty()) break;
      const std::vector<float> out =
          op(o, rows, {view, 0, {start, context, slots.data(), 1, saves}});
      for (size_t i = 0; i < rows.size(); ++i) {
        std::copy_n(out.begin() + static_cast<int64_t>(i) * cols, cols,
                    all.out.begin() + rows[i] * cols);
      }
    }
    all.states = memory.get();
    return all;
  }

  void expect(int64_t floats, int64_t cols, float allowed, const std::string& what, const Op& op) {
    const Outcome want = run(*cpu, 0, floats, cols, op), whole = run(*gpu, 0, floats, cols, op);
    for (const int chunk : {1, 4, 16}) {
      EXPECT_TRUE(run(*gpu, chunk, floats, cols, op) == whole) << what << " in chunks of " << chunk;
    }
    expect_near(whole.out, want.out, allowed * std::max(1.0f, largest(want.out)), what);
    for (size_t i = 0; i < want.states.size(); ++i) {  // slots that are never written keep 1e30
      const float most = allowed * std::max(1.0f, std::fabs(want.states[i]));
      ASSERT_LE(std::fabs(whole.states[i] - want.states[i]), most) << what << ": state " << i;
    }
  }

  static std::vector<float> pick(const std::vector<float>& all, std::span<const int64_t> rows,
                                 int64_t cols) {
    std::vector<float> out;
    for (const int64_t r : rows) {
      out.insert(out.end(), all.begin() + r * cols, all.begin() + (r + 1) * cols);
    }
    return out;
  }
  static std::vector<float> numbers(int64_t n, uint32_t seed, float scale = 1.0f) {
    return random_floats(static_cast<size_t>(n), seed, scale);
  }
  static std::vector<float> decays(int64_t n, uint32_t seed) {
    std::vector<float> a = numbers(n, seed);
    for (float& v : a) v = -0.05f - std::fabs(v);
    return a;
  }
};

TEST_F(CudaStates, CausalConv) {
  constexpr int64_t kChannels = 333;
  const auto x = numbers(kTokens * kChannels, 1), bias = numbers(kChannels, 3);
  for (const int taps : {2, 3, 4, 7, 16}) {
    const auto weight = numbers(taps * kChannels, 2);
    for (const bool silu : {false, true}) {
      expect((taps - 1) * kChannels, kChannels, 1e-5f, fmt::format("{} taps", taps),
             [&](ops::Ops& o, std::span<const int64_t> rows, const ops::StateRef& state) {
               const auto n = static_cast<int64_t>(rows.size());
               DeviceFloats in(o, pick(x, rows, kChannels)), w(o, weight), b(o, bias);
               const Matrix m = in.matrix(n, kChannels);
               o.causal_conv({m, m, w.data(), silu ? b.data() : nullptr, taps, silu, state});
               return in.get();
             });
    }
  }
}

TEST_F(CudaStates, SelectiveScan) {
  constexpr int64_t kChannels = 150;
  for (const int64_t n : {5, 16, 40}) {
    const auto x = numbers(kTokens * kChannels, 1), dt = numbers(kTokens * kChannels, 2),
               b = numbers(kTokens * n, 3), c = numbers(kTokens * n, 4),
               bias = numbers(kChannels, 5), d = numbers(kChannels, 6),
               a = decays(n * kChannels, 7);
    expect(n * kChannels, kChannels, 2e-5f, fmt::format("{} states", n),
           [&](ops::Ops& o, std::span<const int64_t> rows, const ops::StateRef& state) {
             const auto count = static_cast<int64_t>(rows.size());
             DeviceFloats in(o, pick(x, rows, kChannels)), steps(o, pick(dt, rows, kChannels)),
                 bs(o, pick(b, rows, n)), cs(o, pick(c, rows, n)), its_bias(o, bias), its_d(o, d),
                 its_a(o, a);
             const Matrix m = in.matrix(count, kChannels);
             o.selective_scan({m, steps.matrix(count, kChannels), m, bs.matrix(count, n),
                               cs.matrix(count, n), its_bias.data(), its_a.data(), its_d.data(),
                               state});
             return in.get();
           });
  }
}

TEST_F(CudaStates, LinearScan) {
  struct Shape {
    int heads, dim, groups, n;
    bool steps;
  };
  for (const Shape& s : {Shape{4, 64, 2, 128, true},
                         {3, 80, 1, 16, true},
                         {2, 16, 2, 256, true},
                         {4, 128, 4, 96, false},
                         {2, 40, 1, 64, false},
                         {1, 24, 1, 500, true}}) {
    const int64_t cols = int64_t{s.heads} * s.dim, shared = int64_t{s.groups} * s.n;
    const auto x = numbers(kTokens * cols, 1), b = numbers(kTokens * shared, 2, 0.3f),
               c = numbers(kTokens * shared, 3, 0.3f), dt = numbers(kTokens * s.heads, 4),
               bias = numbers(s.heads, 5), d = numbers(s.heads, 6), a = decays(s.heads, 7);
    expect(cols * s.n, cols, 2e-5f, fmt::format("{} heads of {}, {} states", s.heads, s.dim, s.n),
           [&](ops::Ops& o, std::span<const int64_t> rows, const ops::StateRef& state) {
             const auto count = static_cast<int64_t>(rows.size());
             DeviceFloats in(o, pick(x, rows, cols)), bs(o, pick(b, rows, shared)),
                 cs(o, pick(c, rows, shared)), steps(o, pick(dt, rows, s.heads)), its_bias(o, bias),
                 its_d(o, d), its_a(o, a);
             ops::LinearScan scan;
             scan.x = scan.out = in.matrix(count, cols);
             scan.b = bs.matrix(count, shared);
             scan.c = cs.matrix(count, shared);
             if (s.steps) {
               scan.dt = steps.matrix(count, s.heads);
               scan.dt_bias = its_bias.data();
               scan.dt_min = 0.1f;
               scan.dt_max = 1.5f;
               scan.d = its_d.data();
             }
             scan.a = its_a.data();
             scan.heads = s.heads;
             scan.head_dim = s.dim;
             scan.groups = s.groups;
             scan.n = s.n;
             scan.state = state;
             o.linear_scan(scan);
             return in.get();
           });
  }
}

TEST_F(CudaStates, DeltaScan) {
  struct Shape {
    int key_heads, value_heads, key_dim, value_dim;
    bool tiled = false;
  };
  for (const Shape& s :
       {Shape{2, 4, 128, 128}, {1, 2, 24, 40}, {2, 2, 200, 64}, {2, 6, 128, 64, true}}) {
    const int64_t keys = int64_t{s.key_heads} * s.key_dim,
                  cols = int64_t{s.value_heads} * s.value_dim;
    const auto q = numbers(kTokens * keys, 1), k = numbers(kTokens * keys, 2),
               v = numbers(kTokens * cols, 3), b = numbers(kTokens * s.value_heads, 4),
               alpha = numbers(kTokens * s.value_heads, 5), bias = numbers(s.value_heads, 6),
               a = decays(s.value_heads, 7);
    // Of tiles, the queries are divided by their lengths several times.
    expect(cols * s.key_dim, cols, s.tiled ? 3e-4f : 2e-5f, fmt::format("keys of {}", s.key_dim),
           [&](ops::Ops& o, std::span<const int64_t> rows, const ops::StateRef& state) {
             const auto count = static_cast<int64_t>(rows.size());
             DeviceFloats qs(o, pick(q, rows, keys)), ks(o, pick(k, rows, keys)),
                 vs(o, pick(v, rows, cols)), bs(o, pick(b, rows, s.value_heads)),
                 alphas(o, pick(alpha, rows, s.value_heads)), its_bias(o, bias), its_a(o, a);
             ops::DeltaScan scan;
             scan.q = qs.matrix(count, keys);
             scan.k = ks.matrix(count, keys);
             scan.v = scan.out = vs.matrix(count, cols);
             scan.b = bs.matrix(count, s.value_heads);
             scan.alpha = alphas.matrix(count, s.value_heads);
             scan.a = its_a.data();
             scan.dt_bias = its_bias.data();
             scan.key_heads = s.key_heads;
             scan.value_heads = s.value_heads;
             scan.key_dim = s.key_dim;
             scan.value_dim = s.value_dim;
             scan.state = state;
             scan.tiled = s.tiled;
             o.delta_scan(scan);
             return vs.get();
           });
  }
}

// Operations on rows that layers with states and their neighbours need.
TEST_F(CudaStates, RowsAreNearTheHost) {
  constexpr int64_t kRows = 5, kCols = 4096;
  const auto x = numbers(kRows * kCols, 1, 2.0f), gate = numbers(kRows * kCols, 2, 2.0f),
             weight = numbers(kCols, 3);
  const auto both = [&](const auto& op, const std::string& what) {
    std::vector<std::vector<float>> out;
    for (ops::Ops* o : {cpu.get(), gpu.get()}) {
      DeviceFloats in(*o, x), other(*o, gate), w(*o, weight);
      op(*o, in.matrix(kRows, kCols), other.matrix(kRows, kCols), w.data());
      out.push_back(in.get());
    }
    expect_near(out[1], out[0], 1e-5f * std::max(1.0f, largest(out[0])), what);
  };
  both([](ops::Ops& o, const Matrix& m, const Matrix& g, float*) { o.sigmoid_product(m, g); },
       "sigmoid_product");
  both([](ops::Ops& o, const Matrix& m, const Matrix&,
          float*) { o.xielu(m, {0.7f, 0.9f, 0.5f, -1e-6f}); },
       "xielu");
  both(
      [](ops::Ops& o, const Matrix& m, const Matrix&, float* w) {
        const ops::Norm norm{ops::NormKind::kRms, w, nullptr, 1e-5f};
        o.norm_heads(m, 2, kCols / 2, norm, true);
      },
      "norms of long heads");
  both(
      [](ops::Ops& o, const Matrix& m, const Matrix&, float* w) {
        std::vector<int32_t> positions;
        for (int i = 0; i < kRows; ++i) positions.push_back(i * 1700);
        o.rope_table(m.data, positions, {w, 32}, 1.5f, {0.1f, 8.0f});
      },
      "angles that grow with the position");
}

}  // namespace
}  // namespace freshet

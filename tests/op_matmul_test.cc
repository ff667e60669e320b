// Every matmul row that this CPU can run, through Ops, against the reference row; and batch
// invariance: a token's result has the same bits alone, in a batch, and for any thread pool.
#include <algorithm>
#include <cmath>

#include "tests/op_cases.h"
#include "tests/op_test_util.h"

namespace freshet {
namespace {

using cases::MatmulCase;
using ops::MatmulKernel;
using ops::Product;
using ops::Weight;
using test::Guarded;

// Rows of a format with random numbers, encoded once and kept.
class Stored {
 public:
  Stored(quant::Format format, int64_t rows, int64_t cols, uint32_t seed)
      : format_(format), cols_(cols), bytes_(quant::row_bytes(format, cols)) {
    const quant::FormatInfo& f = quant::info(format);
    const auto n = static_cast<size_t>(cols);
    data_.resize(bytes_ * static_cast<size_t>(rows));
    for (int64_t r = 0; r < rows; ++r) {
      uint8_t* row = data_.data() + static_cast<size_t>(r) * bytes_;
      const std::vector<float> x = test::random_floats(n, seed + static_cast<uint32_t>(r), 0.5f);
      f.encode(x.data(), row, cols, nullptr);
      rows_.push_back(row);
    }
  }
  Weight pack(ops::Ops& o) const { return std::move(o.pack(format_, rows_, cols_)).value(); }
  std::vector<float> decoded(int64_t row) const {
    std::vector<float> x(static_cast<size_t>(cols_));
    quant::info(format_).decode(rows_[static_cast<size_t>(row)], x.data(), cols_);
    return x;
  }

 private:
  quant::Format format_;
  int64_t cols_;
  size_t bytes_;
  std::vector<uint8_t> data_;
  std::vector<const uint8_t*> rows_;
};

// The possible cost of rounding the activations, relative to |x| |w|.
double tolerance(const MatmulKernel& row) {
  switch (row.act) {
    case ops::ActKind::kF32:
      return 1e-6;
    case ops::ActKind::kBF16:
      return 1e-3;
    case ops::ActKind::kQ8x256:
    case ops::ActKind::kInt8:
      return 2.5e-3;
  }
  return 0.0;
}

class MatmulConformance : public testing::TestWithParam<const MatmulKernel*> {
 protected:
  const MatmulKernel& row() const { return *GetParam(); }
  std::unique_ptr<ops::Ops> make(ThreadPool& pool, bool reference) const {
    const std::string format(quant::info(row().format).name);
    const std::string name = reference ? format + ".reference" : row().name;
    auto o = test::make_ops(pool, "matmul=" + name, 8 << 20);
    EXPECT_EQ(o->matmul_row(row().format), name);
    return o;
  }
};

std::vector<const MatmulKernel*> matmul_rows() {
  std::vector<const MatmulKernel*> rows;
  for (const MatmulKernel& row : cpu::kernels().matmul) {
    const bool writable = quant::info(row.format).encode != nullptr;
    if (writable && test::machine().has(row.isa)) rows.push_back(&row);
  }
  return rows;
}
INSTANTIATE_TEST_SUITE_P(Rows, MatmulConformance, testing::ValuesIn(matmul_rows()),
                         [](const auto& i) {
                           std::string s = i.param->name;
                           std::replace(s.begin(), s.end(), '.', '_');
                           return s;
                         });

double norm(const float* x, int64_t n) {
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) sum += double{x[i]} * x[i];
  return std::sqrt(sum);
}

TEST_P(MatmulConformance, AgreesWithTheReferenceAndKeepsTheLawOfTheBatch) {
  ThreadPool one(1), three(3, false);
  const auto reference = make(one, true), alone = make(one, false), shared = make(three, false);
  uint32_t seed = 1;
  for (const MatmulCase& c : cases::matmul_cases()) {
    SCOPED_TRACE(fmt::format("tokens={} rows={} cols={}", c.tokens, c.rows, c.cols));
    const Stored stored(row().format, c.rows, c.cols, seed += 1000);
    const Weight w_reference = stored.pack(*reference), w = stored.pack(*shared);
    ASSERT_STREQ(w.kernel->name, row().name);
    const auto tokens = static_cast<size_t>(c.tokens), rows = static_cast<size_t>(c.rows);
    const auto cols = static_cast<size_t>(c.cols);
    std::vector<float> x = test::random_floats(tokens * cols, seed + 1);
    const std::vector<float> bias = test::random_floats(rows, seed + 2);
    const Matrix xs{x.data(), c.tokens, c.cols, c.cols};
    // out has a larger stride than rows; the gap must stay unchanged.
    const size_t stride = rows + 3;
    std::vector<float> want(tokens * stride, 1.0f), again(tokens * stride, 1.0f);
    Guarded got((tokens * stride - 3) * sizeof(float));
    std::copy_n(want.begin(), tokens * stride - 3, got.floats());
    const auto product = [&](const Weight& weight, float* out) {
      return Product{
          &weight, {out, c.tokens, c.rows, static_cast<int64_t>(stride)}, bias.data(), 0.75f, true};
    };
    const Product p_reference = product(w_reference, want.data());
    reference->matmul(xs, {&p_reference, 1});
    const Product p = product(w, got.floats());
    shared->matmul(xs, {&p, 1});
    for (size_t r = 0; r < rows; ++r) {
      const double w_norm = norm(stored.decoded(static_cast<int64_t>(r)).data(), c.cols);
      for (size_t t = 0; t < tokens; ++t) {
        const double scale = w_norm * norm(xs.row(static_cast<int64_t>(t)), c.cols) + 2.0;
        ASSERT_NEAR(got.floats()[t * stride + r], want[t * stride + r], tolerance(row()) * scale)
            << "token " << t << " row " << r;
      }
    }
    for (int64_t t = 0; t < c.tokens; ++t) {
      Product q = product(w, again.data() + static_cast<size_t>(t) * stride);
      q.out.rows = 1;
      alone->matmul(xs.slice_rows(t, 1), {&q, 1});
    }
    ASSERT_EQ(0, std::memcmp(again.data(), got.floats(), (tokens * stride - 3) * sizeof(float)));
  }
}

TEST_P(MatmulConformance, DecodesItsRowsExactly) {
  ThreadPool pool(2, false);
  const auto o = make(pool, false);
  const Stored stored(row().format, 37, 512, 77);
  const Weight w = stored.pack(*o);
  const std::vector<int32_t> ids = {36, 0, 17, 16, 15, 17};
  Guarded out(ids.size() * 512 * sizeof(float));
  o->embed({out.floats(), static_cast<int64_t>(ids.size()), 512, 512}, w, ids, 1.0f);
  for (size_t i = 0; i < ids.size(); ++i) {
    const std::vector<float> want = stored.decoded(ids[i]);
    ASSERT_EQ(0, std::memcmp(want.data(), out.floats() + i * 512, 512 * sizeof(float)));
  }
}

// A weight with permuted columns gives the same bits as with permuted inputs.
TEST_P(MatmulConformance, InputsMayBeTakenInAnotherOrder) {
  if (row().act == ops::ActKind::kInt8) GTEST_SKIP() << "rows of INT8 are encoded as a whole";
  ThreadPool pool(2, false);
  constexpr int64_t kCols = 512, kRows = 256;
  const Stored stored(row().format, kRows, kCols, 33), other(row().format, kRows, kCols, 3300);
  for (const bool reference : {false, true}) {
    const auto o = make(pool, reference);
    const Weight plain = stored.pack(*o), second = other.pack(*o);
    Weight ordered = stored.pack(*o);
    for (int32_t c = 0; c < kCols; ++c) ordered.inputs.push_back(c * 77 % kCols);
    for (const int64_t tokens : {1, 70}) {
      std::vector<float> x = test::random_floats(static_cast<size_t>(tokens * kCols), 8), picked;
      for (int64_t i = 0; i < tokens * kCols; ++i) {
        const int64_t from = i / kCols * kCols + ordered.inputs[static_cast<size_t>(i % kCols)];
        picked.push_back(x[static_cast<size_t>(from)]);
      }
      const Matrix xs{x.data(), tokens, kCols, kCols}, ps{picked.data(), tokens, kCols, kCols};
      std::vector<float> out[4];
      const auto product = [&](const Weight& w, int i) {
        out[i].resize(static_cast<size_t>(tokens * kRows));
        return Product{&w, {out[i].data(), tokens, kRows, kRows}};
      };
      const Product want = product(plain, 0), want_second = product(second, 1);
      o->matmul(ps, {&want, 1});
      o->matmul(xs, {&want_second, 1});
      const Product both[] = {product(ordered, 2), product(second, 3)};
      o->matmul(xs, both);
      EXPECT_EQ(out[0], out[2]);
      EXPECT_EQ(out[1], out[3]);
    }
  }
}

TEST_P(MatmulConformance, ExpertsKeepTheLawOfTheBatch) {
  ThreadPool one(1), three(3, false);
  const auto alone = make(one, false), shared = make(three, false), reference = make(one, true);
  constexpr int64_t kHidden = 256, kFf = 256, kTokens = 21;
  constexpr int kTopK = 3;
  std::vector<Weight> gate_up, down, reference_gate_up, reference_down;
  for (uint32_t e = 0; e < 6; ++e) {
    const Stored g(row().format, 2 * kFf, kHidden, 100 * e),
        d(row().format, kHidden, kFf, 7 + 100 * e);
    gate_up.push_back(g.pack(*shared));
    down.push_back(d.pack(*shared));
    reference_gate_up.push_back(g.pack(*reference));
    reference_down.push_back(d.pack(*reference));
  }
  std::vector<float> x = test::random_floats(kTokens * kHidden, 5);
  std::vector<int32_t> ids;
  std::vector<float> weights = test::random_floats(kTokens * kTopK, 6);
  for (int t = 0; t < kTokens; ++t)
    ids.insert(ids.end(), {t % 6, (t + 4) % 6, (t * t + 2) % 3 * 2 + (t % 2 == 0)});
  const Matrix xs{x.data(), kTokens, kHidden, kHidden};
  std::vector<float> want(kTokens * kHidden), got(want.size()), again(want.size());
  const auto run = [&](ops::Ops& o, const std::vector<Weight>& g, const std::vector<Weight>& d,
                       int64_t first, int64_t count, std::vector<float>& out) {
    const Matrix to{out.data() + first * kHidden, count, kHidden, kHidden};
    o.moe(to, xs.slice_rows(first, count), ids.data() + first * kTopK,
          weights.data() + first * kTopK, kTopK, {g, d, nullptr, nullptr, {}, false}, false);
  };
  run(*reference, reference_gate_up, reference_down, 0, kTokens, want);
  run(*shared, gate_up, down, 0, kTokens, got);
  for (int64_t t = 0; t < kTokens; ++t) run(*alone, gate_up, down, t, 1, again);
  EXPECT_EQ(0, std::memcmp(again.data(), got.data(), got.size() * sizeof(float)));
  double difference = 0.0;
  for (size_t i = 0; i < got.size(); ++i) difference += std::pow(got[i] - want[i], 2);
  EXPECT_LT(std::sqrt(difference), 10 * tolerance(row()) * norm(want.data(), kTokens * kHidden));
}

// Many tokens run both GEMMs, the activation and the encoding in one parallel region, in two parts;
// few tokens do not.
TEST_P(MatmulConformance, GatedMlpsKeepTheLawOfTheBatch) {
  ThreadPool one(1), three(3, false);
  const auto alone = make(one, false), shared = make(three, false), reference = make(one, true);
  constexpr int64_t kHidden = 256, kFf = 512, kTokens = 262;
  const Stored gate(row().format, kFf, kHidden, 1), up(row().format, kFf, kHidden, 10000),
      down(row().format, kHidden, kFf, 20000);
  std::vector<float> x = test::random_floats(kTokens * kHidden, 5);
  const std::vector<float> bias = test::random_floats(kFf, 6);
  std::vector<float> between(2 * kTokens * kFf);
  const Matrix xs{x.data(), kTokens, kHidden, kHidden};
  std::vector<float> want(kTokens * kHidden, 1.0f), got = want, again = want;
  const auto run = [&](ops::Ops& o, int64_t first, int64_t count, std::vector<float>& out) {
    const Weight g = gate.pack(o), u = up.pack(o), d = down.pack(o);
    for (int64_t t = first; t < kTokens; t += count) {
      const Matrix to{out.data() + t * kHidden, count, kHidden, kHidden};
      o.gated({{xs.slice_rows(t, count)},
               {&g, {between.data(), count, kFf, kFf}},
               {&u, {between.data() + count * kFf, count, kFf, kFf}, bias.data()},
               {},
               {&d, to, nullptr, 0.5f, true}});
    }
  };
  run(*reference, 0, kTokens, want);
  run(*shared, 0, kTokens, got);
  for (const int64_t count : {int64_t{1}, kTokens}) {  // tokens at a time
    std::fill(again.begin(), again.end(), 1.0f);
    run(*alone, 0, count, again);
    EXPECT_EQ(0, std::memcmp(again.data(), got.data(), got.size() * sizeof(float))) << count;
  }
  double difference = 0.0;
  for (size_t i = 0; i < got.size(); ++i) difference += std::pow(got[i] - want[i], 2);
  EXPECT_LT(std::sqrt(difference), 10 * tolerance(row()) * norm(want.data(), kTokens * kHidden));
}

}  // namespace
}  // namespace freshet

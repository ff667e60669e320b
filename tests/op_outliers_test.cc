// Products in two parts: INT8 with outlier columns in 16 bits, on every INT8 row that this CPU can
// run, against sums in F64 of the same numbers; and batch invariance.
#include <cmath>

#include "tests/op_test_util.h"

namespace freshet {
namespace {

using ops::MatmulKernel;
using ops::Product;
using ops::Weight;
using quant::Format;

std::vector<const MatmulKernel*> int8_rows() {
  std::vector<const MatmulKernel*> rows;
  for (const MatmulKernel& row : cpu::kernels().matmul) {
    if (row.format == Format::kINT8 && test::machine().has(row.isa)) rows.push_back(&row);
  }
  return rows;
}

// A matrix in INT8 with some columns in 16 bits.
class SplitMatrix {
 public:
  SplitMatrix(int64_t rows, int64_t cols, std::vector<int32_t> columns, Format format,
              uint32_t seed)
      : cols_(cols), columns_(std::move(columns)), format_(format) {
    const size_t stride = quant::row_bytes(Format::kINT8, cols);
    codes_.resize(static_cast<size_t>(rows) * stride);
    apart_.resize(static_cast<size_t>(rows) * columns_.size());
    numbers_.resize(static_cast<size_t>(rows * cols));
    for (int64_t r = 0; r < rows; ++r) {
      const auto w =
          test::random_floats(static_cast<size_t>(cols), seed + static_cast<uint32_t>(r));
      uint8_t* const row = codes_.data() + static_cast<size_t>(r) * stride;
      quant::info(Format::kINT8).encode(w.data(), row, cols, nullptr);
      float* const numbers = numbers_.data() + r * cols;
      quant::info(Format::kINT8).decode(row, numbers, cols);
      uint16_t* const apart = apart_.data() + static_cast<size_t>(r) * columns_.size();
      for (size_t i = 0; i < columns_.size(); ++i) {
        const float v = w[static_cast<size_t>(columns_[i])] * 1.5f;
        quant::info(format).encode(&v, apart + i, 1, nullptr);
        quant::info(format).decode(apart + i, numbers + columns_[i], 1);
      }
    }
  }
  Weight pack(ops::Ops& o) const {
    std::vector<const uint8_t*> rows, apart;
    const size_t stride = quant::row_bytes(Format::kINT8, cols_);
    for (size_t r = 0; r * stride < codes_.size(); ++r) {
      rows.push_back(codes_.data() + r * stride);
      apart.push_back(reinterpret_cast<const uint8_t*>(apart_.data() + r * columns_.size()));
    }
    Weight w = o.pack(Format::kINT8, rows, cols_).value();
    if (columns_.empty()) return w;
    Weight values = o.pack(format_, apart, std::ssize(columns_)).value();
    EXPECT_TRUE(o.set_outliers(w, columns_, std::move(values)).ok());
    return w;
  }
  float at(int64_t row, int64_t col) const {
    return numbers_[static_cast<size_t>(row * cols_ + col)];
  }

 private:
  int64_t cols_;
  std::vector<int32_t> columns_;
  Format format_;
  std::vector<uint8_t> codes_;
  std::vector<uint16_t> apart_;
  std::vector<float> numbers_;
};

constexpr int64_t kSplitRows = 70, kSplitCols = 300;
const std::vector<int32_t> kLoud = {0, 5, 63, 64, 211, 299};

std::vector<float> loud_inputs(int64_t tokens) {
  auto x = test::random_floats(static_cast<size_t>(tokens * kSplitCols), 4);
  for (int64_t t = 0; t < tokens; ++t) {
    for (const int32_t c : kLoud) x[static_cast<size_t>(t * kSplitCols + c)] *= 70.0f;
  }
  return x;
}

// The error of `out` over its size.
double error_of(const std::vector<float>& out, const SplitMatrix& w, const std::vector<float>& x,
                int64_t tokens) {
  double error = 0.0, energy = 0.0;
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t r = 0; r < kSplitRows; ++r) {
      double sum = 0.0;
      for (int64_t c = 0; c < kSplitCols; ++c)
        sum += double{w.at(r, c)} * x[static_cast<size_t>(t * kSplitCols + c)];
      error += std::pow(out[static_cast<size_t>(t * kSplitRows + r)] - sum, 2);
      energy += sum * sum;
    }
  }
  return std::sqrt(error / energy);
}

class Outliers : public testing::TestWithParam<const MatmulKernel*> {
 protected:
  std::unique_ptr<ops::Ops> make(ThreadPool& pool) const {
    return test::make_ops(pool, std::string("matmul=") + GetParam()->name, 8 << 20);
  }
};
INSTANTIATE_TEST_SUITE_P(Rows, Outliers, testing::ValuesIn(int8_rows()), [](const auto& i) {
  std::string s = i.param->name;
  std::replace(s.begin(), s.end(), '.', '_');
  return s;
});

TEST_P(Outliers, AreMultipliedApartAndKeepTheLawOfTheBatch) {
  ThreadPool one(1), three(3, false);
  const auto alone = make(one), shared = make(three);
  for (const Format format : {Format::kBF16, Format::kF16}) {
    const SplitMatrix matrix(kSplitRows, kSplitCols, kLoud, format, 100);
    const Weight w = matrix.pack(*alone), same = matrix.pack(*shared);
    for (const int64_t tokens : {1, 3, 33, 140}) {
      SCOPED_TRACE(fmt::format("{} tokens={}", quant::info(format).name, tokens));
      auto x = loud_inputs(tokens);
      const Matrix xs{x.data(), tokens, kSplitCols, kSplitCols};
      std::vector<float> out(static_cast<size_t>(tokens * kSplitRows)), again = out;
      const Product p{&same, {out.data(), tokens, kSplitRows, kSplitRows}};
      shared->matmul(xs, {&p, 1});
      for (int64_t t = 0; t < tokens; ++t) {
        const Product q{&w, {again.data() + t * kSplitRows, 1, kSplitRows, kSplitRows}};
        alone->matmul(xs.slice_rows(t, 1), {&q, 1});
      }
      EXPECT_EQ(0, std::memcmp(out.data(), again.data(), out.size() * sizeof(float)));
      EXPECT_LT(error_of(out, matrix, x, tokens), 3e-3);
    }
  }
}

// What the columns are for: rounded together with them, the other inputs lose most of their bits.
TEST_P(Outliers, SpareTheOtherInputs) {
  ThreadPool pool(2, false);
  const auto o = make(pool);
  constexpr int64_t kTokens = 20;
  // Columns with large inputs have no weight in the plain matrix's result.
  const SplitMatrix apart(kSplitRows, kSplitCols, kLoud, Format::kBF16, 100);
  const SplitMatrix plain(kSplitRows, kSplitCols, {}, Format::kBF16, 100);
  const Weight split = apart.pack(*o), whole = plain.pack(*o);
  auto x = loud_inputs(kTokens);
  const Matrix xs{x.data(), kTokens, kSplitCols, kSplitCols};
  std::vector<float> with(kTokens * kSplitRows), without = with;
  const Product a{&split, {with.data(), kTokens, kSplitRows, kSplitRows}};
  const Product b{&whole, {without.data(), kTokens, kSplitRows, kSplitRows}};
  o->matmul(xs, {&a, 1});
  o->matmul(xs, {&b, 1});
  if (GetParam()->act != ops::ActKind::kInt8) GTEST_SKIP() << "does not round its inputs";
  EXPECT_GT(error_of(without, plain, x, kTokens), 2 * error_of(with, apart, x, kTokens));
}

// Groups mix products with the same columns, with others and with none; results do not change.
TEST_P(Outliers, MayBeGroupedAndAdded) {
  ThreadPool pool(3, false);
  const auto o = make(pool);
  const SplitMatrix of[] = {{kSplitRows, kSplitCols, kLoud, Format::kBF16, 100},
                            {kSplitRows, kSplitCols, kLoud, Format::kBF16, 200},
                            {kSplitRows, kSplitCols, {}, Format::kBF16, 300},
                            {kSplitRows, kSplitCols, {7, 8}, Format::kBF16, 400}};
  constexpr int64_t kTokens = 9;
  auto x = loud_inputs(kTokens);
  const Matrix xs{x.data(), kTokens, kSplitCols, kSplitCols};
  const std::vector<float> bias = test::random_floats(kSplitRows, 77);
  std::vector<Weight> weights;
  for (const SplitMatrix& m : of) weights.push_back(m.pack(*o));
  std::vector<std::vector<float>> one(4, std::vector<float>(kTokens * kSplitRows, 2.0f));
  auto together = one;
  std::vector<Product> group;
  for (size_t i = 0; i < weights.size(); ++i) {
    const Product p{
        &weights[i], {one[i].data(), kTokens, kSplitRows, kSplitRows}, bias.data(), 0.5f, true};
    o->matmul(xs, {&p, 1});
    group.push_back(p);
    group.back().out.data = together[i].data();
  }
  o->project({xs}, group);
  EXPECT_EQ(one, together);
  std::vector<float> plain(kTokens * kSplitRows);
  const Product p{&weights[0], {plain.data(), kTokens, kSplitRows, kSplitRows}};
  o->matmul(xs, {&p, 1});
  for (size_t i = 0; i < plain.size(); ++i) {
    const float want = 2.0f + 0.5f * (plain[i] + bias[i % kSplitRows]);
    EXPECT_NEAR(one[0][i], want, 1e-4f * (std::abs(want) + 50.0f));
  }
}

// The host's fused form of gated MLPs is for undivided weights.
TEST_P(Outliers, WorkInGatedMlps) {
  ThreadPool one(1), three(3, false);
  const auto alone = make(one), shared = make(three);
  constexpr int64_t kFf = 256, kTokens = 150;
  const SplitMatrix gate(kFf, kSplitCols, kLoud, Format::kBF16, 1),
      up(kFf, kSplitCols, kLoud, Format::kBF16, 1000), down(kSplitCols, kFf, {3}, Format::kF16, 5);
  auto x = loud_inputs(kTokens);
  std::vector<float> between(2 * kTokens * kFf), got(kTokens * kSplitCols), again = got;
  const auto run = [&](ops::Ops& o, int64_t count, std::vector<float>& out) {
    const Weight g = gate.pack(o), u = up.pack(o), d = down.pack(o);
    const Matrix xs{x.data(), kTokens, kSplitCols, kSplitCols};
    for (int64_t t = 0; t < kTokens; t += count) {
      const Matrix to{out.data() + t * kSplitCols, count, kSplitCols, kSplitCols};
      o.gated({{xs.slice_rows(t, count)},
               {&g, {between.data(), count, kFf, kFf}},
               {&u, {between.data() + count * kFf, count, kFf, kFf}},
               {},
               {&d, to}});
    }
  };
  run(*shared, kTokens, got);
  run(*alone, 1, again);
  EXPECT_EQ(got, again);
}

}  // namespace
}  // namespace freshet

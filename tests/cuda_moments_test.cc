// Second moments of calibration on a GPU against those of the processor, bit by bit; and products
// in two parts, whose outlier columns are multiplied apart.
#include "quantizer/calibration/input_collector.h"
#include "tests/cuda_fixture.h"

namespace freshet {
namespace {

using CudaMoments = test::CudaTest;

// The gram matrix of steps of these numbers of tokens.
std::vector<float> moments(ops::Ops& host, ops::Device* device, const std::vector<int64_t>& steps,
                           int64_t cols, int64_t step_cols) {
  constexpr int64_t kMostTokens = 1024;
  quantizer::InputCollector collector({.gram = true}, host, kMostTokens, step_cols, device);
  ops::Weight weight;
  weight.id = 3;
  uint32_t seed = 1;
  for (const int64_t tokens : steps) {
    const int64_t stride = cols + 8;
    std::vector<float> x = test::random_floats(static_cast<size_t>(tokens * stride), seed++, 3.0f);
    collector.begin_step();
    collector.before(weight, {x.data(), tokens, cols, stride});
  }
  EXPECT_TRUE(collector.finish().ok());
  return collector.of(3)->gram;
}

TEST_F(CudaMoments, HaveTheProcessorsBits) {
  const auto host = test::make_ops(pool, "", size_t{256} << 20);
  struct Shape {
    std::vector<int64_t> steps;
    int64_t cols, step_cols;
  };
  const Shape shapes[] = {{{1}, 4, 64},           {{31, 32, 33}, 64, 64},
                          {{500, 7}, 132, 96},    {{1000, 1000, 3}, 768, 768},
                          {{64, 130}, 1028, 512}, {{256}, 4096, 4096}};
  for (const Shape& s : shapes) {
    const std::vector<float> want = moments(*host, nullptr, s.steps, s.cols, s.step_cols);
    const std::vector<float> got = moments(*host, gpu->device(), s.steps, s.cols, s.step_cols);
    ASSERT_EQ(want.size(), static_cast<size_t>(s.cols * s.cols));
    ASSERT_EQ(got.size(), want.size());
    EXPECT_NE(want[0], 0.0f);
    EXPECT_EQ(0, std::memcmp(want.data(), got.data(), want.size() * sizeof(float)))
        << s.cols << " columns, " << s.steps.size() << " steps";
  }
}

// A weight of INT8 whose inputs have large numbers in some columns.
struct TwoParts {
  static constexpr int64_t kRows = 272, kCols = 512;
  std::vector<int32_t> columns = {0, 7, 64, 65, 300, 511};
  std::vector<uint8_t> codes;
  std::vector<uint16_t> apart;
  std::vector<float> x;
  int64_t tokens;

  explicit TwoParts(int64_t count) : tokens(count) {
    const size_t row = quant::row_bytes(quant::Format::kINT8, kCols);
    codes.resize(row * kRows);
    for (int64_t r = 0; r < kRows; ++r) {
      const auto w = test::random_floats(kCols, static_cast<uint32_t>(r), 0.05f);
      quant::info(quant::Format::kINT8)
          .encode(w.data(), codes.data() + row * static_cast<size_t>(r), kCols, nullptr);
    }
    for (const float v : test::random_floats(kRows * columns.size(), 9999, 0.05f))
      apart.push_back(f32_to_bf16(v));
    x = test::random_floats(static_cast<size_t>(tokens * kCols), 5);
    for (int64_t t = 0; t < tokens; ++t) {
      for (const int32_t c : columns) x[static_cast<size_t>(t * kCols + c)] *= 60.0f;
    }
  }
  ops::Weight pack(ops::Ops& o) const {
    std::vector<const uint8_t*> rows, values;
    for (size_t r = 0; r < kRows; ++r) {
      rows.push_back(codes.data() + r * codes.size() / kRows);
      values.push_back(reinterpret_cast<const uint8_t*>(apart.data() + r * columns.size()));
    }
    ops::Weight w = o.pack(quant::Format::kINT8, rows, kCols).value();
    EXPECT_TRUE(o.set_outliers(w, columns,
                               o.pack(quant::Format::kBF16, values, std::ssize(columns)).value())
                    .ok());
    return w;
  }
};

TEST_F(CudaMoments, ProductsInTwoPartsAgreeWithTheReferenceInAnyBatch) {
  for (const int64_t tokens : {1, 8, 17, 40, 130}) {
    const TwoParts t(tokens);
    const ops::Weight there = t.pack(*gpu), here = t.pack(*cpu);
    std::vector<float> want(static_cast<size_t>(tokens * t.kRows)), x = t.x;
    const ops::Product reference{&here, {want.data(), tokens, t.kRows, t.kRows}};
    cpu->matmul({x.data(), tokens, t.kCols, t.kCols}, {&reference, 1});
    test::DeviceFloats in(*gpu, t.x), out(*gpu, want.size()), alone(*gpu, want.size());
    const Matrix xs = in.matrix(tokens, t.kCols), to = out.matrix(tokens, t.kRows);
    const ops::Product product{&there, to};
    gpu->project({xs}, {&product, 1});
    for (int64_t i = 0; i < tokens; ++i) {
      const ops::Product one{&there, alone.matrix(tokens, t.kRows).slice_rows(i, 1)};
      gpu->project({xs.slice_rows(i, 1)}, {&one, 1});
    }
    const std::vector<float> got = out.get(), single = alone.get();
    EXPECT_EQ(0, std::memcmp(got.data(), single.data(), got.size() * sizeof(float))) << tokens;
    double error = 0.0, energy = 0.0;
    for (size_t i = 0; i < got.size(); ++i) {
      error += std::pow(got[i] - want[i], 2);
      energy += std::pow(want[i], 2);
    }
    EXPECT_LT(std::sqrt(error / energy), 4e-3) << tokens;
    EXPECT_GT(energy, 0.0);
  }
}

}  // namespace
}  // namespace freshet

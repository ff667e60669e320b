// Every row of the CPU tables that this CPU can run, against the reference rows.
#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/op_cases.h"
#include "tests/op_test_util.h"

namespace freshet {
namespace {

using ops::Activation;
using ops::VectorKernels;
using test::Guarded;
using test::machine;

const VectorKernels& reference() {
  return ops::reference_kernels().vector[0];
}

constexpr double kUlp = 1.2e-7;  // largest relative distance of adjacent floats
constexpr double kTiny = 1e-37;  // exponentials below this may be zero

class VectorConformance : public testing::TestWithParam<const VectorKernels*> {
 protected:
  const VectorKernels& row() const { return *GetParam(); }

  // Runs f(kernels, out) on both rows and compares, relative to the largest value or to each value.
  template <class Run>
  void compare(size_t n, double tolerance, bool each, Run run) {
    Guarded want(n * sizeof(float)), got(n * sizeof(float));
    run(reference(), want.floats());
    run(row(), got.floats());
    double greatest = 1e-30;
    for (size_t i = 0; i < n; ++i)
      greatest = std::max<double>(greatest, std::abs(want.floats()[i]));
    for (size_t i = 0; i < n; ++i) {
      const double w = want.floats()[i], g = got.floats()[i];
      const double scale = each ? std::abs(w) : greatest;
      ASSERT_LE(std::abs(w - g), tolerance * scale + kTiny)
          << "at " << i << " of " << n << ": " << w << " " << g;
    }
  }
};

std::vector<const VectorKernels*> vector_rows() {
  std::vector<const VectorKernels*> rows;
  for (const VectorKernels& row : cpu::kernels().vector) {
    if (machine().has(row.isa)) rows.push_back(&row);
  }
  return rows;
}
INSTANTIATE_TEST_SUITE_P(Rows, VectorConformance, testing::ValuesIn(vector_rows()),
                         [](const auto& i) { return std::string(i.param->name).substr(7); });

TEST_P(VectorConformance, RowsAreThoseThatOpsRuns) {
  ThreadPool pool(1);
  const auto o = test::make_ops(pool, std::string("vector=") + row().name);
  EXPECT_EQ(o->vector_row(), row().name);
}

TEST_P(VectorConformance, Norms) {
  for (const int64_t n : cases::row_lengths()) {
    const auto size = static_cast<size_t>(n);
    const std::vector<float> x = test::random_floats(size, 1, 3.0f);
    const std::vector<float> w = test::random_floats(size, 2), b = test::random_floats(size, 3);
    for (const bool weighted : {false, true}) {
      const float* weight = weighted ? w.data() : nullptr;
      const float* bias = weighted ? b.data() : nullptr;
      compare(size, 1e-6, false, [&](const VectorKernels& k, float* out) {
        k.rms_norm(out, x.data(), weight, bias, n, 1e-5f);
      });
      compare(size, 2e-6, false, [&](const VectorKernels& k, float* out) {
        k.layer_norm(out, x.data(), weight, bias, n, 1e-5f);
      });
    }
  }
}

TEST_P(VectorConformance, Rope) {
  for (const int half : {1, 4, 7, 8, 12, 16, 20, 32, 48, 64, 128}) {
    const auto n = static_cast<size_t>(2 * half);
    const std::vector<float> x = test::random_floats(n, 4), table = test::random_floats(n, 5);
    for (const bool interleaved : {false, true}) {
      compare(n, 3e-7, false, [&](const VectorKernels& k, float* out) {
        std::copy(x.begin(), x.end(), out);
        k.rope(out, table.data(), 2 * half, interleaved);
      });
    }
  }
}

// Values over the whole range where an activation is not trivial, and a few beyond.
std::vector<float> sweep() {
  std::vector<float> x = {0.0f, -0.0f, 1e-30f, -1e-30f, 60.0f, 1e4f};
  for (float v = -12.0f; v < 30.0f; v += 0.001f) x.push_back(v);
  for (float v = 1e-7f; v < 1.0f; v *= 1.01f) x.insert(x.end(), {v, -v});
  return x;
}

TEST_P(VectorConformance, Activations) {
  const std::vector<float> x = sweep();
  const auto n = static_cast<int64_t>(x.size());
  for (const Activation a :
       {Activation::kNone, Activation::kSilu, Activation::kGelu, Activation::kGeluTanh,
        Activation::kRelu, Activation::kRelu2, Activation::kQuickGelu}) {
    SCOPED_TRACE(static_cast<int>(a));
    // GELU (tanh) amplifies the rounding of its cubic term at the far left.
    const double ulps = a == Activation::kGeluTanh ? 150 : a == Activation::kQuickGelu ? 12 : 4;
    compare(x.size(), ulps * kUlp, true, [&](const VectorKernels& k, float* out) {
      std::copy(x.begin(), x.end(), out);
      k.activation(out, n, static_cast<int>(a));
    });
    const std::vector<float> up = test::random_floats(x.size(), 6);
    compare(x.size(), (ulps + 1) * kUlp, true, [&](const VectorKernels& k, float* out) {
      k.glu(out, x.data(), up.data(), n, static_cast<int>(a), 0.0f, 0.0f);
    });
  }
  const std::vector<float> up = test::random_floats(x.size(), 7, 6.0f);
  compare(x.size(), 20 * kUlp, true, [&](const VectorKernels& k, float* out) {
    k.glu(out, x.data(), up.data(), n, 0, 7.0f, 1.702f);
  });
  compare(x.size(), 3 * kUlp, true, [&](const VectorKernels& k, float* out) {
    std::copy(x.begin(), x.end(), out);
    k.softcap(out, n, 5.0f);
  });
}

TEST_P(VectorConformance, NotANumberStays) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (int a = 1; a <= static_cast<int>(Activation::kGeluTanh); ++a) {
    std::vector<float> x(20, nan);
    row().activation(x.data(), 20, a);
    for (const float v : x) EXPECT_TRUE(std::isnan(v)) << a;
  }
  std::vector<float> x(20, nan);
  row().softcap(x.data(), 20, 30.0f);
  for (const float v : x) EXPECT_TRUE(std::isnan(v));
}

TEST_P(VectorConformance, SumsAndScales) {
  for (const int64_t n : cases::row_lengths()) {
    const auto size = static_cast<size_t>(n);
    const std::vector<float> x = test::random_floats(size, 8), y = test::random_floats(size, 9);
    compare(size, kUlp, false, [&](const VectorKernels& k, float* out) {
      std::copy(x.begin(), x.end(), out);
      k.add(out, y.data(), n, 0.37f);
    });
    compare(size, 0.0, true, [&](const VectorKernels& k, float* out) {
      std::copy(x.begin(), x.end(), out);
      k.scale(out, n, 0.37f);
    });
  }
}

}  // namespace
}  // namespace freshet

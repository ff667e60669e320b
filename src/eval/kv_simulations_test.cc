// The simulated methods by what defines them: fewer bits lose more, what makes up for rounding
// loses less, and the figures do not depend on how a text is cut.
#include "eval/kv_simulations.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include <gtest/gtest.h>

#include "ops/ops.h"

namespace freshet::eval {
namespace {

constexpr int kTokens = 300, kDim = 64, kHeads = 2;

class Simulated : public ::testing::Test {
 protected:
  Simulated() {
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    for (auto* x : {&q_, &k_, &v_}) {
      x->resize(kTokens * kHeads * kDim);
      for (float& f : *x) f = normal(random);
    }
    // A channel that is far from the others, as keys have.
    for (int t = 0; t < kTokens * kHeads; ++t) k_[static_cast<size_t>(t * kDim + 3)] += 6.0f;
    // Numbers far from the others of their token, one in each.
    for (int t = 0; t < kTokens * kHeads; ++t)
      v_[static_cast<size_t>(t * kDim + t * 7 % kDim)] = t % 2 == 0 ? 12.0f : -12.0f;
    table_.resize((kTokens + 15) / 16);
    std::iota(table_.begin(), table_.end(), 0);
  }
  static int method(std::string_view name) {
    const auto methods = simulated_methods();
    return static_cast<int>(std::ranges::find(methods, name) - methods.begin());
  }
  std::vector<float> run(const ops::KernelTable& table, int step) {
    ops::OpsOptions o;
    o.scratch_bytes = size_t{16} << 20;
    o.reference = true;
    auto ops = ops::Ops::create(pool_, table, {}, o);
    EXPECT_TRUE(ops.ok()) << ops.status().message();
    const ops::KvShape shape{ops::KvType::kF32, kHeads, kDim, kDim};
    std::vector<float> cache(shape.block_bytes() * table_.size() / sizeof(float));
    const ops::KvView view{shape, reinterpret_cast<uint8_t*>(cache.data()),
                           static_cast<int32_t>(table_.size())};
    std::vector<float> out(q_.size());
    for (int first = 0; first < kTokens; first += step) {
      const int count = std::min(step, kTokens - first);
      const int32_t starts[] = {0, count}, lengths[] = {first + count};
      const ops::AttentionBatch batch{starts, lengths, table_.data(), std::ssize(table_)};
      const auto rows = [&](std::vector<float>& x) {
        return Matrix{x.data() + first * kHeads * kDim, count, kHeads * kDim, kHeads * kDim};
      };
      (*ops)->store_kv(view, rows(k_), rows(v_), batch);
      (*ops)->attention(rows(out), rows(q_), view, batch, {kHeads, 0.125f});
    }
    return out;
  }
  std::vector<float> run(std::string_view name, int step = kTokens) {
    return run(simulated_kernels(method(name)), step);
  }
  double loss(std::string_view name) {
    const std::vector<float> exact = run(ops::reference_kernels(), kTokens), coarse = run(name);
    double sum = 0.0;
    for (size_t i = 0; i < exact.size(); ++i) sum += std::pow(double{coarse[i] - exact[i]}, 2.0);
    return std::sqrt(sum / static_cast<double>(exact.size()));
  }

  ThreadPool pool_{2};
  std::vector<float> q_, k_, v_;
  std::vector<int32_t> table_;
};

TEST_F(Simulated, LosesAsItsBitsSay) {
  for (const std::string_view name : simulated_methods()) EXPECT_GT(loss(name), 1e-4) << name;
  EXPECT_LT(loss("kivi4"), 0.5 * loss("kivi2"));
  EXPECT_LT(loss("gear4"), 0.5 * loss("gear2"));
  EXPECT_LT(loss("gear2"), loss("kivi2")) << "outliers are kept";
  for (const std::string_view name : {"wkvquant4", "kvquant4"})
    EXPECT_LT(loss(name), 0.5 * loss("kivi2")) << name;
}

TEST_F(Simulated, CutsChangeNothing) {
  for (const std::string_view name : {"kivi2", "gear4"}) EXPECT_EQ(run(name, 7), run(name)) << name;
  // These know the first 128 tokens from the beginning.
  for (const std::string_view name : {"wkvquant4", "kvquant4"})
    EXPECT_EQ(run(name, 128), run(name)) << name;
}

TEST_F(Simulated, NewestTokensAreExact) {
  const std::vector<float> exact = run(ops::reference_kernels(), kTokens), kivi = run("kivi2");
  const auto at = [](int token) { return token * kHeads * kDim; };
  EXPECT_NEAR(kivi[static_cast<size_t>(at(100))], exact[static_cast<size_t>(at(100))], 1e-5);
  EXPECT_GT(std::abs(kivi[static_cast<size_t>(at(299))] - exact[static_cast<size_t>(at(299))]),
            1e-4);
}

}  // namespace
}  // namespace freshet::eval

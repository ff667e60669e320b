// Every row and layout: weights of keys against a sum in double, and gathered slots against reading
// the slots where they were.
#include <cmath>
#include <random>

#include <gtest/gtest.h>

#include "backend/cpu/backend.h"
#include "ops/hadamard.h"
#include "ops/ops.h"

namespace freshet::cpu {
namespace {

using ops::KvType;

constexpr int kKvHeads = 2, kGroup = 3, kTokens = 75, kBlocks = 12;

struct LayoutCase {
  const char* row;  // "": the best
  KvType type;
  int key_dim, value_dim;
  bool shares;
};

class KvOps : public ::testing::TestWithParam<LayoutCase> {
 protected:
  void SetUp() override {
    const LayoutCase& c = GetParam();
    ops::OpsOptions o;
    o.scratch_bytes = size_t{64} << 20;
    if (*c.row != 0) o.force_kernels = {std::string("attention=") + c.row};
    auto made = ops::Ops::create(pool_, kernels(), detect(), o);
    if (!made.ok()) GTEST_SKIP() << made.status().message();
    ops_ = std::move(*made);
    view_.shape = {c.type, c.shares ? 1 : kKvHeads, c.key_dim, c.value_dim, c.shares};
    data_.resize(view_.shape.block_bytes() * kBlocks / sizeof(float) + 64);
    const auto at = reinterpret_cast<uintptr_t>(data_.data());
    view_.data = reinterpret_cast<uint8_t*>((at + 63) / 64 * 64);
    view_.blocks = kBlocks;
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    const int kv = view_.shape.kv_heads;
    k_.resize(static_cast<size_t>(kTokens * kv * c.key_dim));
    v_.resize(static_cast<size_t>(kTokens * kv * c.value_dim));
    q_.resize(static_cast<size_t>(kTokens * kv * kGroup * c.key_dim));
    for (auto* x : {&k_, &v_, &q_}) {
      for (float& f : *x) f = normal(random);
    }
    batch_ = {starts_, lengths_, table_, 6};
    ops_->store_kv(view_, matrix(k_), matrix(v_), batch_);
  }

  static Matrix matrix(std::vector<float>& x) {
    const auto cols = static_cast<int64_t>(x.size()) / kTokens;
    return {x.data(), kTokens, cols, cols};
  }

  std::vector<float> keys(std::span<const int32_t> blocks, int head, int32_t slots) {
    std::vector<float> out(static_cast<size_t>(slots * view_.shape.key_dim));
    ops_->read_keys(view_, blocks, head, slots, out.data());
    return out;
  }

  // As keys() gives them.
  std::vector<float> as_stored(const float* from) const {
    std::vector<float> x(from, from + view_.shape.key_dim);
    if (ops::info(view_.shape.type).key.rotated) ops::hadamard(x.data(), view_.shape.key_dim);
    return x;
  }

  // What a query attends to in slot `slot` alone: its value.
  std::vector<float> value(const int32_t* table, int32_t slot) {
    const int heads = view_.shape.kv_heads;
    std::vector<float> q(static_cast<size_t>(heads * view_.shape.key_dim), 0.5f);
    std::vector<float> out(static_cast<size_t>(heads * view_.shape.value_dim));
    const int32_t start[] = {0, 1}, length[] = {slot + 1};
    const ops::KeyRange range[] = {{slot, slot + 1}};
    const auto qs = static_cast<int64_t>(q.size()), outs = static_cast<int64_t>(out.size());
    ops_->attention({out.data(), 1, outs, outs}, {q.data(), 1, qs, qs}, view_,
                    {start, length, table, 6, range}, {.heads = heads});
    return out;
  }

  ThreadPool pool_{2};
  std::unique_ptr<ops::Ops> ops_;
  ops::KvView view_;
  std::vector<float> data_, k_, v_, q_;
  const int32_t starts_[2] = {0, kTokens}, lengths_[1] = {kTokens};
  const int32_t table_[6] = {7, 2, 9, 0, 4, -1};
  ops::AttentionBatch batch_;
};

TEST_P(KvOps, ScoresAreSoftmaxWeights) {
  const int kv = view_.shape.kv_heads, dim = view_.shape.key_dim, heads = kv * kGroup;
  std::vector<float> sinks(static_cast<size_t>(heads));
  for (size_t h = 0; h < sinks.size(); ++h) sinks[h] = 0.3f * static_cast<float>(h);
  for (const float cap : {0.0f, 4.0f}) {
    const ops::AttentionParams params{heads, 0.2f, cap, 0, cap > 0 ? sinks.data() : nullptr};
    constexpr int kScored = 41, kStride = 96;
    std::vector<int64_t> sums(static_cast<size_t>(kv * kStride), 3);
    const ops::ScoredQueries scored[] = {{0, kScored, sums.data(), kStride}};
    ops_->key_scores(matrix(q_), view_, batch_, params, scored);
    for (int h = 0; h < kv; ++h) {
      const std::vector<float> k = keys(table_, h, kTokens);
      std::vector<double> expected(kStride);
      for (int t = kTokens - kScored; t < kTokens; ++t) {
        for (int g = 0; g < kGroup; ++g) {
          const std::vector<float> q = as_stored(q_.data() + (t * heads + h * kGroup + g) * dim);
          std::vector<double> w;
          double sum = cap > 0 ? std::exp(double{sinks[static_cast<size_t>(h * kGroup + g)]}) : 0.0;
          for (int j = 0; j <= t; ++j) {
            double s = 0;
            for (int d = 0; d < dim; ++d)
              s += double{q[static_cast<size_t>(d)]} * k[static_cast<size_t>(j * dim + d)];
            s *= double{params.scale};
            if (cap > 0) s = cap * std::tanh(s / cap);
            sum += w.emplace_back(std::exp(s));
          }
          for (size_t j = 0; j < w.size(); ++j) expected[j] += w[j] / sum;
        }
      }
      for (int j = 0; j < kStride; ++j) {
        const auto sum = static_cast<double>(sums[static_cast<size_t>(h * kStride + j)] - 3);
        EXPECT_NEAR(sum * 0x1p-30, expected[static_cast<size_t>(j)],
                    2e-6 * expected[static_cast<size_t>(j)] + 1e-7)
            << "head " << h << " key " << j;
      }
    }
    // In parts, the sums are the same whole numbers.
    std::vector<int64_t> parts(sums.size(), 3);
    const int32_t all[] = {0, 60}, shorter[] = {60};
    const ops::ScoredQueries first[] = {{0, 60 - (kTokens - kScored), parts.data(), kStride}};
    Matrix q = matrix(q_);
    q.rows = 60;
    ops_->key_scores(q, view_, {all, shorter, table_, 6}, params, first);
    const int32_t rest[] = {0, kTokens - 60};
    const ops::ScoredQueries second[] = {{0, kTokens - 60, parts.data(), kStride}};
    ops_->key_scores({q_.data() + 60 * q.cols, kTokens - 60, q.cols, q.cols}, view_,
                     {rest, lengths_, table_, 6}, params, second);
    EXPECT_EQ(parts, sums);
    // Apart, they add up to the same.
    std::vector<int64_t> each(static_cast<size_t>(kScored) * sums.size());
    const ops::ScoredQueries apart[] = {{0, kScored, each.data(), kStride, true}};
    ops_->key_scores(matrix(q_), view_, batch_, params, apart);
    std::vector<int64_t> added(sums.size(), 3);
    for (size_t i = 0; i < each.size(); ++i) added[i % sums.size()] += each[i];
    EXPECT_EQ(added, sums);
    for (int i = 0; i < kScored; i += 8) {  // each is what it is alone
      std::vector<int64_t> alone(sums.size());
      const int token = kTokens - kScored + i;
      const int32_t one[] = {0, 1}, seen[] = {token + 1};
      const ops::ScoredQueries last[] = {{0, 1, alone.data(), kStride}};
      ops_->key_scores({q_.data() + token * q.cols, 1, q.cols, q.cols}, view_,
                       {one, seen, table_, 6}, params, last);
      EXPECT_TRUE(std::ranges::equal(
          alone, std::span(each).subspan(static_cast<size_t>(i) * sums.size(), sums.size())))
          << i;
    }
  }
}

TEST_P(KvOps, GatherMovesBitsUnchanged) {
  const int kv = view_.shape.kv_heads, dim = view_.shape.key_dim, width = view_.shape.value_dim;
  constexpr int32_t kKept = 37;
  std::vector<int32_t> kept;
  for (int h = 0; h < kv; ++h) {
    for (int i = 0; i < kKept; ++i) kept.push_back(i * 2 + (i > 5 ? h : 0));
  }
  std::vector<std::vector<float>> k;
  for (int h = 0; h < kv; ++h) k.push_back(keys(table_, h, kTokens));
  std::vector<std::vector<float>> v;
  for (int t = 0; t < kTokens; ++t) v.push_back(value(table_, t));
  const int32_t to[6] = {2, 11, 7, -1, -1, -1};  // some of them are sources
  ops_->gather_kv(view_, std::span(table_).first(5), std::span(to).first(3), kept.data(), kKept);
  for (int h = 0; h < kv; ++h) {
    const std::vector<float> moved = keys(to, h, kKept);
    for (int i = 0; i < kKept; ++i) {
      const int from = kept[static_cast<size_t>(h * kKept + i)];
      for (int d = 0; d < dim; ++d) {
        ASSERT_EQ(moved[static_cast<size_t>(i * dim + d)],
                  k[static_cast<size_t>(h)][static_cast<size_t>(from * dim + d)]);
      }
      const std::vector<float> got = value(to, i);
      for (int d = 0; d < width; ++d) {
        ASSERT_EQ(got[static_cast<size_t>(h * width + d)],
                  v[static_cast<size_t>(from)][static_cast<size_t>(h * width + d)]);
      }
    }
  }
}

// Attention multiplies them by zero weights.
TEST_P(KvOps, GatherLeavesEmptySlotsZero) {
  const int kv = view_.shape.kv_heads;
  std::vector<int64_t> sums(static_cast<size_t>(kv * 96));
  const ops::ScoredQueries scored[] = {{0, kTokens, sums.data(), 96}};  // uses the same workspace
  ops_->key_scores(matrix(q_), view_, batch_, {.heads = kv * kGroup}, scored);
  const std::vector<int32_t> kept(static_cast<size_t>(kv) * 2, 3);
  const int32_t to[6] = {11, -1, -1, -1, -1, -1};
  ops_->gather_kv(view_, std::span(table_).first(5), std::span(to).first(1), kept.data(), 2);
  for (int h = 0; h < kv; ++h) {
    const std::vector<float> all = keys(to, h, ops::kBlockTokens);
    for (size_t i = static_cast<size_t>(2 * view_.shape.key_dim); i < all.size(); ++i)
      ASSERT_EQ(all[i], 0.0f);
  }
}

TEST_P(KvOps, KeysAreReadAsStored) {
  const int kv = view_.shape.kv_heads, dim = view_.shape.key_dim;
  const double tolerance = view_.shape.type == KvType::kFP8    ? 0.07
                           : view_.shape.type == KvType::kInt8 ? 0.02
                           : view_.shape.type == KvType::kK8V4 ? 0.02
                           : view_.shape.type == KvType::kInt4 ? 0.3
                           : view_.shape.type == KvType::kBF16 ? 0.005
                                                               : 0.001;
  for (int h = 0; h < kv; ++h) {
    const std::vector<float> k = keys(table_, h, kTokens);
    for (int t = 0; t < kTokens; ++t) {
      const std::vector<float> stored = as_stored(k_.data() + (t * kv + h) * dim);
      for (int d = 0; d < dim; ++d) {
        const float x = stored[static_cast<size_t>(d)];
        ASSERT_NEAR(k[static_cast<size_t>(t * dim + d)], x, tolerance * (1.0 + std::abs(x)));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, KvOps,
    ::testing::Values(LayoutCase{"", KvType::kF16, 64, 64, false},
                      LayoutCase{"", KvType::kF16, 128, 32, false},
                      LayoutCase{"", KvType::kInt8, 72, 40, false},
                      LayoutCase{"", KvType::kF16, 80, 64, true},
                      LayoutCase{"attention.avx2", KvType::kF32, 24, 16, false},
                      LayoutCase{"attention.avx2", KvType::kBF16, 64, 64, false},
                      LayoutCase{"attention.avx512", KvType::kFP8, 64, 48, false},
                      LayoutCase{"attention.avx512", KvType::kInt8, 64, 48, true},
                      LayoutCase{"", KvType::kInt4, 128, 64, false},
                      LayoutCase{"", KvType::kK8V4, 64, 128, false},
                      LayoutCase{"attention.avx2", KvType::kInt4, 96, 80, false},
                      LayoutCase{"attention.avx512", KvType::kK8V4, 80, 96, false},
                      LayoutCase{"attention.reference", KvType::kInt4, 96, 48, false},
                      LayoutCase{"attention.reference", KvType::kK8V4, 64, 32, false},
                      LayoutCase{"attention.reference", KvType::kInt8, 72, 40, false},
                      LayoutCase{"attention.reference", KvType::kF16, 20, 12, false},
                      LayoutCase{"attention.reference", KvType::kF16, 20, 12, true}));

}  // namespace
}  // namespace freshet::cpu

// Tokens kept in 4 bits beside others, on every kind of row, against a softmax in double over the
// keys and values that these must have become; and their share of the weights of other keys.
#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <random>
#include <utility>

#include <gtest/gtest.h>

#include "backend/cpu/backend.h"
#include "ops/ops.h"
#include "tensor/dtype.h"

namespace freshet::cpu {
namespace {

using ops::kBlockTokens;
using ops::KvType;

constexpr int kKvHeads = 2, kGroup = 3, kHeads = kKvHeads * kGroup, kBlocks = 24;
constexpr int kTokens = 230, kQueries = 5;

struct CoarseCase {
  const char* row;  // "": the best
  KvType type;
  int key_dim, value_dim;
  double tolerance;  // kernels round queries and weights to a byte over 4-bit codes
};

// A vector after the definition of INT4 in docs/kv-cache.md.
std::vector<double> in_four_bits(const float* x, int n) {
  const int size = n & -n;
  const auto rotate = [&](const std::vector<double>& from) {
    std::vector<double> to(from.size());
    for (int i = 0; i < n; ++i) {
      for (int j = 0; j < size; ++j) {
        const bool minus = std::popcount(static_cast<unsigned>(i % size & j)) % 2 == 1;
        to[static_cast<size_t>(i)] +=
            (minus ? -1.0 : 1.0) * from[static_cast<size_t>(i / size * size + j)] / std::sqrt(size);
      }
    }
    return to;
  };
  std::vector<double> y = rotate({x, x + n});
  for (int g = 0; g < n; g += 32) {
    const auto first = y.begin() + g, last = y.begin() + std::min(n, g + 32);
    const double top = *std::max_element(
        first, last, [](double a, double b) { return std::abs(a) < std::abs(b); });
    const double scale = f16_to_f32(f32_to_f16(static_cast<float>(top / -8.0)));
    for (auto at = first; at != last; ++at)
      *at = std::clamp(std::nearbyint(*at / scale), -8.0, 7.0) * scale;
  }
  return rotate(y);
}

class CoarseKv : public ::testing::TestWithParam<CoarseCase> {
 protected:
  using Vector = std::vector<double>;
  struct Kept {  // of a KV head
    std::vector<int32_t> fine, coarse;
  };

  void SetUp() override {
    const CoarseCase& c = GetParam();
    ops::OpsOptions o;
    o.scratch_bytes = size_t{64} << 20;
    if (*c.row != 0) o.force_kernels = {std::string("attention=") + c.row};
    auto made = ops::Ops::create(pool_, kernels(), detect(), o);
    if (!made.ok()) GTEST_SKIP() << made.status().message();
    ops_ = std::move(*made);
    view_.shape = {c.type, kKvHeads, c.key_dim, c.value_dim};
    parts_ = ops::coarse_parts(view_.shape);
    data_.resize(view_.shape.block_bytes() * kBlocks / sizeof(float) + 64);
    const auto at = reinterpret_cast<uintptr_t>(data_.data());
    view_.data = reinterpret_cast<uint8_t*>((at + 63) / 64 * 64);
    view_.blocks = kBlocks;
    std::mt19937 random(11);
    std::normal_distribution<float> normal;
    k_.resize(static_cast<size_t>(kTokens * kKvHeads * c.key_dim));
    v_.resize(static_cast<size_t>(kTokens * kKvHeads * c.value_dim));
    q_.resize(static_cast<size_t>(kTokens * kHeads * c.key_dim));
    for (auto* x : {&k_, &v_, &q_}) {
      for (float& f : *x) {
        f = normal(random);
        if (c.type == KvType::kF16) f = f16_to_f32(f32_to_f16(f));
        if (c.type == KvType::kBF16) f = bf16_to_f32(f32_to_bf16(f));
      }
    }
  }

  Matrix rows(std::vector<float>& x, int first, int count) {
    const auto cols = static_cast<int64_t>(x.size()) / kTokens;
    return {x.data() + first * cols, count, cols, cols};
  }

  // Stores tokens [first, first + count), which become the last of `slots`.
  void store(const std::vector<int32_t>& table, int first, int count, int32_t slots) {
    const int32_t start[] = {0, count}, length[] = {slots};
    ops_->store_kv(view_, rows(k_, first, count), rows(v_, first, count),
                   {start, length, table.data(), std::ssize(table)});
  }

  // Drops slots at random, other ones in each head, and keeps the books.
  void evict(std::span<const int32_t> from, std::span<const int32_t> to, int32_t count,
             std::span<const int32_t> coarse_from, std::span<const int32_t> coarse_to) {
    std::mt19937 random(static_cast<uint32_t>(count));
    std::vector<int32_t> kept, dropped;
    const auto slots = static_cast<int32_t>(kept_[0].fine.size());
    const auto before = static_cast<int32_t>(kept_[0].coarse.size());
    for (Kept& head : kept_) {
      std::vector<int32_t> order(static_cast<size_t>(slots));
      std::iota(order.begin(), order.end(), 0);
      std::ranges::shuffle(order, random);
      std::sort(order.begin(), order.begin() + count);
      std::sort(order.begin() + count, order.end());
      kept.insert(kept.end(), order.begin(), order.begin() + count);
      dropped.insert(dropped.end(), order.begin() + count, order.end());
      const std::vector<int32_t> tokens = std::exchange(head.fine, {});
      for (int32_t i = 0; i < slots; ++i)
        (i < count ? head.fine : head.coarse)
            .push_back(tokens[static_cast<size_t>(order[static_cast<size_t>(i)])]);
    }
    ops_->recode_kv(view_, from, to, kept.data(), count,
                    {dropped.data(), slots - count, before, parts_, coarse_from, coarse_to});
  }

  // Two evictions; the blocks of the results were read by them. Leaves kQueries tokens behind 50
  // others in the blocks fine_, and 150 coarse ones in coarse_.
  void build() {
    for (Kept& head : kept_) {
      head.fine.resize(150);
      std::iota(head.fine.begin(), head.fine.end(), 0);
    }
    const std::vector<int32_t> all = {7, 2, 9, 0, 4, 11, 5, 8, 1, 3};
    store(all, 0, 150, 150);
    const auto coarse_of = [&](int32_t tokens) {  // the last is replaced by the second eviction
      const int32_t each = kBlockTokens * parts_;
      std::vector<int32_t> ids;
      for (const int32_t id : {0, 4, 11, 13, 14}) {
        if (std::ssize(ids) * each < tokens) ids.push_back(id);
      }
      return ids;
    };
    const std::vector<int32_t> first = coarse_of(110);
    const std::vector<int32_t> kept = {2, 5, 7, 9, 1, 3};
    evict(all, std::span(kept).first(3), 40, {}, first);
    store(kept, 150, 50, 90);
    for (Kept& head : kept_) {
      for (int32_t t = 150; t < 200; ++t) head.fine.push_back(t);
    }
    coarse_ = coarse_of(150);
    coarse_[first.size() - 1] = 15;
    evict(kept, std::span(fine_).first(4), 50, first, coarse_);
    store(fine_, 200, kQueries, 50 + kQueries);
  }

  // What a query head reads: keys with their values, the last ones being coarse.
  struct Read {
    std::vector<Vector> keys, values;
    std::vector<double> weights;
    Vector out;
  };
  Read expected(int query, int head, const float* sinks) const {
    const ops::KvShape& s = view_.shape;
    const int kv_head = head / kGroup;
    const auto row = [&](const std::vector<float>& x, int token, int dim) {
      return x.data() + (token * kKvHeads + kv_head) * dim;
    };
    Read r;
    const Kept& kept = kept_[static_cast<size_t>(kv_head)];
    std::vector<int32_t> fine = kept.fine;
    for (int t = 200; t <= query; ++t) fine.push_back(t);
    for (const int32_t t : fine) {
      const float* const k = row(k_, t, s.key_dim);
      const float* const v = row(v_, t, s.value_dim);
      r.keys.emplace_back(k, k + s.key_dim);
      r.values.emplace_back(v, v + s.value_dim);
    }
    for (const int32_t t : kept.coarse) {
      r.keys.push_back(in_four_bits(row(k_, t, s.key_dim), s.key_dim));
      r.values.push_back(in_four_bits(row(v_, t, s.value_dim), s.value_dim));
    }
    const float* const q = q_.data() + (query * kHeads + head) * s.key_dim;
    double sum = sinks != nullptr ? std::exp(double{sinks[head]}) : 0.0;
    for (const Vector& k : r.keys) {
      double dot = 0.0;
      for (int d = 0; d < s.key_dim; ++d) dot += double{q[d]} * k[static_cast<size_t>(d)];
      sum += r.weights.emplace_back(std::exp(dot * kScale));
    }
    r.out.resize(static_cast<size_t>(s.value_dim));
    for (size_t i = 0; i < r.keys.size(); ++i) {
      r.weights[i] /= sum;
      for (size_t d = 0; d < r.out.size(); ++d) r.out[d] += r.weights[i] * r.values[i][d];
    }
    return r;
  }

  static constexpr float kScale = 0.15f;
  ThreadPool pool_{2};
  std::unique_ptr<ops::Ops> ops_;
  ops::KvView view_;
  int32_t parts_ = 0;
  std::vector<float> data_, k_, v_, q_;
  std::vector<Kept> kept_ = std::vector<Kept>(kKvHeads);
  const std::vector<int32_t> fine_ = {1, 2, 9, 7};
  std::vector<int32_t> coarse_;
};

TEST_P(CoarseKv, AttentionReadsBothPartsAsOne) {
  build();
  const ops::KvShape& s = view_.shape;
  const std::vector<float> sinks = {0.5f, -1.0f, 2.0f, 0.0f, 3.0f, 1.0f};
  // In front, a sequence of 20 tokens that has no coarse ones.
  const std::vector<int32_t> other = {20, 21, 0, 0};
  store(other, 210, 20, 20);
  std::vector<int32_t> tables = other;
  tables.insert(tables.end(), fine_.begin(), fine_.end());
  const int32_t starts[] = {0, 3, 3 + kQueries}, lengths[] = {20, 50 + kQueries};
  const int32_t slots[] = {0, 150};
  const auto stride = std::ssize(coarse_);
  std::vector<int32_t> blocks(static_cast<size_t>(stride), -1);
  blocks.insert(blocks.end(), coarse_.begin(), coarse_.end());
  std::vector<float> q(q_.begin() + 227 * kHeads * s.key_dim, q_.end());
  q.insert(q.end(), q_.begin() + 200 * kHeads * s.key_dim,
           q_.begin() + (200 + kQueries) * kHeads * s.key_dim);
  const int64_t q_cols = int64_t{kHeads} * s.key_dim, cols = int64_t{kHeads} * s.value_dim;
  for (const float* sink : {static_cast<const float*>(nullptr), sinks.data()}) {
    const ops::AttentionParams params{kHeads, kScale, 0.0f, 0, sink};
    std::vector<float> out(static_cast<size_t>((3 + kQueries) * cols));
    const Matrix outs{out.data(), 3 + kQueries, cols, cols};
    const Matrix qs{q.data(), 3 + kQueries, q_cols, q_cols};
    const ops::AttentionBatch batch{starts, lengths, tables.data(), 4};
    const float* const sums =
        ops_->attend_both(outs, qs, view_, batch, params, {slots, blocks.data(), stride, parts_});
    std::vector<int64_t> scores(static_cast<size_t>(kKvHeads * 64));
    const ops::ScoredQueries scored[] = {{1, kQueries, scores.data(), 64}};
    ops_->key_scores(qs, view_, batch, params, scored, sums);
    std::vector<double> weights(scores.size());
    for (int t = 0; t < kQueries; ++t) {
      for (int h = 0; h < kHeads; ++h) {
        const Read r = expected(200 + t, h, sink);
        for (int d = 0; d < s.value_dim; ++d) {
          ASSERT_NEAR(outs.row(3 + t)[h * s.value_dim + d], r.out[static_cast<size_t>(d)],
                      GetParam().tolerance)
              << "query " << t << " head " << h;
        }
        for (size_t i = 0; i < 51 + static_cast<size_t>(t); ++i)
          weights[static_cast<size_t>(h / kGroup * 64) + i] += r.weights[i];
      }
    }
    for (size_t i = 0; i < scores.size(); ++i) {
      ASSERT_NEAR(static_cast<double>(scores[i]) * 0x1p-30, weights[i],
                  GetParam().tolerance * (0.01 + weights[i]));
    }

    // The same bits alone, and without its neighbour's those of attention().
    std::vector<float> alone(static_cast<size_t>(kQueries * cols));
    const int32_t own[] = {0, 1};
    for (int t = 0; t < kQueries; ++t) {
      const int32_t length[] = {51 + t};
      ops_->attend_both({alone.data() + t * cols, 1, cols, cols},
                        {q.data() + (3 + t) * q_cols, 1, q_cols, q_cols}, view_,
                        {own, length, fine_.data(), 4}, params,
                        {std::span(slots).last(1), coarse_.data(), stride, parts_});
    }
    EXPECT_TRUE(std::equal(alone.begin(), alone.end(), outs.row(3)));
    std::vector<float> plain(static_cast<size_t>(3 * cols));
    const int32_t three[] = {0, 3};
    ops_->attention({plain.data(), 3, cols, cols}, {q.data(), 3, q_cols, q_cols}, view_,
                    {three, std::span(lengths).first(1), other.data(), 4}, params);
    EXPECT_TRUE(std::equal(plain.begin(), plain.end(), outs.row(0)));
  }
}

TEST(CoarseParts, FollowFromTheBytesOfABlock) {
  EXPECT_EQ(ops::coarse_parts({KvType::kF16, 8, 128, 128}), 3);
  EXPECT_EQ(ops::coarse_parts({KvType::kF32, 3, 64, 64}), 7);
  EXPECT_EQ(ops::coarse_parts({KvType::kInt8, 8, 128, 128}), 1);
  EXPECT_EQ(ops::coarse_parts({KvType::kF16, 1, 576, 512, true}), 0);
}

INSTANTIATE_TEST_SUITE_P(
    Rows, CoarseKv,
    ::testing::Values(CoarseCase{"attention.reference", KvType::kF32, 64, 64, 2e-5},
                      CoarseCase{"attention.reference", KvType::kF16, 24, 48, 2e-5},
                      CoarseCase{"", KvType::kF16, 64, 64, 0.02},
                      CoarseCase{"", KvType::kF32, 128, 64, 0.02},
                      CoarseCase{"attention.avx512", KvType::kBF16, 64, 96, 0.02},
                      CoarseCase{"attention.avx2", KvType::kF16, 80, 64, 0.02}));

}  // namespace
}  // namespace freshet::cpu

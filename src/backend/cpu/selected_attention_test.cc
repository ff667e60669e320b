// Every row: the selected blocks against a plain selection in double, and the same bits however a
// sequence is cut into steps.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include <gtest/gtest.h>

#include "backend/cpu/backend.h"
#include "ops/hadamard.h"
#include "ops/ops.h"
#include "tensor/dtype.h"

namespace freshet::cpu {
namespace {

using ops::kBlockTokens;
using ops::KvType;

constexpr int kHeadsOfKeys = 2, kQueryHeads = 6, kLong = 300, kShort = 40, kBudget = 9;
constexpr int kTableStride = 24;

struct SelectCase {
  const char* row;  // "": the best; "reference": the reference path
  KvType type;
  int key_dim, value_dim;
};

class SelectedAttention : public ::testing::TestWithParam<SelectCase> {
 protected:
  void SetUp() override {
    const SelectCase& c = GetParam();
    ops::OpsOptions o;
    o.scratch_bytes = size_t{64} << 20;
    o.reference = c.row == std::string_view("reference");
    if (*c.row != 0 && !o.reference) o.force_kernels = {std::string("attention=") + c.row};
    auto made = ops::Ops::create(pool_, kernels(), detect(), o);
    if (!made.ok()) GTEST_SKIP() << made.status().message();
    ops_ = std::move(*made);
    view_.shape = {c.type, kHeadsOfKeys, c.key_dim, c.value_dim};
    view_.shape.bounded = true;
    view_.shape.summed = !ops::has_int4(c.type);
    view_.blocks = 2 * kTableStride;
    clear();
    std::mt19937 random(11);
    std::normal_distribution<float> normal;
    const auto draw = [&](std::vector<float>& x, int cols) {
      x.resize(static_cast<size_t>((kLong + kShort) * cols));
      for (float& f : x) f = normal(random);
    };
    draw(k_, kHeadsOfKeys * c.key_dim);
    draw(v_, kHeadsOfKeys * c.value_dim);
    draw(q_, kQueryHeads * c.key_dim);
    for (int i = 0; i < 2 * kTableStride; ++i) tables_.push_back(i * 29 % (2 * kTableStride));
  }

  void clear() {
    data_.assign(view_.shape.block_bytes() * static_cast<size_t>(view_.blocks) / 4 + 64, 0.0f);
    const auto at = reinterpret_cast<uintptr_t>(data_.data());
    view_.data = reinterpret_cast<uint8_t*>((at + 63) / 64 * 64);
  }

  // Rows [first, first + count) of the flattened tokens: the long sequence's come first.
  static Matrix rows(std::vector<float>& x, int64_t first, int64_t count) {
    const auto cols = static_cast<int64_t>(x.size()) / (kLong + kShort);
    return {x.data() + first * cols, count, cols, cols};
  }

  // Runs slots [first, first + count) of a sequence in a step of their own.
  void step(int sequence, int first, int count, const ops::BlockSelection& rule,
            std::vector<float>& out) {
    const int64_t token = first + (sequence == 0 ? 0 : kLong);
    const int32_t starts[] = {0, count}, lengths[] = {first + count};
    const ops::AttentionBatch batch{starts, lengths, tables_.data() + sequence * kTableStride,
                                    kTableStride};
    ops_->store_kv(view_, rows(k_, token, count), rows(v_, token, count), batch);
    ops_->selected_attention(rows(out, token, count), rows(q_, token, count), view_, batch, params_,
                             {&rule, 1});
  }

  std::vector<float> output() const {
    return std::vector<float>(
        static_cast<size_t>((kLong + kShort) * kQueryHeads * GetParam().value_dim));
  }

  // The whole of both sequences in one step.
  std::vector<float> whole(const ops::BlockSelection& rule) {
    std::vector<float> out = output();
    const int32_t starts[] = {0, kLong, kLong + kShort}, lengths[] = {kLong, kShort};
    const ops::AttentionBatch batch{starts, lengths, tables_.data(), kTableStride};
    const ops::BlockSelection rules[] = {rule, {}};
    ops_->store_kv(view_, rows(k_, 0, kLong + kShort), rows(v_, 0, kLong + kShort), batch);
    ops_->selected_attention(rows(out, 0, kLong + kShort), rows(q_, 0, kLong + kShort), view_,
                             batch, params_, rules);
    return out;
  }

  // The least BF16 number that is at least x, times `sign`, as a float.
  static double outward(float x, float sign) {
    float y = bf16_to_f32(f32_to_bf16(x));
    if (sign * y >= sign * x) return double{y};
    const uint16_t bits = f32_to_bf16(x);
    y = bf16_to_f32(static_cast<uint16_t>(bits + (x * sign > 0 ? 1 : -1)));
    return double{y};
  }

  // The blocks that the query in slot `slot` of the long sequence reads with a KV head, ascending.
  std::vector<int32_t> blocks_read(const std::vector<float>& keys, int slot, int head) {
    const int dim = GetParam().key_dim;
    const int own = slot / kBlockTokens;
    std::vector<std::pair<double, int>> bounds;
    for (int b = 0; b < own; ++b) {
      double promise = 0.0;
      for (int h = head * 3; h < head * 3 + 3; ++h) {
        std::vector<float> q(static_cast<size_t>(dim));
        std::copy_n(q_.data() + (slot * kQueryHeads + h) * dim, dim, q.data());
        if (ops::info(GetParam().type).key.rotated) ops::hadamard(q.data(), dim);
        for (int d = 0; d < dim; ++d) {
          float low = 1e30f, high = -1e30f;
          for (int t = b * kBlockTokens; t < (b + 1) * kBlockTokens; ++t) {
            low = std::min(low, keys[static_cast<size_t>(t * dim + d)]);
            high = std::max(high, keys[static_cast<size_t>(t * dim + d)]);
          }
          const double x = double{q[static_cast<size_t>(d)]};
          const double least = outward(low, -1.0f), greatest = outward(high, 1.0f);
          promise += x * (least + greatest) + 0.15 * std::abs(x) * (greatest - least);
        }
      }
      // The first block and, with a large budget, some of the newest are read in any case.
      const bool always = b == 0 || b >= own - std::min(3, kBudget / 8);
      bounds.emplace_back(always ? -1e300 : -promise, b);
    }
    std::ranges::sort(bounds);
    std::vector<int32_t> blocks = {own};
    for (size_t i = 0; i < std::min<size_t>(kBudget - 1, bounds.size()); ++i)
      blocks.push_back(bounds[i].second);
    std::ranges::sort(blocks);
    return blocks;
  }

  // What the heads of a KV head make of these blocks of the long sequence, by plain attention.
  std::vector<float> over_blocks(const std::vector<int32_t>& blocks, int slot, int head) {
    std::vector<int32_t> table;
    for (const int32_t b : blocks) table.push_back(tables_[static_cast<size_t>(b)]);
    const auto before = static_cast<int32_t>((blocks.size() - 1) * kBlockTokens);
    const int32_t start[] = {0, 1}, length[] = {before + slot % kBlockTokens + 1};
    std::vector<float> out(static_cast<size_t>(kQueryHeads * GetParam().value_dim));
    const auto cols = static_cast<int64_t>(out.size());
    ops_->attention({out.data(), 1, cols, cols}, rows(q_, slot, 1), view_,
                    {start, length, table.data(), std::ssize(table)}, params_);
    const int width = 3 * GetParam().value_dim;
    return {out.begin() + head * width, out.begin() + (head + 1) * width};
  }

  void keeps_bits(const ops::BlockSelection& rule);

  // Query head h in a slot: the newest quarter of the budget and the keys with the largest weights,
  // summed over the query heads of its KV head; the mean of the values in full blocks has the rest.
  std::vector<double> plain_sparq(int slot, int h, int budget) {
    const int dim = GetParam().key_dim, values = GetParam().value_dim, head = h / 3;
    const std::vector<float> keys = keys_of(head);
    const int older = slot + 1 - budget / 4;
    std::vector<double> total(static_cast<size_t>(slot + 1), 0.0), mine = total;
    for (int g = head * 3; g < head * 3 + 3; ++g) {
      std::vector<double> weights;
      double sum = 0.0;
      for (int t = 0; t <= slot; ++t) {
        double score = 0.0;
        for (int d = 0; d < dim; ++d)
          score += double{q_[static_cast<size_t>((slot * kQueryHeads + g) * dim + d)]} *
                   double{keys[static_cast<size_t>(t * dim + d)]};
        sum += weights.emplace_back(std::exp(score * double{params_.scale}));
      }
      for (size_t t = 0; t < weights.size(); ++t) total[t] += weights[t] / sum;
      for (size_t t = 0; g == h && t < weights.size(); ++t) mine[t] = weights[t] / sum;
    }
    std::vector<int> order(static_cast<size_t>(older));
    std::iota(order.begin(), order.end(), 0);
    std::ranges::sort(order, [&](int a, int b) {
      return total[static_cast<size_t>(a)] > total[static_cast<size_t>(b)];
    });
    std::vector<double> out(static_cast<size_t>(values), 0.0), mean = out;
    const auto value = [&](int t, int d) {
      return double{v_[static_cast<size_t>((t * kHeadsOfKeys + head) * values + d)]};
    };
    double left = 0.0;
    for (int i = budget - budget / 4; i < older; ++i)
      left += mine[static_cast<size_t>(order[static_cast<size_t>(i)])];
    order.resize(static_cast<size_t>(budget - budget / 4));
    for (int t = older; t <= slot; ++t) order.push_back(t);
    const int full = (slot + 1) / kBlockTokens * kBlockTokens;
    for (int d = 0; d < values; ++d) {
      auto& x = out[static_cast<size_t>(d)];
      for (const int t : order) x += mine[static_cast<size_t>(t)] * value(t, d);
      for (int t = 0; t < full; ++t) mean[static_cast<size_t>(d)] += value(t, d) / full;
      x += left * mean[static_cast<size_t>(d)];
    }
    return out;
  }

  std::vector<float> keys_of(int head) {
    std::vector<float> keys(static_cast<size_t>(kLong * GetParam().key_dim));
    ops_->read_keys(view_, {tables_.data(), kTableStride}, head, kLong, keys.data());
    return keys;
  }

  ThreadPool pool_{2};
  std::unique_ptr<ops::Ops> ops_;
  ops::KvView view_;
  std::vector<float> data_, k_, v_, q_;
  std::vector<int32_t> tables_;
  const ops::AttentionParams params_{kQueryHeads, 0.3f};
};

TEST_P(SelectedAttention, ReadsTheBlocksWithTheHighestBounds) {
  const int width = 3 * GetParam().value_dim;
  const std::vector<float> out = whole({100, kBudget}), full = whole({0, 0});
  const std::vector<float> keys[] = {keys_of(0), keys_of(1)};
  for (const int slot : {0, 79, 143, 144, 159, 160, 239, 240, 255, 256, 299}) {
    for (int head = 0; head < kHeadsOfKeys; ++head) {
      const auto at = (slot * kHeadsOfKeys + head) * width;
      const std::vector<float> mine(out.begin() + at, out.begin() + at + width);
      const std::vector<float> all(full.begin() + at, full.begin() + at + width);
      if (slot < 144) {
        EXPECT_EQ(mine, all) << slot;
        continue;
      }
      const std::vector<int32_t> blocks = blocks_read(keys[head], slot, head);
      EXPECT_EQ(mine, over_blocks(blocks, slot, head)) << "slot " << slot << " head " << head;
      EXPECT_NE(mine, all) << slot;
    }
  }
  const auto others = static_cast<std::ptrdiff_t>(kLong * kHeadsOfKeys * width);
  EXPECT_TRUE(std::equal(out.begin() + others, out.end(), full.begin() + others));
}

// Every row of the long sequence but those from 200 to 219, in the blocks of a pattern.
constexpr ops::BlockSelection kPattern{
    .from = 220, .before = 200, .sinks = 2, .window = 3, .stride = 4};

TEST_P(SelectedAttention, ReadsAFixedPattern) {
  const int width = 3 * GetParam().value_dim;
  const std::vector<float> out = whole(kPattern), full = whole({});
  for (const int slot : {0, 70, 90, 100, 199, 200, 219, 220, 299}) {
    for (int head = 0; head < kHeadsOfKeys; ++head) {
      const auto at = (slot * kHeadsOfKeys + head) * width;
      const std::vector<float> mine(out.begin() + at, out.begin() + at + width);
      std::vector<int32_t> blocks;
      const int own = slot / kBlockTokens;
      for (int b = 0; b <= own; ++b) {
        const bool read = b < 2 || b > own - 3 || (own - b) % 4 == 0;
        if (read || (slot >= 200 && slot < 220)) blocks.push_back(b);
      }
      EXPECT_EQ(mine, over_blocks(blocks, slot, head)) << "slot " << slot << " head " << head;
      const std::vector<float> all(full.begin() + at, full.begin() + at + width);
      EXPECT_EQ(mine == all, slot == 0 || slot == 70 || slot == 200 || slot == 219) << slot;
    }
  }
}

// With all features, a key's approximate weight is its own.
TEST_P(SelectedAttention, ReadsTheTokensWithTheLargestWeights) {
  if (!view_.shape.summed) GTEST_SKIP() << "4-bit codes";
  const SelectCase& c = GetParam();
  const int budget = 96;
  // Its own values are not rounded.
  const double off = c.type == KvType::kFP8    ? 0.15
                     : c.type == KvType::kInt8 ? 0.02
                     : c.type == KvType::kBF16 ? 0.01
                                               : 0.004;
  const ops::BlockSelection rule{
      .from = 100, .blocks = budget / kBlockTokens, .components = c.key_dim};
  const std::vector<float> out = whole(rule), full = whole({});
  for (const int slot : {99, 100, 159, 160, 255, 299}) {
    for (int h = 0; h < kQueryHeads; ++h) {
      const auto at = static_cast<std::ptrdiff_t>((slot * kQueryHeads + h) * c.value_dim);
      if (slot < 100) {
        EXPECT_TRUE(
            std::equal(out.begin() + at, out.begin() + at + c.value_dim, full.begin() + at));
        continue;
      }
      const std::vector<double> want = plain_sparq(slot, h, budget);
      for (int d = 0; d < c.value_dim; ++d)
        EXPECT_NEAR(double{out[static_cast<size_t>(at + d)]}, want[static_cast<size_t>(d)], off)
            << "slot " << slot << " head " << h << " feature " << d;
    }
  }
}

TEST_P(SelectedAttention, IsTheSameHoweverStepsAreCut) {
  keeps_bits({100, kBudget});
}

TEST_P(SelectedAttention, APatternIsTheSameHoweverStepsAreCut) {
  keeps_bits(kPattern);
}

TEST_P(SelectedAttention, TokensAreTheSameHoweverStepsAreCut) {
  if (!view_.shape.summed) GTEST_SKIP() << "4-bit codes";
  keeps_bits({.from = 100, .blocks = 5, .components = 16});
}

void SelectedAttention::keeps_bits(const ops::BlockSelection& rule) {
  const std::vector<float> want = whole(rule);
  clear();
  std::vector<float> cut = output();
  step(1, 0, kShort, {}, cut);
  for (int first = 0; first < kLong;) {
    const int count = std::min(first < 120 ? 33 : 1 + first % 3, kLong - first);
    if (first > 150 && first % 2 == 0) {
      // Drafts that were rejected: other keys in these slots and those behind.
      std::vector<float> unused = output();
      const std::vector<float> keys = k_;
      for (float& f : k_) f = -3.0f * f;
      step(0, first, std::min(20, kLong - first), rule, unused);
      k_ = keys;
    }
    step(0, first, count, rule, cut);
    first += count;
  }
  EXPECT_EQ(cut, want);
}

TEST_P(SelectedAttention, ABudgetAboveTheLengthIsFullAttention) {
  const std::vector<float> full = whole({0, 0});
  EXPECT_EQ(whole({0, (kLong + kBlockTokens - 1) / kBlockTokens}), full);
  EXPECT_NE(whole({0, kLong / kBlockTokens - 1}), full);
  const int all = (kLong + kBlockTokens - 1) / kBlockTokens;
  EXPECT_EQ(whole({.window = all}), full);
  EXPECT_EQ(whole({.sinks = all - 1, .window = 1}), full);
  EXPECT_EQ(whole({.window = 1, .stride = 1}), full);
  EXPECT_NE(whole({.window = all - 1}), full);
  if (!view_.shape.summed) return;
  EXPECT_EQ(whole({.blocks = all, .components = 16}), full);
  EXPECT_NE(whole({.blocks = all - 1, .components = 16}), full);
}

constexpr SelectCase kSelectCases[] = {
    {"", KvType::kF32, 64, 64},
    {"", KvType::kF16, 64, 64},
    {"", KvType::kBF16, 128, 128},
    {"", KvType::kFP8, 64, 64},
    {"", KvType::kInt8, 64, 64},
    {"", KvType::kInt4, 64, 64},
    {"", KvType::kK8V4, 128, 64},
    {"attention.avx512", KvType::kF32, 40, 40},
    {"attention.avx512", KvType::kFP8, 64, 64},
    {"attention.avx2", KvType::kF16, 128, 64},
    {"attention.avx2", KvType::kInt8, 72, 64},
    {"attention.avx2", KvType::kInt4, 72, 64},
    {"attention.neon", KvType::kF16, 64, 64},
    {"attention.neon", KvType::kInt8, 72, 64},
    {"reference", KvType::kF32, 64, 64},
    {"reference", KvType::kInt8, 40, 40},
    {"reference", KvType::kInt4, 64, 64},
};
INSTANTIATE_TEST_SUITE_P(Rows, SelectedAttention, ::testing::ValuesIn(kSelectCases));

}  // namespace
}  // namespace freshet::cpu

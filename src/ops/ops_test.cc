// Tests the reference rows against definitions written out in double, and the parts of Ops that do
// not depend on a backend: planning, routing, experts, checks.
#include "ops/ops.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tensor/dtype.h"

namespace freshet::ops {
namespace {

using testing::ElementsAre;
using testing::FloatNear;
using testing::HasSubstr;
using testing::Pointwise;

std::vector<float> random_floats(int64_t n, uint32_t seed, float scale = 1.0f) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> v(static_cast<size_t>(n));
  for (float& x : v) x = normal(rng);
  return v;
}

Matrix view(std::vector<float>& v, int64_t cols) {
  return {v.data(), static_cast<int64_t>(v.size()) / cols, cols, cols};
}

class OpsTest : public testing::Test {
 protected:
  OpsTest() : pool_(3, false) { make(OpsOptions{.scratch_bytes = 16 << 20}); }
  void make(const OpsOptions& options) {
    ops_ = std::move(Ops::create(pool_, reference_kernels(), Capabilities{}, options)).value();
  }
  // Random values in the format, and the values that they decode to.
  Weight weight(quant::Format format, int64_t rows, int64_t cols, uint32_t seed,
                std::vector<float>* decoded) {
    const quant::FormatInfo& f = quant::info(format);
    const size_t bytes = quant::row_bytes(format, cols);
    const std::vector<float> x = random_floats(rows * cols, seed);
    std::vector<uint8_t> stored(static_cast<size_t>(rows) * bytes);
    std::vector<const uint8_t*> row_pointers;
    decoded->resize(x.size());
    for (int64_t r = 0; r < rows; ++r) {
      uint8_t* row = stored.data() + static_cast<size_t>(r) * bytes;
      f.encode(x.data() + r * cols, row, cols, nullptr);
      f.decode(row, decoded->data() + r * cols, cols);
      row_pointers.push_back(row);
    }
    return std::move(ops_->pack(format, row_pointers, cols)).value();
  }

  ThreadPool pool_;
  std::unique_ptr<Ops> ops_;
};

TEST_F(OpsTest, MatmulOfEveryFormatIsTheProductOfItsDecodedRows) {
  for (const quant::FormatInfo& f : quant::all_formats()) {
    if (f.encode == nullptr) continue;
    for (const int64_t tokens : {1, 3, 70}) {
      const int64_t rows = 37;
      const int64_t cols = f.block_size == 1 ? 301 : 3 * f.block_size;
      std::vector<float> w;
      const Weight packed = weight(f.format, rows, cols, 7, &w);
      std::vector<float> x = random_floats(tokens * cols, 8);
      std::vector<float> bias = random_floats(rows, 9);
      std::vector<float> out(static_cast<size_t>(tokens * rows), 1.0f);
      const Product p{&packed, view(out, rows), bias.data(), 0.5f, true};
      ops_->matmul(view(x, cols), {&p, 1});
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t r = 0; r < rows; ++r) {
          double sum = bias[static_cast<size_t>(r)];
          for (int64_t k = 0; k < cols; ++k) {
            sum +=
                double{w[static_cast<size_t>(r * cols + k)]} * x[static_cast<size_t>(t * cols + k)];
          }
          ASSERT_NEAR(out[static_cast<size_t>(t * rows + r)], 1.0 + 0.5 * sum, 2e-4) << f.name;
        }
      }
      std::vector<float> row(static_cast<size_t>(cols));
      const int32_t id = 35;
      ops_->embed(view(row, cols), packed, {&id, 1}, 1.0f);
      ASSERT_EQ(0, std::memcmp(row.data(), w.data() + id * cols, row.size() * 4)) << f.name;
    }
  }
}

TEST_F(OpsTest, MatmulHeadsUsesAWeightAHead) {
  const int64_t heads = 3, in = 32, out_dim = 20, tokens = 5;
  std::vector<std::vector<float>> w(3);
  std::vector<Weight> packed;
  for (uint32_t h = 0; h < heads; ++h) {
    packed.push_back(weight(quant::Format::kQ8_0, out_dim, in, h, &w[h]));
  }
  std::vector<float> x = random_floats(tokens * heads * in, 1);
  std::vector<float> out(static_cast<size_t>(tokens * heads * out_dim));
  ops_->matmul_heads(view(x, heads * in), packed, view(out, heads * out_dim));
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t r = 0; r < out_dim; ++r) {
        double sum = 0.0;
        for (int64_t k = 0; k < in; ++k) {
          sum += double{w[static_cast<size_t>(h)][static_cast<size_t>(r * in + k)]} *
                 x[static_cast<size_t>((t * heads + h) * in + k)];
        }
        ASSERT_NEAR(out[static_cast<size_t>((t * heads + h) * out_dim + r)], sum, 1e-4);
      }
    }
  }
}

TEST_F(OpsTest, KnownValuesOfActivations) {
  // From a table of the normal distribution: Phi(1) = 0.841344746.
  const auto apply = [&](Activation a, float x) {
    std::vector<float> v = {x};
    ops_->activation(view(v, 1), a);
    return v[0];
  };
  EXPECT_FLOAT_EQ(apply(Activation::kGelu, 1.0f), 0.8413447461f);
  EXPECT_FLOAT_EQ(apply(Activation::kGelu, -2.0f), -0.0455002639f);
  EXPECT_FLOAT_EQ(apply(Activation::kGeluTanh, 1.0f), 0.8411919906f);
  EXPECT_FLOAT_EQ(apply(Activation::kSilu, 1.0f), 0.7310585786f);
  EXPECT_FLOAT_EQ(apply(Activation::kQuickGelu, 1.0f), 0.8457957659f);
  EXPECT_FLOAT_EQ(apply(Activation::kRelu2, 3.0f), 9.0f);
  EXPECT_FLOAT_EQ(apply(Activation::kRelu2, -3.0f), 0.0f);
  EXPECT_FLOAT_EQ(apply(Activation::kRelu, -3.0f), 0.0f);
  std::vector<float> both = {2.0f, -1.0f};
  ops_->xielu(view(both, 2), {.positive = 0.8f, .negative = 0.9f, .beta = 0.5f});
  EXPECT_FLOAT_EQ(both[0], 4.2f);            // 0.8 * 4 + 0.5 * 2
  EXPECT_FLOAT_EQ(both[1], -0.1689085030f);  // 0.9 / e - 0.5
  std::vector<float> gate = {9.0f}, up = {-8.0f}, out = {0.0f};
  ops_->glu(view(out, 1), view(gate, 1), view(up, 1), {Activation::kSilu, 7.0f, 1.702f});
  EXPECT_NEAR(out[0], -6.0f * 7.0f / (1.0f + std::exp(-1.702f * 7.0f)), 1e-4);
  std::vector<float> capped = {30.0f};
  ops_->softcap(view(capped, 1), 30.0f);
  EXPECT_FLOAT_EQ(capped[0], 30.0f * 0.7615941560f);
}

TEST_F(OpsTest, KnownValuesOfNormsAndRope) {
  std::vector<float> x = {3.0f, -4.0f, 0.0f, 0.0f}, w = {1.0f, 2.0f, 1.0f, 1.0f}, out(4);
  ops_->norm(view(out, 4), view(x, 4), {NormKind::kRms, w.data(), nullptr, 0.0f});
  EXPECT_THAT(out, ElementsAre(1.2f, -3.2f, 0.0f, 0.0f));
  x = {1.0f, 3.0f, 1.0f, 3.0f};
  ops_->norm(view(out, 4), view(x, 4), {NormKind::kLayer, w.data(), w.data(), 0.0f});
  EXPECT_THAT(out, ElementsAre(0.0f, 4.0f, 0.0f, 2.0f));
  ops_->norm_heads(view(x, 4), 2, 2, {NormKind::kRms, nullptr, nullptr, 0.0f}, false);
  EXPECT_FLOAT_EQ(x[0], 1.0f / std::sqrt(5.0f));
  EXPECT_FLOAT_EQ(x[3], 3.0f / std::sqrt(5.0f));

  const int32_t position = 2;
  const std::vector<float> inv_freq = {1.0f, 0.25f};
  std::vector<float> table(4);
  ops_->rope_table(table.data(), {&position, 1}, inv_freq, 1.0f);
  EXPECT_FLOAT_EQ(table[0], -0.4161468365f);  // cos 2
  EXPECT_FLOAT_EQ(table[3], 0.4794255386f);   // sin 0.5
  const int32_t far = 8;
  const std::vector<float> still = {0.0f, 0.0f};
  ops_->rope_table(table.data(), {&far, 1}, still, 1.0f, {.gain = 0.1f, .interval = 4.0f});
  EXPECT_FLOAT_EQ(table[0], 1.1098612289f);  // 1 + 0.1 ln(1 + floor(9 / 4))
  EXPECT_FLOAT_EQ(table[3], 0.0f);
  table = {0.0f, 1.0f, 1.0f, 0.0f};  // a quarter turn of pair 0
  x = {1.0f, 2.0f, 3.0f, 4.0f};
  ops_->rope(view(x, 4), 1, 4, 0, 4, false, table.data());
  EXPECT_THAT(x, ElementsAre(-3.0f, 2.0f, 1.0f, 4.0f));
  x = {1.0f, 2.0f, 3.0f, 4.0f};
  ops_->rope(view(x, 4), 1, 4, 0, 4, true, table.data());
  EXPECT_THAT(x, ElementsAre(-2.0f, 1.0f, 3.0f, 4.0f));
}

struct Routed {
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

class RouteTest : public OpsTest {
 protected:
  Routed route(std::vector<float> logits, const Routing& r) {
    Routed out{std::vector<int32_t>(static_cast<size_t>(r.top_k)),
               std::vector<float>(static_cast<size_t>(r.top_k))};
    ops_->route(view(logits, r.experts), r, out.ids.data(), out.weights.data());
    return out;
  }
};

TEST_F(RouteTest, MixtralRenormalisesTheSoftmax) {
  const Routed r = route({1.0f, 3.0f, 2.0f, 0.0f}, {.experts = 4, .top_k = 2, .renormalize = true});
  EXPECT_THAT(r.ids, ElementsAre(1, 2));
  EXPECT_THAT(r.weights, Pointwise(FloatNear(1e-6f), {0.7310586f, 0.2689414f}));
}

TEST_F(RouteTest, QwenMoeKeepsTheSoftmax) {
  const Routed r = route({1.0f, 3.0f, 2.0f, 0.0f}, {.experts = 4, .top_k = 2});
  EXPECT_THAT(r.weights, Pointwise(FloatNear(1e-6f), {0.6439143f, 0.2368828f}));
}

TEST_F(RouteTest, GptOssTakesTheSoftmaxOfTheChosen) {
  const Routed r = route({-1.0f, -3.0f, 2.0f, 0.0f},
                         {.score = Routing::Score::kTopkSoftmax, .experts = 4, .top_k = 2});
  EXPECT_THAT(r.ids, ElementsAre(2, 3));
  EXPECT_THAT(r.weights, Pointwise(FloatNear(1e-6f), {0.8807971f, 0.1192029f}));
}

TEST_F(RouteTest, PhiMoeWeighsEachChoiceAmongThoseNearIt) {
  // 2.98 is within 2 % of 3, and 2.9 is within 2 % of neither.
  const Routed r =
      route({1.0f, 3.0f, 2.98f, 2.9f},
            {.score = Routing::Score::kSparsemixer, .experts = 4, .top_k = 2, .tolerance = 0.02f});
  EXPECT_THAT(r.ids, ElementsAre(1, 2));
  EXPECT_THAT(r.weights, Pointwise(FloatNear(1e-6f), {0.5049998f, 1.0f}));
}

TEST_F(RouteTest, TiesGoToTheLowerId) {
  EXPECT_THAT(route({0.0f, 1.0f, 1.0f, 1.0f}, {.experts = 4, .top_k = 2}).ids, ElementsAre(1, 2));
  const Routing groups{.experts = 4, .top_k = 2, .groups = 2, .top_groups = 1};
  EXPECT_THAT(route({0.0f, 1.0f, 1.0f, 0.0f}, groups).ids, ElementsAre(1, 0));
}

TEST_F(RouteTest, DeepSeekV2LimitsGroupsByTheirBest) {
  // Groups {0, 1}, {2, 3}, {4, 5}; the best single scores are in groups 0 and 2.
  const Routing v2{.experts = 6, .top_k = 3, .groups = 3, .top_groups = 2, .scale = 16.0f};
  const Routed r = route({5.0f, 0.0f, 3.0f, 3.5f, 1.0f, 4.0f}, v2);
  EXPECT_THAT(r.ids, ElementsAre(0, 5, 4));
  EXPECT_NEAR(r.weights[0], 9.135555f, 1e-4);
}

TEST_F(RouteTest, DeepSeekV3ChoosesByCorrectedScoresAndWeighsByPlainOnes) {
  const std::vector<float> correction = {0.0f, 0.0f, 0.6f, 0.0f, 0.0f, 0.0f};
  const Routing v3{.score = Routing::Score::kSigmoid,
                   .experts = 6,
                   .top_k = 2,
                   .groups = 3,
                   .top_groups = 1,
                   .group_score_top = 2,
                   .correction = correction.data(),
                   .renormalize = true,
                   .renormalize_eps = 1e-20f,
                   .scale = 2.5f};
  // Sums of the best two: 0.95 + 0.5, 0.5 + 0.6 + 0.5, 0.73 + 0.73.
  const Routed r = route({3.0f, 0.0f, 0.0f, 0.0f, 1.0f, 1.0f}, v3);
  EXPECT_THAT(r.ids, ElementsAre(2, 3));
  EXPECT_THAT(r.weights, Pointwise(FloatNear(1e-6f), {1.25f, 1.25f}));
}

TEST_F(OpsTest, AttentionIsTheSoftmaxOverWhatAQuerySees) {
  const int64_t context = 40, queries = 5;
  const int heads = 4, kv_heads = 2, key_dim = 20, value_dim = 12, window = 18;
  std::vector<float> k = random_floats(context * kv_heads * key_dim, 1);
  std::vector<float> v = random_floats(context * kv_heads * value_dim, 2);
  std::vector<float> q = random_floats(queries * heads * key_dim, 3);
  const std::vector<float> sinks = {0.5f, -1.0f, 2.0f, 0.0f};
  const KvShape shape{KvType::kF32, kv_heads, key_dim, value_dim, false};
  std::vector<float> memory(shape.block_bytes() / sizeof(float) * 5);
  const KvView cache{shape, reinterpret_cast<uint8_t*>(memory.data()), 5};
  const std::vector<int32_t> table = {4, 0, 2}, all = {0, 40}, some = {0, 5}, length = {40};
  ops_->store_kv(cache, view(k, kv_heads * key_dim), view(v, kv_heads * value_dim),
                 {all, length, table.data(), 3});
  for (const bool with_sinks : {false, true}) {
    const AttentionParams params{heads, 0.3f, 4.0f, window, with_sinks ? sinks.data() : nullptr};
    std::vector<float> out(static_cast<size_t>(queries * heads * value_dim));
    ops_->attention(view(out, heads * value_dim), view(q, heads * key_dim), cache,
                    {some, length, table.data(), 3}, params);
    for (int64_t i = 0; i < queries; ++i) {
      for (int h = 0; h < heads; ++h) {
        const int64_t position = context - queries + i;
        double sum = with_sinks ? std::exp(sinks[static_cast<size_t>(h)]) : 0.0;
        std::vector<double> want(value_dim);
        for (int64_t p = position - window + 1; p <= position; ++p) {
          const float* key = view(k, key_dim).row(p * kv_heads + h / 2);
          const float* query = view(q, key_dim).row(i * heads + h);
          const double score = std::inner_product(key, key + key_dim, query, 0.0) * 0.3;
          const double weight = std::exp(4.0 * std::tanh(score / 4.0));
          sum += weight;
          for (int d = 0; d < value_dim; ++d) {
            want[static_cast<size_t>(d)] +=
                weight * view(v, value_dim).row(p * kv_heads + h / 2)[d];
          }
        }
        for (int d = 0; d < value_dim; ++d) {
          ASSERT_NEAR(view(out, value_dim).row(i * heads + h)[d],
                      want[static_cast<size_t>(d)] / sum, 1e-5);
        }
      }
    }
  }
}

TEST_F(OpsTest, MoeIsTheWeightedSumOfItsExperts) {
  const int64_t tokens = 9, hidden = 64, ff = 32, experts = 5;
  const int top_k = 2;
  std::vector<std::vector<float>> gw(experts), dw(experts);
  std::vector<Weight> gate_up, down;
  for (uint32_t e = 0; e < experts; ++e) {
    gate_up.push_back(weight(quant::Format::kF32, 2 * ff, hidden, e, &gw[e]));
    down.push_back(weight(quant::Format::kF32, hidden, ff, 10 + e, &dw[e]));
  }
  std::vector<float> x = random_floats(tokens * hidden, 3);
  const std::vector<float> gate_up_bias = random_floats(experts * 2 * ff, 4);
  const std::vector<float> down_bias = random_floats(experts * hidden, 5);
  std::vector<int32_t> ids;
  std::vector<float> weights;
  for (int t = 0; t < tokens; ++t) {
    ids.insert(ids.end(), {(t * 3 + 2) % 5, t % 2});
    weights.insert(weights.end(), {0.75f, 0.5f});
  }
  for (const bool before : {false, true}) {
    const Experts e{gate_up, down, gate_up_bias.data(), down_bias.data(), {}, before};
    std::vector<float> out(static_cast<size_t>(tokens * hidden), 2.0f);
    ops_->moe(view(out, hidden), view(x, hidden), ids.data(), weights.data(), top_k, e, true);
    for (size_t t = 0; t < static_cast<size_t>(tokens); ++t) {
      std::vector<double> want(static_cast<size_t>(hidden), 2.0);
      for (size_t k = 0; k < 2; ++k) {
        const auto id = static_cast<size_t>(ids[t * 2 + k]);
        const double w = weights[t * 2 + k];
        std::vector<double> h(2 * ff), a(ff);
        for (size_t r = 0; r < h.size(); ++r) {
          h[r] = gate_up_bias[id * 2 * ff + r];
          for (size_t c = 0; c < hidden; ++c) {
            h[r] += gw[id][r * hidden + c] * (before ? w : 1.0) * x[t * hidden + c];
          }
        }
        for (size_t r = 0; r < a.size(); ++r) a[r] = h[r] / (1.0 + std::exp(-h[r])) * h[r + ff];
        for (size_t r = 0; r < want.size(); ++r) {
          double sum = down_bias[id * hidden + r];
          for (size_t c = 0; c < ff; ++c) sum += dw[id][r * ff + c] * a[c];
          want[r] += (before ? 1.0 : w) * sum;
        }
      }
      for (size_t r = 0; r < want.size(); ++r) {
        ASSERT_NEAR(out[t * hidden + r], want[r], 1e-3 * (1.0 + std::abs(want[r])));
      }
    }
    // A token on its own gets the same bits.
    std::vector<float> alone(static_cast<size_t>(hidden), 2.0f);
    ops_->moe(view(alone, hidden), view(x, hidden).slice_rows(4, 1), ids.data() + 8,
              weights.data() + 8, top_k, e, true);
    EXPECT_EQ(0, std::memcmp(alone.data(), out.data() + 4 * hidden, alone.size() * 4));
  }
}

TEST_F(OpsTest, ForcedRowsRunOrFailToPlan) {
  const auto error = [&](const char* forced) {
    return Ops::create(pool_, reference_kernels(), Capabilities{}, {.force_kernels = {forced}})
        .status()
        .message();
  };
  EXPECT_THAT(error("matmul=q4_0.never"), HasSubstr("no such row; known: f32.reference"));
  EXPECT_THAT(error("softmax=fast"), HasSubstr("KIND=NAME"));
  EXPECT_THAT(error("matmul"), HasSubstr("KIND=NAME"));
  EXPECT_EQ(error("matmul=q4_0.reference"), "");
  AttentionKernel wide = reference_kernels().attention[0];
  wide.name = "attention.wide";
  wide.isa = CpuIsa::kAvx512;
  const KernelTable table{"test", {}, {}, {&wide, 1}, {}};
  const Capabilities avx2{.isa = CpuIsa::kAvx2};
  const auto failed =
      Ops::create(pool_, table, avx2, {.force_kernels = {"attention=attention.wide"}});
  EXPECT_THAT(failed.status().message(), HasSubstr("it needs avx512, this processor offers avx2"));
  const KvShape shape{KvType::kF16, 1, 8, 8, false};
  const auto row = [&](CpuIsa isa, const OpsOptions& o) {
    return std::string((*Ops::create(pool_, table, {.isa = isa}, o))->attention_row(shape));
  };
  EXPECT_EQ(row(CpuIsa::kAvx512, {}), "attention.wide");
  EXPECT_EQ(row(CpuIsa::kAvx2, {}), "attention.reference");
  EXPECT_EQ(row(CpuIsa::kAvx512, {.reference = true}), "attention.reference");
}

TEST_F(OpsTest, PackRefusesRowsThatAreNotWholeBlocks) {
  const std::vector<uint8_t> row(1000);
  const uint8_t* rows[] = {row.data()};
  EXPECT_THAT(ops_->pack(quant::Format::kQ4_0, rows, 40).status().message(),
              HasSubstr("q4_0 matrix cannot be [1, 40]"));
  EXPECT_FALSE(ops_->pack(quant::Format::kQ4_0, {}, 32).ok());
}

TEST_F(OpsTest, WrongShapesAreNamedInFull) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  std::vector<float> w;
  const Weight packed = weight(quant::Format::kQ8_0, 16, 64, 1, &w);
  std::vector<float> x(32), out(16);
  const Product p{&packed, view(out, 16)};
  EXPECT_DEATH(ops_->matmul(view(x, 32), {&p, 1}), "K=64 N=16 format=q8_0.*x \\[1, 32\\]");
}

TEST(KernelTable, NamesOfInstructionSets) {
  for (const char* name : {"scalar", "avx2", "avxvnni", "avx512", "avx512vnni", "amx"}) {
    EXPECT_EQ(name_of(*isa_by_name(name)), name);
  }
  EXPECT_FALSE(isa_by_name("sse9").ok());
  EXPECT_TRUE(Capabilities{.isa = CpuIsa::kAmx}.has(CpuIsa::kAvx512));
  EXPECT_FALSE(Capabilities{.isa = CpuIsa::kAmx}.has(CpuIsa::kAvxVnni));
  EXPECT_FALSE(Capabilities{.isa = CpuIsa::kAvx2}.has(CpuIsa::kAvx512));
  EXPECT_EQ(*kv_type_by_name("bf16"), KvType::kBF16);
  EXPECT_EQ(*kv_type_by_name("fp8"), KvType::kFP8);
  EXPECT_EQ(*kv_type_by_name("int8"), KvType::kInt8);
  EXPECT_FALSE(kv_type_by_name("q8").ok());
  EXPECT_EQ((KvShape{KvType::kF16, 2, 24, 24, false}.block_bytes()), 16u * 2 * 48 * 2);
  EXPECT_EQ((KvShape{KvType::kBF16, 1, 40, 32, true}.block_bytes()), 16u * 40 * 2);
  EXPECT_EQ((KvShape{KvType::kFP8, 2, 24, 16, false}.block_bytes()), 16u * 2 * 40);
  EXPECT_EQ((KvShape{KvType::kInt8, 2, 64, 32, false}.block_bytes()), 16u * 2 * (96 + 3 * 2));
  EXPECT_EQ((KvShape{KvType::kInt8, 1, 40, 32, true}.block_bytes()), 16u * (40 + 2 * 2));
}

TEST(KvTypes, ScalesOfInt8) {
  const auto of = [](float largest) { return int8_scale(std::bit_cast<uint32_t>(largest)); };
  EXPECT_EQ(f16_to_f32(of(254.0f).bits), 2.0f);
  EXPECT_EQ(of(254.0f).to_code, 0.5f);
  EXPECT_EQ(of(0.0f).bits, 0);
  EXPECT_EQ(of(0.0f).to_code, 0.0f);
  EXPECT_EQ(of(1e-30f).to_code, 0.0f);
  EXPECT_EQ(f16_to_f32(of(3e38f).bits), 65504.0f);
  EXPECT_EQ(of(std::numeric_limits<float>::infinity()).bits, of(3e38f).bits);
  EXPECT_TRUE(std::isnan(f16_to_f32(of(std::numeric_limits<float>::quiet_NaN()).bits)));
}

}  // namespace
}  // namespace freshet::ops

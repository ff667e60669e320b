// Layers of any branches: one alone, three, side by side. The architectures' own layers are tested
// against transformers by tests/golden_test.cc.
#include "layers/decoder.h"

#include <cmath>
#include <cstring>
#include <set>

#include <gtest/gtest.h>

#include "ops/kernel_table.h"

namespace freshet {
namespace {

constexpr int kVocab = 48, kHidden = 32, kTokens = 40, kContext = 64;

// Numbers of a matrix, kept for plain computations.
using Numbers = std::vector<float>;

class BranchTest : public ::testing::Test {
 protected:
  BranchTest() {
    auto ops = ops::Ops::create(pool_, ops::reference_kernels(), {}, {.reference = true});
    FRESHET_CHECK(ops.ok());
    ops_ = std::move(*ops);
  }

  static ModelSpec spec_of(std::vector<LayerSpec> layers) {
    ModelSpec spec;
    spec.vocab_size = kVocab;
    spec.hidden_size = spec.embedding_size = kHidden;
    spec.layers = std::move(layers);
    spec.ropes = {RopeSpec{.rotary_dim = 8}};
    spec.max_context = kContext;
    spec.tied_embeddings = true;
    spec.final_norm = NormSpec{.weight = false};
    EXPECT_TRUE(validate(spec).ok()) << validate(spec).message();
    return spec;
  }
  static BranchSpec attention(int window, std::optional<NormSpec> in = NormSpec{.weight = false}) {
    AttentionSpec a;
    a.heads = 4;
    a.kv_heads = 2;
    a.head_dim = a.value_dim = 8;
    a.window = window;
    a.rope = 0;
    a.scale = 0.35f;
    return {{.in = in}, a};
  }
  static BranchSpec mlp(std::optional<NormSpec> in = NormSpec{.weight = false}) {
    return {{.in = in}, MlpSpec{.gated = false, .ff = 24}};
  }

  // Weights in the order of the branches: models with the same branches have the same weights, in
  // whatever layers the branches are.
  std::unique_ptr<Decoder> model(const std::vector<LayerSpec>& layers) {
    state_ = 1;
    numbers_.clear();
    ModelSpec spec = spec_of(layers);
    ModelWeights w;
    w.embedding = matrix(kVocab, kHidden, 2.0f, ops::Use::kTable);
    for (const LayerSpec& layer : spec.layers) {
      LayerWeights& out = w.layers.emplace_back();
      for (const BranchSpec& branch : layer.branches) {
        BranchWeights& b = out.branches.emplace_back();
        if (std::holds_alternative<AttentionSpec>(branch.body)) {
          auto& a = b.body.emplace<AttentionWeights>();
          a.q.weight = matrix(32, kHidden, 0.4f);
          a.k.weight = matrix(16, kHidden, 0.4f);
          a.v.weight = matrix(16, kHidden, 0.4f);
          a.out.weight = matrix(kHidden, 32, 0.4f);
        } else {
          auto& m = b.body.emplace<MlpWeights>();
          m.up.weight = matrix(24, kHidden, 0.4f);
          m.down.weight = matrix(kHidden, 24, 0.4f);
        }
      }
    }
    auto decoder = std::make_unique<Decoder>(std::move(spec), std::move(w),
                                             std::vector<Model::WeightInfo>(), *ops_);
    EXPECT_TRUE(decoder->reserve(kTokens, kTokens, kContext).ok());
    return decoder;
  }

  ops::Weight matrix(int rows, int cols, float range, ops::Use use = ops::Use::kProducts) {
    Numbers& v = numbers_.emplace_back(static_cast<size_t>(rows * cols));
    for (float& x : v) {
      state_ = state_ * 6364136223846793005u + 1442695040888963407u;
      x = range * (static_cast<float>(state_ >> 40) / float{1 << 24} - 0.5f);
    }
    std::vector<const uint8_t*> pointers;
    for (int r = 0; r < rows; ++r) {
      pointers.push_back(reinterpret_cast<const uint8_t*>(v.data() + r * cols));
    }
    auto packed = ops_->pack(quant::Format::kF32, pointers, cols, ops::Ops::kNoLook, use);
    FRESHET_CHECK(packed.ok());
    return std::move(*packed);
  }

  static KvStorage cache_of(const Decoder& model) {
    const KvCacheSpec spec = kv_cache_spec(model.spec(), ops::KvType::kF32);
    auto cache = KvStorage::allocate(spec, std::vector<int32_t>(spec.groups.size(), 4));
    FRESHET_CHECK(cache.ok());
    return std::move(*cache);
  }

  static int32_t id_of(int position) { return position * 7919 % kVocab; }

  // Logits of tokens [first, end) of one sequence whose earlier ones are in the cache: of all, or
  // of the last alone.
  static Numbers forward(Decoder& model, const KvStorage& cache, int first, int end, bool all) {
    ForwardBatch batch;
    for (int p = first; p < end; ++p) {
      batch.token_ids.push_back(id_of(p));
      batch.positions.push_back(p);
      if (all || p + 1 == end) batch.logit_rows.push_back(p - first);
    }
    batch.query_start = {0, end - first};
    batch.context_len = {end};
    batch.tables.assign(cache.spec().groups.size(), {{2, 0, 3, 1}, 4});
    Numbers logits(batch.logit_rows.size() * kVocab);
    model.forward(batch, cache, {logits.data()});
    return logits;
  }

  static void expect_same_bits(const Numbers& got, const Numbers& want) {
    ASSERT_EQ(got.size(), want.size());
    EXPECT_EQ(std::memcmp(got.data(), want.data(), got.size() * sizeof(float)), 0);
  }

  // Rows that need no logits are dropped on the way, and prompts are cut: neither changes a bit.
  void expect_rows_do_not_matter(const std::vector<LayerSpec>& layers) {
    const auto decoder = model(layers);
    const Numbers all = forward(*decoder, cache_of(*decoder), 0, kTokens, true);
    const Numbers want(all.end() - kVocab, all.end());
    expect_same_bits(forward(*decoder, cache_of(*decoder), 0, kTokens, false), want);
    const KvStorage cache = cache_of(*decoder);
    (void)forward(*decoder, cache, 0, 17, false);
    expect_same_bits(forward(*decoder, cache, 17, kTokens, false), want);
  }

  ThreadPool pool_{2, false};
  std::unique_ptr<ops::Ops> ops_;
  std::vector<Numbers> numbers_;
  uint64_t state_ = 1;
};

// x = x / sqrt(mean square), in double.
std::vector<double> normed(const std::vector<double>& x) {
  double squares = 0.0;
  for (const double v : x) squares += v * v;
  std::vector<double> out = x;
  for (double& v : out) v /= std::sqrt(squares / static_cast<double>(x.size()) + 1e-6);
  return out;
}

std::vector<double> times(const Numbers& w, const std::vector<double>& x) {
  std::vector<double> out(w.size() / x.size(), 0.0);
  for (size_t r = 0; r < out.size(); ++r) {
    for (size_t c = 0; c < x.size(); ++c) out[r] += double{w[r * x.size() + c]} * x[c];
  }
  return out;
}

TEST_F(BranchTest, LayersOfAnMlpAloneAreWhatTheyCompute) {
  const auto decoder = model({{{mlp()}}, {{mlp()}}});
  EXPECT_TRUE(kv_cache_spec(decoder->spec(), ops::KvType::kF32).groups.empty());
  const KvStorage cache = cache_of(*decoder);
  for (const bool all : {true, false}) {
    const Numbers logits = forward(*decoder, cache, 0, 5, all);
    for (int p = all ? 0 : 4; p < 5; ++p) {
      const auto row = numbers_[0].begin() + id_of(p) * kHidden;
      std::vector<double> x(row, row + kHidden);
      for (size_t layer = 0; layer < 2; ++layer) {
        std::vector<double> up = times(numbers_[1 + 2 * layer], normed(x));
        for (double& v : up) v /= 1.0 + std::exp(-v);
        const std::vector<double> down = times(numbers_[2 + 2 * layer], up);
        for (size_t i = 0; i < x.size(); ++i) x[i] += down[i];
      }
      const std::vector<double> want = times(numbers_[0], normed(x));
      const size_t first = all ? static_cast<size_t>(p) * kVocab : 0;
      for (size_t i = 0; i < kVocab; ++i) EXPECT_NEAR(logits[first + i], want[i], 1e-4);
    }
  }
}

TEST_F(BranchTest, ThreeBranchesAreThreeLayersOfOne) {
  const auto together = model({{{attention(0), attention(16), mlp()}}, {{mlp()}}});
  const auto apart = model({{{attention(0)}}, {{attention(16)}}, {{mlp()}}, {{mlp()}}});
  for (const bool all : {true, false}) {
    expect_same_bits(forward(*together, cache_of(*together), 0, kTokens, all),
                     forward(*apart, cache_of(*apart), 0, kTokens, all));
  }
}

TEST_F(BranchTest, RowsWithoutLogitsChangeNoBit) {
  expect_rows_do_not_matter({{{attention(0), mlp()}}, {{mlp()}}, {{mlp()}}});
  expect_rows_do_not_matter({{{mlp()}}, {{mlp(), attention(0), attention(16), mlp()}}});
  expect_rows_do_not_matter({{{attention(16)}}, {{attention(0)}}});
}

TEST_F(BranchTest, ParallelBranchesReadTheLayersInput) {
  const auto parallel = [](std::vector<BranchSpec> branches) {
    return LayerSpec{std::move(branches), true};
  };
  expect_rows_do_not_matter({{{mlp()}}, parallel({attention(0), mlp(std::nullopt)})});
  expect_rows_do_not_matter({parallel({attention(0), attention(16, std::nullopt), mlp()})});
  expect_rows_do_not_matter({parallel({mlp(), attention(16, std::nullopt), attention(0)})});
  // Sharing the norm in front is having the same one; reading the input is not reading the sum.
  const auto logits = [&](const LayerSpec& layer) {
    const auto decoder = model({layer});
    return forward(*decoder, cache_of(*decoder), 0, kTokens, true);
  };
  const Numbers shared = logits(parallel({attention(0), mlp(std::nullopt)}));
  expect_same_bits(logits(parallel({attention(0), mlp()})), shared);
  EXPECT_NE(logits({{attention(0), mlp()}}), shared);
}

TEST(BranchKinds, SayAllThatTheirUsersAsk) {
  std::set<std::string_view> names;
  for (const BranchKind* kind : branch_kinds()) {
    EXPECT_TRUE(names.insert(kind->name).second) << kind->name;
    const bool writes = kind->store != nullptr || kind->write_cross != nullptr;
    if (writes) EXPECT_NE(kind->cache, nullptr) << kind->name;
    EXPECT_EQ(kind->store != nullptr, kind->stored_outputs != nullptr) << kind->name;
  }
  EXPECT_EQ(names.size(), std::variant_size_v<BranchBody>);
}

}  // namespace
}  // namespace freshet

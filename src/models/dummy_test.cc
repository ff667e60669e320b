#include "models/dummy.h"

#include <cmath>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "ops/kernel_table.h"

namespace freshet::models {
namespace {

constexpr int kTokens = 16, kLayers = 24, kExperts = 64, kChosen = 4, kFf = 48, kHidden = 256;

// The weights of experts, of all layers, that somebody asked products of.
std::set<const ops::Weight*> g_experts;

void run_noted(const ops::MatmulArgs& args, const uint8_t* act, int64_t act_row_bytes,
               int64_t first, int64_t last) {
  if (args.weight->rows == 2 * kFf && args.weight->cols == kHidden) g_experts.insert(args.weight);
  for (const ops::MatmulKernel& k : ops::reference_kernels().matmul)
    if (k.format == args.weight->format) return k.run(args, act, act_row_bytes, first, last);
}

ModelSpec sparse_model() {
  AttentionSpec attention;
  attention.heads = attention.kv_heads = 4;
  attention.head_dim = attention.value_dim = 32;
  MoeSpec moe;
  moe.routing.experts = kExperts;
  moe.routing.top_k = kChosen;
  moe.expert_ff = kFf;
  const BranchNorms norms{.in = NormSpec{}};
  ModelSpec spec;
  spec.vocab_size = 4000;
  spec.hidden_size = spec.embedding_size = kHidden;
  spec.layers.assign(kLayers, {{{norms, attention}, {norms, moe}}});
  spec.max_context = 64;
  spec.final_norm = NormSpec{};
  return spec;
}

// How many experts of all layers kTokens tokens choose, if logits of these rows are wanted.
double experts_chosen(std::vector<int32_t> logit_rows) {
  std::vector<ops::MatmulKernel> rows(ops::reference_kernels().matmul.begin(),
                                      ops::reference_kernels().matmul.end());
  for (ops::MatmulKernel& row : rows) row.run = run_noted;
  ops::KernelTable kernels = ops::reference_kernels();
  kernels.matmul = rows;
  ThreadPool pool(1, false);
  auto ops = ops::Ops::create(pool, kernels, ops::Capabilities{}, {});
  EXPECT_TRUE(ops.ok());
  auto model = dummy_model(sparse_model(), [](auto...) { return quant::Format::kBF16; }, **ops);
  EXPECT_TRUE(model.ok()) << model.status().message();
  const KvCacheSpec cache_spec = kv_cache_spec((*model)->spec(), ops::KvType::kF32);
  auto cache = KvStorage::allocate(cache_spec, {1});
  EXPECT_TRUE(cache.ok() && (*model)->reserve(kTokens, kTokens, kTokens).ok());

  ForwardBatch batch{{}, {}, {}, {0, kTokens}, {kTokens}, {{{0}, 1}}, std::move(logit_rows)};
  for (int t = 0; t < kTokens; ++t) {
    batch.token_ids.push_back(t * 7919 % 4000);
    batch.positions.push_back(t);
  }
  std::vector<float> logits(size_t{4000} * kTokens);
  g_experts.clear();
  (*model)->forward(batch, *cache, {logits.data()});
  return static_cast<double>(g_experts.size());
}

std::vector<int32_t> all_rows() {
  std::vector<int32_t> rows(kTokens);
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

// Of a layer.
double experts_if_drawn() {
  return kExperts * (1.0 - std::pow(1.0 - double{kChosen} / kExperts, kTokens));
}

TEST(Dummy, TokensChooseExpertsAsEvenlyAsIfDrawn) {
  // Drawn, a layer's number has a standard deviation below 2.5 (as it would be if a token's own
  // choices could meet), so that a mean of layers is off by four times 2.5 / sqrt(kLayers) in fewer
  // than one of 10,000 draws.
  EXPECT_NEAR(experts_chosen(all_rows()) / kLayers, experts_if_drawn(), 10.0 / std::sqrt(kLayers));
}

TEST(Dummy, InTheLastLayerOnlyTokensWhoseLogitsAreWantedChoose) {
  const double all = experts_chosen(all_rows());
  EXPECT_NEAR(all - experts_chosen({kTokens - 1}), experts_if_drawn() - kChosen, 10.0);
  EXPECT_NEAR(all - experts_chosen({}), experts_if_drawn(), 10.0);
}

TEST(Dummy, MatricesHaveTheFormatsAskedFor) {
  ThreadPool pool(1, false);
  auto ops = ops::Ops::create(pool, ops::reference_kernels(), ops::Capabilities{}, {});
  ASSERT_TRUE(ops.ok());
  ModelSpec spec = sparse_model();
  for (LayerSpec& layer : spec.layers) {
    layer.branches[1].body = MlpSpec{.ff = 256};
  }
  auto model = dummy_model(
      spec,
      [](Role role, int layer, int64_t, bool head) {
        if (head) return quant::Format::kQ6_K;
        return role == Role::kDown && layer == 3 ? quant::Format::kQ8_0 : quant::Format::kQ4_0;
      },
      **ops);
  ASSERT_TRUE(model.ok()) << model.status().message();
  int eights = 0, sixes = 0;
  for (const Model::WeightInfo& w : (*model)->weights()) {
    eights += w.format == quant::Format::kQ8_0;
    sixes += w.format == quant::Format::kQ6_K;
    if (w.format == quant::Format::kQ8_0) {
      EXPECT_EQ(w.name, "mlp.down");
    }
    if (w.format == quant::Format::kQ6_K) {
      EXPECT_EQ(w.name, "head");
    }
  }
  EXPECT_EQ(eights, 1);
  EXPECT_EQ(sixes, 1);
}

}  // namespace
}  // namespace freshet::models

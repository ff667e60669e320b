// The launches of a CudaDevice for golden models, recorded by a fake plug-in: checks which
// operations share a kernel, and that nothing is encoded separately if the previous operation could
// have written it in the GEMM's input form. Needs no GPU.
#include <map>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "backend/cuda/device.h"
#include "tests/fake_cuda_plugin.h"
#include "tests/golden_cases.h"

namespace freshet::testing {
namespace {

using cuda::testing::FakeKernels;
using cuda::testing::FakePlugin;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

std::string name_of(const std::string& launch) {
  return launch.substr(0, launch.find(' '));
}

// The launches of one step, split by layer: [0] is everything before the first layer. Every layer
// starts with a norm of the whole residual stream.
class Launches : public ::testing::Test {
 protected:
  std::unique_ptr<Runner> open(const std::string& name, const FakeKernels& kernels,
                               ops::ProjectionHooks* hooks = nullptr,
                               std::vector<int> captures = {}) {
    FakePlugin::kernels = kernels;
    auto device = cuda::CudaDevice::open(FakePlugin::api(), 0, {});
    EXPECT_TRUE(device.ok());
    Runner::Options options;
    options.kv = ops::KvType::kF16;
    options.max_tokens = 256;
    options.context = 128;
    options.hooks = hooks;
    options.captures = std::move(captures);
    auto runner = Runner::open(directory() + name, options, std::move(*device));
    EXPECT_TRUE(runner.ok()) << runner.status().message();
    return runner.ok() ? std::move(*runner) : nullptr;
  }

  // One step with `tokens` tokens of one sequence; logits are wanted for all of them.
  static std::vector<std::string> step(Runner& runner, int tokens) {
    FakePlugin::log.clear();
    runner.run({Ids(static_cast<size_t>(tokens), 5)}, 0);
    return FakePlugin::log;
  }
  std::vector<std::string> names(const std::string& model, int tokens,
                                 const FakeKernels& kernels = {},
                                 ops::ProjectionHooks* hooks = nullptr) {
    const auto runner = open(model, kernels, hooks);
    lines = step(*runner, tokens);
    layers = static_cast<int>(runner->model().spec().layers.size());
    std::vector<std::string> all;
    for (const std::string& line : lines) all.push_back(name_of(line));
    return all;
  }
  // The launches of the first layer; checks that all layers are alike.
  std::vector<std::string> first_layer(const std::vector<std::string>& all,
                                       size_t before = 2) const {
    const size_t behind = 2;  // norm and GEMM of the output head
    const size_t each = (all.size() - before - behind) / static_cast<size_t>(layers);
    EXPECT_EQ(each * static_cast<size_t>(layers) + before + behind, all.size());
    const auto first = all.begin() + static_cast<int64_t>(before);
    return {first, first + static_cast<int64_t>(each)};
  }

  std::vector<std::string> lines;
  int layers = 0;
};

TEST_F(Launches, HeadsJoinAttentionAndGateAndUpEndInSwiGlu) {
  for (const char* model : {"llama", "qwen2", "qwen3", "phi3", "mistral-swa"}) {
    SCOPED_TRACE(model);
    EXPECT_THAT(first_layer(names(model, 5)),
                ElementsAre("norm", "products", "attention", "products", "norm", "gated_products",
                            "products"));
    // Norms write only the GEMMs' input form, and so does attention.
    EXPECT_THAT(lines[2], HasSubstr("norm -["));
    EXPECT_THAT(lines[4], HasSubstr("only1 before heads"));
  }
}

TEST_F(Launches, OutputProjectionsPrefetchGateAndUp) {
  names("llama", 1);
  EXPECT_THAT(lines[5], HasSubstr(" next w"));
  for (const size_t other : {3, 8}) EXPECT_THAT(lines[other], Not(HasSubstr(" next w")));
}

TEST_F(Launches, WithoutFittingKernelsTheGluWritesTheFormOfDown) {
  const FakeKernels none{false, false, false, 0};
  EXPECT_THAT(first_layer(names("llama", 5, none)),
              ElementsAre("norm", "products", "attention", "products", "norm", "products", "glu",
                          "products"));
  EXPECT_THAT(lines[8], HasSubstr("glu -["));
}

TEST_F(Launches, ParallelBranchesShareOneInput) {
  EXPECT_THAT(
      first_layer(names("cohere", 5)),
      ElementsAre("norm", "products", "attention", "products", "gated_products", "products"));
}

TEST_F(Launches, NormRouterAndRoutesAreOneKernelOfFewTokens) {
  EXPECT_THAT(first_layer(names("mixtral", 5)),
              ElementsAre("norm", "products", "attention", "products", "route_one", "few_experts"));
  EXPECT_THAT(first_layer(names("mixtral", 20)),
              ElementsAre("norm", "products", "attention", "products", "route_one", "group",
                          "experts", "combine"));
  EXPECT_THAT(first_layer(names("mixtral", 50)),
              ElementsAre("norm", "products", "attention", "products", "norm", "router", "experts",
                          "combine"));
  FakeKernels apart;
  apart.route_one = false;
  EXPECT_THAT(
      first_layer(names("mixtral", 5, apart)),
      ElementsAre("norm", "products", "attention", "products", "norm", "products", "few_experts"));
  EXPECT_THAT(lines.back(), HasSubstr("products"));
}

TEST_F(Launches, SharedExpertsReadWhatTheNormWrote) {
  const std::vector<std::string> all = names("qwen2-moe", 5);
  EXPECT_THAT(first_layer(all), ElementsAre("norm", "products", "attention", "products", "norm",
                                            "products", "few_experts", "gated_products", "products",
                                            "products", "sigmoid_gate", "add"));
}

TEST_F(Launches, LatentAttentionWritesTheFormThatValuesRead) {
  // Its heads are too narrow here to be slices of one encoded matrix, so each is encoded
  // separately.
  const std::vector<std::string> all = names("deepseek-v2", 5);
  EXPECT_EQ(std::count(all.begin(), all.end(), "attention"), layers);
  EXPECT_EQ(std::count(all.begin(), all.end(), "heads"), 2 * layers) << "queries, and latents";
}

// Repeated steps are captured as graphs, but not while hooks are set; the hooks then see each
// projection.
TEST_F(Launches, HooksSeeProjectionsOneByOne) {
  class Counter : public ops::ProjectionHooks {
   public:
    void before(const ops::Weight& w, const Matrix& /*x*/) override { before_.insert(w.id); }
    void after(const ops::Product& p, const Matrix& /*x*/) override {
      EXPECT_TRUE(before_.contains(p.weight->id));
      EXPECT_FALSE(p.add);
      ++after_;
    }
    std::multiset<int32_t> before_;
    int after_ = 0;
  };
  Counter counter;
  const std::vector<std::string> all = names("llama", 5, {}, &counter);
  EXPECT_EQ(counter.after_, 7 * layers + 1);
  EXPECT_EQ(std::set<int32_t>(counter.before_.begin(), counter.before_.end()).size(),
            counter.before_.size());
  EXPECT_EQ(std::count(all.begin(), all.end(), "products"), 7 * layers + 1);
  EXPECT_EQ(std::count(all.begin(), all.end(), "gated_products"), 0);
  EXPECT_EQ(std::count(all.begin(), all.end(), "glu"), layers);
  EXPECT_EQ(std::count(all.begin(), all.end(), "add"), 2 * layers);
  for (const bool hooked : {false, true}) {
    const auto runner = open("llama", {}, hooked ? &counter : nullptr);
    FakePlugin::log.clear();
    runner->run({{5, 6, 7, 8, 9}}, 1);
    const std::vector<std::string>& log = FakePlugin::log;
    EXPECT_EQ(std::count(log.begin(), log.end(), "graph_begin"), hooked ? 0 : 1);
    EXPECT_EQ(std::count(log.begin(), log.end(), "graph_play"), hooked ? 0 : 4);
  }
}

// A drafter's steps, which return inner states, are captured as graphs like all others.
TEST_F(Launches, StepsThatReturnStatesAreReplayed) {
  const auto runner = open("llama", {}, nullptr, {0, 1});
  FakePlugin::log.clear();
  runner->run({{5, 6, 7, 8, 9}}, 1);
  const std::vector<std::string>& log = FakePlugin::log;
  EXPECT_EQ(std::count(log.begin(), log.end(), "graph_begin"), 1);
  EXPECT_EQ(std::count(log.begin(), log.end(), "graph_play"), 4);
}

// For experts, hooks see only those that have tokens, each with its own tokens.
TEST_F(Launches, HooksSeeEachExpertWithItsTokens) {
  class Counter : public ops::ProjectionHooks {
   public:
    void before(const ops::Weight& w, const Matrix& x) override {
      if (w.use == ops::Use::kExperts) rows[w.id] += x.rows;
    }
    void after(const ops::Product& p, const Matrix& x) override {
      if (p.weight->use != ops::Use::kExperts) return;
      EXPECT_EQ(x.rows, p.out.rows);
      EXPECT_EQ(p.out.cols, p.weight->rows);
      ++calls;
    }
    std::map<int32_t, int64_t> rows;  // by Weight::id
    int calls = 0;
  };
  for (const int tokens : {5, 50}) {
    Counter counter;
    const auto runner = open("mixtral", {}, &counter);
    step(*runner, tokens);
    const ModelSpec& spec = runner->model().spec();
    // Gate-and-up and down of top_k experts, each of which gets every token.
    const int top_k = spec.layers[0].find<MoeSpec>()->routing.top_k;
    const auto experts = static_cast<int>(spec.layers.size()) * top_k;
    EXPECT_EQ(counter.calls, 2 * experts);
    EXPECT_EQ(std::ssize(counter.rows), 2 * experts);
    for (const auto& [id, rows] : counter.rows) EXPECT_EQ(rows, tokens) << id;
  }
}

}  // namespace
}  // namespace freshet::testing

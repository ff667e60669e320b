// What a drafter keeps of one owner's text is not used for another owner's.
#include "speculative/model_drafter.h"

#include <numeric>

#include <gtest/gtest.h>

#include "speculative/registry.h"

namespace freshet::speculative {
namespace {

// A language model that counts what it is given, and always continues with the token 1.
class CountingModel final : public Model {
 public:
  CountingModel(ModelSpec spec, int64_t& tokens) : spec_(std::move(spec)), tokens_(tokens) {}
  const ModelSpec& spec() const override { return spec_; }
  size_t workspace_bytes(int64_t, int64_t, int64_t) const override { return 0; }
  Status reserve(int64_t, int64_t, int64_t) override { return {}; }
  std::vector<WeightInfo> weights() const override { return {}; }
  void forward(const ForwardBatch& batch, const KvStorage&, const StepResults& results) override {
    tokens_ += batch.tokens();
    for (size_t row = 0; row < batch.logit_rows.size(); ++row) results.best[row] = 1;
  }

 private:
  ModelSpec spec_;
  int64_t& tokens_;
};

// A model that drafts in one pass: the row of position p gives the token p.
class PositionModel final : public Model {
 public:
  explicit PositionModel(ModelSpec spec, std::vector<int32_t>& seen)
      : spec_(std::move(spec)), seen_(seen) {}
  const ModelSpec& spec() const override { return spec_; }
  size_t workspace_bytes(int64_t, int64_t, int64_t) const override { return 0; }
  Status reserve(int64_t, int64_t, int64_t) override { return {}; }
  std::vector<WeightInfo> weights() const override { return {}; }
  void forward(const ForwardBatch& batch, const KvStorage&, const StepResults& results) override {
    seen_.insert(seen_.end(), batch.token_ids.begin(), batch.token_ids.end());
    for (size_t row = 0; row < batch.logit_rows.size(); ++row)
      results.best[row] = batch.positions[static_cast<size_t>(batch.logit_rows[row])];
  }

 private:
  ModelSpec spec_;
  std::vector<int32_t>& seen_;
};

Result<ModelSpec> llama_spec() {
  const std::string path = FRESHET_UNPACKED_DATA "/golden/llama";
  FRESHET_ASSIGN_OR_RETURN(const auto checkpoint, loader::Checkpoint::open(path));
  return read_spec(checkpoint);
}

TEST(ModelDrafter, DraftsInOnePassWithMasks) {
  auto spec = llama_spec();
  ASSERT_TRUE(spec.ok()) << spec.status().message();
  auto compute = runtime::Compute::open({.threads = 1});
  ASSERT_TRUE(compute.ok());
  std::vector<int32_t> seen;
  ModelDrafterOptions options{.vocab = spec->vocab_size, .mask = 63};
  auto runner = DraftRunner::create(
      std::make_unique<runtime::LoadedModel>(
          *compute, std::make_unique<PositionModel>(std::move(*spec), seen)),
      {.max_model_len = 64, .max_tokens = 64, .max_rows = 6, .cache_tokens = 256});
  ASSERT_TRUE(runner.ok()) << runner.status().message();
  ModelDrafter drafter(std::move(*runner), std::move(options));
  const SamplingParams greedy{.temperature = 0.0f};
  std::vector<int32_t> tokens = {5, 6, 7, 8, 9};
  const auto propose = [&](std::vector<int> limits) {
    seen.clear();
    std::vector<DraftRequest> r;
    for (size_t i = 0; i < limits.size(); ++i)
      r.push_back({.sequence = i + 1, .tokens = tokens, .limit = limits[i], .params = &greedy});
    drafter.propose(r);
    std::vector<std::vector<int32_t>> drafts;
    for (const DraftRequest& request : r) drafts.push_back(request.draft);
    return drafts;
  };
  using Drafts = std::vector<std::vector<int32_t>>;
  EXPECT_EQ(propose({4}), (Drafts{{4, 5, 6, 7}}));
  EXPECT_EQ(seen, (std::vector<int32_t>{5, 6, 7, 8, 9, 63, 63, 63}));
  // The cache has forgotten the masks: only the new token is read, and its masks.
  tokens.push_back(30);
  EXPECT_EQ(propose({2}), (Drafts{{5, 6}}));
  EXPECT_EQ(seen, (std::vector<int32_t>{30, 63}));
  // Six rows are shared by all sequences.
  tokens.push_back(31);
  EXPECT_EQ(propose({4, 4, 4}), (Drafts{{6, 7, 8, 9}, {6, 7}, {}}));
}

TEST(ModelDrafter, KeepsEachOwnersCacheApart) {
  auto spec = llama_spec();
  ASSERT_TRUE(spec.ok()) << spec.status().message();
  auto compute = runtime::Compute::open({.threads = 1});
  ASSERT_TRUE(compute.ok());
  int64_t run = 0;
  const DraftRunnerLimits limits{
      .max_model_len = 128, .max_tokens = 128, .max_rows = 4, .cache_tokens = 1024};
  const int64_t vocab = spec->vocab_size;
  auto runner =
      DraftRunner::create(std::make_unique<runtime::LoadedModel>(
                              *compute, std::make_unique<CountingModel>(std::move(*spec), run)),
                          limits);
  ASSERT_TRUE(runner.ok()) << runner.status().message();
  ModelDrafterOptions options;
  options.vocab = vocab;
  ModelDrafter drafter(std::move(*runner), std::move(options));

  const SamplingParams greedy{.temperature = 0.0f};
  std::vector<int32_t> tokens(64);
  std::iota(tokens.begin(), tokens.end(), 3);
  const auto rows_for = [&](uint64_t sequence, uint64_t owner) {
    DraftRequest r{
        .sequence = sequence, .tokens = tokens, .limit = 1, .params = &greedy, .owner = owner};
    run = 0;
    drafter.propose({&r, 1});
    EXPECT_EQ(r.draft, std::vector<int32_t>{1});
    return run;
  };
  EXPECT_EQ(rows_for(1, 7), 64);
  EXPECT_LT(rows_for(2, 7), 17);  // the prefix is in the cache
  EXPECT_EQ(rows_for(3, 8), 64);
}

// While nothing is drafted a head does not run the rows of plain steps, and drafts again when
// asked.
TEST(ModelDrafter, AHeadSleepsWhileNothingIsDrafted) {
  auto spec = llama_spec();
  ASSERT_TRUE(spec.ok()) << spec.status().message();
  auto compute = runtime::Compute::open({.threads = 1});
  ASSERT_TRUE(compute.ok());
  int64_t run = 0;
  const int64_t vocab = spec->vocab_size;
  const auto hidden = static_cast<size_t>(spec->hidden_size);
  spec->features = FeatureSpec{.width = spec->hidden_size};
  auto runner = DraftRunner::create(
      std::make_unique<runtime::LoadedModel>(
          *compute, std::make_unique<CountingModel>(std::move(*spec), run)),
      {.max_model_len = 1024, .max_tokens = 128, .max_rows = 4, .cache_tokens = 2048});
  ASSERT_TRUE(runner.ok()) << runner.status().message();
  ModelDrafterOptions options;
  options.vocab = vocab;
  options.needs.last = true;
  ModelDrafter drafter(std::move(*runner), std::move(options));

  const SamplingParams greedy{.temperature = 0.0f};
  const std::vector<float> states(100 * hidden, 0.5f);
  std::vector<int32_t> tokens(101);
  std::iota(tokens.begin(), tokens.end(), 3);
  const auto observe = [&](int32_t first, int32_t count) {
    const TargetRows rows{
        .sequence = 1, .tokens = tokens, .first = first, .count = count, .last = states.data()};
    drafter.observe({&rows, 1});
  };
  const auto propose = [&] {
    DraftRequest r{.sequence = 1, .tokens = tokens, .limit = 1, .params = &greedy};
    drafter.propose({&r, 1});
    return r.draft;
  };
  observe(0, 100);
  EXPECT_EQ(run, 99);  // a prompt is run at once
  EXPECT_EQ(propose(), std::vector<int32_t>{1});
  run = 0;
  for (int i = 0; i < 500; ++i) {
    tokens.push_back(i % 50);
    observe(static_cast<int32_t>(tokens.size()) - 2, 1);
  }
  EXPECT_LE(run, 64);  // those of the first steps
  run = 0;
  EXPECT_EQ(propose(), std::vector<int32_t>());  // wakes it
  tokens.push_back(7);
  observe(static_cast<int32_t>(tokens.size()) - 2, 1);
  EXPECT_EQ(propose(), std::vector<int32_t>{1});
  EXPECT_EQ(run, 1);
}

}  // namespace
}  // namespace freshet::speculative

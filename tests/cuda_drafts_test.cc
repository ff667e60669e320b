// Drafts on a GPU: rounds that are enqueued without waiting for the host give the tokens of rounds
// that are run one by one. Skipped without a GPU.
#include <gtest/gtest.h>

#include "models/dummy_head.h"
#include "runtime/compute.h"
#include "runtime/loaded_model.h"
#include "speculative/draft_runner.h"

namespace freshet::speculative {
namespace {

constexpr int kRounds = 5;
const DraftRunnerLimits kLimits{
    .max_model_len = 256, .max_tokens = 64, .max_rows = 4, .cache_tokens = 1024};

struct Input {
  std::vector<int32_t> ids;
  std::vector<float> features;
  int rounds;
};

// A language model, or an EAGLE-3 head of random weights, and sequences of several lengths.
class CudaDrafts : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    auto opened = runtime::Compute::open({.threads = 1, .device = "auto"});
    ASSERT_TRUE(opened.ok()) << opened.status().message();
    compute_ = *opened;
    if (compute_->ops().device() == nullptr) GTEST_SKIP() << "no GPU here";
    const std::string path = FRESHET_UNPACKED_DATA "/golden/llama";
    const auto checkpoint = loader::Checkpoint::open(path);
    ASSERT_TRUE(checkpoint.ok());
    auto target = load_model(*checkpoint, compute_->ops(), {});
    ASSERT_TRUE(target.ok()) << target.status().message();
    target_ = std::move(*target);
    const bool head = GetParam();
    const int width = 3 * target_->spec().hidden_size;
    std::mt19937 random(7);
    std::uniform_real_distribution<float> number(-1.0f, 1.0f);
    for (const int length : {1, 6, 20}) {
      Input& in = inputs_.emplace_back();
      for (int i = 0; i < length; ++i) in.ids.push_back(3 + i * 5 % 50);
      for (int i = 0; head && i < length * width; ++i) in.features.push_back(number(random));
      in.rounds = kRounds - length % 3;
    }
  }

  std::unique_ptr<DraftRunner> runner() {
    std::unique_ptr<Model> model;
    if (GetParam()) {
      auto head = models::dummy_head(
          json::Value(), *target_, [](auto...) { return quant::Format::kBF16; }, compute_->ops());
      EXPECT_TRUE(head.ok()) << head.status().message();
      model = std::move(head->model);
      target_ids_ = std::move(head->target_ids);
    } else {
      const std::string path = FRESHET_UNPACKED_DATA "/golden/llama";
      const auto checkpoint = loader::Checkpoint::open(path);
      model = std::move(load_model(*checkpoint, compute_->ops(), {})).value();
    }
    auto runner = DraftRunner::create(
        std::make_unique<runtime::LoadedModel>(compute_, std::move(model)), kLimits);
    EXPECT_TRUE(runner.ok()) << runner.status().message();
    EXPECT_TRUE((*runner)->set_id_map(target_ids_).ok());
    return std::move(*runner);
  }
  std::vector<DraftRunner::Work> works(std::vector<DraftSequence>& sequences) const {
    std::vector<DraftRunner::Work> works;
    for (size_t i = 0; i < inputs_.size(); ++i) {
      const Input& in = inputs_[i];
      works.push_back({.sequence = &sequences[i],
                       .ids = in.ids,
                       .features = in.features.empty() ? nullptr : in.features.data(),
                       .wants_token = true});
    }
    return works;
  }

  std::shared_ptr<runtime::Compute> compute_;
  std::unique_ptr<Model> target_;
  std::vector<int32_t> target_ids_;
  std::vector<Input> inputs_;
};

TEST_P(CudaDrafts, AChainIsTheRoundsOneByOne) {
  const std::unique_ptr<DraftRunner> one_by_one = runner(), chained = runner();
  std::vector<DraftSequence> sequences(inputs_.size()), others(inputs_.size());
  std::vector<std::vector<int32_t>> want(inputs_.size());
  std::vector<std::vector<float>> states(inputs_.size()), first(inputs_.size());
  for (int round = 0; round < kRounds; ++round) {
    std::vector<DraftRunner::Work> all = works(sequences), run;
    std::vector<size_t> of;
    std::vector<int32_t> ids(all.size());
    for (size_t i = 0; i < all.size(); ++i) {
      if (inputs_[i].rounds <= round) continue;
      if (round > 0) {
        const auto column = static_cast<size_t>(want[i].back());
        ids[i] = target_ids_.empty() ? want[i].back() : target_ids_[column];
        all[i].ids = std::span(ids).subspan(i, 1);
        all[i].features = GetParam() ? states[i].data() : nullptr;
      }
      run.push_back(all[i]);
      of.push_back(i);
    }
    one_by_one->run(run, round > 0);
    for (size_t k = 0; k < run.size(); ++k) {
      ASSERT_FALSE(run[k].failed);
      want[of[k]].push_back(run[k].token);
      states[of[k]].assign(run[k].state.begin(), run[k].state.end());
      if (round == 0) first[of[k]] = states[of[k]];
    }
  }
  std::vector<DraftRunner::Work> work = works(others);
  std::vector<int> rounds;
  for (const Input& in : inputs_) rounds.push_back(in.rounds);
  ASSERT_TRUE(chained->chains(work, rounds));
  for (int again = 0; again < 3; ++again) {  // the second time recorded, the third time replayed
    EXPECT_EQ(chained->chain(work, rounds), want);
    for (size_t i = 0; i < work.size(); ++i) {
      if (GetParam()) {
        EXPECT_TRUE(std::ranges::equal(work[i].state, first[i]));
      }
      chained->cut(others[i], 0);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Models, CudaDrafts, testing::Bool(), [](const auto& param) {
  return std::string(param.param ? "head" : "language_model");
});

}  // namespace
}  // namespace freshet::speculative

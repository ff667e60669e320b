// Several models on one Compute: each computes what it computes alone.
#include "runtime/loaded_model.h"

#include <array>
#include <cstring>

#include <gtest/gtest.h>

namespace freshet::runtime {
namespace {

constexpr StepLimits kLarge{.tokens = 512, .logit_rows = 4, .context = 512};
constexpr StepLimits kSmall{.tokens = 16, .logit_rows = 2, .context = 64};

std::shared_ptr<Compute> compute(bool reference) {
  ComputeOptions options;
  options.threads = 2;
  options.reference = reference;
  auto opened = Compute::open(options);
  FRESHET_CHECK(opened.ok(), "{}", opened.status().message());
  return *opened;
}

// A golden model with one sequence.
class Sequence {
 public:
  Sequence(std::shared_ptr<Compute> where, const std::string& name, const StepLimits& limits)
      : limits_(limits) {
    LoadOptions options;
    options.model = FRESHET_UNPACKED_DATA "/golden/" + name;
    auto loaded = LoadedModel::load(std::move(where), options);
    FRESHET_CHECK(loaded.ok(), "{}", loaded.status().message());
    model_ = std::move(*loaded);
    FRESHET_CHECK(model_->reserve(limits).ok());
    blocks_ = static_cast<int32_t>(limits.context / ops::kBlockTokens);
    groups_ = kv_cache_spec(model_->spec(), ops::KvType::kF16).groups.size();
    auto cache = model_->make_cache(ops::KvType::kF16, std::vector<int32_t>(groups_, blocks_));
    FRESHET_CHECK(cache.ok());
    cache_ = std::move(*cache);
  }

  // The most tokens that a step may have, then two more one by one; the last token's logits of each
  // step.
  static constexpr int kSteps = 3;
  std::vector<float> step(int number) {
    const auto prompt = static_cast<int>(limits_.tokens) - 8;
    const int first = number == 0 ? 0 : prompt + number - 1;
    const int end = number == 0 ? prompt : first + 1;
    ForwardBatch batch;
    for (int p = first; p < end; ++p) {
      batch.token_ids.push_back(p * 37 % model_->spec().vocab_size);
      batch.positions.push_back(p);
    }
    batch.query_start = {0, end - first};
    batch.context_len = {end};
    batch.logit_rows = {end - first - 1};
    BlockTables table{{}, blocks_};
    for (int32_t b = 0; b < blocks_; ++b) table.ids.push_back(b);
    batch.tables.assign(groups_, table);
    std::vector<float> logits(static_cast<size_t>(model_->spec().vocab_size));
    model_->model().forward(batch, cache_, {logits.data()});
    return logits;
  }

 private:
  StepLimits limits_;
  std::unique_ptr<LoadedModel> model_;
  KvStorage cache_;
  int32_t blocks_ = 0;
  size_t groups_ = 0;
};

class TwoModels : public ::testing::TestWithParam<bool> {};

TEST_P(TwoModels, HaveTheBitsThatTheyHaveAlone) {
  const char* const names[] = {"mixtral", "deepseek-v2"};
  const StepLimits limits[] = {kLarge, kSmall};
  std::array<std::vector<std::vector<float>>, 2> alone;
  for (size_t m = 0; m < 2; ++m) {
    Sequence sequence(compute(GetParam()), names[m], limits[m]);
    for (int s = 0; s < Sequence::kSteps; ++s) alone[m].push_back(sequence.step(s));
  }
  // Whichever is loaded first, and whichever reserves more.
  for (const bool swapped : {false, true}) {
    const auto where = compute(GetParam());
    const size_t first = swapped ? 1 : 0, second = 1 - first;
    Sequence a(where, names[first], limits[first]);
    Sequence b(where, names[second], limits[second]);
    for (size_t s = 0; s < Sequence::kSteps; ++s) {
      EXPECT_EQ(a.step(static_cast<int>(s)), alone[first][s]) << names[first] << ", step " << s;
      EXPECT_EQ(b.step(static_cast<int>(s)), alone[second][s]) << names[second] << ", step " << s;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Paths, TwoModels, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Reference" : "Fast"; });

TEST(Workspace, IsActivationsOfAllAndTheLargestScratch) {
  const auto where = compute(false);
  const auto spec_of = [](const std::string& name) {
    auto checkpoint = loader::Checkpoint::open(FRESHET_UNPACKED_DATA "/golden/" + name);
    FRESHET_CHECK(checkpoint.ok());
    return freshet::read_spec(*checkpoint).value();
  };
  const ModelSpec mixtral = spec_of("mixtral"), llama = spec_of("llama");
  const PlannedModel large{mixtral, kLarge}, small{llama, kSmall};
  const auto bytes = [&](std::initializer_list<PlannedModel> models) {
    return workspace_bytes(*where, {models.begin(), models.size()});
  };
  EXPECT_GT(bytes({large, small}), bytes({large}));
  EXPECT_LT(bytes({large, small}), bytes({large}) + bytes({small}));
  EXPECT_EQ(bytes({large, small}), bytes({small, large}));
  LoadOptions options;
  options.model = FRESHET_UNPACKED_DATA "/golden/mixtral";
  const auto loaded = LoadedModel::load(where, options);
  ASSERT_TRUE(loaded.ok());
  EXPECT_EQ(bytes({large}),
            (*loaded)->model().workspace_bytes(kLarge.tokens, kLarge.logit_rows, kLarge.context));
}

TEST(LoadedModel, RandomWeightsNeedAFormatThatIsWritten) {
  LoadOptions options;
  options.model = FRESHET_UNPACKED_DATA "/golden/llama";
  options.load_format = "dummy:q8_0";
  const auto loaded = LoadedModel::load(compute(false), options);
  ASSERT_TRUE(loaded.ok()) << loaded.status().message();
  EXPECT_GT((*loaded)->weight_bytes(), 0u);
  for (const char* format : {"dummy", "dummy:", "dummy:q9", "random"}) {
    options.load_format = format;
    EXPECT_EQ(LoadedModel::load(compute(false), options).status().code(),
              StatusCode::kInvalidArgument)
        << format;
  }
}

}  // namespace
}  // namespace freshet::runtime

// Rejection sampling on whole models: as many rejections as the distributions of model and drafter
// demand. With FRESHET_EXTRA_DATA also on the trained pair there (models/target and models/draft),
// whose distance is known.
#include <cmath>
#include <filesystem>
#include <future>
#include <string>

#include <gtest/gtest.h>

#include "freshet/engine.h"

#ifndef FRESHET_EXTRA_DATA
#define FRESHET_EXTRA_DATA ""
#endif

namespace freshet {
namespace {

// Lets the model write `requests` times 8 texts.
EngineStats::Speculation write_texts(const EngineOptions& options, int requests, int tokens,
                                     Acceptance method) {
  auto engine = Engine::load(options);
  EXPECT_TRUE(engine.ok()) << engine.status().message();
  if (!engine.ok()) return {};
  for (int i = 0; i < requests; ++i) {
    std::promise<void> done;
    Request r;
    r.prompt = {1, 3 + i % 50, 40 + i % 7};
    r.params.n = 8;
    r.params.max_tokens = tokens;
    r.params.seed = static_cast<uint64_t>(i);
    r.params.ignore_eos = true;
    r.params.rejection_sample_method = method;
    r.on_done = [&](const Usage&) { done.set_value(); };
    EXPECT_TRUE((*engine)->submit(std::move(r)).ok());
    done.get_future().wait();
  }
  return (*engine)->stats().speculation;
}

EngineOptions options_of(const std::string& model, std::string config) {
  EngineOptions o;
  o.model = model;
  o.threads = 2;
  o.max_model_len = 128;
  o.speculative_config = std::move(config);
  o.count_rejections = true;
  return o;
}

TEST(GoldenAccept, RejectionsOfTheFirstLayer) {
  const std::string model = FRESHET_UNPACKED_DATA "/golden/llama";
  const auto options = options_of(
      model, R"({"method": "early_exit", "exit_layer": 1, "num_speculative_tokens": 4})");
  const auto counted = write_texts(options, 40, 60, Acceptance::kRejection);
  EXPECT_GT(counted.rejections, 500);
  EXPECT_GT(counted.expected_rejections, 500.0);
  EXPECT_LT(std::abs(counted.rejection_z()), 4.9);  // 1e-6; the seeds are fixed
}

// reference.json of the pair: the mean of the sum of min(p, q) along texts is 0.5877.
TEST(GoldenAccept, RejectionsOfTheTrainedPair) {
  const std::string models = std::string(FRESHET_EXTRA_DATA) + "/models/";
  if (!std::filesystem::is_directory(models + "target")) GTEST_SKIP() << "needs FRESHET_EXTRA_DATA";
  const auto options =
      options_of(models + "target", R"({"method": "draft_model", "model": ")" + models +
                                        R"(draft", "num_speculative_tokens": 3})");
  const auto counted = write_texts(options, 6, 100, Acceptance::kRejection);
  const auto decided = static_cast<double>(counted.rejections + counted.accepted_tokens);
  EXPECT_LT(std::abs(counted.rejection_z()), 4.9);
  EXPECT_NEAR(counted.expected_rejections / decided, 1.0 - 0.5877, 0.08);
  const auto blocks = write_texts(options, 6, 100, Acceptance::kBlock);
  const auto length = [](const EngineStats::Speculation& s) {
    return static_cast<double>(s.accepted_tokens) / static_cast<double>(s.drafts);
  };
  EXPECT_GT(length(blocks), length(counted) - 0.1);
}

}  // namespace
}  // namespace freshet

// A head that drafts in one pass (P-EAGLE), compared with a plain computation in PyTorch:
// tools/golden_heads.py made tests/data/heads/p-eagle.json.
#include "speculative/golden_head_test.h"

namespace freshet::speculative {
namespace {

using models::HeadKind;

class ParallelHead : public GoldenHead {
 protected:
  void SetUp() override { open("p-eagle.json", "llama"); }
};

// Each step from the first row on.
TEST_F(ParallelHead, LogitsOfMaskedRowsAreThoseOfPyTorch) {
  auto head = load(HeadKind::kEagle3, save("head", *golden_.find("config")));
  ASSERT_TRUE(head.ok()) << head.status().message();
  const auto width = static_cast<size_t>(kTaps * kHidden);
  ASSERT_EQ(head->mask_features.size(), width);
  const int32_t mask = head->plan.mask_token;
  const auto run = runner(std::move(head->model));
  ASSERT_NE(run, nullptr);
  for (const HeadStep& step : read_steps(golden_)) {
    std::vector<int32_t> ids(tokens_.begin() + 1,
                             tokens_.begin() + static_cast<std::ptrdiff_t>(step.known));
    std::vector<float> features(
        features_.begin(), features_.begin() + static_cast<std::ptrdiff_t>(ids.size() * width));
    for (size_t k = 1; k < step.drafts.size(); ++k) {
      ids.push_back(mask);
      features.insert(features.end(), head->mask_features.begin(), head->mask_features.end());
    }
    DraftSequence sequence;
    DraftRunner::Work work{.sequence = &sequence,
                           .ids = ids,
                           .features = features.data(),
                           .wants_token = true,
                           .wants_logits = true};
    work.wanted = static_cast<int>(step.drafts.size());
    run->run({&work, 1}, false);
    const size_t vocab = work.logits.size() / step.drafts.size();
    for (size_t k = 0; k < step.drafts.size(); ++k) {
      for (size_t i = 0; i < step.logits[k].size(); ++i)
        ASSERT_NEAR(work.logits[k * vocab + i], step.logits[k][i], 1e-3) << step.known << ", " << k;
    }
    run->release(sequence);
  }
}

// As an engine drives it: rows come step by step, and a step may be put off.
TEST_F(ParallelHead, DraftsAreThoseOfPyTorch) {
  expect_drafts(HeadKind::kEagle3, save("head", *golden_.find("config")), read_steps(golden_));
}

TEST_F(ParallelHead, NeedsAMaskToken) {
  json::Value config = *golden_.find("config");
  config.as_object()["ptd_token_id"] = json::Value(5000);
  const auto far = load(HeadKind::kEagle3, save("far", config));
  ASSERT_FALSE(far.ok());
  EXPECT_NE(far.status().message().find("ptd_token_id"), std::string::npos);
  config.as_object()["ptd_token_id"] = json::Value();
  const auto none = load(HeadKind::kEagle3, save("none", config));
  ASSERT_FALSE(none.ok());
  EXPECT_NE(none.status().message().find("names no mask"), std::string::npos);
  // Without the tensor it is an ordinary head of several layers.
  const auto plain = load(HeadKind::kEagle3, save("plain", *golden_.find("config"), "mask_hidden"));
  ASSERT_TRUE(plain.ok()) << plain.status().message();
  EXPECT_EQ(plain->plan.mask_token, -1);
  EXPECT_EQ(plain->plan.spec.layers.size(), 3u);
}

}  // namespace
}  // namespace freshet::speculative

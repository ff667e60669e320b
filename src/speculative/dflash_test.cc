// DFlash heads, compared with a plain computation in PyTorch: tools/golden_dflash.py made
// tests/data/heads/dflash.json.
#include "speculative/golden_head_test.h"

namespace freshet::speculative {
namespace {

using models::HeadKind;

class DFlash : public GoldenHead {
 protected:
  void SetUp() override {
    open("dflash.json", "gemma3");
    for (const json::Value& head : golden_.find("heads")->as_array()) {
      configs_.push_back(*head.find("config"));
      steps_.push_back(read_steps(head));
    }
  }

  // The error of a head whose configuration is changed.
  std::string error(const std::string& name, const json::Value& config,
                    const std::string& without = "", const std::string& more = "") const {
    const auto head = load(HeadKind::kDFlash, save("bad-" + name, config, without, more));
    EXPECT_FALSE(head.ok()) << name;
    return head.ok() ? "" : head.status().message();
  }

  std::vector<json::Value> configs_;
  std::vector<std::vector<HeadStep>> steps_;  // [configs]
};

TEST_F(DFlash, LogitsOfBlocksAreThoseOfPyTorch) {
  const auto width = static_cast<size_t>(kTaps * kHidden);
  for (size_t c = 0; c < configs_.size(); ++c) {
    auto head = load(HeadKind::kDFlash, save(fmt::format("dflash-{}", c), configs_[c]));
    ASSERT_TRUE(head.ok()) << head.status().message();
    EXPECT_EQ(head->plan.block, 7);
    EXPECT_EQ(head->plan.boundaries, (std::vector{1, 2}));
    const int32_t mask = head->plan.mask_token;
    const auto run = runner(std::move(head->model));
    ASSERT_NE(run, nullptr);
    for (const HeadStep& step : steps_[c]) {
      DraftSequence sequence;
      const auto known = std::span(tokens_).first(step.known - 1);
      ASSERT_GE(features_.size(), known.size() * width);
      DraftRunner::Work context{.sequence = &sequence, .ids = known, .features = features_.data()};
      run->run({&context, 1}, false);
      std::vector<int32_t> block(1 + step.drafts.size(), mask);
      block[0] = tokens_[step.known - 1];
      DraftRunner::Work work{
          .sequence = &sequence, .ids = block, .wants_token = true, .wants_logits = true};
      work.wanted = static_cast<int>(step.drafts.size());
      run->run({&work, 1}, false);
      const size_t vocab = work.logits.size() / step.drafts.size();
      for (size_t k = 0; k < step.drafts.size(); ++k) {
        for (size_t i = 0; i < step.logits[k].size(); ++i)
          ASSERT_NEAR(work.logits[k * vocab + i], step.logits[k][i], 1e-3)
              << c << ": " << step.known << ", " << k;
      }
      run->release(sequence);
    }
  }
}

TEST_F(DFlash, DraftsAreThoseOfPyTorch) {
  for (size_t c = 0; c < configs_.size(); ++c)
    expect_drafts(HeadKind::kDFlash, save(fmt::format("drafts-{}", c), configs_[c]), steps_[c]);
}

// The form of vLLM's "speculators": the layer's keys apart, and numbers of layers that ran.
TEST_F(DFlash, ReadsTheSpeculatorsForm) {
  json::Object layer = configs_[0].as_object();
  json::Object config;
  config["speculators_model_type"] = json::Value("dflash");
  config["block_size"] = json::Value(7);
  config["mask_token_id"] = *configs_[0].find("dflash_config")->find("mask_token_id");
  config["aux_hidden_state_layer_ids"] = json::Array{json::Value(1), json::Value(2)};
  config["draft_vocab_size"] = json::Value(288);
  layer["dflash_config"] = json::Value();
  config["transformer_layer_config"] = json::Value(std::move(layer));
  expect_drafts(HeadKind::kDFlash, save("speculators", json::Value(config)), steps_[0]);
}

TEST_F(DFlash, NamesWhatDoesNotFit) {
  const auto with = [&](const char* key, json::Value value) {
    json::Value config = configs_[0];
    config.as_object()[key] = std::move(value);
    return config;
  };
  const auto own = [&](const char* key, json::Value value) {
    json::Value config = configs_[0];
    config.as_object().find("dflash_config")->as_object()[key] = std::move(value);
    return config;
  };
  const auto ids = [&](std::vector<int> layers) {
    json::Array list;
    for (const int id : layers) list.emplace_back(id);
    return own("target_layer_ids", json::Value(std::move(list)));
  };
  const std::pair<json::Value, std::string> cases[] = {
      {ids({0, 2}), "before the last of its 3"},
      {ids({1, 0}), "ascending"},
      {ids({0}), "has 128 columns; 1 layers of this target give 64"},
      {ids({}), "target_layer_ids"},
      {own("target_layer_ids", json::Value("all")), "target_layer_ids"},
      {own("mask_token_id", json::Value(288)), "mask_token_id"},
      {own("mask_token_id", json::Value()), "names no mask token"},
      {own("conv_kernel_size", json::Value(2)), "conv_kernel_size"},
      {own("projector_type", json::Value("domino")), "domino"},
      {with("speculators_model_type", json::Value("dspark")), "dspark"},
      {with("sample_from_anchor", json::Value(true)), "sample_from_anchor"},
      {with("sample_from_anchor", json::Value("no")), "sample_from_anchor"},
      {with("is_causal", json::Value(1)), "is_causal"},
      {own("attention_mode", json::Value("mla")), "attention_mode"},
      {with("block_size", json::Value(1)), "block_size 1"},
      {with("block_size", json::Value("8")), "block_size"},
      {with("sliding_window", json::Value(4)), "sliding_window 4"},
      {with("draft_vocab_size", json::Value(100)), "lm_head.weight"},
      {with("hidden_size", json::Value(32)), "it is for another model"},
      {with("layer_types", json::Array{json::Value("full_attention")}), "layer_types"},
      {with("num_hidden_layers", json::Value(4)), "layers.3.mlp.gate_proj"},
      {with("num_key_value_heads", json::Value(3)), "3 key-value heads"},
  };
  int number = 0;
  for (const auto& [config, part] : cases) {
    const std::string message = error(std::to_string(number++), config);
    EXPECT_NE(message.find(part), std::string::npos) << part << " in: " << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  }
  for (const char* tensor : {"fc.weight", "hidden_norm.weight", "norm.weight",
                             "layers.1.self_attn.k_proj.weight", "layers.2.mlp.up_proj.weight"}) {
    const std::string message = error("tensor", configs_[0], tensor);
    EXPECT_NE(message.find(tensor), std::string::npos) << message;
  }
  const std::string message = error("more", configs_[0], "", "candidate_selector.weight");
  EXPECT_NE(message.find("candidate_selector"), std::string::npos) << message;
}

}  // namespace
}  // namespace freshet::speculative

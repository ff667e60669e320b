// A head that drafts in one pass (P-EAGLE), compared with a plain computation in PyTorch:
// tools/golden_heads.py made tests/data/heads/p-eagle.json.
#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>

#include <gtest/gtest.h>

#include "models/draft_heads.h"
#include "speculative/draft_runner.h"
#include "speculative/model_drafter.h"
#include "tensor/dtype.h"

namespace freshet::speculative {
namespace {

constexpr int kHidden = 64, kTaps = 2;

// The formula of tests/seeded_checkpoints.cc.
std::vector<float> seeded(const std::string& name, int64_t count, double scale, double offset) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : name) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i) {
    uint64_t x = hash + static_cast<uint64_t>(i) + 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    const double u = static_cast<double>((x ^ (x >> 31)) >> 40) / 8388608.0 - 1.0;
    values.push_back(bf16_to_f32(f32_to_bf16(static_cast<float>(offset + scale * u))));
  }
  return values;
}

template <class T>
void append(std::string& data, const std::vector<T>& values) {
  data.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

struct Step {
  size_t known = 0;
  std::vector<int32_t> drafts;
  std::vector<std::vector<double>> logits;  // the first ones of each draft's row
};

class ParallelHead : public ::testing::Test {
 protected:
  void SetUp() override {
    std::stringstream text;
    text << std::ifstream(std::string(FRESHET_SOURCE_DIR) + "/tests/data/heads/p-eagle.json")
                .rdbuf();
    auto parsed = json::parse(text.str());
    ASSERT_TRUE(parsed.ok());
    golden_ = std::move(*parsed);
    for (const json::Value& id : golden_.find("tokens")->as_array())
      tokens_.push_back(static_cast<int32_t>(id.as_int64().value()));
    features_ = seeded("features", std::ssize(tokens_) * kTaps * kHidden,
                       golden_.find("features")->as_double(), 0.0);
    for (const json::Value& s : golden_.find("steps")->as_array()) {
      Step& step = steps_.emplace_back();
      step.known = static_cast<size_t>(s.find("known")->as_int64().value());
      for (const json::Value& id : s.find("drafts")->as_array())
        step.drafts.push_back(static_cast<int32_t>(id.as_int64().value()));
      for (const json::Value& row : s.find("logits")->as_array()) {
        step.logits.emplace_back();
        for (const json::Value& v : row.as_array()) step.logits.back().push_back(v.as_double());
      }
    }
    runtime::LoadOptions loading;
    loading.model = std::string(FRESHET_SOURCE_DIR) + "/tests/data/golden/llama";
    loading.threads = 1;
    loading.reference = true;
    auto compute = runtime::Compute::open(loading);
    ASSERT_TRUE(compute.ok());
    compute_ = *compute;
    auto target = runtime::LoadedModel::load(compute_, loading);
    ASSERT_TRUE(target.ok()) << target.status().message();
    target_ = std::move(*target);
  }

  // The head's folder. `without`: a tensor that is left out.
  std::string save(const std::string& name, const json::Value& config,
                   const std::string& without = "") const {
    json::Object header;
    std::string data;
    const auto add = [&](const std::string& tensor, const char* type, json::Array shape,
                         size_t from) {
      json::Object t;
      t["dtype"] = json::Value(type);
      t["shape"] = std::move(shape);
      t["data_offsets"] = json::Array{json::Value(static_cast<int64_t>(from)),
                                      json::Value(static_cast<int64_t>(data.size()))};
      header[tensor] = std::move(t);
    };
    std::vector<int64_t> offsets;
    for (const json::Value& v : golden_.find("d2t")->as_array())
      offsets.push_back(v.as_int64().value());
    append(data, offsets);
    add("d2t", "I64", {json::Value(std::ssize(offsets))}, 0);
    for (const auto& [tensor, described] : golden_.find("tensors")->as_object()) {
      if (tensor == without) continue;
      const json::Array& parts = described.as_array();
      int64_t count = 1;
      for (const json::Value& n : parts[0].as_array()) count *= n.as_int64().value();
      const size_t from = data.size();
      append(data, seeded(tensor, count, parts[1].as_double(), parts[2].as_double()));
      add(tensor, "F32", parts[0].as_array(), from);
    }
    const std::string path = ::testing::TempDir() + "parallel_head/" + name;
    std::filesystem::create_directories(path);
    std::ofstream(path + "/config.json") << json::write(config);
    const std::string text = json::write(json::Value(std::move(header)));
    const auto length = static_cast<uint64_t>(text.size());
    std::ofstream out(path + "/model.safetensors", std::ios::binary);
    out.write(reinterpret_cast<const char*>(&length), sizeof length);
    out << text << data;
    return path;
  }

  Result<models::DraftHead> load(const std::string& path) const {
    FRESHET_ASSIGN_OR_RETURN(const auto checkpoint, loader::Checkpoint::open(path));
    return models::load_head(models::HeadKind::kEagle3, checkpoint, target_->model(),
                             compute_->ops());
  }

  std::unique_ptr<DraftRunner> runner(std::unique_ptr<Model> model) const {
    auto made =
        DraftRunner::create(std::make_unique<runtime::LoadedModel>(compute_, std::move(model)),
                            {.max_model_len = 64,
                             .max_tokens = 64,
                             .max_rows = 8,
                             .cache_tokens = 256,
                             .kv_type = ops::KvType::kF32});
    EXPECT_TRUE(made.ok()) << made.status().message();
    return made.ok() ? std::move(*made) : nullptr;
  }

  json::Value golden_;
  std::vector<int32_t> tokens_;
  std::vector<float> features_;  // [tokens, taps * hidden]
  std::vector<Step> steps_;
  std::shared_ptr<runtime::Compute> compute_;
  std::unique_ptr<runtime::LoadedModel> target_;
};

// Each step from the first row on.
TEST_F(ParallelHead, LogitsOfMaskedRowsAreThoseOfPyTorch) {
  auto head = load(save("head", *golden_.find("config")));
  ASSERT_TRUE(head.ok()) << head.status().message();
  const auto width = static_cast<size_t>(kTaps * kHidden);
  ASSERT_EQ(head->mask_features.size(), width);
  const int32_t mask = head->plan.mask_token;
  const auto run = runner(std::move(head->model));
  ASSERT_NE(run, nullptr);
  for (const Step& step : steps_) {
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
  auto head = load(save("head", *golden_.find("config")));
  ASSERT_TRUE(head.ok()) << head.status().message();
  ModelDrafterOptions options;
  options.needs.boundaries = head->plan.boundaries;
  options.target_ids = head->target_ids;
  options.vocab = target_->spec().vocab_size;
  options.mask = head->plan.mask_token;
  options.mask_features = head->mask_features;
  auto run = runner(std::move(head->model));
  ASSERT_NE(run, nullptr);
  ModelDrafter drafter(std::move(run), std::move(options));
  const SamplingParams greedy{.temperature = 0.0f};
  size_t shown = 0;
  for (const Step& step : steps_) {
    std::vector<std::vector<float>> states(kTaps);
    for (size_t p = shown; p + 1 < step.known; ++p) {
      for (size_t b = 0; b < kTaps; ++b) {
        const float* const from = features_.data() + (p * kTaps + b) * kHidden;
        states[b].insert(states[b].end(), from, from + kHidden);
      }
    }
    const std::span<const int32_t> known = std::span(tokens_).first(step.known);
    const TargetRows rows{.sequence = 1,
                          .tokens = known,
                          .first = static_cast<int32_t>(shown),
                          .count = static_cast<int32_t>(step.known - 1 - shown),
                          .boundaries = {states[0].data(), states[1].data()}};
    drafter.observe({&rows, 1});
    shown = step.known - 1;
    for (int turn = 0; turn < 2; ++turn) {
      DraftRequest r{.sequence = 1,
                     .tokens = known,
                     .limit = static_cast<int32_t>(step.drafts.size()),
                     .params = &greedy};
      drafter.propose({&r, 1});
      EXPECT_EQ(r.draft, step.drafts) << step.known << " tokens, turn " << turn;
    }
  }
}

TEST_F(ParallelHead, NeedsAMaskToken) {
  json::Value config = *golden_.find("config");
  config.as_object()["ptd_token_id"] = json::Value(5000);
  const auto far = load(save("far", config));
  ASSERT_FALSE(far.ok());
  EXPECT_NE(far.status().message().find("ptd_token_id"), std::string::npos);
  config.as_object()["ptd_token_id"] = json::Value();
  const auto none = load(save("none", config));
  ASSERT_FALSE(none.ok());
  EXPECT_NE(none.status().message().find("names no mask"), std::string::npos);
  // Without the tensor it is an ordinary head of several layers.
  const auto plain = load(save("plain", *golden_.find("config"), "mask_hidden"));
  ASSERT_TRUE(plain.ok()) << plain.status().message();
  EXPECT_EQ(plain->plan.mask_token, -1);
  EXPECT_EQ(plain->plan.spec.layers.size(), 3u);
}

}  // namespace
}  // namespace freshet::speculative

// Heads whose weights are a formula and whose drafts were computed in PyTorch (tests/data/heads).
// For tests of one thread.
#pragma once

#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "models/draft_heads.h"
#include "speculative/draft_runner.h"
#include "speculative/model_drafter.h"
#include "tensor/dtype.h"

namespace freshet::speculative {

inline constexpr int kHidden = 64, kTaps = 2;

// The formula of tests/seeded_checkpoints.cc.
inline std::vector<float> seeded_values(const std::string& name, int64_t count, double scale,
                                        double offset) {
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
void append_bytes(std::string& data, const std::vector<T>& values) {
  data.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

struct HeadStep {
  size_t known = 0;
  std::vector<int32_t> drafts;
  std::vector<std::vector<double>> logits;  // the first ones of each draft's row
};

class GoldenHead : public ::testing::Test {
 protected:
  // file: in tests/data/heads. target: of the golden models.
  void open(const std::string& file, const std::string& target) {
    std::stringstream text;
    text << std::ifstream(std::string(FRESHET_SOURCE_DIR) + "/tests/data/heads/" + file).rdbuf();
    auto parsed = json::parse(text.str());
    ASSERT_TRUE(parsed.ok());
    golden_ = std::move(*parsed);
    for (const json::Value& id : golden_.find("tokens")->as_array())
      tokens_.push_back(static_cast<int32_t>(id.as_int64().value()));
    features_ = seeded_values("features", std::ssize(tokens_) * kTaps * kHidden,
                              golden_.find("features")->as_double(), 0.0);
    runtime::LoadOptions loading;
    loading.model = FRESHET_UNPACKED_DATA "/golden/" + target;
    loading.threads = 1;
    loading.reference = true;
    auto compute = runtime::Compute::open(loading);
    ASSERT_TRUE(compute.ok());
    compute_ = *compute;
    auto target = runtime::LoadedModel::load(compute_, loading);
    ASSERT_TRUE(target.ok()) << target.status().message();
    target_ = std::move(*target);
  }

  static std::vector<HeadStep> read_steps(const json::Value& golden) {
    std::vector<HeadStep> steps;
    for (const json::Value& s : golden.find("steps")->as_array()) {
      HeadStep& step = steps.emplace_back();
      step.known = static_cast<size_t>(s.find("known")->as_int64().value());
      for (const json::Value& id : s.find("drafts")->as_array())
        step.drafts.push_back(static_cast<int32_t>(id.as_int64().value()));
      for (const json::Value& row : s.find("logits")->as_array()) {
        step.logits.emplace_back();
        for (const json::Value& v : row.as_array()) step.logits.back().push_back(v.as_double());
      }
    }
    return steps;
  }

  // The head's folder. `without`: a tensor that is left out. `more`: one of 8 numbers besides.
  std::string save(const std::string& name, const json::Value& config,
                   const std::string& without = "", const std::string& more = "") const {
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
    if (const json::Value* const d2t = golden_.find("d2t")) {
      std::vector<int64_t> offsets;
      for (const json::Value& v : d2t->as_array()) offsets.push_back(v.as_int64().value());
      append_bytes(data, offsets);
      add("d2t", "I64", {json::Value(std::ssize(offsets))}, 0);
    }
    if (!more.empty()) {
      const size_t from = data.size();
      append_bytes(data, std::vector<float>(8, 1.0f));
      add(more, "F32", {json::Value(8)}, from);
    }
    for (const auto& [tensor, described] : golden_.find("tensors")->as_object()) {
      if (tensor == without) continue;
      const json::Array& parts = described.as_array();
      int64_t count = 1;
      for (const json::Value& n : parts[0].as_array()) count *= n.as_int64().value();
      const size_t from = data.size();
      append_bytes(data, seeded_values(tensor, count, parts[1].as_double(), parts[2].as_double()));
      add(tensor, "F32", parts[0].as_array(), from);
    }
    const std::string path = ::testing::TempDir() + "golden_head/" + name;
    std::filesystem::create_directories(path);
    std::ofstream(path + "/config.json") << json::write(config);
    const std::string text = json::write(json::Value(std::move(header)));
    const auto length = static_cast<uint64_t>(text.size());
    std::ofstream out(path + "/model.safetensors", std::ios::binary);
    out.write(reinterpret_cast<const char*>(&length), sizeof length);
    out << text << data;
    return path;
  }

  Result<models::DraftHead> load(models::HeadKind kind, const std::string& path) const {
    FRESHET_ASSIGN_OR_RETURN(const auto checkpoint, loader::Checkpoint::open(path));
    return models::load_head(kind, checkpoint, target_->model(), compute_->ops());
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

  // What an engine makes of a loaded head.
  std::unique_ptr<ModelDrafter> drafter(models::DraftHead head) const {
    ModelDrafterOptions options;
    options.needs.boundaries = head.plan.boundaries;
    options.target_ids = std::move(head.target_ids);
    options.vocab = target_->spec().vocab_size;
    options.mask = head.plan.mask_token;
    options.mask_features = std::move(head.mask_features);
    options.block = head.plan.block;
    auto run = runner(std::move(head.model));
    return run == nullptr ? nullptr
                          : std::make_unique<ModelDrafter>(std::move(run), std::move(options));
  }

  // Shows the drafter the rows from `shown` to the last known token but one.
  void show(ModelDrafter& drafter, size_t shown, size_t known) const {
    std::vector<std::vector<float>> states(kTaps);
    for (size_t p = shown; p + 1 < known; ++p) {
      for (size_t b = 0; b < kTaps; ++b) {
        const float* const from = features_.data() + (p * kTaps + b) * kHidden;
        states[b].insert(states[b].end(), from, from + kHidden);
      }
    }
    const TargetRows rows{.sequence = 1,
                          .tokens = std::span(tokens_).first(known),
                          .first = static_cast<int32_t>(shown),
                          .count = static_cast<int32_t>(known - 1 - shown),
                          .boundaries = {states[0].data(), states[1].data()}};
    drafter.observe({&rows, 1});
  }

  // As an engine drives it: rows come step by step, and each step is proposed twice, as if put off.
  void expect_drafts(models::HeadKind kind, const std::string& path,
                     const std::vector<HeadStep>& steps) const {
    auto head = load(kind, path);
    ASSERT_TRUE(head.ok()) << head.status().message();
    const auto drafts = drafter(std::move(*head));
    ASSERT_NE(drafts, nullptr);
    const SamplingParams greedy{.temperature = 0.0f};
    size_t shown = 0;
    for (const HeadStep& step : steps) {
      show(*drafts, shown, step.known);
      shown = step.known - 1;
      for (int turn = 0; turn < 2; ++turn) {
        DraftRequest r{.sequence = 1,
                       .tokens = std::span(tokens_).first(step.known),
                       .limit = static_cast<int32_t>(step.drafts.size()),
                       .params = &greedy};
        drafts->propose({&r, 1});
        EXPECT_EQ(r.draft, step.drafts) << step.known << " tokens, turn " << turn;
      }
    }
  }

  json::Value golden_;
  std::vector<int32_t> tokens_;
  std::vector<float> features_;  // [tokens, taps * hidden]
  std::shared_ptr<runtime::Compute> compute_;
  std::unique_ptr<runtime::LoadedModel> target_;
};

}  // namespace freshet::speculative

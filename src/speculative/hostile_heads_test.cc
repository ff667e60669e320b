// Files of heads that are cut or changed: one line says what is wrong, or the head drafts.
#include "speculative/golden_head_test.h"

namespace freshet::speculative {
namespace {

using models::HeadKind;

struct HostileCase {
  const char* file;
  const char* target;
  HeadKind kind;
};

class HostileHeads : public GoldenHead, public ::testing::WithParamInterface<HostileCase> {
 protected:
  void SetUp() override {
    open(GetParam().file, GetParam().target);
    const json::Value* const heads = golden_.find("heads");
    config_ = *(heads != nullptr ? heads->as_array().back() : golden_).find("config");
  }

  // Loads the head, and drafts with it if it loads. Returns the error.
  std::string attempt(const std::string& path) const {
    auto head = load(GetParam().kind, path);
    if (!head.ok()) {
      const std::string message = head.status().message();
      EXPECT_FALSE(message.empty());
      EXPECT_EQ(message.find('\n'), std::string::npos) << message;
      EXPECT_LT(message.size(), 600u) << message;
      return message;
    }
    if (head->plan.boundaries.size() != kTaps) return "";
    const auto drafts = drafter(std::move(*head));
    if (drafts == nullptr) return "";
    show(*drafts, 0, 9);
    const SamplingParams greedy{.temperature = 0.0f};
    DraftRequest r{
        .sequence = 1, .tokens = std::span(tokens_).first(9), .limit = 3, .params = &greedy};
    drafts->propose({&r, 1});
    for (const int32_t id : r.draft) {
      EXPECT_GE(id, 0);
      EXPECT_LT(id, target_->spec().vocab_size);
    }
    return "";
  }

  // Every value of `at` in turn becomes each hostile one.
  void vary(json::Value& at, const std::string& where) {
    static const char* const kValues[] = {"-1",    "0",    "1",        "3",     "2147483648",
                                          "1e300", "0.5",  "\"word\"", "[]",    "[-1, 99999999999]",
                                          "{}",    "null", "true",     "[1, 1]"};
    std::vector<std::string> keys;
    for (const auto& [key, value] : at.as_object()) keys.push_back(key);
    for (const std::string& key : keys) {
      const json::Value was = *at.as_object().find(key);
      for (const char* text : kValues) {
        SCOPED_TRACE(where + key + " = " + text);
        auto value = json::parse(text);
        ASSERT_TRUE(value.ok());
        at.as_object()[key] = std::move(*value);
        attempt(save_config());
      }
      at.as_object()[key] = was;
      if (was.is_object()) vary(*at.as_object().find(key), where + key + ".");
    }
  }

  // The folder with the configuration as it is now; the weights are written once.
  std::string save_config() {
    if (folder_.empty()) folder_ = save(std::string("hostile-") + GetParam().file, config_);
    std::ofstream(folder_ + "/config.json") << json::write(config_);
    return folder_;
  }

  json::Value config_;
  std::string folder_;
};

TEST_P(HostileHeads, ValuesOfTheConfiguration) {
  ASSERT_EQ(attempt(save_config()), "");
  vary(config_, "");
}

TEST_P(HostileHeads, CutFiles) {
  const std::string path = save(std::string("cut-") + GetParam().file, config_);
  const std::string weights = path + "/model.safetensors";
  const auto size = static_cast<int64_t>(std::filesystem::file_size(weights));
  for (const int64_t left : {size - 1, size - 4, size / 2, int64_t{3000}, int64_t{1000}, int64_t{9},
                             int64_t{8}, int64_t{7}, int64_t{0}}) {
    std::filesystem::resize_file(weights, static_cast<uintmax_t>(left));
    EXPECT_NE(attempt(path), "") << left << " of " << size << " bytes";
  }
  std::ofstream(path + "/config.json") << "{\"hidden_size\": ";
  EXPECT_NE(attempt(path), "");
}

INSTANTIATE_TEST_SUITE_P(Formats, HostileHeads,
                         ::testing::Values(HostileCase{"p-eagle.json", "llama", HeadKind::kEagle3},
                                           HostileCase{"dflash.json", "gemma3", HeadKind::kDFlash}),
                         [](const auto& test) {
                           return test.param.kind == HeadKind::kDFlash ? "DFlash" : "PEagle";
                         });

}  // namespace
}  // namespace freshet::speculative

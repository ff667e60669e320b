// The diagnosis finds out how the trained EAGLE-3 head of FRESHET_EXTRA_DATA was wired, whatever
// its configuration says. Skipped without that folder.
#include "eval/head_wiring.h"

#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include <gtest/gtest.h>

#include "speculative/golden_head_test.h"
#include "tokenizer/tokenizer.h"

#ifndef FRESHET_EXTRA_DATA
#define FRESHET_EXTRA_DATA ""
#endif

namespace freshet::eval {
namespace {

namespace fs = std::filesystem;

std::string contents(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream out;
  out << in.rdbuf();
  return out.str();
}

class HeadWiring : public ::testing::Test {
 protected:
  void SetUp() override {
    const fs::path models = fs::path(FRESHET_EXTRA_DATA) / "models";
    if (std::strlen(FRESHET_EXTRA_DATA) == 0 || !fs::exists(models / "eagle3"))
      GTEST_SKIP() << "needs FRESHET_EXTRA_DATA";
    models_ = models;
    folder_ = fs::temp_directory_path() / fs::path("freshet-wiring-" + std::to_string(getpid()));
    fs::create_directories(folder_);
    options_.loading.model = models / "target";
    const auto tokenizer = tokenizer::Tokenizer::load(options_.loading.model);
    ASSERT_TRUE(tokenizer.ok());
    const std::string text = contents(models / "valid.txt").substr(0, 20000);
    const auto ids = tokenizer->encode(text);
    for (size_t from = 0; from + 256 <= std::min<size_t>(ids.size(), 2048); from += 256)
      options_.texts.emplace_back(ids.begin() + static_cast<std::ptrdiff_t>(from),
                                  ids.begin() + static_cast<std::ptrdiff_t>(from + 256));
  }
  void TearDown() override {
    if (!folder_.empty()) fs::remove_all(folder_);
  }

  // The head with another text in its configuration.
  speculative::Config eagle3(const std::string& from, const std::string& to) const {
    for (const auto& file : fs::directory_iterator(models_ / "eagle3")) {
      const fs::path copy = folder_ / file.path().filename();
      fs::remove(copy);
      if (file.path().filename() != "config.json") fs::create_symlink(file.path(), copy);
    }
    std::string config = contents(models_ / "eagle3/config.json");
    const size_t at = config.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    config.replace(at, from.size(), to);
    std::ofstream(folder_ / "config.json") << config;
    speculative::Config c;
    c.method = "eagle3";
    c.model = folder_;
    return c;
  }
  std::string best(const speculative::Config& config) const {
    const auto wiring = diagnose_wiring(config, options_);
    if (!wiring.ok()) return wiring.status().message();
    EXPECT_GT(wiring->drafts, 1000);
    EXPECT_EQ(wiring->variants.front().name, "as configured");
    return wiring->variants[wiring->best].name;
  }

  fs::path models_, folder_;
  WiringOptions options_;
};

TEST_F(HeadWiring, FindsTheTrainedLayers) {
  EXPECT_EQ(best(eagle3("\"bias\": false", "\"bias\": false")), "as configured");
  const std::string ids = "2,\n   4,\n   5\n";
  EXPECT_EQ(best(eagle3(ids, "1, 3, 4")), "layer ids + 1");
  EXPECT_EQ(best(eagle3(ids, "3, 5, 6")), "layer ids - 1");
}

TEST_F(HeadWiring, FindsTheResidualNorm) {
  EXPECT_EQ(best(eagle3("\"bias\": false", "\"norm_before_residual\": true")),
            "norm after residual");
}

TEST_F(HeadWiring, FindsStatesAndOrderOfEagle) {
  speculative::Config config;
  config.method = "eagle";
  config.model = models_ / "eagle.safetensors";
  const auto wiring = diagnose_wiring(config, options_);
  ASSERT_TRUE(wiring.ok()) << wiring.status().message();
  EXPECT_EQ(wiring->best, 0u);
  ASSERT_EQ(wiring->variants.size(), 4u);
  for (size_t v = 1; v < 4; ++v) {
    EXPECT_TRUE(wiring->variants[v].error.empty()) << wiring->variants[v].error;
    EXPECT_LT(wiring->variants[v].acceptance, 0.9 * wiring->variants[0].acceptance);
  }
}

// Random weights: no wiring is better than another, but each runs on each fourth token.
class DFlashWiring : public speculative::GoldenHead {};

TEST_F(DFlashWiring, TriesOtherLayers) {
  open("dflash.json", "gemma3");
  speculative::Config config;
  config.method = "dflash";
  config.model = save("wiring", *golden_.find("heads")->as_array()[0].find("config"));
  WiringOptions options;
  options.loading.model = FRESHET_UNPACKED_DATA "/golden/gemma3";
  options.loading.threads = 1;
  for (int32_t text = 0; text < 2; ++text) {
    std::vector<int32_t>& ids = options.texts.emplace_back();
    for (int32_t i = 0; i < 101; ++i) ids.push_back((17 * i + 5 * text + i * i) % 280);
  }
  const auto wiring = diagnose_wiring(config, options);
  ASSERT_TRUE(wiring.ok()) << wiring.status().message();
  EXPECT_EQ(wiring->drafts, 2 * 25);
  std::vector<std::string> names;
  for (const WiringVariant& v : wiring->variants) {
    names.push_back(v.name);
    EXPECT_EQ(v.error, "") << v.name;
  }
  EXPECT_EQ(names, (std::vector<std::string>{"as configured", "layer ids - 1", "layer ids + 1",
                                             "last layer first"}));
}

}  // namespace
}  // namespace freshet::eval

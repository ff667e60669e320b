// Every architecture against transformers' own outputs (tests/data/golden: tiny checkpoints whose
// weights are a formula, logits at every position, greedy continuations; F32 arithmetic on BF16
// weights), and batch invariance of all of them.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>

#include <gtest/gtest.h>

#include "tests/golden_cases.h"

namespace freshet::testing {
namespace {

// Options that the usual configuration of a model type does not use (tools/golden_models.py).
std::string variants_directory() {
  return FRESHET_UNPACKED_DATA "/golden-variants/";
}

std::unique_ptr<Runner> open(const std::string& name, bool reference, ops::KvType kv) {
  Runner::Options options;
  options.reference = reference;
  options.kv = kv;
  options.context = 256;
  auto runner = Runner::open(directory() + name, options);
  EXPECT_TRUE(runner.ok()) << runner.status().message();
  return runner.ok() ? std::move(*runner) : nullptr;
}

std::unique_ptr<Runner> open(const std::string& name, bool reference) {
  return open(name, reference, reference ? ops::KvType::kF32 : ops::KvType::kF16);
}

float largest(const std::vector<float>& values) {
  float most = 0;
  for (const float v : values) most = std::max(most, std::fabs(v));
  return most;
}

void expect_close(const std::vector<float>& got, const std::vector<float>& want, float tolerance,
                  const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  const float allowed = tolerance * largest(want);
  float worst = 0;
  size_t where = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const float off = std::fabs(got[i] - want[i]);
    if (!(off <= worst)) {
      worst = off;
      where = i;
    }
  }
  EXPECT_LE(worst, allowed) << what << " at number " << where << ": " << got[where] << " for "
                            << want[where];
}

class Golden : public ::testing::TestWithParam<std::string> {};

TEST_P(Golden, ReferencePathMatchesTransformers) {
  const auto runner = open(GetParam(), true);
  ASSERT_NE(runner, nullptr);
  for (const Case& c : read_cases(GetParam())) {
    expect_close(runner->run({c.ids}, 0)[0], c.logits, 2e-4f, GetParam());
  }
}

TEST_P(Golden, FastPathIsNearTransformers) {
  const auto runner = open(GetParam(), false);
  ASSERT_NE(runner, nullptr);
  for (const Case& c : read_cases(GetParam())) {
    expect_close(runner->run({c.ids}, 0)[0], c.logits, 1e-2f, GetParam());
  }
}

// If two experts score almost equally, a router may select the other one at some position.
TEST_P(Golden, KeysAndValuesInInt8AreNearTransformers) {
  const auto reference = open(GetParam(), true, ops::KvType::kInt8);
  const auto fast = open(GetParam(), false, ops::KvType::kInt8);
  ASSERT_NE(reference, nullptr);
  ASSERT_NE(fast, nullptr);
  const auto& layers = fast->model().spec().layers;
  const bool experts =
      std::ranges::any_of(layers, [](const LayerSpec& l) { return l.find<MoeSpec>() != nullptr; });
  for (const Case& c : read_cases(GetParam())) {
    const std::vector<float> got = reference->run({c.ids}, 0)[0];
    expect_close(fast->run({c.ids}, 0)[0], got, 1e-2f, GetParam());
    ASSERT_EQ(got.size(), c.logits.size());
    double error = 0.0, all = 0.0;
    for (size_t i = 0; i < got.size(); ++i) {
      error += std::pow(double{got[i]} - c.logits[i], 2);
      all += std::pow(double{c.logits[i]}, 2);
    }
    EXPECT_LE(std::sqrt(error / all), experts ? 0.15 : 0.03) << GetParam();
  }
}

TEST_P(Golden, GreedyContinuationsAreTheSame) {
  const auto runner = open(GetParam(), true);
  ASSERT_NE(runner, nullptr);
  for (const Case& c : read_cases(GetParam())) {
    std::vector<float> margins;
    const Ids got = runner->greedy(c.ids, static_cast<int>(c.greedy.size()), &margins);
    for (size_t i = 0; i < got.size(); ++i) {
      if (margins[i] <= 1e-3f) break;  // a tie may go either way, and the continuation with it
      ASSERT_EQ(got[i], c.greedy[i]) << "after " << i << " tokens";
    }
  }
}

TEST_P(Golden, TheBatchChangesNoBit) {
  for (const bool reference : {true, false}) {
    const auto runner = open(GetParam(), reference);
    ASSERT_NE(runner, nullptr);
    expect_batch_changes_no_bit(*runner, read_cases(GetParam()), reference ? "reference" : "fast");
  }
  for (const ops::KvType kv : {ops::KvType::kFP8, ops::KvType::kInt8}) {
    const auto runner = open(GetParam(), false, kv);
    ASSERT_NE(runner, nullptr);
    expect_batch_changes_no_bit(*runner, read_cases(GetParam()), std::string(ops::name_of(kv)));
  }
}

INSTANTIATE_TEST_SUITE_P(Models, Golden, ::testing::ValuesIn(models(directory())), test_name);

TEST(GoldenSet, AllArchitecturesAreHere) {
  EXPECT_EQ(models(directory()).size(), 27u);
}

class GoldenVariant : public ::testing::TestWithParam<std::string> {};

TEST_P(GoldenVariant, ReferencePathMatchesTransformers) {
  auto runner = Runner::open(variants_directory() + GetParam(), {.context = 64});
  ASSERT_TRUE(runner.ok()) << runner.status().message();
  for (const Case& c : read_cases(GetParam(), variants_directory())) {
    // transformers takes length-dependent frequencies from the sequence it is given.
    const auto length = static_cast<int64_t>(c.ids.size());
    ASSERT_TRUE((*runner)->model().reserve(length, length, length).ok());
    expect_close((*runner)->run({c.ids}, 0)[0], c.logits, 2e-4f, GetParam());
  }
}

INSTANTIATE_TEST_SUITE_P(Models, GoldenVariant, ::testing::ValuesIn(models(variants_directory())),
                         test_name);

// Models whose weights are a formula (tools/golden_seeded.py). Only those with logits for ids alone
// are decoders.
std::string seeded_directory() {
  return FRESHET_UNPACKED_DATA "/seeded/";
}

std::vector<std::string> seeded_decoders() {
  std::vector<std::string> names;
  for (const std::string& name : models(seeded_directory())) {
    const std::string path = seeded_directory() + name + "/golden.safetensors";
    if (!std::filesystem::exists(path)) continue;  // compared with something else than logits
    const auto file = loader::SafetensorsFile::open(path);
    FRESHET_CHECK(file.ok(), "{}", file.status().message());
    bool ids_alone = file->find("logits_0") != nullptr;
    for (int i = 0; i < 8; ++i) {
      const std::string number = std::to_string(i);
      ids_alone = ids_alone && file->find("decoder_ids_" + number) == nullptr &&
                  file->find("image_" + number + "_0") == nullptr;
    }
    if (ids_alone) names.push_back(name);
  }
  return names;
}

// How many rows of `want` are farther than the tolerance from those of `got`.
int64_t rows_off(const std::vector<float>& got, const std::vector<float>& want, size_t rows,
                 float tolerance) {
  const size_t cols = want.size() / rows;
  const float allowed = tolerance * largest(want);
  int64_t off = 0;
  for (size_t row = 0; row < rows; ++row) {
    bool near = true;
    for (size_t i = row * cols; i < (row + 1) * cols; ++i) {
      near = near && std::fabs(got[i] - want[i]) <= allowed;
    }
    off += near ? 0 : 1;
  }
  return off;
}

class GoldenSeeded : public ::testing::TestWithParam<std::string> {
 protected:
  std::unique_ptr<Runner> open_seeded(bool reference) {
    Runner::Options options;
    options.reference = reference;
    options.kv = reference ? ops::KvType::kF32 : ops::KvType::kF16;
    options.context = 256;
    auto runner = Runner::open(seeded_directory() + GetParam(), options);
    EXPECT_TRUE(runner.ok()) << runner.status().message();
    return runner.ok() ? std::move(*runner) : nullptr;
  }
  std::vector<Case> cases() { return read_cases(GetParam(), seeded_directory()); }
};

TEST_P(GoldenSeeded, ReferencePathMatchesTransformers) {
  const auto runner = open_seeded(true);
  ASSERT_NE(runner, nullptr);
  ASSERT_FALSE(cases().empty());
  for (const Case& c : cases()) {
    // transformers takes length-dependent frequencies from the sequence it is given.
    const auto length = static_cast<int64_t>(c.ids.size());
    ASSERT_TRUE(runner->model().reserve(length, length, length).ok());
    expect_close(runner->run({c.ids}, 0)[0], c.logits, 2e-4f, GetParam());
  }
}

// If two experts score almost equally, a router may select the other one at some position.
TEST_P(GoldenSeeded, FastPathIsNearTransformers) {
  const auto runner = open_seeded(false);
  ASSERT_NE(runner, nullptr);
  const bool experts = std::ranges::any_of(runner->model().spec().layers, [](const LayerSpec& l) {
    return l.find<MoeSpec>() != nullptr;
  });
  for (const Case& c : cases()) {
    const size_t rows = c.ids.size();
    const auto length = static_cast<int64_t>(rows);
    ASSERT_TRUE(runner->model().reserve(length, length, length).ok());
    EXPECT_LE(rows_off(runner->run({c.ids}, 0)[0], c.logits, rows, 1e-2f),
              experts ? (length + 19) / 20 : 0)
        << GetParam();
  }
}

TEST_P(GoldenSeeded, GreedyContinuationsAreTheSame) {
  const auto runner = open_seeded(true);
  ASSERT_NE(runner, nullptr);
  for (const Case& c : cases()) {
    const auto length = static_cast<int64_t>(c.ids.size() + c.greedy.size());
    ASSERT_TRUE(runner->model().reserve(length, length, length).ok());
    std::vector<float> margins;
    const Ids got = runner->greedy(c.ids, static_cast<int>(c.greedy.size()), &margins);
    for (size_t i = 0; i < got.size() && margins[i] > 1e-3f; ++i) {
      ASSERT_EQ(got[i], c.greedy[i]) << "after " << i << " tokens";
    }
  }
}

TEST_P(GoldenSeeded, TheBatchChangesNoBit) {
  for (const bool reference : {true, false}) {
    const auto runner = open_seeded(reference);
    ASSERT_NE(runner, nullptr);
    expect_batch_changes_no_bit(*runner, cases(), reference ? "reference" : "fast");
  }
}

INSTANTIATE_TEST_SUITE_P(Models, GoldenSeeded, ::testing::ValuesIn(seeded_decoders()), test_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(GoldenSeeded);

// The same weights in the layout of llama.cpp's converter.
std::string gguf_directory() {
  return FRESHET_UNPACKED_DATA "/golden-gguf/";
}

class GoldenGguf : public ::testing::TestWithParam<std::string> {};

TEST_P(GoldenGguf, ReferencePathMatchesTransformers) {
  const std::string path = gguf_directory() + GetParam() + "/model.gguf";
  auto runner = Runner::open(path, {.max_tokens = 64, .context = 64});
  ASSERT_TRUE(runner.ok()) << runner.status().message();
  for (const Case& c : read_cases(GetParam(), gguf_directory())) {
    expect_close((*runner)->run({c.ids}, 0)[0], c.logits, 2e-4f, GetParam());
  }
}

INSTANTIATE_TEST_SUITE_P(Models, GoldenGguf, ::testing::ValuesIn(models(gguf_directory())),
                         test_name);

// An INT8 checkpoint (tools/golden_int8.py). Its GEMMs round activations: the fast path does this
// too, and the reference path, which does not, differs more.
TEST(GoldenInt8, FastPathIsNearTransformersAndKeepsTheLawOfTheBatch) {
  const std::string folder = FRESHET_UNPACKED_DATA "/golden-int8/";
  auto runner = Runner::open(folder + "llama", {.reference = false, .context = 256});
  ASSERT_TRUE(runner.ok()) << runner.status().message();
  const std::vector<Case> cases = read_cases("llama", folder);
  ASSERT_EQ(cases.size(), 3u);
  for (const Case& c : cases) {
    expect_close((*runner)->run({c.ids}, 0)[0], c.logits, 1e-2f, "int8");
  }
  expect_batch_changes_no_bit(**runner, cases, "int8");
}

// The tiny Llama as compressed-tensors 0.20 and bitsandbytes 0.50 write it, with the logits of the
// dequantised weights. The fast path of int8 rounds activations, too.
std::string quantised_directory() {
  return FRESHET_UNPACKED_DATA "/golden-quant/";
}

class GoldenQuantised : public ::testing::TestWithParam<std::string> {};

TEST_P(GoldenQuantised, BothPathsMatchTheDequantisedWeights) {
  const std::vector<Case> cases = read_cases(GetParam(), quantised_directory());
  ASSERT_EQ(cases.size(), 2u);
  for (const bool reference : {true, false}) {
    auto runner =
        Runner::open(quantised_directory() + GetParam(), {.reference = reference, .context = 256});
    ASSERT_TRUE(runner.ok()) << runner.status().message();
    const float tolerance = reference ? 2e-4f : GetParam() == "int8" ? 6e-2f : 1e-2f;
    for (const Case& c : cases) {
      expect_close((*runner)->run({c.ids}, 0)[0], c.logits, tolerance, GetParam());
      if (!reference) continue;
      EXPECT_EQ((*runner)->greedy(c.ids, static_cast<int>(c.greedy.size())), c.greedy);
    }
    expect_batch_changes_no_bit(**runner, cases, GetParam());
  }
}

INSTANTIATE_TEST_SUITE_P(Models, GoldenQuantised,
                         ::testing::ValuesIn(models(quantised_directory())), test_name);

// Weights stay in quantised form; only blocks that straddle rows (down_proj of bitsandbytes) do
// not.
TEST(GoldenQuantisedSet, IsStoredAsPublished) {
  const std::pair<const char*, const char*> stored[] = {
      {"bnb-fp4", "fp4"},         {"bnb-nf4", "nf4"},           {"bnb-nf4-double", "nf4"},
      {"fp8-block", "fp8_g32"},   {"fp8-dynamic", "fp8_g32"},   {"fp8-static", "fp8_g32"},
      {"int8", "int8"},           {"mxfp4", "mxfp4"},           {"mxfp8", "mxfp8"},
      {"nvfp4", "nvfp4"},         {"w4a16", "int4_g32"},        {"w4a16-actorder", "int4_g32"},
      {"w4a16-asym", "int4_g32"}, {"w4a16-channel", "int4_g32"}};
  ASSERT_EQ(models(quantised_directory()).size(), std::size(stored));
  for (const auto& [name, format] : stored) {
    auto runner = Runner::open(quantised_directory() + name, {.context = 64});
    ASSERT_TRUE(runner.ok()) << runner.status().message();
    const bool straddles = std::string_view(name).starts_with("bnb");
    int found = 0;
    for (const Model::WeightInfo& w : (*runner)->model().weights()) {
      found += quant::info(w.format).name == format;
    }
    EXPECT_EQ(found, straddles ? 12 : 14) << name;
  }
}

}  // namespace
}  // namespace freshet::testing

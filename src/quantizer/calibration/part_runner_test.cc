#include "quantizer/calibration/part_runner.h"

#include <cmath>
#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>

#include "runtime/loaded_model.h"

namespace freshet::quantizer {
namespace {

std::string golden_path(const std::string& name) {
  for (const char* folder : {"/golden/", "/seeded/"}) {
    std::string path = std::string(FRESHET_UNPACKED_DATA) + folder + name;
    if (std::filesystem::is_directory(path)) return path;
  }
  FRESHET_CHECK(false, "no golden model '{}'", name);
  return {};
}

std::shared_ptr<runtime::Compute> two_threads() {
  runtime::ComputeOptions options;
  options.threads = 2;
  auto compute = runtime::Compute::open(options);
  FRESHET_CHECK(compute.ok());
  return *compute;
}

Windows some_windows(int vocab) {
  Windows windows;
  for (const int length : {33, 5, 64, 1, 40}) {
    auto& w = windows.emplace_back();
    for (int i = 0; i < length; ++i) w.push_back((i * 37 + length * 11) % vocab);
  }
  return windows;
}

// The stream behind the last layer, of the whole model at once.
std::vector<float> whole_model(const std::shared_ptr<runtime::Compute>& compute,
                               const std::string& path, const std::vector<int32_t>& ids) {
  runtime::LoadOptions options;
  options.model = path;
  auto loaded = runtime::LoadedModel::load(compute, options);
  FRESHET_CHECK(loaded.ok(), "{}", loaded.status().message());
  Model& model = (*loaded)->model();
  const auto layers = static_cast<int>(model.spec().layers.size());
  const auto tokens = std::ssize(ids);
  FRESHET_CHECK(model.capture({layers}).ok());
  FRESHET_CHECK((*loaded)->reserve({tokens, 1, tokens}).ok());
  const size_t groups = kv_cache_spec(model.spec(), ops::KvType::kF32).groups.size();
  const auto blocks = static_cast<int32_t>((tokens + 15) / 16);
  auto cache = (*loaded)->make_cache(ops::KvType::kF32, std::vector<int32_t>(groups, blocks));
  FRESHET_CHECK(cache.ok());
  ForwardBatch batch;
  batch.token_ids = ids;
  for (int32_t p = 0; p < tokens; ++p) batch.positions.push_back(p);
  batch.query_start = {0, static_cast<int32_t>(tokens)};
  batch.context_len = {static_cast<int32_t>(tokens)};
  BlockTables table{{}, blocks};
  for (int32_t b = 0; b < blocks; ++b) table.ids.push_back(b);
  batch.tables.assign(groups, table);
  std::vector<float> out(static_cast<size_t>(tokens * model.spec().hidden_size));
  float* const to[] = {out.data()};
  StepResults results;
  results.boundaries = to;
  model.forward(batch, *cache, results);
  return out;
}

class PartRunnerGolden : public testing::TestWithParam<std::string> {};

TEST_P(PartRunnerGolden, PartsGiveTheBitsOfTheWholeModel) {
  const std::string path = golden_path(GetParam());
  const auto compute = two_threads();
  const auto checkpoint = loader::Checkpoint::open(path);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  const auto model = models::describe(*checkpoint);
  ASSERT_TRUE(model.ok());
  const Windows windows = some_windows(model->spec.vocab_size);
  PartRunner::Options options;
  options.folder = testing::TempDir();
  options.memory = GetParam() == "llama" ? 0 : size_t{1} << 30;  // once through a file
  auto runner = PartRunner::create(compute, *checkpoint, *model, windows, options);
  ASSERT_TRUE(runner.ok()) << runner.status().message();
  EXPECT_EQ((*runner)->on_disk(), options.memory == 0);
  const Progress no_progress;
  const models::WeightReader reader(*checkpoint, *model->architecture, compute->ops(), no_progress);
  int linears = 0;
  for (const models::Part& part : models::parts_of(model->spec)) {
    const auto collected = (*runner)->collect(part, {});
    ASSERT_TRUE(collected.ok()) << collected.status().message();
    const auto tensors = models::linear_tensors(reader, model->spec, part);
    ASSERT_TRUE(tensors.ok()) << tensors.status().message();
    for (const models::LinearTensor& t : *tensors) {
      ++linears;
      if (t.expert >= 0 || t.input == models::InputOf::kLatent) continue;
      const InputStats* stats = collected->of(t, reader);
      ASSERT_NE(stats, nullptr) << t.source->name;
      EXPECT_EQ(stats->tokens, (*runner)->tokens());
      EXPECT_EQ(stats->cols, t.cols);
    }
    const Status moved = (*runner)->advance(part);
    ASSERT_TRUE(moved.ok()) << moved.message();
  }
  EXPECT_GE(linears, (GetParam().starts_with("zamba2") ? 2 : 4) * std::ssize(model->spec.layers));
  for (size_t w = 0; w < windows.size(); ++w) {
    const std::vector<float> expected = whole_model(compute, path, windows[w]);
    std::vector<float> got(expected.size());
    ASSERT_TRUE((*runner)->read(static_cast<int64_t>(w), got.data()).ok());
    EXPECT_EQ(expected, got) << "window " << w;
  }
}

INSTANTIATE_TEST_SUITE_P(Models, PartRunnerGolden,
                         testing::Values("llama", "gpt2", "cohere", "mixtral", "deepseek-v3",
                                         "gemma2", "qwen2-moe", "phi3", "opt", "gpt-neox",
                                         "mistral-swa", "gpt-oss", "qwen3-next", "qwen3-5",
                                         "minimax", "falcon-h1", "zamba2", "zamba2-plain"),
                         [](const auto& chosen) {
                           std::string name = chosen.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST(InputCollector, SumsAreThoseOfItsInputs) {
  const std::string path = golden_path("llama");
  const auto compute = two_threads();
  const auto checkpoint = loader::Checkpoint::open(path);
  ASSERT_TRUE(checkpoint.ok());
  const auto model = models::describe(*checkpoint);
  ASSERT_TRUE(model.ok());
  const Windows windows = some_windows(model->spec.vocab_size);
  PartRunner::Options options;
  options.folder = testing::TempDir();
  auto runner = PartRunner::create(compute, *checkpoint, *model, windows, options);
  ASSERT_TRUE(runner.ok());
  const auto parts = models::parts_of(model->spec);
  ASSERT_TRUE((*runner)->advance(parts[0]).ok());
  const auto collected = (*runner)->collect(parts[1], {.gram = true, .sample_every = 1});
  ASSERT_TRUE(collected.ok());
  for (const char* name : {"q_proj", "o_proj"}) {
    const InputStats* stats =
        collected->find(std::string("model.layers.0.self_attn.") + name + ".weight");
    ASSERT_NE(stats, nullptr);
    const auto cols = static_cast<size_t>(stats->cols);
    ASSERT_EQ(stats->samples.size(), cols * static_cast<size_t>(stats->tokens));
    for (size_t a = 0; a < cols; ++a) {
      double abs = 0, most = 0;
      std::vector<double> product(cols);
      for (size_t t = 0; t < stats->samples.size(); t += cols) {
        abs += std::fabs(stats->samples[t + a]);
        most = std::max<double>(most, std::fabs(stats->samples[t + a]));
        for (size_t b = 0; b < cols; ++b)
          product[b] += static_cast<double>(stats->samples[t + a]) * stats->samples[t + b];
      }
      const auto tokens = static_cast<double>(stats->tokens);
      EXPECT_NEAR(stats->mean_abs[a], abs / tokens, 1e-6 * abs / tokens);
      EXPECT_EQ(stats->max_abs[a], static_cast<float>(most));
      EXPECT_NEAR(stats->mean_square[a], product[a] / tokens, 1e-6 * product[a] / tokens);
      const double scale = std::sqrt(product[a] / tokens) + 1e-3;
      for (size_t b = 0; b < cols; ++b) {
        const double other = std::sqrt(stats->mean_square[b]) + 1e-3;
        EXPECT_NEAR(stats->gram[a * cols + b], product[b] / tokens, 1e-5 * scale * other);
        EXPECT_EQ(stats->gram[a * cols + b], stats->gram[b * cols + a]);
      }
    }
  }
  EXPECT_EQ(collected->find("model.layers.0.self_attn.q_proj.weight"),
            collected->find("model.layers.0.self_attn.v_proj.weight"));
}

// What several layers share is counted over all of them, as if their inputs were one's.
TEST(PartRunner, UsesOfSharedMatricesAreAddedUp) {
  const auto compute = two_threads();
  const auto checkpoint = loader::Checkpoint::open(golden_path("zamba2"));
  ASSERT_TRUE(checkpoint.ok());
  const auto model = models::describe(*checkpoint);
  ASSERT_TRUE(model.ok());
  const Windows windows = some_windows(model->spec.vocab_size);
  PartRunner::Options options;
  options.folder = testing::TempDir();
  const Progress no_progress;
  const models::WeightReader reader(*checkpoint, *model->architecture, compute->ops(), no_progress);
  const auto shared = models::shared_parts_of(model->spec);
  ASSERT_EQ(shared.size(), 2u);
  for (const models::Part& block : shared) {
    const auto whole = PartRunner::create(compute, *checkpoint, *model, windows, options);
    ASSERT_TRUE(whole.ok());
    const auto uses = (*whole)->collect_uses(block, {.gram = true}, reader);
    ASSERT_TRUE(uses.ok()) << uses.status().message();
    const auto linears = models::linear_tensors(reader, model->spec, block);
    ASSERT_TRUE(linears.ok());
    EXPECT_EQ(linears->size(), 6u);  // q, k, v, o, gates with ups, down
    const auto runner = PartRunner::create(compute, *checkpoint, *model, windows, options);
    ASSERT_TRUE(runner.ok());
    const std::vector<int>& layers = models::sharers_of(model->spec, block);
    ASSERT_EQ(layers.size(), 2u);
    std::vector<PartRunner::Collected> each;
    for (const models::Part& part : models::parts_of(model->spec)) {
      if (std::ranges::count(layers, part.layer) > 0) {
        auto one = (*runner)->collect(part, {.gram = true});
        ASSERT_TRUE(one.ok());
        each.push_back(std::move(*one));
      }
      ASSERT_TRUE((*runner)->advance(part).ok());
    }
    for (const models::LinearTensor& t : *linears) {
      const InputStats* sum = uses->of(t, reader);
      const InputStats *a = each[0].of(t, reader), *b = each[1].of(t, reader);
      ASSERT_TRUE(sum != nullptr && a != nullptr && b != nullptr) << t.source->name;
      EXPECT_EQ(sum->tokens, 2 * (*runner)->tokens());
      EXPECT_NE(a->gram, b->gram) << t.source->name;
      ASSERT_EQ(sum->gram.size(), static_cast<size_t>(t.cols * t.cols));
      for (size_t i = 0; i < sum->gram.size(); ++i)
        EXPECT_NEAR(sum->gram[i], (a->gram[i] + b->gram[i]) / 2, 1e-5f * sum->gram[0] + 1e-6f);
      for (size_t c = 0; c < sum->max_abs.size(); ++c)
        EXPECT_EQ(sum->max_abs[c], std::max(a->max_abs[c], b->max_abs[c]));
    }
  }
}

TEST(PartRunner, RefusesWhatCannotBeRun) {
  const auto compute = two_threads();
  const auto checkpoint = loader::Checkpoint::open(golden_path("llama"));
  ASSERT_TRUE(checkpoint.ok());
  const auto model = models::describe(*checkpoint);
  ASSERT_TRUE(model.ok());
  const Windows none, empty = {{}};
  EXPECT_FALSE(PartRunner::create(compute, *checkpoint, *model, none, {}).ok());
  EXPECT_FALSE(PartRunner::create(compute, *checkpoint, *model, empty, {}).ok());
  const Windows one = {{1, 2, 3}};
  PartRunner::Options nowhere;
  nowhere.memory = 0;
  nowhere.folder = "/nonexistent/folder";
  const auto failed = PartRunner::create(compute, *checkpoint, *model, one, nowhere);
  ASSERT_FALSE(failed.ok());
  EXPECT_NE(failed.status().message().find("/nonexistent/folder"), std::string::npos);
}

}  // namespace
}  // namespace freshet::quantizer

// Converted files of the families: the same logits as those of the folder.
#include "quantizer/gguf_families.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>

#include <gtest/gtest.h>

#include "layers/model.h"
#include "ops/kernel_table.h"
#include "quantizer/gguf_export.h"

namespace freshet::quantizer {
namespace {

namespace fs = std::filesystem;

constexpr int kRead = 40;  // tokens, more than the windows of the models have

std::string seeded(const std::string& name) {
  return FRESHET_UNPACKED_DATA "/seeded/" + name;
}

class GgufFamilies : public testing::TestWithParam<std::string> {
 protected:
  GgufFamilies() : pool_(2) {
    std::string name = (fs::temp_directory_path() / "freshet-family-XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
  }
  ~GgufFamilies() override { fs::remove_all(folder_); }

  Status convert(const std::string& model) {
    FRESHET_ASSIGN_OR_RETURN(const auto checkpoint, loader::Checkpoint::open(model));
    ExportOptions o;
    o.output = file();
    o.recipe = Recipe::by_name("bf16").value();
    o.name = "test";
    o.warn = [](const std::string&) {};
    return export_gguf(checkpoint, pool_, o);
  }
  std::string file() const { return folder_ + "/model.gguf"; }

  // Of all positions, by the plain operations.
  Result<std::vector<float>> logits(const std::string& path) {
    FRESHET_ASSIGN_OR_RETURN(const auto checkpoint, loader::Checkpoint::open(path));
    FRESHET_ASSIGN_OR_RETURN(
        const auto ops, ops::Ops::create(pool_, ops::reference_kernels(), {}, {.reference = true}));
    FRESHET_ASSIGN_OR_RETURN(const auto model, load_model(checkpoint, *ops, {}));
    FRESHET_RETURN_IF_ERROR(model->reserve(kRead, kRead, kRead));
    constexpr int kBlocks = (kRead + ops::kBlockTokens - 1) / ops::kBlockTokens;
    const KvCacheSpec cache_spec = kv_cache_spec(model->spec(), ops::KvType::kF32);
    FRESHET_ASSIGN_OR_RETURN(
        const KvStorage cache,
        KvStorage::allocate(cache_spec, std::vector<int32_t>(cache_spec.groups.size(), kBlocks)));
    ForwardBatch batch;
    for (int t = 0; t < kRead; ++t) {
      batch.token_ids.push_back((t * 7 + 3) % model->spec().vocab_size);
      batch.positions.push_back(t);
      batch.logit_rows.push_back(t);
    }
    batch.query_start = {0, kRead};
    batch.context_len = {kRead};
    BlockTables table;
    for (int b = 0; b < kBlocks; ++b) table.ids.push_back(b);
    table.stride = kBlocks;
    batch.tables.assign(cache_spec.groups.size(), table);
    std::vector<float> out(static_cast<size_t>(kRead) *
                           static_cast<size_t>(model->spec().vocab_size));
    model->forward(batch, cache, {out.data()});
    return out;
  }

  ThreadPool pool_;
  std::string folder_;
};

TEST_P(GgufFamilies, GiveTheLogitsOfTheFolder) {
  const Status status = convert(seeded(GetParam()));
  ASSERT_TRUE(status.ok()) << status.message();
  const auto want = logits(seeded(GetParam()));
  const auto got = logits(file());
  ASSERT_TRUE(want.ok()) << want.status().message();
  ASSERT_TRUE(got.ok()) << got.status().message();
  ASSERT_EQ(got->size(), want->size());
  float largest = 0.0f, off = 0.0f;
  for (size_t i = 0; i < want->size(); ++i) {
    largest = std::max(largest, std::fabs((*want)[i]));
    off = std::max(off, std::fabs((*got)[i] - (*want)[i]));
  }
  EXPECT_LE(off, 1e-4f * largest);
}

INSTANTIATE_TEST_SUITE_P(Models, GgufFamilies,
                         testing::Values("apertus", "arcee", "cohere2", "ernie4-5", "ernie4-5-moe",
                                         "exaone4", "falcon", "falcon-7b", "glm4-moe",
                                         "gpt-bigcode", "granitemoe", "hunyuan-dense", "minimax-m2",
                                         "nemotron", "olmo3", "olmoe", "phi", "phimoe", "seed-oss"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::ranges::replace(name, '-', '_');
                           return name;
                         });

using GgufFamiliesRefused = GgufFamilies;

TEST_F(GgufFamiliesRefused, NamesWhatHasNoPlace) {
  const Status status = convert(seeded("smollm3"));  // every second layer without RoPE
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.message().find("'no_rope_layers' has no place in a GGUF file"),
            std::string::npos)
      << status.message();
}

}  // namespace
}  // namespace freshet::quantizer

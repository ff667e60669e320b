// Converted files of the families: the same logits as those of the folder.
#include "quantizer/gguf_families.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <limits>
#include <span>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "layers/model.h"
#include "loader/gguf.h"
#include "loader/gguf_writer.h"
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

  // `change` may set further options.
  Status convert(const std::string& model, const char* type = "bf16",
                 const std::function<void(ExportOptions&)>& change = {}) {
    FRESHET_ASSIGN_OR_RETURN(const auto checkpoint, loader::Checkpoint::open(model));
    ExportOptions o;
    o.output = file();
    o.recipe = Recipe::by_name(type).value();
    o.name = "test";
    o.warn = [](const std::string&) {};
    if (change) change(o);
    return export_gguf(checkpoint, pool_, o);
  }
  void expect_near(const std::string& path, const std::string& folder, float tolerance = 1e-4f) {
    const auto want = logits(folder);
    const auto got = logits(path);
    ASSERT_TRUE(want.ok()) << want.status().message();
    ASSERT_TRUE(got.ok()) << got.status().message();
    ASSERT_EQ(got->size(), want->size());
    float largest = 0.0f, off = 0.0f;
    for (size_t i = 0; i < want->size(); ++i) {
      largest = std::max(largest, std::fabs((*want)[i]));
      off = std::max(off, std::fabs((*got)[i] - (*want)[i]));
    }
    EXPECT_LE(off, tolerance * largest);
  }
  std::string file() const { return folder_ + "/model.gguf"; }

  // The file with other metadata.
  std::string changed(std::string_view left_out,
                      const std::function<void(loader::GgufWriter&)>& add = {}) {
    const auto made = loader::GgufFile::open(file());
    EXPECT_TRUE(made.ok());
    loader::GgufWriter out;
    for (const auto& [key, value] : made->metadata()) {
      if (key != left_out) out.add_value(key, value);
    }
    if (add) add(out);
    for (const loader::TensorSource& t : made->tensors())
      EXPECT_TRUE(out.add_tensor(t.name, *t.format, t.shape).ok());
    const std::string path = folder_ + "/changed.gguf";
    EXPECT_TRUE(out.open(path).ok());
    for (const loader::TensorSource& t : made->tensors())
      EXPECT_TRUE(out.write({t.data, t.bytes}).ok());
    EXPECT_TRUE(out.close().ok());
    return path;
  }

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
  // The multipliers that go into Falcon-H1's weights would round them to BF16 again.
  const Status status = convert(seeded(GetParam()), GetParam() == "falcon-h1" ? "f32" : "bf16");
  ASSERT_TRUE(status.ok()) << status.message();
  expect_near(file(), seeded(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(
    Models, GgufFamilies,
    testing::Values("apertus", "arcee", "bamba", "cohere2", "ernie4-5", "ernie4-5-moe", "exaone4",
                    "falcon", "falcon-7b", "falcon-h1", "glm4-moe", "gpt-bigcode", "granitemoe",
                    "granitemoehybrid", "granitemoehybrid-dense", "hunyuan-dense", "jamba", "lfm2",
                    "lfm2-moe", "mamba", "mamba2", "minimax-m2", "nemotron", "nemotron-h", "olmo3",
                    "olmoe", "phi", "phimoe", "qwen3-5", "qwen3-5-moe", "qwen3-next", "seed-oss"),
    [](const auto& model) {
      std::string name = model.param;
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

using GgufStates = GgufFamilies;

// Files mix formats: gates and decays then have matrices of their own.
TEST_F(GgufStates, PartsOfOneProjectionMayHaveDifferentFormats) {
  for (const std::string model : {"qwen3-next", "qwen3-5"}) {
    const Status status = convert(seeded(model), "bf16", [&](ExportOptions& o) {
      ASSERT_TRUE(o.overrides.add_tensor_type("attn_gate=f32").ok());
      if (model == "qwen3-5") {
        ASSERT_TRUE(o.overrides.add_tensor_type("ssm_alpha=f32").ok());
      }
    });
    ASSERT_TRUE(status.ok()) << status.message();
    expect_near(file(), seeded(model));
  }
}

// Early files of Qwen3-Next have queries, keys, values and gates in one matrix, as the folder does.
TEST_F(GgufStates, EarlyFilesOfQwen3NextAreTheSameModel) {
  ASSERT_TRUE(convert(seeded("qwen3-next")).ok());
  const auto checkpoint = loader::Checkpoint::open(seeded("qwen3-next"));
  const auto made = loader::GgufFile::open(file());
  ASSERT_TRUE(checkpoint.ok() && made.ok());
  loader::GgufWriter out;
  for (const auto& [key, value] : made->metadata()) out.add_value(key, value);
  std::vector<std::span<const uint8_t>> data;
  const auto put = [&](std::string name, const loader::TensorSource& t) {
    ASSERT_TRUE(out.add_tensor(name, *t.format, t.shape).ok()) << name;
    data.emplace_back(t.data, t.bytes);
  };
  for (const loader::TensorSource& t : made->tensors()) {
    const int layer = std::atoi(t.name.c_str() + std::string("blk.").size());
    if (t.name.ends_with(".attn_gate.weight")) continue;
    if (!t.name.ends_with(".attn_qkv.weight")) {
      put(t.name, t);
      continue;
    }
    const loader::TensorSource* const fused =
        checkpoint->find(fmt::format("model.layers.{}.linear_attn.in_proj_qkvz.weight", layer));
    ASSERT_NE(fused, nullptr);
    put(fmt::format("blk.{}.ssm_in.weight", layer), *fused);
  }
  const std::string early = folder_ + "/early.gguf";
  ASSERT_TRUE(out.open(early).ok());
  for (const auto bytes : data) ASSERT_TRUE(out.write(bytes).ok());
  ASSERT_TRUE(out.close().ok());
  expect_near(early, seeded("qwen3-next"));
}

TEST_F(GgufStates, LayersMayBeListed) {
  const Status status = convert(seeded("qwen3-next"), "bf16", [](ExportOptions& o) {
    o.metadata = {{"qwen3next.full_attention_interval", "3"}};
  });
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_FALSE(logits(file()).ok());  // layer 2 is none with attention
  const std::string listed = changed("", [](loader::GgufWriter& out) {
    out.add_i32s("qwen3next.attention.recurrent_layers", std::vector<int32_t>{1, 1, 1, 0});
  });
  expect_near(listed, seeded("qwen3-next"));
}

TEST_F(GgufStates, TowersOfQwen35AreRefused) {
  ASSERT_TRUE(convert(seeded("qwen3-5")).ok());
  loader::GgufWriter tower;
  tower.add_string("general.architecture", "clip");
  ASSERT_TRUE(tower.add_tensor("v.blk.0.ln1.weight", quant::Format::kF32, {1}).ok());
  const std::string path = folder_ + "/mmproj.gguf";
  ASSERT_TRUE(tower.open(path).ok());
  ASSERT_TRUE(tower.write(std::vector<uint8_t>(4)).ok());
  ASSERT_TRUE(tower.close().ok());
  const auto checkpoint = loader::Checkpoint::open(file(), path);
  std::string message(checkpoint.status().message());
  if (checkpoint.ok()) message = read_spec(*checkpoint).status().message();
  EXPECT_NE(message.find("leave out --mmproj"), std::string::npos) << message;
}

TEST_F(GgufStates, WhatReadersMissIsToldInOneLine) {
  for (const auto& [model, part] : {std::pair{"nemotron-h", "time_step_min"},
                                    {"bamba", "rotates other features"},
                                    {"granitemoehybrid", ""}}) {
    std::string lines;
    const Status status = convert(seeded(model), "bf16", [&](ExportOptions& o) {
      o.warn = [&](const std::string& line) { lines += line + "\n"; };
    });
    ASSERT_TRUE(status.ok()) << status.message();
    const bool told = lines.find("llama.cpp ro") != std::string::npos ||
                      lines.find("llama.cpp has") != std::string::npos;
    EXPECT_EQ(told, *part != 0) << lines;
    EXPECT_NE(lines.find(part), std::string::npos) << lines;
  }
}

// Readers of the format rotate where this key is missing.
TEST_F(GgufStates, BambaRotatesWithoutAKeyThatSaysSo) {
  const Status status = convert(seeded("bamba"));
  ASSERT_TRUE(status.ok()) << status.message();
  expect_near(changed("granitehybrid.rope.scaling.finetuned"), seeded("bamba"));
}

TEST_F(GgufStates, CountsThatCannotBeAreRefused) {
  ASSERT_TRUE(convert(seeded("qwen3-5")).ok());
  const auto refused = [&](const char* key, const std::function<void(loader::GgufWriter&)>& add) {
    const auto got = logits(changed(key, add));
    EXPECT_FALSE(got.ok());
    EXPECT_NE(got.status().message().find(key), std::string::npos) << got.status().message();
  };
  constexpr const char* kBehind = "qwen35.nextn_predict_layers";
  refused(kBehind, [](auto& out) { out.add_i32(kBehind, std::numeric_limits<int32_t>::min()); });
  constexpr const char* kBlocks = "qwen35.block_count";
  refused(kBlocks, [](auto& out) { out.add_u64(kBlocks, std::numeric_limits<int64_t>::max()); });
  refused(kBlocks, [](auto& out) { out.add_u64(kBlocks, uint64_t{1} << 63); });
  constexpr const char* kListed = "qwen35.attention.recurrent_layers";
  refused(kListed, [](auto& out) { out.add_i32s(kListed, std::vector<int32_t>{1, 1, 1}); });
}

// Each with one line that names the key.
TEST_F(GgufStates, WhatIsNotHonouredIsRefused) {
  const struct {
    const char *model, *key, *value;
    const char* says = nullptr;  // other than the key
  } cases[] = {{"qwen3-next", "qwen3next.attention.scale", "0.5"},
               {"qwen3-next", "qwen3next.expert_weights_scale", "2.5"},
               {"qwen3-5", "qwen35.attention.sliding_window", "64"},
               {"jamba", "jamba.logit_scale", "2.0"},
               {"falcon-h1", "falcon-h1.final_logit_softcapping", "30.0"},
               {"nemotron-h", "nemotron_h.ssm.group_count", "0"},
               {"granitemoehybrid", "granitehybrid.expert_shared_feed_forward_length", "0"},
               {"mamba2", "mamba2.ssm.inner_size", "0"},
               {"qwen3-next", "qwen3next.expert_weights_norm", "false"},
               {"qwen3-5-moe", "qwen35moe.expert_weights_norm", "false"},
               {"granitemoe", "granitemoe.rope.scaling.finetuned", "false"},
               {"qwen3-5", "qwen35.block_count", "16777216"},
               {"lfm2", "lfm2.block_count", "4097"},
               {"jamba", "jamba.block_count", "0"},
               {"falcon-h1", "falcon-h1.nextn_predict_layers", "100"},
               {"jamba", "jamba.block_count", "3", "jamba.attention.head_count_kv' has"},
               {"nemotron-h", "nemotron_h.block_count", "3", "nemotron_h.attention.head_count_kv"}};
  for (const auto& c : cases) {
    const Status status = convert(seeded(c.model), "bf16",
                                  [&](ExportOptions& o) { o.metadata = {{c.key, c.value}}; });
    ASSERT_TRUE(status.ok()) << status.message();
    const auto got = logits(file());
    ASSERT_FALSE(got.ok()) << c.key;
    const std::string message(got.status().message());
    EXPECT_NE(message.find(c.says != nullptr ? c.says : c.key), std::string::npos) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  }
}

}  // namespace
}  // namespace freshet::quantizer

// Bits per weight of the golden models, whose files say them in other ways.
#include "eval/model_size.h"

#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>
#include <unistd.h>

#include "base/json.h"

namespace freshet::eval {
namespace {

namespace fs = std::filesystem;

const fs::path kData = FRESHET_UNPACKED_DATA;

ModelSize size_of(const fs::path& model) {
  auto size = model_size(model.string());
  EXPECT_TRUE(size.ok()) << size.status().message();
  return size.ok() ? *size : ModelSize{};
}

// Every architecture stores its linear layers in one plain type: the count from the shapes of the
// architecture must be that of the file.
TEST(ModelSize, OfPlainModelsIsThatOfTheirType) {
  int models = 0;
  for (const auto& entry : fs::directory_iterator(kData / "golden")) {
    SCOPED_TRACE(entry.path().filename());
    if (entry.path().filename() == "gpt-oss") continue;  // MXFP4 experts
    const ModelSize size = size_of(entry.path());
    EXPECT_EQ(size.bits_per_weight(), 16.0);
    EXPECT_EQ(size.bits_per_weight_total(), 16.0);
    EXPECT_GT(size.weights, size.linear_weights);
    ++models;
  }
  EXPECT_GE(models, 26);
}

TEST(ModelSize, OfGgufFiles) {
  // Routers of experts and vectors are F32 there.
  for (const char* name : {"llama", "phi3", "gpt2", "gemma3", "cohere"})
    EXPECT_EQ(size_of(kData / "golden-gguf" / name / "model.gguf").bits_per_weight(), 16.0) << name;
  for (const char* name : {"mixtral", "deepseek-v2", "qwen2-moe"}) {
    const double bits = size_of(kData / "golden-gguf" / name / "model.gguf").bits_per_weight();
    EXPECT_GT(bits, 16.0) << name;
    EXPECT_LT(bits, 16.2) << name;
  }
}

TEST(ModelSize, ScalesCount) {
  // One BF16 scale for each row: of 64 columns in three quarters of the weights, else of 160.
  const ModelSize size = size_of(kData / "golden-int8/llama");
  EXPECT_NEAR(size.bits_per_weight(), 8.0 + (32768.0 * 16 / 64 + 10240.0 * 16 / 160) / 43008.0,
              1e-12);
}

// A folder with the golden Llama's configuration and tensors of these types and shapes, all zero
// but for the first value of I32 vectors.
class PackedModel {
 public:
  explicit PackedModel(const std::string& name)
      : folder_(fs::temp_directory_path() / fmt::format("freshet-{}-{}", name, getpid())) {
    fs::create_directories(folder_);
    fs::copy_file(kData / "golden/llama/config.json", folder_ / "config.json",
                  fs::copy_options::overwrite_existing);
  }
  ~PackedModel() { fs::remove_all(folder_); }

  void add(const std::string& name, const char* type, std::vector<int64_t> shape, int first = 0) {
    int64_t bytes = type == std::string_view("I32") ? 4 : type == std::string_view("U8") ? 1 : 2;
    json::Array sizes;
    for (const int64_t n : shape) {
      bytes *= n;
      sizes.emplace_back(n);
    }
    json::Object entry;
    entry["dtype"] = type;
    entry["shape"] = std::move(sizes);
    const auto begin = std::ssize(data_);
    entry["data_offsets"] = json::Array{begin, begin + bytes};
    header_[name] = std::move(entry);
    data_.resize(data_.size() + static_cast<size_t>(bytes));
    if (first != 0) data_[static_cast<size_t>(begin)] = static_cast<char>(first);
  }
  // The two layers in GPTQ's layout: 4 bits, groups of 32.
  void add_gptq_layers(int first_group) {
    for (int layer = 0; layer < 2; ++layer) {
      const auto linear = [&](const char* name, int64_t rows, int64_t cols) {
        const std::string stem = fmt::format("model.layers.{}.{}.", layer, name);
        add(stem + "qweight", "I32", {cols / 8, rows});
        add(stem + "qzeros", "I32", {cols / 32, rows / 8});
        add(stem + "scales", "F16", {cols / 32, rows});
        add(stem + "g_idx", "I32", {cols}, first_group);
        add(stem + "bias", "F16", {rows});
      };
      for (const char* name : {"self_attn.q_proj", "self_attn.o_proj"}) linear(name, 64, 64);
      for (const char* name : {"self_attn.k_proj", "self_attn.v_proj"}) linear(name, 32, 64);
      for (const char* name : {"mlp.gate_proj", "mlp.up_proj"}) linear(name, 160, 64);
      linear("mlp.down_proj", 64, 160);
      add(fmt::format("model.layers.{}.input_layernorm.weight", layer), "BF16", {64});
    }
  }
  ModelSize size() {
    std::string header = json::write(json::Value(header_));
    const uint64_t length = header.size();
    std::ofstream out(folder_ / "model.safetensors", std::ios::binary);
    out.write(reinterpret_cast<const char*>(&length), sizeof length);
    out << header << data_;
    out.close();
    return size_of(folder_);
  }

 private:
  fs::path folder_;
  json::Object header_;
  std::string data_;
};

TEST(ModelSize, PackedIntegersCountWithScalesAndZeroPoints) {
  PackedModel model("ordered");
  model.add_gptq_layers(0);
  const ModelSize size = model.size();
  EXPECT_EQ(size.linear_weights, 2 * 43008);
  EXPECT_NEAR(size.bits_per_weight(), 4.0 + 16.0 / 32 + 4.0 / 32, 1e-12);
  // Biases and norms of two bytes each beside them.
  const double others = 2 * (64 * 3 + 32 * 2 + 160 * 2 + 64);
  EXPECT_NEAR(size.bits_per_weight_total(),
              (size.bits_per_weight() * 2 * 43008 + 16 * others) / (2 * 43008 + others), 1e-12);
}

TEST(ModelSize, AnOrderOfColumnsCountsWhereItTellsSomething) {
  PackedModel model("shuffled");
  model.add_gptq_layers(1);  // 1, 0, 0 ...
  const double indices = 2.0 * (6 * 64 + 160) * 32;
  EXPECT_NEAR(model.size().bits_per_weight(), 4.625 + indices / (2 * 43008), 1e-12);
}

TEST(ModelSize, APackedHeadHasTheWeightsOfTheVocabulary) {
  PackedModel model("head");
  model.add_gptq_layers(0);
  const int64_t before = model.size().weights;
  model.add("lm_head.weight_packed", "I32", {288, 8});
  model.add("lm_head.weight_scale", "BF16", {288, 2});
  EXPECT_EQ(model.size().weights - before, 288 * 64);
}

}  // namespace
}  // namespace freshet::eval

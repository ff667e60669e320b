// Folders of models: what is in them, and that there is never half a one.
#include "quantizer/containers/checkpoint_writer.h"

#include <algorithm>
#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>

#include "loader/checkpoint.h"

namespace freshet::quantizer {
namespace {

namespace fs = std::filesystem;

class CheckpointFolder : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::temp_directory_path() / fmt::format("freshet-writer-{}", static_cast<void*>(this));
    fs::create_directories(root_ / "source");
    const char* const files[] = {"config.json",     "tokenizer.json", "chat_template.jinja",
                                 "old.safetensors", ".hidden",        "pytorch_model.bin"};
    for (const char* name : files) std::ofstream(root_ / "source" / name) << name;
    options_.output = (root_ / "out").string();
    options_.source = (root_ / "source").string();
  }
  void TearDown() override { fs::remove_all(root_); }

  // Tensors of 3, 4 and 8 million numbers, and small ones of odd sizes.
  Status write(const CheckpointOptions& options) {
    FRESHET_ASSIGN_OR_RETURN(auto writer, CheckpointWriter::create(options));
    FRESHET_RETURN_IF_ERROR(writer->add("odd", "U8", {3}, std::vector<uint8_t>{1, 2, 3}));
    FRESHET_RETURN_IF_ERROR(writer->add("scalar", "F32", {}, std::vector<uint8_t>(4, 7)));
    for (int64_t i = 3; i < 9; ++i) {
      const std::vector<uint8_t> bytes(static_cast<size_t>(i << 20), static_cast<uint8_t>(i));
      FRESHET_RETURN_IF_ERROR(
          writer->add(fmt::format("w{}", i), "F16", {i, int64_t{1} << 19}, bytes));
    }
    const auto config = json::parse(
        R"({"zeta": 1, "quantization_config": {"old": 1}, "model_type": "llama", "x": 0.10})");
    json::Object q;
    q["quant_method"] = "gptq";
    return writer->finish(
        config_with(*config, json::Value(q), "me"),
        std::vector<std::pair<std::string, json::Value>>{{"quantize_config.json", json::Value(q)}});
  }

  void expect_contents() {
    const auto checkpoint = loader::Checkpoint::open(options_.output);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
    EXPECT_EQ(checkpoint->tensors().size(), 8u);
    for (const loader::TensorSource& t : checkpoint->tensors()) {
      const size_t unit = t.dtype == "F32" ? 4 : t.dtype == "F16" ? 2 : 1;
      EXPECT_EQ(t.file_offset % unit, 0u) << t.name << ": readers view tensors in place";
    }
    const loader::TensorSource* last = checkpoint->find("w8");
    ASSERT_NE(last, nullptr);
    EXPECT_EQ(last->data[last->bytes - 1], 8);
    EXPECT_EQ(checkpoint->find("odd")->data[2], 3);
    const std::string text = json::write(checkpoint->config());
    EXPECT_EQ(text, R"({"zeta":1,"quantization_config":{"quant_method":"gptq"},)"
                    R"("model_type":"llama","x":0.10,"freshet":"me"})");
  }
  std::vector<std::string> names(const fs::path& folder) {
    std::vector<std::string> out;
    for (const auto& e : fs::directory_iterator(folder)) out.push_back(e.path().filename());
    std::ranges::sort(out);
    return out;
  }

  fs::path root_;
  CheckpointOptions options_;
};

TEST_F(CheckpointFolder, OneFile) {
  ASSERT_TRUE(write(options_).ok());
  expect_contents();
  EXPECT_EQ(names(options_.output),
            (std::vector<std::string>{"chat_template.jinja", "config.json", "model.safetensors",
                                      "quantize_config.json", "tokenizer.json"}));
}

TEST_F(CheckpointFolder, Shards) {
  // The first one exceeds the bytes that are held in memory.
  options_.shard_bytes = int64_t{26} << 20;
  ASSERT_TRUE(write(options_).ok());
  expect_contents();
  const auto index = json::parse_file(options_.output + "/model.safetensors.index.json");
  ASSERT_TRUE(index.ok());
  EXPECT_EQ(index->find("weight_map")->get_string("w8", ""), "model-00002-of-00002.safetensors");
  EXPECT_EQ(index->find("metadata")->get_int("total_size", 0), (33 << 20) + 7);
}

TEST_F(CheckpointFolder, AnUnfinishedOneIsGone) {
  {
    auto writer = CheckpointWriter::create(options_);
    ASSERT_TRUE(writer.ok());
    ASSERT_TRUE((*writer)->add("w", "F32", {1}, std::vector<uint8_t>(4)).ok());
    EXPECT_EQ(names(root_).size(), 2u);
  }
  EXPECT_EQ(names(root_), std::vector<std::string>{"source"});
}

TEST_F(CheckpointFolder, OnlyCheckpointsAreReplaced) {
  ASSERT_TRUE(write(options_).ok());
  const auto message = [&] { return write(options_).message(); };
  EXPECT_NE(message().find("--force"), std::string::npos);
  options_.force = true;
  std::ofstream(options_.output + "/left.txt") << "x";
  EXPECT_EQ(message(), "");
  EXPECT_FALSE(fs::exists(options_.output + "/left.txt"));
  expect_contents();
  EXPECT_EQ(names(root_), (std::vector<std::string>{"out", "source"}));
  fs::create_directory(options_.output + "/mine");
  EXPECT_NE(message().find("folder 'mine'"), std::string::npos);
  EXPECT_TRUE(fs::exists(options_.output + "/mine"));
  options_.output = (root_ / "source").string();
  EXPECT_NE(message().find("holds the model that is read"), std::string::npos);
  options_.output = root_.string();
  EXPECT_NE(message().find("holds the model that is read"), std::string::npos);
}

TEST_F(CheckpointFolder, AFullDiskIsAnErrorAndLeavesNothing) {
  if (!fs::exists("/dev/full")) GTEST_SKIP() << "no /dev/full";
  auto writer = CheckpointWriter::create(options_);
  ASSERT_TRUE(writer.ok());
  // The first shard's file is made when the first tensor comes; it goes to a full device.
  for (const auto& e : fs::directory_iterator(root_)) {
    if (e.path().extension() == ".partial") fs::create_symlink("/dev/full", e.path() / "shard-0");
  }
  Status status = (*writer)->add("w", "F32", {1}, std::vector<uint8_t>(4));
  if (status.ok()) status = (*writer)->finish(json::Value(json::Object()));
  EXPECT_NE(status.message().find("No space left"), std::string::npos) << status.message();
  writer->reset();
  EXPECT_EQ(names(root_), std::vector<std::string>{"source"});
}

}  // namespace
}  // namespace freshet::quantizer

#include "loader/checkpoint.h"

#include <filesystem>

#include <gmock/gmock.h>

#include "loader/loader_test.h"

namespace freshet::loader {
namespace {

using testing::HasSubstr;
namespace fs = std::filesystem;

class CheckpointTest : public testing::Test {
 protected:
  void SetUp() override {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = testing::TempDir() + "checkpoint_" + test->name();
    fs::remove_all(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  void copy(const std::string& name) { fs::copy(data_path(name), folder_); }
  std::string error() const {
    const auto c = Checkpoint::open(folder_);
    return c.ok() ? "" : c.status().message();
  }
  void write(const std::string& name, std::string_view text) const {
    write_bytes(folder_ + "/" + name, {reinterpret_cast<const uint8_t*>(text.data()), text.size()});
  }
  std::string folder_;
};

TEST_F(CheckpointTest, OpensShards) {
  auto opened = Checkpoint::open(data_path("sharded"));
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  const Checkpoint c = *std::move(opened);
  EXPECT_EQ(c.kind(), Checkpoint::Kind::kHuggingFace);
  EXPECT_EQ(c.config().get_string("model_type", ""), "qwen3");
  EXPECT_TRUE(c.generation_config().find("eos_token_id")->is_array());
  EXPECT_EQ(c.gguf(), nullptr);
  EXPECT_EQ(c.total_bytes(), 192u);
  expect_tensors(c.tensors(), "sharded");
  ASSERT_NE(c.find("lm_head.weight"), nullptr);
  EXPECT_EQ(c.find("absent"), nullptr);
  c.prefetch();
}

TEST_F(CheckpointTest, OpensOneSafetensors) {
  const auto c = Checkpoint::open(data_path("single"));
  ASSERT_TRUE(c.ok()) << c.status().message();
  expect_tensors(c->tensors(), "single");
  EXPECT_TRUE(c->generation_config().is_null());
}

TEST_F(CheckpointTest, OpensGguf) {
  const auto c = Checkpoint::open(data_path("model.gguf"));
  ASSERT_TRUE(c.ok()) << c.status().message();
  EXPECT_EQ(c->kind(), Checkpoint::Kind::kGguf);
  EXPECT_TRUE(c->config().is_null());
  ASSERT_NE(c->gguf(), nullptr);
  EXPECT_EQ(c->gguf()->get_string("general.architecture"), "llama");
  expect_tensors(c->tensors(), "model.gguf");
}

TEST_F(CheckpointTest, OpensSplitGgufByFolderOrAnyPart) {
  for (const char* name :
       {"split", "split/model-00001-of-00003.gguf", "split/model-00003-of-00003.gguf"}) {
    auto opened = Checkpoint::open(data_path(name));
    ASSERT_TRUE(opened.ok()) << opened.status().message();
    const Checkpoint c = *std::move(opened);
    EXPECT_EQ(c.gguf()->get_string("general.name"), "split");
    expect_tensors(c.tensors(), "split");
  }
}

TEST_F(CheckpointTest, MissesAPartOfASplitGguf) {
  copy("split");
  fs::remove(folder_ + "/model-00002-of-00003.gguf");
  EXPECT_THAT(error(), HasSubstr("model-00002-of-00003.gguf"));
}

TEST_F(CheckpointTest, RefusesAPartUnderAnotherName) {
  copy("split");
  fs::rename(folder_ + "/model-00001-of-00003.gguf", folder_ + "/alone.gguf");
  const auto c = Checkpoint::open(folder_ + "/alone.gguf");
  EXPECT_THAT(c.status().message(), HasSubstr("one of 3 parts"));
}

TEST_F(CheckpointTest, RefusesPartsThatRepeatTensors) {
  copy("split");
  fs::copy_file(folder_ + "/model-00002-of-00003.gguf", folder_ + "/model-00003-of-00003.gguf",
                fs::copy_options::overwrite_existing);
  EXPECT_THAT(error(), HasSubstr("is in more than one file"));
}

TEST_F(CheckpointTest, SaysWhatAFolderLacks) {
  EXPECT_THAT(error(), HasSubstr("cannot open"));
  fs::create_directory(folder_);
  EXPECT_THAT(error(), HasSubstr("holds no model"));
  fs::copy(data_path("single/model.safetensors"), folder_);
  EXPECT_THAT(error(), HasSubstr("no config.json"));
  write("config.json", "[]");
  EXPECT_THAT(error(), HasSubstr("not a JSON object"));
  EXPECT_THAT(Checkpoint::open(folder_ + "/model.safetensors").status().message(),
              HasSubstr("give the directory"));
}

TEST_F(CheckpointTest, RefusesToChooseBetweenModels) {
  fs::create_directory(folder_);
  fs::copy(data_path("model.gguf"), folder_);
  EXPECT_EQ(error(), "");
  fs::copy(data_path("aligned.gguf"), folder_);
  EXPECT_THAT(error(), HasSubstr("holds 2 GGUF models; name one"));
}

TEST_F(CheckpointTest, KeepsAnIndexInItsFolder) {
  copy("sharded");
  const std::string index = "model.safetensors.index.json";
  for (const char* file : {"../sharded/x", "/etc/passwd", "..", "", "a\\u0000b"}) {
    write(index, fmt::format(R"({{"weight_map":{{"w":"{}"}}}})", file));
    EXPECT_THAT(error(), HasSubstr("tensor 'w' is mapped to something")) << file;
  }
  write(index, R"({"weight_map":{"w":"model-00001-of-00002.safetensors"}})");
  EXPECT_THAT(error(), HasSubstr("tensor 'w' is not in model-00001-of-00002.safetensors"));
  write(index, R"({"weight_map":{"w":3}})");
  EXPECT_THAT(error(), HasSubstr("tensor 'w'"));
  write(index, R"({"weight_map":3})");
  EXPECT_THAT(error(), HasSubstr("weight_map"));
}

// The files decide, as in transformers.
TEST_F(CheckpointTest, OverrulesAStaleIndex) {
  copy("sharded");
  const std::string index = "model.safetensors.index.json";
  write(index, R"({"weight_map":{"w":"absent.safetensors"}})");
  EXPECT_EQ(error(), "");  // the numbered set is complete
  const auto whole = Checkpoint::open(folder_);
  ASSERT_TRUE(whole.ok());
  EXPECT_FALSE(whole->tensors().empty());
  // An index that omits tensors, or assigns them to another of its files.
  std::string map;
  for (const TensorSource& t : whole->tensors()) {
    map += fmt::format(R"("{}":"model-0000{}-of-00002.safetensors",)", t.name, map.empty() ? 1 : 2);
  }
  write(index, "{\"weight_map\":{" + map.substr(0, map.size() - 1) + "}}");
  EXPECT_EQ(Checkpoint::open(folder_)->tensors().size(), whole->tensors().size());
  fs::remove(folder_ + "/model-00002-of-00002.safetensors");
  write(index, R"({"weight_map":{"w":"absent.safetensors"}})");
  EXPECT_THAT(error(), HasSubstr("cannot open"));
  fs::copy(data_path("single/model.safetensors"), folder_);
  EXPECT_EQ(error(), "");  // a single file takes precedence over any index
  write(index, "{broken");
  EXPECT_EQ(error(), "");
}

TEST_F(CheckpointTest, DoesWithoutAGenerationConfigThatCannotBeRead) {
  copy("single");
  for (const char* text : {"{broken", "[]", "null"}) {
    write("generation_config.json", text);
    const auto c = Checkpoint::open(folder_);
    ASSERT_TRUE(c.ok()) << c.status().message();
    EXPECT_TRUE(c->generation_config().is_null());
  }
}

}  // namespace
}  // namespace freshet::loader

#include "loader/gguf_writer.h"

#include <csignal>
#include <filesystem>

#include <gmock/gmock.h>
#include <sys/resource.h>

#include "loader/loader_test.h"

namespace freshet::loader {
namespace {

using testing::HasSubstr;
namespace fs = std::filesystem;

class GgufWriterTest : public testing::Test {
 protected:
  void SetUp() override {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = testing::TempDir() + "gguf_writer_" + test->name();
    fs::remove_all(folder_);
    fs::create_directory(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::string path(const std::string& name) const { return folder_ + "/" + name; }
  size_t files() const {
    return static_cast<size_t>(std::distance(fs::directory_iterator(folder_), {}));
  }
  std::string folder_;
};

// Copies all of `from`, writing the data in chunks of `piece` bytes.
void copy(const GgufFile& from, GgufWriter& to, const std::string& path, size_t piece) {
  for (const auto& [key, value] : from.metadata()) to.add_value(key, value);
  for (const TensorSource& t : from.tensors()) {
    ASSERT_TRUE(to.add_tensor(t.name, *t.format, t.shape).ok());
  }
  ASSERT_TRUE(to.open(path).ok());
  for (const TensorSource& t : from.tensors()) {
    for (size_t at = 0; at < t.bytes; at += piece) {
      ASSERT_TRUE(to.write({t.data + at, std::min(piece, t.bytes - at)}).ok());
    }
  }
  EXPECT_FALSE(fs::exists(path));
  const Status s = to.close();
  ASSERT_TRUE(s.ok()) << s.message();
}

TEST_F(GgufWriterTest, WritesTheBytesThatThePackageWrites) {
  const auto original = GgufFile::open(data_path("writable.gguf"));
  ASSERT_TRUE(original.ok());
  for (const size_t piece : {size_t{1}, size_t{50}, size_t{1} << 20}) {
    GgufWriter writer;
    copy(*original, writer, path(std::to_string(piece)), piece);
    EXPECT_EQ(read_bytes(path(std::to_string(piece))), read_bytes(data_path("writable.gguf")));
  }
  EXPECT_EQ(files(), 3u);
}

TEST_F(GgufWriterTest, WritesAnotherAlignment) {
  const auto original = GgufFile::open(data_path("aligned.gguf"));
  ASSERT_TRUE(original.ok());
  GgufWriter writer(4096);
  std::vector<TensorSource> kept;
  for (const TensorSource& t : original->tensors()) {
    if (!t.format) continue;
    ASSERT_TRUE(writer.add_tensor(t.name, *t.format, t.shape).ok());
    kept.push_back(t);
  }
  ASSERT_TRUE(writer.open(path("x.gguf")).ok());
  for (const TensorSource& t : kept) ASSERT_TRUE(writer.write({t.data, t.bytes}).ok());
  ASSERT_TRUE(writer.close().ok());
  const auto again = GgufFile::open(path("x.gguf"));
  ASSERT_TRUE(again.ok()) << again.status().message();
  EXPECT_EQ(again->alignment(), 4096u);
  for (const TensorSource& t : kept) {
    const TensorSource* copy = again->find_tensor(t.name);
    ASSERT_NE(copy, nullptr);
    EXPECT_EQ(copy->file_offset % 4096, 0u);
    EXPECT_EQ(copy->shape, t.shape);
    EXPECT_EQ(fnv1a(copy->data, copy->bytes), fnv1a(t.data, t.bytes));
  }
}

TEST_F(GgufWriterTest, WritesEveryKindOfValue) {
  GgufWriter writer;
  writer.add_u32("u32", 1);
  writer.add_u32("u32", 7);  // replaces
  writer.add_i32("i32", -7);
  writer.add_u64("u64", uint64_t{1} << 40);
  writer.add_f32("f32", 0.25f);
  writer.add_bool("bool", true);
  writer.add_string("string", "é");
  const std::vector<int32_t> ints = {1, -2};
  const std::vector<float> floats = {0.5f};
  const std::vector<std::string> strings = {"", "b"};
  writer.add_i32s("i32s", ints);
  writer.add_f32s("f32s", floats);
  writer.add_strings("strings", strings);
  ASSERT_TRUE(writer.open(path("x.gguf")).ok());
  ASSERT_TRUE(writer.close().ok());
  const auto f = GgufFile::open(path("x.gguf"));
  ASSERT_TRUE(f.ok()) << f.status().message();
  EXPECT_EQ(f->metadata().size(), 9u);
  EXPECT_EQ(f->get_u32("u32"), 7u);
  EXPECT_EQ(f->get_int("i32"), -7);
  EXPECT_EQ(f->get_int("u64"), int64_t{1} << 40);
  EXPECT_EQ(f->get_f32("f32"), 0.25f);
  EXPECT_EQ(f->get_bool("bool"), true);
  EXPECT_EQ(f->get_string("string"), "é");
  EXPECT_EQ(*f->get_ints("i32s"), (std::vector<int64_t>{1, -2}));
  EXPECT_EQ(*f->get_floats("f32s"), floats);
  EXPECT_THAT(*f->get_strings("strings"), testing::ElementsAre("", "b"));
}

TEST_F(GgufWriterTest, RefusesTensorsThatTheFormatCannotHold) {
  GgufWriter writer;
  EXPECT_TRUE(writer.add_tensor("w", quant::Format::kQ4_0, {2, 32}).ok());
  EXPECT_THAT(writer.add_tensor("w", quant::Format::kF32, {2}).message(),
              HasSubstr("'w' is written twice"));
  EXPECT_THAT(writer.add_tensor("a", quant::Format::kQ4_0, {32, 2}).message(),
              HasSubstr("block of 32"));
  EXPECT_FALSE(writer.add_tensor("b", quant::Format::kF32, {}).ok());
  EXPECT_FALSE(writer.add_tensor("c", quant::Format::kF32, {1, 1, 1, 1, 1}).ok());
  EXPECT_FALSE(writer.add_tensor("d", quant::Format::kF32, {-1}).ok());
  EXPECT_FALSE(writer.add_tensor("e", quant::Format::kF32, {int64_t{1} << 62}).ok());
}

TEST_F(GgufWriterTest, LeavesNothingBehindWhenDropped) {
  {
    GgufWriter writer;
    ASSERT_TRUE(writer.add_tensor("w", quant::Format::kF32, {1 << 20}).ok());
    ASSERT_TRUE(writer.open(path("x.gguf")).ok());
    EXPECT_EQ(files(), 1u);
  }
  EXPECT_EQ(files(), 0u);
}

TEST_F(GgufWriterTest, ReportsAFullDisk) {
  // A file size limit stands in for a full disk: both take the same error path of write(2).
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit small = before;
  small.rlim_cur = 1 << 20;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  GgufWriter writer;
  ASSERT_TRUE(writer.add_tensor("w", quant::Format::kF32, {1 << 20}).ok());
  Status s = writer.open(path("x.gguf"));
  const std::vector<uint8_t> chunk(1 << 19);
  for (int i = 0; i < 8 && s.ok(); ++i) s = writer.write(chunk);
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(s.code(), StatusCode::kIo);
  EXPECT_THAT(s.message(), HasSubstr("cannot write " + path("x.gguf")));
  EXPECT_EQ(files(), 0u);
}

TEST_F(GgufWriterTest, ReportsAFolderThatIsNotThere) {
  GgufWriter writer;
  EXPECT_EQ(writer.open(path("absent/x.gguf")).code(), StatusCode::kIo);
}

}  // namespace
}  // namespace freshet::loader

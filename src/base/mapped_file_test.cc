#include "base/mapped_file.h"

#include <cstdio>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace freshet {
namespace {

std::string write_temp(const std::string& bytes) {
  const std::string path = testing::TempDir() + "freshet_mapped_file";
  std::ofstream(path, std::ios::binary) << bytes;
  return path;
}

std::string text_of(const MappedFile& file) {
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

TEST(MappedFile, ShowsTheBytesBeforeAndAfterAdvice) {
  std::string bytes(3 * 4096 + 17, '\0');
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 31);
  const std::string path = write_temp(bytes);
  const auto file = MappedFile::open(path);
  ASSERT_TRUE(file.ok());
  EXPECT_EQ(file->path(), path);
  EXPECT_EQ(text_of(*file), bytes);
  file->release(1, bytes.size());
  file->prefetch(100, 5000);
  file->release(bytes.size() + 1, 5);
  file->prefetch(0, SIZE_MAX);
  EXPECT_EQ(text_of(*file), bytes);
  std::remove(path.c_str());
}

TEST(MappedFile, MovesAndOutlivesTheDirectoryEntry) {
  const std::string path = write_temp("hello");
  auto opened = MappedFile::open(path);
  ASSERT_TRUE(opened.ok());
  std::remove(path.c_str());
  MappedFile a = std::move(*opened);
  MappedFile b;
  EXPECT_TRUE(b.bytes().empty());
  b = std::move(a);
  EXPECT_EQ(text_of(b), "hello");
}

TEST(MappedFile, EmptyFileIsEmpty) {
  const std::string path = write_temp("");
  const auto file = MappedFile::open(path);
  ASSERT_TRUE(file.ok());
  EXPECT_TRUE(file->bytes().empty());
  file->release(0, 10);
  std::remove(path.c_str());
}

TEST(MappedFile, ErrorsNameThePath) {
  const auto missing = MappedFile::open("no/such/file");
  EXPECT_EQ(missing.status().code(), StatusCode::kNotFound);
  EXPECT_THAT(missing.status().message(), testing::HasSubstr("no/such/file"));
  EXPECT_EQ(MappedFile::open(testing::TempDir()).status().code(), StatusCode::kIo);
}

}  // namespace
}  // namespace freshet

#include "base/whole_file.h"

#include <filesystem>
#include <fstream>
#include <iterator>

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

namespace freshet {
namespace {

namespace fs = std::filesystem;

class WholeFile : public testing::Test {
 protected:
  WholeFile() : folder_(testing::TempDir() + "/whole_file_" + std::to_string(::getpid())) {
    fs::create_directories(folder_);
  }
  ~WholeFile() override { fs::remove_all(folder_); }

  std::string text(const std::string& name) const {
    std::ifstream in(folder_ + "/" + name, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  }
  int64_t files() const {
    return std::distance(fs::directory_iterator(folder_), fs::directory_iterator());
  }

  std::string folder_;
};

TEST_F(WholeFile, ReplacesAllAndKeepsPermissions) {
  const std::string path = folder_ + "/a";
  ASSERT_TRUE(write_whole_file(path, "a longer text").ok());
  ASSERT_EQ(::chmod(path.c_str(), 0640), 0);
  const uint8_t one[] = {'o', 'n'}, two[] = {'e', 0};
  const std::span<const uint8_t> pieces[] = {one, {}, two};
  ASSERT_TRUE(write_whole_file(path, pieces, Durable::kNo).ok());
  EXPECT_EQ(text("a"), std::string("one\0", 4));
  struct stat there{};
  ASSERT_EQ(::stat(path.c_str(), &there), 0);
  EXPECT_EQ(there.st_mode & 07777, 0640u);
  EXPECT_EQ(files(), 1);
}

TEST_F(WholeFile, LeavesNothingAfterAnError) {
  EXPECT_EQ(write_whole_file(folder_ + "/none/a", "text").message(),
            "cannot write " + folder_ + "/none/a: No such file or directory");
  fs::create_directories(folder_ + "/folder/inside");
  const Status onto_folder = write_whole_file(folder_ + "/folder", "text");
  EXPECT_EQ(onto_folder.message(), "cannot write " + folder_ + "/folder: Is a directory");
  EXPECT_EQ(files(), 1);
}

}  // namespace
}  // namespace freshet

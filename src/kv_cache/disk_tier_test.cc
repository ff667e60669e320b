#include "kv_cache/disk_tier.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

namespace freshet::kv_cache {
namespace {

namespace fs = std::filesystem;

int64_t fake_now = 1000;

// System calls that fail on demand.
class FaultyCalls final : public LogCalls {
 public:
  ssize_t write(int fd, const void* data, size_t bytes, int64_t offset) override {
    if (full) {
      errno = ENOSPC;
      return -1;
    }
    if (broken) {
      errno = EIO;
      return -1;
    }
    return LogCalls::write(fd, data, short_writes ? std::min<size_t>(bytes, 7) : bytes, offset);
  }
  ssize_t read(int fd, std::span<const iovec> to, int64_t offset) override {
    const ssize_t n = LogCalls::read(fd, short_reads ? to.first(1) : to, offset);
    return n;
  }
  bool full = false, broken = false, short_writes = false, short_reads = false;
};

class DiskTierTest : public ::testing::Test {
 protected:
  static constexpr size_t kUnit = 96;
  void SetUp() override {
    folder_ = fs::temp_directory_path() /
              fmt::format("freshet_disk_{}_{}", ::getpid(),
                          ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  Result<std::unique_ptr<DiskTier>> open(const std::string& identity = "model a",
                                         int64_t limit = 1 << 20) {
    DiskTierOptions o;
    o.folder = folder_.string();
    o.limit = limit;
    o.identity = identity;
    o.pieces = {{64, 32}, {96}};
    o.calls = &calls_;
    o.seconds = [] { return fake_now; };
    return DiskTier::open(std::move(o));
  }
  static BlockKey key_of(int i) { return {static_cast<uint64_t>(i) * 77, 5}; }
  static std::vector<uint8_t> bytes_of(int i) {
    std::vector<uint8_t> bytes(kUnit);
    for (size_t b = 0; b < kUnit; ++b)
      bytes[b] = static_cast<uint8_t>(b * 31 + static_cast<size_t>(i) * 7);
    return bytes;
  }
  static bool put(DiskTier& tier, int i, int group = 0) {
    return tier.append(key_of(i), group, 16, bytes_of(i));
  }
  // 1: its very bytes, 0: a miss, -1: wrong bytes.
  static int get(DiskTier& tier, int i, int group = 0) {
    std::vector<uint8_t> got(kUnit, 0xEE);
    const std::span<uint8_t> all(got);
    const BlockPieces pieces =
        group == 0 ? BlockPieces{all.first(64), all.subspan(64)} : BlockPieces{all};
    if (!tier.read(key_of(i), group, pieces)) return 0;
    return got == bytes_of(i) ? 1 : -1;
  }
  std::vector<fs::path> logs() const {
    std::vector<fs::path> found;
    for (const auto& file : fs::directory_iterator(folder_)) {
      if (file.path().extension() == ".log") found.push_back(file.path());
    }
    std::ranges::sort(found);
    return found;
  }

  fs::path folder_;
  FaultyCalls calls_;
};

TEST_F(DiskTierTest, SurvivesARestart) {
  BlockSecret secret;
  {
    auto tier = open();
    ASSERT_TRUE(tier.ok()) << tier.status().message();
    secret = (*tier)->secret();
    for (int i = 0; i < 10; ++i) EXPECT_TRUE(put(**tier, i, i % 2));
    EXPECT_EQ(get(**tier, 3, 1), 1);
    EXPECT_EQ(get(**tier, 3, 0), 0) << "another group";
    EXPECT_EQ(open().status().code(), StatusCode::kResourceExhausted) << "one process at a time";
  }
  struct stat s{};
  ASSERT_EQ(::stat(folder_.c_str(), &s), 0);
  EXPECT_EQ(s.st_mode & 0777, 0700U);
  for (const fs::path& log : logs()) {
    ASSERT_EQ(::stat(log.c_str(), &s), 0);
    EXPECT_EQ(s.st_mode & 0777, 0600U);
  }
  auto tier = open();
  ASSERT_TRUE(tier.ok());
  EXPECT_EQ((*tier)->secret(), secret);
  for (int i = 0; i < 10; ++i) EXPECT_EQ(get(**tier, i, i % 2), 1) << i;
  EXPECT_TRUE(put(**tier, 10));
  EXPECT_EQ(get(**tier, 10), 1);
}

// A process may be killed at any byte: what was written completely is there, and nothing else.
TEST_F(DiskTierTest, TruncatedAnywhere) {
  constexpr int kBlocks = 5;
  {
    auto tier = open();
    for (int i = 0; i < kBlocks; ++i) ASSERT_TRUE(put(**tier, i));
  }
  const fs::path log = logs().at(0);
  const fs::path whole = folder_ / "whole";
  fs::copy_file(log, whole);
  const auto size = static_cast<int64_t>(fs::file_size(whole));
  const auto start = static_cast<int64_t>(32 + std::string("model a").size());
  for (int64_t cut = 0; cut <= size; ++cut) {
    fs::copy_file(whole, log, fs::copy_options::overwrite_existing);
    fs::resize_file(log, static_cast<uintmax_t>(cut));
    auto tier = open();
    ASSERT_TRUE(tier.ok()) << cut << ": " << tier.status().message();
    const int64_t complete = cut < start ? 0 : (cut - start) / static_cast<int64_t>(64 + kUnit);
    for (int i = 0; i < kBlocks; ++i) ASSERT_EQ(get(**tier, i), i < complete) << cut << " " << i;
    ASSERT_TRUE(put(**tier, 99));
    ASSERT_EQ(get(**tier, 99), 1);
    tier->reset();
    for (const fs::path& other : logs()) {
      if (other != log) fs::remove(other);
    }
  }
}

// One flipped bit anywhere costs the blocks that it damages, and never gives wrong bytes.
TEST_F(DiskTierTest, FlippedBits) {
  {
    auto tier = open();
    for (int i = 0; i < 3; ++i) ASSERT_TRUE(put(**tier, i));
  }
  const fs::path log = logs().at(0);
  const fs::path whole = folder_ / "whole";
  fs::copy_file(log, whole);
  int misses = 0;
  for (int64_t at = 0; at < static_cast<int64_t>(fs::file_size(whole)); ++at) {
    fs::copy_file(whole, log, fs::copy_options::overwrite_existing);
    {
      std::fstream file(log, std::ios::in | std::ios::out | std::ios::binary);
      file.seekg(at);
      const int byte = file.get();
      file.seekp(at);
      file.put(static_cast<char>(byte ^ (1 << (at % 8))));
    }
    auto tier = open();
    ASSERT_TRUE(tier.ok());
    int found = 0;
    for (int i = 0; i < 3; ++i) {
      const int got = get(**tier, i);
      ASSERT_GE(got, 0) << "wrong bytes after a flip at " << at;
      found += got;
    }
    ASSERT_LT(found, 3) << at;
    misses += 3 - found;
  }
  EXPECT_GT(misses, 300);
}

TEST_F(DiskTierTest, DamageWhileItRuns) {
  auto tier = open();
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(put(**tier, i));
  const fs::path log = logs().at(0);
  fs::resize_file(log, fs::file_size(log) - 10);
  EXPECT_EQ(get(**tier, 3), 0);
  EXPECT_EQ(get(**tier, 2), 1);
  EXPECT_FALSE((*tier)->contains(key_of(3), 0)) << "not tried again";
  fs::remove(log);
  EXPECT_GE(get(**tier, 1), 0);  // the open file may still have it
  tier->reset();
  auto again = open();
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(get(**again, 1), 0);
}

TEST_F(DiskTierTest, FullDiskAndOtherErrors) {
  auto tier = open();
  ASSERT_TRUE(put(**tier, 1));
  calls_.full = true;
  EXPECT_FALSE(put(**tier, 2));
  calls_.full = false;
  EXPECT_FALSE(put(**tier, 2)) << "no attempt for a while";
  fake_now += 11;
  EXPECT_TRUE(put(**tier, 2));
  EXPECT_EQ(get(**tier, 2), 1);
  calls_.broken = true;
  EXPECT_FALSE(put(**tier, 3));
  calls_.broken = false;
  EXPECT_EQ(get(**tier, 2), 1) << "an error of the device evicts nothing";
  fake_now += 11;
  calls_.short_writes = calls_.short_reads = true;
  EXPECT_TRUE(put(**tier, 3));
  EXPECT_EQ(get(**tier, 3), 1);
  EXPECT_GE((*tier)->stats().failed, 2);
  EXPECT_LE(logs().size(), 3U) << "failures leave no files behind";
}

TEST_F(DiskTierTest, OtherIdentitiesAndVersionsAreNotUsed) {
  {
    auto tier = open("model a");
    ASSERT_TRUE(put(**tier, 1));
  }
  {
    auto tier = open("model b");
    ASSERT_TRUE(tier.ok());
    EXPECT_EQ(get(**tier, 1), 0);
    ASSERT_TRUE(put(**tier, 2));
  }
  {
    std::fstream file(logs().at(0), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(8);
    file.put(2);  // the version
  }
  auto tier = open("model a");
  ASSERT_TRUE(tier.ok());
  EXPECT_EQ(get(**tier, 1), 0);
  EXPECT_EQ(get(**tier, 2), 0);
  EXPECT_EQ((*tier)->stats().files, 0);
}

TEST_F(DiskTierTest, TheLeastRecentlyUsedFileGoes) {
  constexpr int64_t kLimit = 4000;  // files of about 1,000 bytes: six blocks
  auto tier = open("a", kLimit);
  ASSERT_TRUE(tier.ok());
  for (int i = 0; i < 18; ++i) ASSERT_TRUE(put(**tier, i));
  EXPECT_EQ(get(**tier, 0), 1);  // its file is used
  for (int i = 18; i < 26; ++i) ASSERT_TRUE(put(**tier, i));
  EXPECT_EQ(get(**tier, 0), 1);
  EXPECT_EQ(get(**tier, 8), 0) << "of the second file";
  EXPECT_GE((*tier)->stats().evicted, 1);
  int64_t bytes = 0;
  for (const fs::path& log : logs()) bytes += static_cast<int64_t>(fs::file_size(log));
  EXPECT_LE(bytes, kLimit);
  EXPECT_EQ(bytes, (*tier)->stats().bytes);
  EXPECT_FALSE(open("a", 100).ok());
}

TEST_F(DiskTierTest, ALinkIsNotFollowed) {
  fs::create_directories(folder_);
  std::ofstream(folder_ / "target") << "precious";
  fs::create_symlink(folder_ / "target", folder_ / "kv-00000001.log");
  auto tier = open();
  ASSERT_TRUE(tier.ok());
  ASSERT_TRUE(put(**tier, 1));
  std::ifstream in(folder_ / "target");
  std::string text;
  in >> text;
  EXPECT_EQ(text, "precious");
}

}  // namespace
}  // namespace freshet::kv_cache

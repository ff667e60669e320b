// Tiers below the cache under the step loop: results stay the same to the bit, whatever is stored,
// swapped, loaded or lost on the way.
#include <filesystem>
#include <fstream>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "engine/prefix_files.h"
#include "engine/step_loop_rig_test.h"
#include "engine/tiers.h"

namespace freshet::engine {
namespace {

namespace fs = std::filesystem;

struct Tiers {
  size_t host_blocks = 0;
  std::string folder;
  std::string identity = "fake model";
  std::unique_ptr<kv_cache::TierStore> store;

  kv_cache::TierStore* open(const KvStorage& cache) {
    const kv_cache::BlockPlaces places(cache);
    size_t block = 0;
    for (const size_t unit : places.unit_bytes()) block += unit;
    kv_cache::TierStore::Options o;
    o.host_bytes = host_blocks * block;
    o.load_seconds = -1.0;  // loading always pays: the fake model computes in no time
    o.write_rate = 0.0;
    if (!folder.empty()) {
      kv_cache::DiskTierOptions disk;
      disk.folder = folder;
      disk.limit = int64_t{1} << 26;
      disk.identity = identity;
      disk.pieces = places.piece_bytes();
      auto opened = kv_cache::DiskTier::open(std::move(disk));
      EXPECT_TRUE(opened.ok()) << opened.status().message();
      o.disk = std::move(*opened);
    }
    auto made = kv_cache::TierStore::create(std::move(o), cache);
    EXPECT_TRUE(made.ok()) << made.status().message();
    store = std::move(*made);
    return store.get();
  }
  void add_to(RigOptions& options) {
    options.tiers = [this](const KvStorage& cache) { return open(cache); };
  }
};

class TiersTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() /
              fmt::format("freshet_tiers_{}_{}", ::getpid(),
                          ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  static std::vector<Outcome> run_all(Rig& rig, int requests = kRequests) {
    std::vector<Pending*> pending;
    for (int i = 0; i < requests; ++i) pending.push_back(&rig.send(request_of(i)));
    std::vector<Outcome> outcomes;
    for (Pending* p : pending) outcomes.push_back(Rig::wait(*p));
    return outcomes;
  }
  static void expect_all_same(const std::vector<Outcome>& a, const std::vector<Outcome>& b) {
    for (size_t i = 0; i < a.size(); ++i) expect_same(a[i], b[i], static_cast<int>(i));
  }
  fs::path folder_;
};

TEST_F(TiersTest, SwappingChangesNothing) {
  for (const std::vector<int>& windows : {std::vector<int>{0}, {0, 24}, {40}}) {
    RigOptions plain;
    plain.windows = windows;
    Rig reference(plain);
    const std::vector<Outcome> expected = run_all(reference);

    RigOptions tight = plain;
    tight.max_model_len = 256;
    tight.max_num_seqs = 24;
    tight.chunk = 33;
    tight.tokens = 100;
    tight.blocks.assign(windows.size(), 40);
    Tiers tiers{.host_blocks = 400};
    tiers.add_to(tight);
    Rig rig(tight);
    expect_all_same(run_all(rig), expected);
    expect_all_same(run_all(rig), expected);  // now much of it comes from the tier
    const EngineStats stats = rig.loop().stats();
    EXPECT_GT(stats.preemptions, 0);
    EXPECT_GT(stats.tiers.swapped, 0);
    EXPECT_GT(stats.tiers.hits, 0);
    EXPECT_GT(stats.tiers.loads, 0);
    EXPECT_TRUE(tiers.store->check().ok());
    rig.stop();
  }
}

TEST_F(TiersTest, AWarmPrefixAfterARestart) {
  for (const std::vector<int>& windows : {std::vector<int>{0}, {0, 24}}) {
    const std::string folder = (folder_ / std::to_string(windows.size())).string();
    RigOptions options;
    options.windows = windows;
    Tiers first{.folder = folder}, second{.folder = folder},
        other{.folder = folder, .identity = "x"};
    std::vector<Outcome> expected;
    {
      first.host_blocks = 64;
      first.add_to(options);
      Rig rig(options);
      expected = run_all(rig, 20);
      rig.stop();
      first.store.reset();
    }
    {
      second.host_blocks = 64;
      second.add_to(options);
      Rig rig(options);
      const std::vector<Outcome> warm = run_all(rig, 20);
      expect_all_same(warm, expected);
      EXPECT_GT(rig.loop().stats().tiers.hits, 200);
      EXPECT_GE(warm[6].usage.cached_tokens, 64);
      rig.stop();
      second.store.reset();
    }
    other.host_blocks = 64;
    other.add_to(options);
    Rig rig(options);
    expect_all_same(run_all(rig, 20), expected);
    EXPECT_EQ(rig.loop().stats().tiers.hits, 0) << "blocks of another model";
    rig.stop();
  }
}

// A prefix of a request is saved to a file, restored into another engine, and found there.
TEST_F(TiersTest, PrefixesInFiles) {
  const std::string path = (folder_ / "slot").string();
  RigOptions options;
  options.windows = {0, 24};
  Rig first(options);
  const Request request = request_of(6);
  const Outcome expected = first.run(request);
  const auto saved = save_prefix(first.loop(), "model", request.prompt, "", path);
  ASSERT_TRUE(saved.ok()) << saved.status().message();
  EXPECT_EQ(saved->tokens.size(), request.prompt.size() / 16 * 16);
  EXPECT_EQ(saved->bytes, static_cast<int64_t>(fs::file_size(path)));
  EXPECT_EQ(save_prefix(first.loop(), "model", request.prompt, "salt", path).status().code(),
            StatusCode::kNotFound);

  Rig second(options);
  EXPECT_FALSE(restore_prefix(second.loop(), "other model", path, "").ok());
  const auto restored = restore_prefix(second.loop(), "model", path, "");
  ASSERT_TRUE(restored.ok()) << restored.status().message();
  EXPECT_EQ(restored->tokens, saved->tokens);
  const Outcome& warm = second.run(request);
  expect_same(warm, expected, 6);
  EXPECT_EQ(warm.usage.cached_tokens, static_cast<int>(saved->tokens.size()));

  EXPECT_EQ(erase_prefix(second.loop(), saved->tokens, ""), 0) << "the answer goes on from there";
  Rig third(options);
  ASSERT_TRUE(restore_prefix(third.loop(), "model", path, "").ok());
  EXPECT_EQ(erase_prefix(third.loop(), saved->tokens, ""), static_cast<int>(saved->tokens.size()));
  EXPECT_EQ(third.run(request).usage.cached_tokens, 0);
}

TEST_F(TiersTest, ADamagedPrefixFileIsRefused) {
  const std::string path = (folder_ / "slot").string();
  Rig rig(RigOptions{});
  const Request request = request_of(6);
  const Outcome expected = rig.run(request);
  ASSERT_TRUE(save_prefix(rig.loop(), "model", request.prompt, "", path).ok());
  const auto size = static_cast<int64_t>(fs::file_size(path));
  const fs::path whole = folder_ / "whole";
  fs::copy_file(path, whole);
  for (int64_t at = 0; at < size; at += 5) {
    fs::copy_file(whole, path, fs::copy_options::overwrite_existing);
    {
      std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
      file.seekg(at);
      const int byte = file.get();
      file.seekp(at);
      file.put(static_cast<char>(byte ^ 4));
    }
    ASSERT_FALSE(restore_prefix(rig.loop(), "model", path, "x").ok()) << at;
    fs::resize_file(path, static_cast<uintmax_t>(at));
    ASSERT_FALSE(restore_prefix(rig.loop(), "model", path, "x").ok()) << at;
  }
  Request salted = request;
  salted.cache_salt = "x";
  const Outcome& outcome = rig.run(salted);
  EXPECT_EQ(outcome.usage.cached_tokens, 0);
  expect_same(outcome, expected, 6);
}

}  // namespace
}  // namespace freshet::engine

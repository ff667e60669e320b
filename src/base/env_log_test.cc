#include <cstdlib>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/env.h"
#include "base/log.h"

namespace freshet {
namespace {

class EnvTest : public testing::Test {
 protected:
  void SetUp() override {
    for (const EnvEntry& e : env_table()) ::unsetenv(e.name);
  }
};

TEST_F(EnvTest, UnsetAndEmptyAreTheSame) {
  EXPECT_EQ(env(EnvVar::kApiKey), std::nullopt);
  ::setenv("FRESHET_API_KEY", "", 1);
  EXPECT_EQ(env(EnvVar::kApiKey), std::nullopt);
  ::setenv("FRESHET_API_KEY", "secret", 1);
  EXPECT_EQ(env(EnvVar::kApiKey), "secret");
}

TEST_F(EnvTest, CacheDirTakesTheFirstThatIsSet) {
  EXPECT_EQ(cache_dir().status().code(), StatusCode::kNotFound);
  ::setenv("HOME", "/home/u", 1);
  EXPECT_EQ(cache_dir().value(), "/home/u/.cache/freshet");
  ::setenv("XDG_CACHE_HOME", "relative", 1);
  EXPECT_EQ(cache_dir().value(), "/home/u/.cache/freshet");
  ::setenv("XDG_CACHE_HOME", "/var/cache", 1);
  EXPECT_EQ(cache_dir().value(), "/var/cache/freshet");
  ::setenv("FRESHET_CACHE_DIR", "here", 1);
  EXPECT_EQ(cache_dir().value(), "here");
}

TEST_F(EnvTest, EachVariableHasItsRow) {
  for (const EnvEntry& e : env_table()) {
    ::setenv(e.name, e.name, 1);
    EXPECT_EQ(env(e.var), e.name);
    EXPECT_FALSE(e.meaning.empty());
  }
}

class LogTest : public testing::Test {
 protected:
  void TearDown() override { set_log_sink(LogLevel::kOff, nullptr); }
};

TEST_F(LogTest, SilentUntilASinkIsSet) {
  EXPECT_FALSE(log_enabled(LogLevel::kError));
  testing::internal::CaptureStderr();
  log_error("nobody listens");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST_F(LogTest, SendsLinesFromTheMinimumUp) {
  std::vector<std::string> lines;
  set_log_sink(LogLevel::kWarning, [&](LogLevel level, std::string_view line) {
    lines.push_back(fmt::format("{}|{}", name_of(level), line));
  });
  log_debug("a");
  log_info("b {}", 1);
  log_warning("c {}", 2);
  log_error("d {}", 3);
  EXPECT_THAT(lines, testing::ElementsAre("warning|c 2", "error|d 3"));
}

TEST_F(LogTest, StderrSinkWritesWholeLines) {
  set_log_sink(LogLevel::kDebug, stderr_log_sink(false));
  testing::internal::CaptureStderr();
  log_info("loading");
  log_warning("odd");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "loading\nwarning: odd\n");
}

TEST_F(LogTest, ThreadsTakeTurns) {
  int count = 0;  // unsynchronised on purpose: this tests the log's lock
  set_log_sink(LogLevel::kInfo, [&](LogLevel, std::string_view) { ++count; });
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([] {
      for (int i = 0; i < 1000; ++i) log_info("{}", i);
    });
  }
  for (auto& t : threads) t.join();
  EXPECT_EQ(count, 4000);
}

}  // namespace
}  // namespace freshet

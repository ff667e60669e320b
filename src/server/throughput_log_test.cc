#include "server/throughput_log.h"

#include <gtest/gtest.h>

namespace freshet::server {
namespace {

TEST(ThroughputLog, CountsWhatHappenedSinceTheLastLine) {
  ThroughputLog log;
  EngineStats stats;
  EXPECT_EQ(log.line(stats, 10.0), std::nullopt);
  stats.prompt_tokens = 1000;
  stats.cached_tokens = 250;
  stats.recomputed_tokens = 1;
  stats.generated_tokens = 400;
  stats.running = 3;
  stats.waiting = 2;
  stats.kv_cache_usage = 0.125;
  EXPECT_EQ(
      log.line(stats, 10.0),
      "Avg prompt throughput: 75.1 tokens/s, Avg generation throughput: 40.0 tokens/s, "
      "Running: 3 reqs, Waiting: 2 reqs, KV cache usage: 12.5%, Prefix cache hit rate: 25.0%");
  stats.generated_tokens = 500;
  stats.running = stats.waiting = 0;
  EXPECT_EQ(log.line(stats, 5.0),
            "Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 20.0 tokens/s, "
            "Running: 0 reqs, Waiting: 0 reqs, KV cache usage: 12.5%, Prefix cache hit rate: 0.0%");
  EXPECT_EQ(log.line(stats, 10.0), std::nullopt);
}

TEST(ThroughputLog, SaysThatARequestHangs) {
  ThroughputLog log;
  EngineStats stats;
  stats.running = 1;
  EXPECT_TRUE(log.line(stats, 10.0).has_value());
  EXPECT_TRUE(log.line(stats, 10.0).has_value());
}

}  // namespace
}  // namespace freshet::server

#include "kv_cache/tier_config.h"

#include <gtest/gtest.h>

namespace freshet::kv_cache {
namespace {

TEST(TierConfig, ReadsTheFormOfTheOffloadingConnector) {
  TierConfig c;
  const Status status = read_transfer_config(
      R"({"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config":
          {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1000000000, "block_size": 16,
           "eviction_policy": "arc", "offload_prompt_only": false,
           "secondary_tiers": [{"type": "fs", "root_dir": "/var/kv", "n_read_threads": 4}]}})",
      c);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(c.host_bytes, 1'000'000'000U);
  EXPECT_EQ(c.policy, "arc");
  EXPECT_FALSE(c.prompt_only);
  EXPECT_EQ(c.folder, "/var/kv");
  EXPECT_EQ(c.readers, 4);
}

TEST(TierConfig, StoresPromptsOnlyUnlessTold) {
  TierConfig c;
  ASSERT_TRUE(read_transfer_config(R"({"kv_connector": "OffloadingConnector",
      "kv_connector_extra_config": {"cpu_bytes_to_use": 1}})",
                                   c)
                  .ok());
  EXPECT_TRUE(c.prompt_only);
}

TEST(TierConfig, NamesWhatItDoesNotHonour) {
  const auto error = [](std::string fields) {
    TierConfig c;
    const Status s = read_transfer_config(
        R"({"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 9, )" +
            fields + "}}",
        c);
    return s.ok() ? std::string("accepted") : s.message();
  };
  EXPECT_EQ(error(R"("block_size": 64)"),
            "--kv-transfer-config: 'block_size' is 64: blocks have 16 tokens");
  EXPECT_EQ(error(R"("lazy": true)"),
            "--kv-transfer-config: 'kv_connector_extra_config' has the field 'lazy', which is not "
            "supported here");
  EXPECT_EQ(error(R"("store_threshold": 2)"),
            "--kv-transfer-config: 'store_threshold' is 2: blocks are stored at once: leave it out "
            "or send 0");
  EXPECT_EQ(error(R"("secondary_tiers": [{"type": "obj"}])"),
            "--kv-transfer-config: the 'type' of a secondary tier must be fs: a folder of this "
            "machine");
  EXPECT_EQ(
      error(R"("secondary_tiers": [{"type": "fs", "root_dir": "/a", "n_write_threads": 16}])"),
      "--kv-transfer-config: 'n_write_threads' is 16: a log has one writer: leave it out");
  EXPECT_EQ(error(R"("eviction_policy": "fifo")"),
            "--kv-transfer-config: 'eviction_policy' must be lru or arc");
  TierConfig c;
  EXPECT_EQ(read_transfer_config(R"({"kv_connector": "LMCacheConnectorV1"})", c).message(),
            "--kv-transfer-config: 'kv_connector' is \"LMCacheConnectorV1\": must be "
            "OffloadingConnector");
  EXPECT_FALSE(read_transfer_config("{", c).ok());
  EXPECT_FALSE(read_transfer_config("[]", c).ok());
}

}  // namespace
}  // namespace freshet::kv_cache

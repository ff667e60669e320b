#include "kv_cache/sparse_attention.h"

#include <string>

#include <gtest/gtest.h>

namespace freshet::kv_cache {
namespace {

TEST(SparseAttentionJson, RoundsBudgetsToBlocks) {
  const auto sparse = make_sparse_attention(R"({"policy": "quest", "budget": 1000})");
  ASSERT_TRUE(sparse.ok()) << sparse.status().message();
  EXPECT_EQ(sparse->budget, 1008);
  EXPECT_EQ(sparse->dense_layers, 2);
  EXPECT_TRUE(sparse->selects());
  EXPECT_EQ(make_sparse_attention(R"({"policy": "quest", "budget": 64, "dense_layers": 0})")
                ->dense_layers,
            0);
  EXPECT_FALSE(make_sparse_attention(R"({"policy": "none"})")->selects());
}

TEST(SparseAttentionJson, RefusesWhatItDoesNotKnow) {
  const auto error = [](const char* json) {
    return std::string(make_sparse_attention(json).status().message());
  };
  EXPECT_EQ(error(R"({"policy": "sparq", "budget": 64})"),
            "sparse_attention: unknown policy \"sparq\"; known: none quest");
  EXPECT_EQ(error(R"({"policy": "quest"})"), "sparse_attention: \"budget\" is missing");
  EXPECT_EQ(error(R"({"policy": "quest", "budget": 64, "sinks": 4})"),
            "sparse_attention: quest has no \"sinks\"; it has budget dense_layers");
  EXPECT_EQ(error(R"({"policy": "none", "budget": 64})"),
            "sparse_attention: none has no \"budget\"");
  for (const char* budget : {"63", "-1", "64.5", "\"64\"", "1e12", "null"}) {
    EXPECT_EQ(error((R"({"policy": "quest", "budget": )" + std::string(budget) + "}").c_str()),
              "sparse_attention: \"budget\" must be a whole number from 64 to 16777216")
        << budget;
  }
  EXPECT_EQ(error(R"({"policy": "quest", "budget": 64, "dense_layers": -1})"),
            "sparse_attention: \"dense_layers\" must be a whole number from 0 to 65536");
  for (const char* wrong : {"", "[]", "\"quest\"", "{", R"({"budget": 64})", R"({"policy": 3})"})
    EXPECT_FALSE(make_sparse_attention(wrong).ok()) << wrong;
}

}  // namespace
}  // namespace freshet::kv_cache

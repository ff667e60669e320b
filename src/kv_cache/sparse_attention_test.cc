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
  EXPECT_EQ(error(R"({"policy": "moba", "budget": 64})"),
            "sparse_attention: unknown policy \"moba\"; known: none quest sparq static");
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

TEST(SparseAttentionJson, ReadsSparqAndPatterns) {
  const auto sparq =
      make_sparse_attention(R"({"policy": "sparq", "budget": 96, "components": 20})");
  ASSERT_TRUE(sparq.ok()) << sparq.status().message();
  EXPECT_EQ(sparq->policy, SparsePolicy::kSparq);
  EXPECT_EQ(sparq->rule(40).blocks, 6);
  EXPECT_EQ(sparq->rule(40).components, 24) << "whole vectors";
  EXPECT_EQ(sparq->rule(40).from, 40);
  const auto pattern =
      make_sparse_attention(R"({"policy": "static", "window": 100, "sinks": 16, "stride": 64})");
  ASSERT_TRUE(pattern.ok()) << pattern.status().message();
  const ops::BlockSelection rule = pattern->rule(40);
  EXPECT_EQ(rule.window, 7);
  EXPECT_EQ(rule.sinks, 1);
  EXPECT_EQ(rule.stride, 4);
  EXPECT_EQ(rule.before, 40) << "the prompt's queries select too";
  EXPECT_EQ(rule.from, 40);
  EXPECT_FALSE(make_sparse_attention(R"({"policy": "static", "window": 64, "rows": "some"})").ok());
  EXPECT_FALSE(make_sparse_attention(R"({"policy": "static"})").ok());
}

// What another request may use: keys and values that follow from the tokens and the salt.
TEST(SparseAttentionJson, TellsWhatIsShared) {
  const auto made = [](const char* json) { return *make_sparse_attention(json); };
  const SparseAttention quest = made(R"({"policy": "quest", "budget": 64})");
  EXPECT_EQ(quest.sharable(50, 80), 50);
  EXPECT_EQ(quest.salt(), "");
  const SparseAttention all = made(R"({"policy": "static", "window": 64})");
  EXPECT_EQ(all.sharable(50, 80), 80);
  EXPECT_NE(all.salt(), "");
  EXPECT_NE(all.salt(), made(R"({"policy": "static", "window": 128})").salt());
  const SparseAttention prompt = made(R"({"policy": "static", "window": 64, "rows": "prompt"})");
  EXPECT_EQ(prompt.sharable(50, 80), 50);
  EXPECT_EQ(prompt.salt(), all.salt()) << "prompts are computed alike";
  const SparseAttention last =
      made(R"({"policy": "static", "window": 64, "rows": "prompt", "dense_last": 20})");
  EXPECT_EQ(last.sharable(50, 80), 30);
  EXPECT_EQ(last.rule(50).before, 30);
  EXPECT_EQ(made(R"({"policy": "static", "window": 64, "rows": "generated"})").salt(), "");
}

}  // namespace
}  // namespace freshet::kv_cache

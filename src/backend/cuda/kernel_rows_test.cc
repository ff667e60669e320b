// Tests the tables of GPU kernels without a GPU: every problem has a row, every row is chosen for
// some problem, and published shapes keep the rows that were measured to be best for them.
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "backend/cuda/attention/attention_rows.h"
#include "backend/cuda/gemm/gemm_rows.h"
#include "backend/cuda/kernel_names.h"
#include "backend/cuda/moe/moe_rows.h"

namespace freshet::cuda {
namespace {

constexpr DeviceLimits kHopper = {90, 132};
constexpr int64_t kCols[] = {64, 320, 576, 1024, 1152, 2048, 2560, 3072, 3584, 4096, 8192, 14336};
constexpr int64_t kRows[] = {16,   64,   100,  512,   640,   1024,  1536,  2112,  2560,
                             4096, 4224, 6144, 10240, 14336, 18944, 18976, 28672, 131072};
constexpr int64_t kTokens[] = {1, 8, 9, 16, 17, 32, 33, 64, 65, 100, 128, 129, 512, 513, 4096};

std::vector<Code> codes() {
  std::vector<Code> all;
  for (int c = 0; c < static_cast<int>(Code::kCount); ++c) all.push_back(static_cast<Code>(c));
  all.push_back(Code::kExactF32);
  return all;
}

GemmProblem problem(const std::vector<GemmWeight>& weights, int64_t tokens) {
  GemmProblem p;
  p.tokens = tokens;
  for (const GemmWeight& w : weights) p.add(w);
  return p;
}
std::string gemm(const std::vector<GemmWeight>& weights, int64_t tokens, int forced = -1) {
  const int row = choose(kGemmRows, kHopper, problem(weights, tokens), forced);
  return row < 0 ? "none" : kGemmRows[row].name;
}
std::string swiglu(Code code, int64_t rows, int64_t cols, int64_t tokens) {
  const GemmWeight w = {code, rows, cols};
  const int row = choose(kSwigluRows, kHopper, problem({w, w}, tokens));
  return row < 0 ? "none" : kSwigluRows[row].name;
}

template <class Body>
void for_each_problem(const Body& body) {
  for (const Code code : codes()) {
    for (const int64_t cols : kCols) {
      for (const int64_t rows : kRows) {
        for (const int64_t tokens : kTokens) body(GemmWeight{code, rows, cols}, tokens);
      }
    }
  }
}

TEST(KernelRows, EveryGemmHasARowOnEveryGpu) {
  for (const DeviceLimits limits : {DeviceLimits{80, 108}, kHopper, DeviceLimits{90, 78},
                                    DeviceLimits{100, 148}, DeviceLimits{120, 170}}) {
    for_each_problem([&](const GemmWeight& w, int64_t tokens) {
      for (const bool aligned : {true, false}) {
        GemmProblem p = problem({w}, tokens);
        p.aligned = aligned;
        ASSERT_GE(choose(kGemmRows, limits, p), 0)
            << static_cast<int>(w.code) << " " << w.rows << " x " << w.cols << ", " << tokens
            << " tokens on " << limits.capability;
      }
    });
  }
}

TEST(KernelRows, EveryRowIsChosenForSomething) {
  std::set<std::string> chosen;
  for_each_problem([&](const GemmWeight& w, int64_t tokens) {
    chosen.insert(gemm({w}, tokens));
    chosen.insert(swiglu(w.code, w.rows, w.cols, tokens));
    const GemmWeight k = {w.code, w.rows / 4, w.cols}, v = {Code::kQ6_K, w.rows / 4, w.cols};
    chosen.insert(gemm({w, k, v}, tokens));
  });
  chosen.insert(
      kGemmRows[choose(kGemmRows, DeviceLimits{80, 108}, problem({{Code::kInt8, 64, 64}}, 1))]
          .name);
  for (const GemmRow& row : kGemmRows) EXPECT_TRUE(chosen.contains(row.name)) << row.name;
  for (const GemmRow& row : kSwigluRows) EXPECT_TRUE(chosen.contains(row.name)) << row.name;
}

TEST(KernelRows, NamesAreUniqueAndSayTheTokens) {
  std::set<std::string> names;
  const auto check = [&](const auto& rows) {
    for (const auto& row : rows) {
      EXPECT_TRUE(names.insert(row.name).second) << row.name;
      EXPECT_LE(row.m_min, row.m_max) << row.name;
      const std::string name = row.name, arch = "sm" + std::to_string(row.capability);
      EXPECT_NE(name.find(arch), std::string::npos) << name;
    }
  };
  check(kGemmRows);
  check(kSwigluRows);
  check(kAttentionRows);
  check(kMoeRows);
}

// Llama-3.1-8B on an H100, the measurements of docs/performance.md.
TEST(KernelRows, PublishedShapesKeepTheirRows) {
  const auto qkv = [](Code code, Code v) {
    return std::vector<GemmWeight>{{code, 4096, 4096}, {code, 1024, 4096}, {v, 1024, 4096}};
  };
  const auto q4 = Code::kQ4_K, q6 = Code::kQ6_K;
  const GemmWeight o = {q4, 4096, 4096}, down = {q6, 4096, 14336}, head = {q6, 128256, 4096};
  EXPECT_EQ(gemm(qkv(q4, q4), 1), "q_sm90_m1_8_small_n");
  EXPECT_EQ(gemm(qkv(q4, q6), 8), "q_pair_sm90_m1_8");
  EXPECT_EQ(gemm(qkv(q4, q6), 16), "q_pair_sm90_m9_16");
  EXPECT_EQ(gemm(qkv(q4, q6), 32), "q_pair_sm90_m17_64");
  EXPECT_EQ(gemm({o}, 8), "q_sm90_m1_8_small_n");
  EXPECT_EQ(gemm({down}, 1), "q_sm90_m1_8_long_k");
  EXPECT_EQ(gemm({down}, 32), "q_sm90_m17_64_splitk8");
  EXPECT_EQ(gemm({head}, 1), "q_sm90_m1_8");
  EXPECT_EQ(gemm({{q4, 128256, 4096}}, 1), "q_sm90_m1_8_large_n");
  EXPECT_EQ(gemm({head}, 16), "q_sm90_m9_16_large_n");
  EXPECT_EQ(gemm({down}, 128), "q_sm90_m65_splitk4");
  EXPECT_EQ(gemm({o}, 4096), "q_sm90_m65");
  EXPECT_EQ(swiglu(q4, 14336, 4096, 1), "swiglu_q_sm90_m1_8_large_n");
  EXPECT_EQ(swiglu(Code::kQ8_0, 14336, 4096, 1), "swiglu_q_sm90_m1_8");
  EXPECT_EQ(swiglu(q6, 14336, 4096, 1), "none");
  EXPECT_EQ(swiglu(q4, 14336, 4096, 32), "swiglu_q_sm90_m17_64_large_n");
  EXPECT_EQ(gemm({{Code::kBF16, 4096, 4096}}, 32), "bf16_sm90_m1_32");
  EXPECT_EQ(gemm({{Code::kBF16, 4096, 4096}}, 64), "bf16_sm90_m33_128_splitk2");
  EXPECT_EQ(swiglu(Code::kBF16, 14336, 4096, 128), "swiglu_bf16_sm90_m65_128");
  EXPECT_EQ(gemm({{Code::kFP8, 4096, 4096}}, 128), "fp8_sm90_m65_128_splitk2");
  EXPECT_EQ(gemm({{Code::kFP8, 128256, 4096}}, 32), "fp8_sm90_m1_64_large_n");
  EXPECT_EQ(swiglu(Code::kFP8, 14336, 4096, 1), "swiglu_fp8_sm90_m1_64");
}

// Models whose K is not 4,096 use the same rows, if shared memory has room for small_n's tiles: two
// tiles for QKV, one for o.
TEST(KernelRows, AnyKHasTheRowsOfPublishedShapes) {
  const auto q4 = Code::kQ4_K, q6 = Code::kQ6_K;
  for (int64_t k = 2048; k <= 8192; k += 256) {
    SCOPED_TRACE(k);
    const GemmWeight q = {q4, 4096, k}, kv = {q4, 1024, k}, v6 = {q6, 1024, k};
    EXPECT_EQ(gemm({q, kv, kv}, 1), k <= 5120 ? "q_sm90_m1_8_small_n" : "q_sm90_m1_8");
    EXPECT_EQ(gemm({q, kv, v6}, 8) == "q_pair_sm90_m1_8", k <= 4352);
    EXPECT_EQ(gemm({q, kv, v6}, 16), "q_pair_sm90_m9_16");
    EXPECT_EQ(gemm({q, kv, v6}, 32), "q_pair_sm90_m17_64");
    EXPECT_EQ(gemm({q}, 8), "q_sm90_m1_8_small_n");
    EXPECT_EQ(gemm({{q6, 4096, k}}, 1), k <= 7424 ? "q_sm90_m1_8_small_n" : "q_sm90_m1_8_long_k");
    EXPECT_EQ(gemm({{q4, 4096, k + 6400}}, 1), "q_sm90_m1_8_long_k");
    EXPECT_EQ(gemm({{q4, 128256, k}}, 1), "q_sm90_m1_8_large_n");
    EXPECT_EQ(gemm({q}, 32), "q_sm90_m17_64_splitk8");
    EXPECT_EQ(gemm({q, kv, kv}, 32), "q_sm90_m17_64_splitk4");
    EXPECT_EQ(gemm({q}, 128), "q_sm90_m65_splitk4");
    EXPECT_EQ(swiglu(q4, 14336, k, 1), "swiglu_q_sm90_m1_8_large_n");
  }
  EXPECT_EQ(gemm({{q4, 4096, 1792}}, 8), "q_sm90_m1_8");
  EXPECT_EQ(swiglu(q4, 14336, 1792, 8), "swiglu_q_sm90_m1_8");
}

// The SwiGLU row that balances the SMs best.
TEST(KernelRows, SwigluTilesByRows) {
  const auto q4 = Code::kQ4_K;
  EXPECT_EQ(swiglu(q4, 14336, 3584, 32), "swiglu_q_sm90_m17_64_large_n");
  EXPECT_EQ(swiglu(q4, 18944, 3584, 32), "swiglu_q_sm90_m17_32_rows160");
  EXPECT_EQ(swiglu(q4, 17408, 5120, 17), "swiglu_q_sm90_m17_32_rows160");
  EXPECT_EQ(swiglu(q4, 9728, 2560, 32), "swiglu_q_sm90_m17_32_rows96");
  EXPECT_EQ(swiglu(q4, 8192, 3072, 32), "swiglu_q_sm90_m17_64");
  EXPECT_EQ(swiglu(q4, 18944, 3584, 33), "swiglu_q_sm90_m17_64");
  EXPECT_EQ(swiglu(q4, 9728, 2560, 64), "swiglu_q_sm90_m17_64_large_n");
}

TEST(KernelRows, AForcedRowIsTakenWhereItFits) {
  const auto forced = forced_rows(std::vector<std::string>{"matmul=q_sm90_m1_8"});
  ASSERT_TRUE(forced.ok());
  const int row = (*forced)[kForcedMatmul];
  EXPECT_EQ(gemm({{Code::kQ4_0, 4096, 4096}}, 1, row), "q_sm90_m1_8");
  EXPECT_EQ(gemm({{Code::kQ4_0, 4096, 4096}}, 9, row), "q_sm90_m9_16");
  EXPECT_EQ(gemm({{Code::kBF16, 4096, 4096}}, 1, row), "bf16_sm90_m1_32");
}

TEST(KernelRows, ForcedRowsThatCannotRunSayWhy) {
  const auto parse = [](const char* text) {
    return forced_rows(std::vector<std::string>{text}).status();
  };
  EXPECT_NE(parse("matmul=none").message().find("q_sm90_m1_8_small_n"), std::string::npos);
  EXPECT_NE(parse("vector=x").message().find("swiglu"), std::string::npos);
  EXPECT_FALSE(parse("matmul").ok());
  const auto forced = forced_rows(std::vector<std::string>{"matmul=q_sm90_m1_8_small_n"});
  ASSERT_TRUE(forced.ok());
  EXPECT_TRUE(runs_on(*forced, kHopper, "H100").ok());
  EXPECT_NE(runs_on(*forced, {80, 108}, "A100").message().find("compute capability 9.0"),
            std::string::npos);
  EXPECT_TRUE(takes_weight(*forced, kHopper, Code::kQ4_0, 4096, 4096).ok());
  EXPECT_TRUE(takes_weight(*forced, kHopper, Code::kBF16, 4096, 100).ok());  // another format
  const Status refused = takes_weight(*forced, kHopper, Code::kQ4_0, 4096, 14336);
  EXPECT_NE(refused.message().find("q_sm90_m1_8_small_n"), std::string::npos);
  EXPECT_NE(refused.message().find("K from 2,048 to 8,192"), std::string::npos);
}

TEST(KernelRows, NamesByTokens) {
  EXPECT_EQ(gemm_names(kNoForcedRows, kHopper, Code::kBF16, 4096, 4096),
            "1-32: bf16_sm90_m1_32; 33-128: bf16_sm90_m33_128_splitk2; 129+: bf16_sm90_m33");
  EXPECT_EQ(gemm_names(kNoForcedRows, {80, 108}, Code::kQ4_0, 4096, 4096),
            "1-64: sm80_small_m; 65+: sm80_large_m");
}

TEST(KernelRows, AttentionByQueriesAndHeads) {
  AttentionProblem p;
  p.format = static_cast<int>(CacheType::kF16);
  p.key_dim = p.value_dim = 128;
  p.heads = 32, p.kv_heads = 8;
  p.sequences = 1;
  p.single = p.partial = true;
  p.max_context = 512;
  const auto row = [&](int forced = -1) {
    return std::string(kAttentionRows[choose(kAttentionRows, kHopper, p, forced)].name);
  };
  EXPECT_EQ(row(), "decode_cluster_sm90");
  EXPECT_EQ(row(kDecodeSm90), "decode_sm90");
  p.sequences = 64;
  EXPECT_EQ(row(), "decode_sm90");
  p.key_dim = p.value_dim = 96;
  EXPECT_EQ(row(), "attention_sm80");
  p.key_dim = p.value_dim = 64;
  p.single = false;
  p.tokens = 16;
  EXPECT_EQ(row(), "extend_sm90");
  p.tokens = 17;
  EXPECT_EQ(row(), "prefill_sm90");
  p.tokens = 128;
  EXPECT_EQ(row(), "prefill_sm90");
  EXPECT_EQ(row(kDecodeSm90), "prefill_sm90");
  p.key_dim = p.value_dim = 256;
  EXPECT_EQ(row(), "prefill_sm90");
  p.format = static_cast<int>(CacheType::kInt8);
  EXPECT_EQ(row(), "attention_sm80");
  p.format = static_cast<int>(CacheType::kF16);
  p.key_dim = p.value_dim = 64;
  p.prefill_aligned = false;
  EXPECT_EQ(row(), "attention_sm80");
}

TEST(KernelRows, ExpertsByTokensAndFormat) {
  MoeProblem p;
  p.format = static_cast<int>(Code::kQ4_K);
  p.down = Code::kQ6_K;
  p.tokens = 8;
  p.hidden = 2048, p.ff = 768;
  p.top_k = 8, p.experts = 128;
  p.silu = true;
  const auto row = [&] { return std::string(kMoeRows[choose(kMoeRows, kHopper, p)].name); };
  EXPECT_EQ(row(), "moe_sm90_m1_8");
  p.weight_before = true;
  EXPECT_EQ(row(), "moe_q_sm90");
  p.tokens = 1;
  EXPECT_EQ(row(), "moe_sm80");
  p.tokens = 32;
  p.silu = false;
  EXPECT_EQ(row(), "moe_sm80");
  p.format = static_cast<int>(Code::kBF16);
  p.down = Code::kBF16;
  EXPECT_EQ(row(), "moe_bf16_sm90");
}

}  // namespace
}  // namespace freshet::cuda

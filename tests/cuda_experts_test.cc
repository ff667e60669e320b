// Routers and experts of the CUDA backend against the reference ops; and batch invariance: a token
// alone has the same routes as in a batch, with the same bits. Skipped without a GPU.
#include <cmath>
#include <cstring>
#include <optional>
#include <tuple>

#include "backend/cuda/arguments.h"
#include "backend/cuda/moe/moe_rows.h"
#include "tests/cuda_fixture.h"
#include "tests/op_cases.h"

namespace freshet {
namespace {

using test::DeviceFloats;
using test::random_floats;
using test::rounded;

class CudaMoe : public test::CudaTest {
 protected:
  struct WeightsOfExperts {
    WeightsOfExperts(ops::Ops& gpu, ops::Ops& cpu, int64_t experts, int64_t hidden, int64_t ff,
                     uint32_t seed, quant::Format gate_up = quant::Format::kBF16,
                     quant::Format down = quant::Format::kBF16) {
      const auto put = [&](quant::Format format, int64_t rows, int64_t cols, auto& on, auto& host) {
        const Stored& s = keep.emplace_back(stored(format, rows, cols, ++seed));
        on.push_back(
            std::move(gpu.pack(format, s.rows, cols, ops::Ops::kNoLook, ops::Use::kExperts))
                .value());
        host.push_back(std::move(cpu.pack(format, s.rows, cols)).value());
      };
      for (int64_t e = 0; e < experts; ++e) {
        put(gate_up, 2 * ff, hidden, up_on, up_host);
        put(down, hidden, ff, down_on, down_host);
      }
    }
    std::vector<Stored> keep;
    std::vector<ops::Weight> up_on, up_host, down_on, down_host;
  };
};

struct ExpertsCase {
  ops::Routing::Score score;
  int64_t hidden, ff, experts = 16;
  bool wide = false;  // many features: fewer tokens
  quant::Format gate_up = quant::Format::kBF16, down = gate_up;
  float limit = 0.0f;
};
class CudaExperts : public CudaMoe, public testing::WithParamInterface<ExpertsCase> {};
using Score = ops::Routing::Score;
using Of = quant::Format;
INSTANTIATE_TEST_SUITE_P(
    Cases, CudaExperts,
    testing::Values(
        ExpertsCase{Score::kSoftmax, 128, 96}, ExpertsCase{Score::kSigmoid, 544, 192},
        ExpertsCase{Score::kTopkSoftmax, 1088, 64}, ExpertsCase{Score::kTopkSoftmax, 2048, 64, 4},
        ExpertsCase{Score::kSigmoid, 2048, 192, 8, true},
        ExpertsCase{Score::kSoftmax, 2056, 576, 8, true},
        ExpertsCase{Score::kSoftmax, 2880, 960, 8, true},
        ExpertsCase{Score::kTopkSoftmax, 2048, 1088, 4, true},
        ExpertsCase{Score::kSoftmax, 2112, 2112, 4, true},
        ExpertsCase{Score::kSoftmax, 200, 96, 16, false, Of::kINT8},
        ExpertsCase{Score::kSoftmax, 160, 96, 16, false, Of::kInt4G32},
        ExpertsCase{Score::kSoftmax, 288, 192, 16, false, Of::kInt4G32},
        ExpertsCase{Score::kSoftmax, 640, 384, 16, false, Of::kInt4G128},
        ExpertsCase{Score::kSoftmax, 544, 192, 16, false, Of::kQ4_0},
        ExpertsCase{Score::kSigmoid, 320, 192, 16, false, Of::kQ8_0},
        ExpertsCase{Score::kSoftmax, 512, 256, 16, false, Of::kQ6_K},
        ExpertsCase{Score::kSoftmax, 1280, 256, 16, false, Of::kQ4_K, Of::kQ6_K},
        ExpertsCase{Score::kSoftmax, 2304, 768, 8, true, Of::kQ4_K},
        ExpertsCase{Score::kTopkSoftmax, 576, 128, 16, false, Of::kMXFP4, Of::kMXFP4, 7.0f},
        ExpertsCase{Score::kTopkSoftmax, 2880, 576, 4, true, Of::kMXFP4, Of::kMXFP4, 7.0f},
        ExpertsCase{Score::kSoftmax, 512, 256, 16, false, Of::kFP8},
        ExpertsCase{Score::kSigmoid, 2048, 256, 8, true, Of::kFP8},
        ExpertsCase{Score::kSoftmax, 2176, 640, 8, true, Of::kFP8},
        ExpertsCase{Score::kSoftmax, 2048, 768, 8, true, Of::kQ4_0},
        ExpertsCase{Score::kSoftmax, 2080, 192, 8, true, Of::kQ4_0, Of::kQ8_0},
        ExpertsCase{Score::kSoftmax, 4096, 64, 8, true, Of::kQ8_0},
        ExpertsCase{Score::kSoftmax, 2048, 768, 8, true, Of::kQ4_K, Of::kQ6_K},
        ExpertsCase{Score::kSoftmax, 2560, 256, 8, true, Of::kQ6_K},
        ExpertsCase{Score::kSoftmax, 2048, 512, 8, true, Of::kQ5_K, Of::kQ6_K},
        ExpertsCase{Score::kSoftmax, 512, 256, 16, false, Of::kQ5_K, Of::kQ6_K},
        ExpertsCase{Score::kSoftmax, 512, 256, 16, false, Of::kQ3_K, Of::kQ4_K},
        ExpertsCase{Score::kSoftmax, 1280, 256, 16, false, Of::kIQ4_XS},
        ExpertsCase{Score::kSoftmax, 512, 192, 16, false, Of::kIQ4_XS, Of::kIQ4_NL},
        ExpertsCase{Score::kSoftmax, 544, 192, 16, false, Of::kQ5_0, Of::kQ5_1},
        ExpertsCase{Score::kSoftmax, 544, 192, 16, false, Of::kQ4_1},
        ExpertsCase{Score::kSoftmax, 2048, 768, 8, true, Of::kIQ4_XS},
        ExpertsCase{Score::kSoftmax, 2048, 512, 8, true, Of::kQ3_K, Of::kQ2_K},
        ExpertsCase{Score::kSoftmax, 2048, 192, 8, true, Of::kInt4G32},
        ExpertsCase{Score::kSoftmax, 2304, 384, 8, true, Of::kInt4G128}));
TEST_P(CudaExperts, AndTheirRoutesAreNearTheReference) {
  const auto& [score, hidden, ff, experts, wide, gate_up, down, limit] = GetParam();
  uint32_t seed = 500 + static_cast<uint32_t>(hidden);
  std::optional<WeightsOfExperts> keep;  // the next ones may get the addresses of the last
  for (const int64_t tokens : {1, 3, 8, 12, 20, 70, 150, 600}) {
    if (wide && tokens > 12) continue;
    SCOPED_TRACE("tokens " + std::to_string(tokens));
    if (tokens == 1 || (tokens == 3 && !wide)) {
      keep.reset();
      keep.emplace(*gpu, *cpu, experts, hidden, ff, seed += 100, gate_up, down);
    }
    ops::Routing r;
    r.score = score;
    r.experts = static_cast<int>(experts);
    r.top_k = 4;
    r.renormalize = score != Score::kTopkSoftmax;
    r.renormalize_eps = 1e-20f;
    r.scale = 1.5f;
    if (score == Score::kSigmoid) {
      r.groups = 4;
      r.top_groups = 2;
      r.group_score_top = 2;
    }
    std::vector<float> logits = random_floats(static_cast<size_t>(tokens * experts), ++seed);
    std::vector<float> correction = random_floats(static_cast<size_t>(experts), ++seed, 0.1f);
    std::vector<int32_t> ids(static_cast<size_t>(tokens * 4));
    std::vector<float> weights(ids.size());
    DeviceFloats dl(*gpu, logits), dc(*gpu, correction), di(*gpu, ids.size()), dw(*gpu, ids.size());
    auto* on_ids = reinterpret_cast<int32_t*>(di.data());
    r.correction = score == Score::kSigmoid ? correction.data() : nullptr;
    cpu->route({logits.data(), tokens, experts, experts}, r, ids.data(), weights.data());
    if (r.correction != nullptr) r.correction = dc.data();
    gpu->route(dl.matrix(tokens, experts), r, on_ids, dw.data());
    const std::vector<float> got_ids = di.get();
    ASSERT_EQ(std::memcmp(got_ids.data(), ids.data(), ids.size() * 4), 0) << "ids";
    expect_near(dw.get(), weights, 1e-5f, "weights");

    std::vector<float> x = rounded(random_floats(static_cast<size_t>(tokens * hidden), ++seed));
    std::vector<float> bias = random_floats(static_cast<size_t>(experts * 2 * ff), ++seed);
    std::vector<float> below = random_floats(static_cast<size_t>(experts * hidden), ++seed);
    std::vector<float> want = random_floats(x.size(), ++seed);
    DeviceFloats dx(*gpu, x), out(*gpu, want), db(*gpu, bias), dd(*gpu, below);
    ops::Experts e;
    if (limit > 0.0f) e.glu = {ops::Activation::kSilu, limit, 1.702f};
    e.gate_up = keep->up_host;
    e.down = keep->down_host;
    e.gate_up_bias = bias.data();
    e.down_bias = below.data();
    cpu->moe({want.data(), tokens, hidden, hidden}, {x.data(), tokens, hidden, hidden}, ids.data(),
             weights.data(), 4, e, true);
    e.gate_up = keep->up_on;
    e.down = keep->down_on;
    e.gate_up_bias = db.data();
    e.down_bias = dd.data();
    gpu->moe(out.matrix(tokens, hidden), dx.matrix(tokens, hidden), on_ids, dw.data(), 4, e, true);
    const std::vector<float> got = out.get();
    expect_near(got, want, 1e-2f * largest(want), "moe");
    DeviceFloats many(*gpu, x.size()), one(*gpu, static_cast<size_t>(hidden));
    gpu->moe(many.matrix(tokens, hidden), dx.matrix(tokens, hidden), on_ids, dw.data(), 4, e,
             false);
    const std::vector<float> all = many.get();
    for (const int64_t t : {tokens / 2, tokens - 1}) {  // one at a time
      gpu->moe(one.matrix(1, hidden), dx.matrix(tokens, hidden).slice_rows(t, 1), on_ids + t * 4,
               dw.data() + t * 4, 4, e, false);
      ASSERT_EQ(std::memcmp(one.get().data(), all.data() + t * hidden, size_t(hidden) * 4), 0)
          << "experts of token " << t << " alone, of " << tokens;
    }
  }
}

// Every row of the table of kernels, forced by name, on problems that it supports: the same bits as
// moe_sm80, which supports them all, and as the row chosen by default.
TEST_F(CudaMoe, EveryForcedRowHasTheSameBits) {
  constexpr int kTopK = 4;
  struct Case {
    Of gate_up, down;
    int64_t hidden, ff, experts, tokens;
  };
  const auto plain = open("cuda", {"moe=moe_sm80"});
  ASSERT_NE(plain, nullptr);
  std::vector<std::unique_ptr<ops::Ops>> forced;
  for (const cuda::MoeRow& row : cuda::kMoeRows) {
    const bool runs = row.capability != 90 || limits().capability == 90;
    forced.push_back(runs ? open("cuda", {fmt::format("moe={}", row.name)}) : nullptr);
  }
  std::vector<int> runs(forced.size());
  uint32_t seed = 900;
  for (const Case& c :
       {Case{Of::kBF16, Of::kBF16, 2048, 192, 8, 8}, Case{Of::kBF16, Of::kBF16, 544, 192, 16, 1},
        Case{Of::kBF16, Of::kBF16, 544, 192, 16, 20}, Case{Of::kBF16, Of::kBF16, 576, 128, 8, 600},
        Case{Of::kQ4_K, Of::kQ6_K, 2048, 256, 16, 8}, Case{Of::kQ4_K, Of::kQ6_K, 1280, 256, 16, 20},
        Case{Of::kQ8_0, Of::kQ8_0, 320, 192, 16, 600},
        Case{Of::kMXFP4, Of::kMXFP4, 576, 128, 16, 70}, Case{Of::kFP8, Of::kFP8, 2048, 256, 8, 3},
        Case{Of::kFP8, Of::kFP8, 512, 256, 16, 20}, Case{Of::kINT8, Of::kINT8, 200, 96, 16, 12}}) {
    const WeightsOfExperts weights_of(*gpu, *cpu, c.experts, c.hidden, c.ff, seed += 100, c.gate_up,
                                      c.down);
    cuda::MoeProblem problem;
    problem.format = static_cast<int>(cuda::code_of(c.gate_up));
    problem.down = cuda::code_of(c.down);
    problem.tokens = c.tokens, problem.hidden = c.hidden, problem.ff = c.ff;
    problem.top_k = kTopK, problem.experts = static_cast<int>(c.experts);
    problem.silu = true;
    std::vector<int32_t> ids;
    for (int64_t t = 0; t < c.tokens; ++t) {
      for (int64_t k = 0; k < kTopK; ++k) {  // four different ones
        ids.push_back(static_cast<int32_t>((t + k * (1 + t % 3)) % c.experts));
      }
    }
    std::vector<float> id_bits(ids.size());
    std::memcpy(id_bits.data(), ids.data(), ids.size() * sizeof(int32_t));
    const auto numbers = static_cast<size_t>(c.tokens * c.hidden);
    std::vector<float> x = rounded(random_floats(numbers, ++seed)), want(numbers);
    const std::vector<float> weights = random_floats(ids.size(), ++seed);
    DeviceFloats dx(*gpu, x), di(*gpu, id_bits), dw(*gpu, weights);
    const auto run = [&](ops::Ops& o) {
      ops::Experts e;
      e.gate_up = weights_of.up_on;
      e.down = weights_of.down_on;
      DeviceFloats out(o, numbers);
      o.moe(out.matrix(c.tokens, c.hidden), dx.matrix(c.tokens, c.hidden),
            reinterpret_cast<int32_t*>(di.data()), dw.data(), kTopK, e, false);
      return out.get();
    };
    ops::Experts host;
    host.gate_up = weights_of.up_host;
    host.down = weights_of.down_host;
    cpu->moe({want.data(), c.tokens, c.hidden, c.hidden}, {x.data(), c.tokens, c.hidden, c.hidden},
             ids.data(), weights.data(), kTopK, host, false);
    const std::vector<float> on_sm80 = run(*plain);
    for (size_t i = 0; i < forced.size(); ++i) {
      const cuda::MoeRow& row = cuda::kMoeRows[i];
      if (forced[i] == nullptr || !cuda::fits(row, limits(), problem)) continue;
      SCOPED_TRACE(fmt::format("{}: {} and {}, {} x {}, {} tokens", row.name,
                               quant::info(c.gate_up).name, quant::info(c.down).name, c.hidden,
                               c.ff, c.tokens));
      ++runs[i];
      const std::vector<float> got = run(*forced[i]);
      EXPECT_EQ(got, on_sm80);
      EXPECT_EQ(got, run(*gpu));
      expect_near(got, want, 1e-2f * largest(want), "moe");
    }
  }
  for (size_t i = 0; i < forced.size(); ++i) {
    if (forced[i] == nullptr) continue;
    EXPECT_GT(runs[i], 0) << cuda::kMoeRows[i].name << " was never run";
  }
}

// For few tokens the router's GEMM, the routing and the grouping are one kernel; for many tokens,
// several.
class CudaRouters : public CudaMoe,
                    public testing::WithParamInterface<std::tuple<int64_t, bool>> {};
INSTANTIATE_TEST_SUITE_P(Features, CudaRouters,
                         testing::Combine(testing::Values(200, 2048), testing::Bool()));
TEST_P(CudaRouters, TokensGoToTheirExperts) {
  const int64_t kHidden = std::get<0>(GetParam());
  const bool in_bf16 = std::get<1>(GetParam());
  constexpr int64_t kFf = 64, kExperts = 40, kTopK = 4;
  Stored router = stored(quant::Format::kF32, kExperts, kHidden, 700);
  if (in_bf16) to_bf16(router);
  const auto on = gpu->pack(quant::Format::kF32, router.rows, kHidden);
  const auto host = cpu->pack(quant::Format::kF32, router.rows, kHidden);
  ASSERT_TRUE(on.ok() && host.ok());
  const WeightsOfExperts weights_of(*gpu, *cpu, kExperts, kHidden, kFf, 701);
  ops::Routing r;
  r.experts = kExperts;
  r.top_k = kTopK;
  r.renormalize = true;
  const auto run = [&](ops::Ops& o, const ops::Weight& w, ops::Experts e, const Matrix& x,
                       const float* norm, const Matrix& normed, const Matrix& logits, int32_t* ids,
                       float* weights, const Matrix& out) {
    const ops::Product p{&w, logits, nullptr, 1.0f, false};
    const ops::Norm its{ops::NormKind::kRms, norm, nullptr, 1e-6f};
    if (in_bf16) {  // as layers do
      ops::MoeBlock block;
      block.in = {x, &its, normed};
      block.router = p;
      block.routing = r;
      block.ids = ids;
      block.weights = weights;
      block.experts = e;
      block.out = out;
      return o.moe_block(block);
    }
    o.norm(normed, x, its);
    o.matmul(normed, {&p, 1});
    o.route(logits, r, ids, weights);
    o.moe(out, x, ids, weights, kTopK, e, false);
  };
  ops::Experts e_on, e_host;
  e_on.gate_up = weights_of.up_on;
  e_on.down = weights_of.down_on;
  e_host.gate_up = weights_of.up_host;
  e_host.down = weights_of.down_host;
  constexpr int64_t kMost = 1500;
  std::vector<float> x = rounded(random_floats(static_cast<size_t>(kMost * kHidden), 799));
  const std::vector<float> norm = random_floats(static_cast<size_t>(kHidden), 798);
  DeviceFloats dx(*gpu, x), dnorm(*gpu, norm);
  for (const int64_t tokens : {1, 5, 9, 40, 300, 600, 1500}) {
    if (kHidden > 1000 && tokens > 40) continue;
    const auto pairs = static_cast<size_t>(tokens * kTopK);
    const auto numbers = static_cast<size_t>(tokens * kHidden);
    std::vector<float> logits(static_cast<size_t>(tokens * kExperts)), weights(pairs);
    std::vector<float> want(numbers), normed(numbers);
    std::vector<int32_t> ids(pairs);
    run(*cpu, *host, e_host, {x.data(), tokens, kHidden, kHidden}, norm.data(),
        {normed.data(), tokens, kHidden, kHidden}, {logits.data(), tokens, kExperts, kExperts},
        ids.data(), weights.data(), {want.data(), tokens, kHidden, kHidden});
    DeviceFloats dl(*gpu, logits.size()), di(*gpu, pairs), dw(*gpu, pairs), out(*gpu, numbers);
    DeviceFloats dn(*gpu, numbers);
    auto* on_ids = reinterpret_cast<int32_t*>(di.data());
    const auto on_gpu = [&](int64_t first, int64_t n) {
      run(*gpu, *on, e_on, dx.matrix(kMost, kHidden).slice_rows(first, n), dnorm.data(),
          dn.matrix(n, kHidden), dl.matrix(n, kExperts), on_ids, dw.data(), out.matrix(n, kHidden));
    };
    on_gpu(0, tokens);
    expect_near(dn.get(), normed, 1e-4f, "norm");
    EXPECT_EQ(std::memcmp(di.get().data(), ids.data(), pairs * 4), 0) << "ids of " << tokens;
    expect_near(dl.get(), logits, 1e-4f, "logits");
    expect_near(dw.get(), weights, 1e-4f, "weights");
    const std::vector<float> got = out.get();
    expect_near(got, want, 1e-2f * largest(want), "experts");
    on_gpu(tokens - 1, 1);
    const std::vector<float> last = out.get();
    ASSERT_EQ(std::memcmp(last.data(), got.data() + (tokens - 1) * kHidden,
                          static_cast<size_t>(kHidden) * 4),
              0)
        << "a token alone, of " << tokens;
  }
}

// For few tokens one kernel computes the norm, the router's GEMM and the routes, with a different
// selection algorithm. Also tests ties, and groups that this kernel does not support.
TEST_F(CudaMoe, FewTokensGoWhereTheyGoAmongOthers) {
  constexpr int64_t kTopK = 8, kTokens = 35;
  uint32_t seed = 1100;
  for (const auto& [score, experts, hidden, ff, groups] :
       {std::tuple<ops::Routing::Score, int64_t, int64_t, int64_t, int>{Score::kSoftmax, 128, 2048,
                                                                        64, 1},
        {Score::kSigmoid, 72, 2048, 64, 1},
        {Score::kSoftmax, 9, 2048, 704, 1},
        {Score::kTopkSoftmax, 32, 1992, 64, 1},
        {Score::kSoftmax, 10, 512, 64, 1},
        {Score::kSigmoid, 64, 2048, 64, 4}}) {
    SCOPED_TRACE(std::to_string(experts) + " experts");
    Stored router = stored(quant::Format::kF32, experts, hidden, ++seed);
    to_bf16(router);
    for (size_t i = 3; i < router.rows.size(); i += 4)
      router.rows[i] = router.rows[i / 2];  // equal rows give ties
    const auto on = gpu->pack(quant::Format::kF32, router.rows, hidden);
    ASSERT_TRUE(on.ok());
    const WeightsOfExperts weights_of(*gpu, *cpu, experts, hidden, ff, seed += 100);
    ops::Experts e;
    e.gate_up = weights_of.up_on;
    e.down = weights_of.down_on;
    ops::Routing r;
    r.score = score;
    r.experts = static_cast<int>(experts);
    r.top_k = kTopK;
    r.renormalize = score != Score::kTopkSoftmax;
    r.groups = groups;
    r.top_groups = (groups + 1) / 2;
    r.group_score_top = 2;
    DeviceFloats correction(*gpu, random_floats(static_cast<size_t>(experts), ++seed, 0.1f));
    if (score == Score::kSigmoid) r.correction = correction.data();
    DeviceFloats x(*gpu, random_floats(static_cast<size_t>(kTokens * hidden), ++seed));
    DeviceFloats norm(*gpu, random_floats(static_cast<size_t>(hidden), ++seed));
    const std::vector<float> bias = random_floats(static_cast<size_t>(experts), ++seed, 0.01f);
    DeviceFloats db(*gpu, bias);
    struct Got {
      std::vector<float> ids, weights, logits, normed, out;
    };
    const auto run = [&](int64_t first, int64_t n) {
      DeviceFloats ids(*gpu, static_cast<size_t>(n * kTopK)), weights(*gpu, ids.get().size());
      DeviceFloats logits(*gpu, static_cast<size_t>(n * experts));
      DeviceFloats normed(*gpu, static_cast<size_t>(n * hidden)), out(*gpu, normed.get().size());
      auto* chosen = reinterpret_cast<int32_t*>(ids.data());
      const Matrix to = normed.matrix(n, hidden);
      const bool biased = score == Score::kSoftmax;
      const ops::Product p{&*on, logits.matrix(n, experts), biased ? db.data() : nullptr, 1.0f,
                           false};
      const ops::Norm its{ops::NormKind::kRms, norm.data(), nullptr, 1e-6f};
      ops::MoeBlock block;
      block.in = {x.matrix(kTokens, hidden).slice_rows(first, n), &its, to};
      block.router = p;
      block.routing = r;
      block.ids = chosen;
      block.weights = weights.data();
      block.experts = e;
      block.out = out.matrix(n, hidden);
      gpu->moe_block(block);
      gpu->moe(out.matrix(n, hidden), to, chosen, weights.data(), kTopK, e, true);
      return Got{ids.get(), weights.get(), logits.get(), normed.get(), out.get()};
    };
    const Got all = run(0, kTokens);
    for (const auto& [t, n] : {std::pair<int64_t, int64_t>{0, 1},
                               {1, 1},
                               {2, 1},
                               {3, 1},
                               {4, 1},
                               {10, 1},
                               {2, 2},
                               {3, 5},
                               {0, 7},
                               {3, 8},
                               {1, 9},
                               {3, 32}}) {
      SCOPED_TRACE(fmt::format("tokens {}+{}", t, n));
      const Got one = run(t, n);
      const auto same = [&](const std::vector<float>& its, const std::vector<float>& of_all) {
        const size_t of_one = its.size() / static_cast<size_t>(n);
        return std::memcmp(its.data(), of_all.data() + static_cast<size_t>(t) * of_one,
                           its.size() * 4) == 0;
      };
      EXPECT_TRUE(same(one.normed, all.normed)) << "norm";
      EXPECT_TRUE(same(one.logits, all.logits)) << "logits";
      EXPECT_TRUE(same(one.ids, all.ids)) << "ids";
      EXPECT_TRUE(same(one.weights, all.weights)) << "weights";
      EXPECT_TRUE(same(one.out, all.out)) << "experts";
    }
  }
}

}  // namespace
}  // namespace freshet

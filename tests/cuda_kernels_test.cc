// Every row of the GPU's tables of GEMM kernels, forced by name, on problems that it supports: the
// result has the same bits as for each token alone. A row that no problem here reaches is a
// failure. Also tests several devices in one process.
#include <algorithm>
#include <optional>

#include "backend/cuda/arguments.h"
#include "backend/cuda/gemm/gemm_rows.h"
#include "tests/cuda_fixture.h"

namespace freshet::test {
namespace {

using cuda::Code;
using cuda::GemmProblem;
using cuda::GemmRow;

class CudaKernels : public CudaTest {
 protected:
  static quant::Format format_of(Code code) {
    if (code == Code::kExactF32) return quant::Format::kF32;
    const auto all = quant::all_formats();
    return std::ranges::find_if(all, [&](const auto& f) { return cuda::code_of(f.format) == code; })
        ->format;
  }

  // Weights of a problem. F32 weights that BF16 represents exactly have a code of their own.
  std::vector<ops::Weight> weights_of(const GemmProblem& p) {
    std::vector<ops::Weight> weights;
    for (int i = 0; i < p.count; ++i) {
      const auto& [code, rows, cols] = p.of[i];
      Stored s = stored(format_of(code), rows, cols, static_cast<uint32_t>(i + 1));
      if (code == Code::kExactF32) to_bf16(s);
      auto packed = gpu->pack(format_of(code), s.rows, cols);
      EXPECT_TRUE(packed.ok()) << packed.status().message();
      weights.push_back(std::move(*packed));
    }
    return weights;
  }

  // Up to two small problems of different formats that a row supports, with the same list of
  // formats.
  std::vector<GemmProblem> problems_for(const GemmRow& row, const std::vector<GemmProblem>& all) {
    std::vector<GemmProblem> found;
    for (const GemmProblem& p : all) {
      const bool other = found.empty() || found[0].format != p.format;
      if (other && found.size() < 2 && cuda::fits(row, limits(), p)) found.push_back(p);
    }
    return found;
  }

  static std::string text(const GemmRow& row, const GemmProblem& p) {
    return fmt::format("{}: {} weights of format {}, {} x {}, {} tokens", row.name, p.count,
                       p.format, p.of[0].rows, p.of[0].cols, p.tokens);
  }
};

// Small problems first; `last` replaces the code of the last weight.
std::vector<GemmProblem> problems(int count, std::optional<Code> last) {
  std::vector<GemmProblem> all;
  std::vector<Code> codes = {Code::kExactF32};
  for (int c = 0; c < static_cast<int>(Code::kCount); ++c) codes.push_back(static_cast<Code>(c));
  for (const int64_t rows : {64, 512, 1152, 2176, 4096, 8704, 12800, 18944, 34304}) {
    for (const int64_t cols : {256, 1280, 2048, 2304, 4096, 8192}) {
      for (const int64_t tokens : {1, 5, 8, 9, 16, 19, 32, 40, 64, 65, 100, 128, 200, 520}) {
        for (const Code code : codes) {
          if (code == Code::kExactF32 && rows > cuda::kMaxExperts) continue;
          GemmProblem p;
          p.tokens = tokens;
          for (int i = 0; i < count; ++i) {
            p.add({i == count - 1 ? last.value_or(code) : code, rows, cols});
          }
          all.push_back(p);
        }
      }
    }
  }
  return all;
}

// Checks some tokens of `got` [tokens, rows] against `alone`.
template <class Alone>
void expect_tokens_alone(const std::vector<float>& got, int64_t tokens, int64_t rows,
                         const Alone& alone) {
  for (const int64_t token : {int64_t{0}, tokens / 2, tokens - 1}) {
    const std::vector<float> want = alone(token);
    ASSERT_EQ(std::memcmp(got.data() + token * rows, want.data(), want.size() * sizeof(float)), 0)
        << "token " << token;
  }
}

TEST_F(CudaKernels, EveryGemmRowHasTheBitsOfEachTokenAlone) {
  const auto single = problems(1, {}), pairs = problems(3, Code::kQ6_K);
  for (int i = 0; i < cuda::kGemmKernels; ++i) {
    const GemmRow& row = cuda::kGemmRows[i];
    if (row.capability == 90 && limits().capability != 90) continue;
    const auto found = problems_for(row, i <= cuda::kGemmPairM65 ? pairs : single);
    EXPECT_FALSE(found.empty()) << row.name << " was never run";
    const auto forced = open("cuda", {fmt::format("matmul={}", row.name)});
    ASSERT_NE(forced, nullptr);
    for (const GemmProblem& p : found) {
      SCOPED_TRACE(text(row, p));
      const std::vector<ops::Weight> weights = weights_of(p);
      DeviceFloats x(*gpu, random_floats(static_cast<size_t>(p.tokens * p.of[0].cols), 1));
      const Matrix in = x.matrix(p.tokens, p.of[0].cols);
      const auto run = [&](ops::Ops& o, const Matrix& from, int which) {
        std::vector<std::unique_ptr<DeviceFloats>> out;
        std::vector<ops::Product> list;
        for (const ops::Weight& w : weights) {
          out.push_back(std::make_unique<DeviceFloats>(o, static_cast<size_t>(from.rows * w.rows)));
          list.push_back({&w, out.back()->matrix(from.rows, w.rows), nullptr, 1.0f, false});
        }
        o.matmul(from, list);
        return out[static_cast<size_t>(which)]->get();
      };
      for (int which = 0; which < p.count; ++which) {
        expect_tokens_alone(run(*forced, in, which), p.tokens, p.of[which].rows,
                            [&](int64_t t) { return run(*gpu, in.slice_rows(t, 1), which); });
      }
    }
  }
}

TEST_F(CudaKernels, EverySwigluRowHasTheBitsOfEachTokenAlone) {
  constexpr int64_t kOut = 64;
  const auto both = problems(2, {});
  for (const GemmRow& row : cuda::kSwigluRows) {
    if (row.capability == 90 && limits().capability != 90) continue;
    const auto found = problems_for(row, both);
    EXPECT_FALSE(found.empty()) << row.name << " was never run";
    const auto forced = open("cuda", {fmt::format("swiglu={}", row.name)});
    ASSERT_NE(forced, nullptr);
    for (const GemmProblem& p : found) {
      SCOPED_TRACE(text(row, p));
      const int64_t ff = p.of[0].rows, cols = p.of[0].cols;
      GemmProblem of_down;
      of_down.add({p.of[0].code, kOut, ff});
      const std::vector<ops::Weight> weights = weights_of(p), down = weights_of(of_down);
      DeviceFloats x(*gpu, random_floats(static_cast<size_t>(p.tokens * cols), 1));
      const Matrix in = x.matrix(p.tokens, cols);
      const auto run = [&](ops::Ops& o, const Matrix& from) {
        DeviceFloats a(o, static_cast<size_t>(from.rows * ff)), b(o, a.get().size());
        DeviceFloats out(o, static_cast<size_t>(from.rows * kOut));
        const Matrix g = a.matrix(from.rows, ff), u = b.matrix(from.rows, ff);
        o.gated({{from},
                 {&weights[0], g, nullptr, 1.0f, false},
                 {&weights[1], u, nullptr, 1.0f, false},
                 {ops::Activation::kSilu, 0.0f, 0.0f},
                 {down.data(), out.matrix(from.rows, kOut), nullptr, 1.0f, false}});
        return out.get();
      };
      expect_tokens_alone(run(*forced, in), p.tokens, kOut,
                          [&](int64_t t) { return run(*gpu, in.slice_rows(t, 1)); });
    }
  }
}

// A second device (or the same one again) next to the first: each has its own stream and graphs.
TEST_F(CudaKernels, SeveralDevicesInOneProcess) {
  const auto second = cuda::open("cuda:1");
  const auto other = open(second.ok() ? "cuda:1" : "cuda:0", {});
  ASSERT_NE(other, nullptr);
  constexpr int64_t kTokens = 8, kRows = 4096, kCols = 4096;
  const Stored s = stored(quant::Format::kQ4_0, kRows, kCols, 1);
  const std::vector<float> values = random_floats(static_cast<size_t>(kTokens * kCols), 2);
  const auto run = [&](ops::Ops& o) {
    const auto weight = o.pack(quant::Format::kQ4_0, s.rows, kCols);
    EXPECT_TRUE(weight.ok());
    DeviceFloats x(o, values), out(o, static_cast<size_t>(kTokens * kRows));
    const ops::Product p{&*weight, out.matrix(kTokens, kRows), nullptr, 1.0f, false};
    o.matmul(x.matrix(kTokens, kCols), {&p, 1});
    return out.get();
  };
  const std::vector<float> want = run(*gpu);
  EXPECT_EQ(std::memcmp(run(*other).data(), want.data(), want.size() * sizeof(float)), 0);
  EXPECT_EQ(std::memcmp(run(*gpu).data(), want.data(), want.size() * sizeof(float)), 0);
}

TEST_F(CudaKernels, AForcedRowThatCannotTakeAWeightFailsAtLoad) {
  if (limits().capability != 90) GTEST_SKIP() << "the rows are Hopper's";
  const auto forced = open("cuda", {"matmul=q_sm90_m1_8_small_n"});
  ASSERT_NE(forced, nullptr);
  const Stored s = stored(quant::Format::kQ4_0, 64, 256, 1);
  const auto packed = forced->pack(quant::Format::kQ4_0, s.rows, 256);
  ASSERT_FALSE(packed.ok());
  EXPECT_NE(packed.status().message().find("q_sm90_m1_8_small_n"), std::string::npos);
}

}  // namespace
}  // namespace freshet::test

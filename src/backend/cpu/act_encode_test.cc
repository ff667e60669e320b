// Encoding of activations for GEMM: all instruction sets give the same bytes.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "backend/cpu/backend.h"
#include "backend/cpu/matmul_layout.h"
#include "backend/cpu/tables.h"

namespace freshet::cpu {
namespace {

using ops::ActEncoder;
using ops::ActKind;

constexpr uint8_t kWall = 0xa5;  // guard bytes around an encoded row

TEST(ActEncoders, GiveTheSameBitsOnEveryInstructionSet) {
  std::mt19937 rng(2);
  std::normal_distribution<float> normal;
  const float odd[] = {0.0f, -0.0f, 1e-40f, 1e-31f, 1e38f, -1e38f, 0.5f, 1e-20f, 7.0f};
  for (const ActKind kind : {ActKind::kBF16, ActKind::kQ8x256, ActKind::kInt8}) {
    for (const int64_t cols : {32, 64, 256, 480, 512, 2048, 7, 50}) {
      for (int trial = 0; trial < 8; ++trial) {
        std::vector<float> x(static_cast<size_t>(cols));
        for (auto& v : x) {
          v = trial == 1 ? 0.0f : std::ldexp(normal(rng), static_cast<int>(rng() % 9) * trial);
          if (trial > 4 && rng() % 40 == 0) v = odd[rng() % 9];
        }
        std::vector<uint8_t> first;
        for (const ActEncoder& e : act_encoders()) {
          if (e.kind != kind || !detect().has(e.isa)) continue;
          const size_t size = e.row_bytes(cols);
          EXPECT_EQ(size % 64, 0u);
          std::vector<uint8_t> out(size + 2 * kLine, kWall);
          std::fill_n(out.begin() + kLine, size, uint8_t{0});
          e.encode(x.data(), cols, 0, cols, true, out.data() + kLine);
          const auto end = out.end() - kLine;
          EXPECT_EQ(std::count(out.begin(), out.begin() + kLine, kWall), kLine);
          EXPECT_EQ(std::count(end, out.end(), kWall), kLine);
          const std::vector<uint8_t> bytes(out.begin() + kLine, end);
          if (first.empty()) first = bytes;
          EXPECT_EQ(first, bytes) << ops::name_of(e.isa) << " cols=" << cols << " trial=" << trial;
        }
      }
    }
  }
}

// Encodes in parts, and without the fine part: the same bytes, and the fine ones are not written.
TEST(ActEncoders, EncodePartsOfARow) {
  std::mt19937 rng(3);
  std::normal_distribution<float> normal;
  for (const ActEncoder& e : act_encoders()) {
    if (!detect().has(e.isa) || !ops::encodes_in_parts(e.kind)) continue;
    for (const int64_t cols : {256, 480, 2048}) {
      std::vector<float> x(static_cast<size_t>(cols));
      for (auto& v : x) v = normal(rng);
      std::vector<uint8_t> whole(e.row_bytes(cols)), parts = whole, coarse = whole;
      e.encode(x.data(), cols, 0, cols, true, whole.data());
      for (int64_t k = (cols - 1) / 256 * 256; k >= 0; k -= 256) {
        const int64_t end = std::min(k + 256, cols);
        e.encode(x.data() + k, cols, k, end, true, parts.data());
        e.encode(x.data() + k, cols, k, end, false, coarse.data());
      }
      EXPECT_EQ(whole, parts) << ops::name_of(e.isa) << " cols=" << cols;
      const bool bytes = e.kind == ActKind::kQ8x256;
      const auto fine =
          static_cast<std::ptrdiff_t>(bytes ? q8x256_layout(cols).fine : bf16_layout(cols).fine);
      EXPECT_TRUE(std::equal(whole.begin(), whole.begin() + fine, coarse.begin()));
      EXPECT_EQ(std::count(coarse.begin() + fine, coarse.begin() + 2 * fine, 0), fine);
      for (int64_t b = 0; bytes && b < blocks_of(cols, 256); ++b) {
        const auto at = static_cast<std::ptrdiff_t>(q8x256_layout(cols).records + b * 2 * kLine);
        EXPECT_TRUE(
            std::equal(whole.begin() + at, whole.begin() + at + kLine, coarse.begin() + at));
      }
    }
  }
}

TEST(ActEncoders, RoundToTheNearestOf255Levels) {
  const std::span<const ActEncoder> all = act_encoders();
  const auto e = std::ranges::find_if(
      all, [](const ActEncoder& a) { return a.kind == ActKind::kQ8x256 && detect().has(a.isa); });
  ASSERT_NE(e, all.end());
  std::vector<float> x(256);
  for (int i = 0; i < 256; ++i) x[static_cast<size_t>(i)] = static_cast<float>(i % 100 - 50) * 0.5f;
  x[0] = -127.0f;  // the step is 1: ties go to even
  std::vector<uint8_t> out(e->row_bytes(256));
  e->encode(x.data(), 256, 0, 256, true, out.data());
  Q8x256Record record;
  std::memcpy(&record, out.data() + q8x256_layout(256).records, sizeof record);
  EXPECT_EQ(record.d, 1.0f);
  const int first_of[8] = {0, 2, 1, 3, 4, 6, 5, 7};
  for (size_t place = 0; place < 8; ++place) {
    int sum = 0;
    for (size_t j = 0; j < 32; ++j) {
      const size_t i = static_cast<size_t>(first_of[place]) * 32 + j;
      const auto want = std::nearbyint(x[i]);
      EXPECT_EQ(static_cast<float>(static_cast<int8_t>(out[i])), want);
      sum += static_cast<int>(want);
    }
    EXPECT_EQ(record.sum32[place], sum);
  }
}

TEST(ActEncoders, SumsOfGroupsAreBf16) {
  std::mt19937 rng(4);
  std::normal_distribution<float> normal;
  constexpr int64_t kCols = 5 * 256 + 200;  // six blocks, so the second four lack two
  std::vector<float> x(kCols);
  for (auto& v : x) v = normal(rng);
  const Q8x256Layout l = q8x256_layout(kCols);
  for (const ActEncoder& e : act_encoders()) {
    if (e.kind != ActKind::kQ8x256 || !detect().has(e.isa)) continue;
    std::vector<uint8_t> out(e.row_bytes(kCols), kWall);
    e.encode(x.data(), kCols, 0, kCols, false, out.data());
    for (int64_t g = 0; g < 64; ++g) {
      int sum = 0;
      float d = 0.0f;
      if (g < 48) {
        std::memcpy(&d, &out[static_cast<size_t>(l.records + g / 8 * 2 * kLine)], 4);
        for (int64_t i = g * 32; i < g * 32 + 32; ++i) {
          sum += static_cast<int8_t>(out[static_cast<size_t>(i)]);
        }
      }
      uint16_t got;
      std::memcpy(&got, &out[static_cast<size_t>(l.sums + g * 2)], 2);
      const auto bits = std::bit_cast<uint32_t>(d * static_cast<float>(sum));
      EXPECT_EQ(got, (bits + 0x8000) >> 16) << ops::name_of(e.isa) << " " << g;
    }
  }
}

}  // namespace
}  // namespace freshet::cpu

// GEMMs of the CUDA backend against the reference ops, on random shapes and in guarded memory; and
// batch invariance: a row has the same bits alone and in any batch. Skipped without a GPU.
#include <bit>
#include <cmath>
#include <cstring>
#include <tuple>

#include "quant/fp8.h"
#include "tests/cuda_fixture.h"
#include "tests/op_cases.h"

namespace freshet {
namespace {

using test::DeviceFloats;
using test::random_floats;
using test::rounded;

// Rounds to E4M3, with one scale per 128 numbers.
std::vector<float> rounded_e4m3(std::vector<float> v) {
  for (size_t at = 0; at < v.size(); at += 128) {
    float most = 0.0f;
    for (size_t i = at; i < at + 128; ++i) most = std::max(most, std::fabs(v[i]));
    const float scale = most / 448.0f;
    for (size_t i = at; i < at + 128; ++i) {
      v[i] = quant::e4m3_to_f32(quant::f32_to_e4m3(v[i] / scale)) * scale;
    }
  }
  return v;
}

// Rounds to integers in [-127, 127] times a power of two; each row contains the largest magnitude,
// so INT8 activations represent the row exactly.
std::vector<float> rounded_int8(std::vector<float> v, int64_t cols) {
  for (size_t i = 0; i < v.size(); ++i) {
    v[i] = std::clamp(std::nearbyint(v[i] * 32.0f), -127.0f, 127.0f) / 32.0f;
    if (static_cast<int64_t>(i) % cols == cols / 2) v[i] = -127.0f / 32.0f;
  }
  return v;
}

class Cuda : public test::CudaTest {};

const quant::Format kFormats[] = {
    quant::Format::kBF16,  quant::Format::kF16,  quant::Format::kF32,      quant::Format::kFP8,
    quant::Format::kQ8_0,  quant::Format::kQ4_0, quant::Format::kQ4_1,     quant::Format::kQ5_0,
    quant::Format::kQ5_1,  quant::Format::kQ2_K, quant::Format::kQ3_K,     quant::Format::kQ4_K,
    quant::Format::kQ5_K,  quant::Format::kQ6_K, quant::Format::kIQ4_NL,   quant::Format::kIQ4_XS,
    quant::Format::kMXFP4, quant::Format::kINT8, quant::Format::kInt4G128, quant::Format::kInt4G32};
// Multiplied as BF16, although the values are not exact in BF16.
bool rounds(quant::Format f) {
  return f != quant::Format::kBF16 && f != quant::Format::kF32 && f != quant::Format::kFP8 &&
         f != quant::Format::kMXFP4 && f != quant::Format::kINT8;
}

TEST_F(Cuda, ProductsAreNearTheReference) {
  std::vector<cases::MatmulCase> all = cases::matmul_cases();
  all.push_back({3, 4100, 1024});  // few split-K slices
  all.push_back({40, 96, 4096});   // many slices
  all.push_back({300, 200, 512});
  for (const quant::Format format : kFormats) {
    uint32_t seed = 1;
    for (cases::MatmulCase c : all) {
      if (quant::info(format).block_size == 1 && seed % 3 == 0) c.cols -= 37;  // ragged ends
      const std::string what =
          fmt::format("{} {}x{}x{}", quant::info(format).name, c.tokens, c.rows, c.cols);
      const Stored s = stored(format, c.rows, c.cols, seed += 3);
      const auto w = gpu->pack(format, s.rows, c.cols);
      const auto ref = cpu->pack(format, s.rows, c.cols);
      ASSERT_TRUE(w.ok() && ref.ok()) << what;
      std::vector<float> x = random_floats(static_cast<size_t>(c.tokens * c.cols), seed + 1);
      x = format == quant::Format::kFP8    ? rounded_e4m3(x)
          : format == quant::Format::kINT8 ? rounded_int8(x, c.cols)
                                           : rounded(x);
      const std::vector<float> bias = random_floats(static_cast<size_t>(c.rows), seed + 2);
      std::vector<float> want = random_floats(static_cast<size_t>(c.tokens * c.rows), seed);
      DeviceFloats dx(*gpu, x), db(*gpu, bias), out(*gpu, want);
      ops::Product p{&*ref, {want.data(), c.tokens, c.rows, c.rows}, bias.data(), 0.5f, true};
      cpu->matmul({x.data(), c.tokens, c.cols, c.cols}, {&p, 1});
      ops::Product q{&*w, out.matrix(c.tokens, c.rows), db.data(), 0.5f, true};
      gpu->matmul(dx.matrix(c.tokens, c.cols), {&q, 1});
      // Rounding to BF16 costs up to 2^-8 of a number, at random; weights with scales are rounded
      // twice. Tensor cores sum E4M3 products with less than F32 precision. The others are exact.
      const float typical = std::sqrt(static_cast<float>(c.cols)) * 0.5f * 0.5f;
      const float allowed = rounds(format)                  ? 1.6e-2f * typical + 1e-4f
                            : format == quant::Format::kFP8 ? 2e-3f * typical + 1e-4f
                                                            : 2e-3f;
      expect_near(out.get(), want, allowed, what);
    }
  }
}

// As docs/cuda.md specifies: the scale is rounded to BF16, and so is its product with the number.
TEST_F(Cuda, QuantisedProductsHaveTheBitsOfTheirValuesInBf16) {
  constexpr int64_t kRows = 80, kCols = 4096, kTokens = 130;
  for (const quant::Format format :
       {quant::Format::kQ4_0, quant::Format::kQ8_0, quant::Format::kQ5_0, quant::Format::kIQ4_NL,
        quant::Format::kIQ4_XS, quant::Format::kQ3_K, quant::Format::kInt4G128,
        quant::Format::kInt4G32}) {
    const quant::FormatInfo& info = quant::info(format);
    const auto scale_of = [&](const uint8_t* block, int col) {
      const auto half = [](const uint8_t* p) {
        uint16_t bits = 0;
        std::memcpy(&bits, p, 2);
        return f16_to_f32(bits);
      };
      if (format == quant::Format::kIQ4_XS) {
        const int g = col / 32, scale = (block[4 + g / 2] >> (g % 2 * 4) & 15) |
                                        (block[2 + g / 4] >> (g % 4 * 2) & 3) << 4;
        return half(block) * static_cast<float>(scale - 32);
      }
      if (format == quant::Format::kQ3_K) {
        const int g = col / 16, scale = (block[96 + g % 8] >> (g / 8 * 4) & 15) |
                                        (block[104 + g % 4] >> (g / 4 * 2) & 3) << 4;
        return half(block + 108) * static_cast<float>(scale - 32);
      }
      if (info.block_bytes - 3 == info.block_size / 2) {  // see quant/int4.h
        const auto bits =
            uint32_t{block[1]} << 24 | uint32_t{block[0]} << 16 | (uint32_t{block[2]} & 0xf0) << 8;
        return std::bit_cast<float>(bits);
      }
      return half(block);
    };
    const Stored s = stored(format, kRows, kCols, 45);
    Stored values = stored(quant::Format::kBF16, kRows, kCols, 46);
    std::vector<float> row(kCols);
    for (int64_t r = 0; r < kRows; ++r) {
      info.decode(s.rows[r], row.data(), kCols);
      for (int64_t c = 0; c < kCols; ++c) {
        const float d = scale_of(s.rows[r] + c / info.block_size * info.block_bytes,
                                 static_cast<int>(c % info.block_size));
        const uint16_t v = f32_to_bf16(d == 0.0f ? 0.0f : std::round(row[c] / d) * test::bf16(d));
        std::memcpy(values.bytes.data() + (r * kCols + c) * 2, &v, 2);
      }
    }
    const auto w = gpu->pack(format, s.rows, kCols);
    const auto plain = gpu->pack(quant::Format::kBF16, values.rows, kCols);
    ASSERT_TRUE(w.ok() && plain.ok());
    DeviceFloats x(*gpu, random_floats(static_cast<size_t>(kTokens * kCols), 47));
    for (const int64_t count : {1, 9, 40, 130}) {
      const Matrix some = x.matrix(kTokens, kCols).slice_rows(0, count);
      EXPECT_EQ(product(*w, some), product(*plain, some))
          << info.name << ", " << count << " tokens";
    }
  }
}

// The number minus the middle of its range, times the scale in BF16, plus the value at the middle
// in BF16.
TEST_F(Cuda, ProductsOfKQuantsHaveTheBitsOfTheirValuesInBf16) {
  constexpr int64_t kRows = 80, kCols = 4096, kTokens = 130;
  const auto half = [](const uint8_t* p) {
    uint16_t bits = 0;
    std::memcpy(&bits, p, 2);
    return f16_to_f32(bits);
  };
  // For numbers that are multiplied by d and added to the minimum.
  const auto value = [](int q, int middle, float d, float least) {
    const float add = test::bf16(std::fma(static_cast<float>(middle), d, least));
    return std::fma(static_cast<float>(q - middle), test::bf16(d), add);
  };
  const auto affine = [&](const uint8_t* block, int col, bool five) {
    const int g = col / 32, middle = five ? 16 : 8;
    const uint8_t* of = block + 4;
    const int scale = g < 4 ? of[g] & 63 : (of[g + 4] & 15) | of[g - 4] >> 6 << 4;
    const int least = g < 4 ? of[g + 4] & 63 : of[g + 4] >> 4 | of[g] >> 6 << 4;
    int q = block[(five ? 48 : 16) + col / 64 * 32 + col % 32] >> (col % 64 / 32 * 4) & 15;
    if (five) q |= (block[16 + col % 32] >> g & 1) << 4;
    const float m = half(block + 2) * static_cast<float>(least);
    return value(q, middle, half(block) * static_cast<float>(scale), -m);
  };
  const auto one = [&](const uint8_t* block, int col, bool five) {
    int q = block[(five ? 8 : 4) + col % 16] >> (col / 16 * 4) & 15;
    if (five) q |= (block[4 + col / 8] >> (col % 8) & 1) << 4;
    return value(q, five ? 16 : 8, half(block), half(block + 2));
  };
  const auto six = [&](const uint8_t* b, int col) {
    const int half_block = col / 128, low = b[half_block * 64 + col % 64] >> (col % 128 / 64 * 4);
    const int high = b[128 + half_block * 32 + col % 32] >> (col % 128 / 32 * 2);
    const auto scale = static_cast<float>(static_cast<int8_t>(b[192 + col / 16]));
    const int q = (low & 15) | (high & 3) << 4;
    return static_cast<float>(q - 32) * test::bf16(half(b + 208) * scale);
  };
  using quant::Format;
  const auto value_of = [&](Format format, const uint8_t* block, int col) {
    if (format == Format::kQ6_K) return six(block, col);
    if (format == Format::kQ4_1 || format == Format::kQ5_1) {
      return one(block, col, format == Format::kQ5_1);
    }
    return affine(block, col, format == Format::kQ5_K);
  };
  for (const Format format :
       {Format::kQ4_K, Format::kQ5_K, Format::kQ6_K, Format::kQ4_1, Format::kQ5_1}) {
    const quant::FormatInfo& info = quant::info(format);
    const Stored s = stored(format, kRows, kCols, 45);
    Stored values = stored(quant::Format::kBF16, kRows, kCols, 46);
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t c = 0; c < kCols; ++c) {
        const uint8_t* block = s.rows[r] + c / info.block_size * info.block_bytes;
        const auto col = static_cast<int>(c % info.block_size);
        const uint16_t v = f32_to_bf16(value_of(format, block, col));
        std::memcpy(values.bytes.data() + (r * kCols + c) * 2, &v, 2);
      }
    }
    const auto w = gpu->pack(format, s.rows, kCols);
    const auto table = gpu->pack(format, s.rows, kCols, ops::Ops::kNoLook, ops::Use::kTable);
    const auto plain = gpu->pack(quant::Format::kBF16, values.rows, kCols);
    ASSERT_TRUE(w.ok() && table.ok() && plain.ok());
    DeviceFloats x(*gpu, random_floats(static_cast<size_t>(kTokens * kCols), 47));
    for (const int64_t count : {1, 9, 40, 130}) {
      const Matrix some = x.matrix(kTokens, kCols).slice_rows(0, count);
      const std::vector<float> want = product(*plain, some);
      EXPECT_EQ(product(*w, some), want) << info.name << ", " << count << " tokens";
      EXPECT_EQ(product(*table, some), want) << info.name << " of a table, " << count << " tokens";
    }
  }
}

TEST_F(Cuda, ARowsProductHasTheSameBitsInEveryBatch) {
  constexpr int64_t kRows = 528, kMost = 256;
  for (const quant::Format format : kFormats) {
    for (const int64_t cols : {int64_t{512}, int64_t{4096}}) {
      const Stored s = stored(format, kRows, cols, 5);
      const auto w = gpu->pack(format, s.rows, cols);
      ASSERT_TRUE(w.ok());
      DeviceFloats x(*gpu, random_floats(static_cast<size_t>(kMost * cols), 6));
      const auto run = [&](int64_t first, int64_t count) {
        return product(*w, x.matrix(kMost, cols).slice_rows(first, count));
      };
      std::vector<float> alone;
      for (int64_t t = 0; t < kMost; ++t) {
        const auto row = run(t, 1);
        alone.insert(alone.end(), row.begin(), row.end());
      }
      for (const int64_t count : {2, 7, 8, 9, 16, 17, 31, 64, 65, 100, 128, 129, 200, 256}) {
        for (const int64_t first : {int64_t{0}, kMost - count}) {
          const auto got = run(first, count);
          ASSERT_EQ(std::memcmp(got.data(), alone.data() + first * kRows, got.size() * 4), 0)
              << quant::info(format).name << " cols=" << cols << " rows " << first << "+" << count;
        }
      }
    }
  }
}

// So many rows that blocks loop over the split-K slices instead of sharing them; how many blocks
// share them depends on the rows and, for 6,160, also on the tokens.
TEST_F(Cuda, AWideProductHasTheSameBitsInEveryBatch) {
  constexpr int64_t kMost = 300;
  const std::tuple<quant::Format, int64_t, int64_t> shapes[] = {
      {quant::Format::kINT8, 27210, 300},      {quant::Format::kINT8, 11250, 640},
      {quant::Format::kINT8, 4112, 4200},      {quant::Format::kINT8, 6160, 1152},
      {quant::Format::kInt4G128, 10256, 2176}, {quant::Format::kInt4G128, 6000, 2176},
      {quant::Format::kBF16, 14352, 2048},     {quant::Format::kBF16, 14336, 2112},
      {quant::Format::kBF16, 6160, 2048},      {quant::Format::kFP8, 10256, 2048},
      {quant::Format::kFP8, 4112, 2176},       {quant::Format::kFP8, 6160, 2048},
      {quant::Format::kFP8, 6160, 1152},       {quant::Format::kFP8, 33860, 1152},
      {quant::Format::kQ4_0, 10256, 2048},     {quant::Format::kQ4_0, 27210, 2176},
      {quant::Format::kQ4_K, 27216, 2304},     {quant::Format::kQ4_0, 6000, 2176},
      {quant::Format::kQ4_0, 6160, 2048},      {quant::Format::kQ4_0, 34010, 576},
      {quant::Format::kQ8_0, 33860, 320},      {quant::Format::kQ4_K, 33860, 768},
      {quant::Format::kQ5_K, 27216, 2304},     {quant::Format::kQ5_K, 6160, 2048},
      {quant::Format::kIQ4_XS, 10256, 2304},   {quant::Format::kQ2_K, 6160, 2304},
      {quant::Format::kQ5_0, 6160, 2176},      {quant::Format::kQ4_1, 10256, 2176}};
  for (const auto& [format, rows, cols] : shapes) {
    const Stored s = stored(format, rows, cols, 15);
    const auto w = gpu->pack(format, s.rows, cols);
    ASSERT_TRUE(w.ok());
    DeviceFloats x(*gpu, random_floats(static_cast<size_t>(kMost * cols), 16));
    const auto run = [&](int64_t first, int64_t count) {
      DeviceFloats out(*gpu, std::vector<float>(static_cast<size_t>(count * rows), 0.25f));
      const bool add = format == quant::Format::kBF16 && rows % 128 == 0;
      ops::Product p{&*w, out.matrix(count, rows), nullptr, 0.5f, add};
      gpu->matmul(x.matrix(kMost, cols).slice_rows(first, count), {&p, 1});
      return out.get();
    };
    for (const int64_t count : {9, 17, 40, 64, 100, 128, 200, 300}) {
      const std::vector<float> got = run(0, count);
      for (const int64_t t : {int64_t{0}, int64_t{7}, count - 1}) {
        const std::vector<float> alone = run(t, 1);
        ASSERT_EQ(std::memcmp(got.data() + t * rows, alone.data(), alone.size() * 4), 0)
            << quant::info(format).name << " of " << rows << " rows: row " << t << " of " << count;
      }
    }
  }
}

// Scales shared by rows or by columns take a different path.
TEST_F(Cuda, Fp8ScalesOfRowsAndOfBlocks) {
  constexpr int64_t kMost = 150;
  constexpr auto kFp8 = quant::Format::kFP8;
  enum { kRow, kBlock, kBoth, kEach };
  struct Case {
    int kind;
    int64_t rows, cols = 2304;
  };
  for (const auto& [kind, rows, cols] : {Case{kRow, 200},
                                         {kBlock, 200},
                                         {kBoth, 200},
                                         {kRow, 2250},
                                         {kBlock, 2250},
                                         {kBoth, 2250},
                                         {kEach, 2250},
                                         {kEach, 33860},
                                         {kRow, 4160},
                                         {kBlock, 4160},
                                         {kRow, 6160},
                                         {kBlock, 6160},
                                         {kEach, 6160},
                                         {kEach, 200, 8320}}) {
    Stored s = stored(kFp8, rows, cols, 31);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t b = 0; b < cols / 128; ++b) {
        const bool of_row = kind == kRow || (kind == kBoth && r >= 64);
        int64_t scale_of = of_row ? 1 + r % 7 : 2 + b % 3 + r / 64;
        if (kind == kEach) {  // changes every 64 rows
          const int64_t turn = r / 64 % 3;
          scale_of = 1 + (turn == 0 ? r % 7 : turn == 1 ? b % 3 + r / 64 % 5 : (r + b) % 7);
        }
        const float scale = 1e-3f * static_cast<float>(scale_of);
        uint8_t* block = s.bytes.data() + (r * (cols / 128) + b) * 132;
        std::memcpy(block + 128, &scale, sizeof scale);
      }
    }
    const auto w = gpu->pack(kFp8, s.rows, cols), ref = cpu->pack(kFp8, s.rows, cols);
    ASSERT_TRUE(w.ok() && ref.ok());
    std::vector<float> x = rounded_e4m3(random_floats(kMost * cols, 32));
    const std::vector<float> bias = random_floats(rows, 33);
    std::vector<float> want(kMost * rows);
    const ops::Product p{&*ref, {want.data(), kMost, rows, rows}, bias.data(), 0.5f, false};
    cpu->matmul({x.data(), kMost, cols, cols}, {&p, 1});
    DeviceFloats dx(*gpu, x), db(*gpu, bias);
    const auto run = [&](int64_t first, int64_t count) {
      DeviceFloats out(*gpu, static_cast<size_t>(count * rows));
      const ops::Product q{&*w, out.matrix(count, rows), db.data(), 0.5f, false};
      gpu->matmul(dx.matrix(kMost, cols).slice_rows(first, count), {&q, 1});
      return out.get();
    };
    const std::vector<float> all = run(0, kMost);
    expect_near(all, want, 1e-3f * largest(want), fmt::format("scales of kind {}", kind));
    for (const int64_t count : {1, 10, 30, 60, 73}) {
      const std::vector<float> some = run(77, count);
      ASSERT_EQ(std::memcmp(some.data(), all.data() + 77 * rows, some.size() * 4), 0)
          << "kind " << kind << ", " << count << " tokens";
    }
  }
}

// Encoding of INT8 activations: the largest magnitude of a row becomes 127; NaN or infinity affects
// the whole row.
struct Int8Row {
  std::vector<int> q;
  float scale = 0.0f;
};
Int8Row int8_row(const float* x, int64_t n) {
  Int8Row row;
  float most = 0.0f;
  bool finite = true;
  for (int64_t i = 0; i < n; ++i) {
    finite = finite && std::isfinite(x[i]);
    most = std::max(most, std::fabs(x[i]));
  }
  row.q.resize(static_cast<size_t>(n));
  row.scale = !finite ? NAN : most < 1e-30f ? 0.0f : most / 127.0f;
  if (!(row.scale > 0.0f)) return row;
  const float up = 127.0f / most;
  for (int64_t i = 0; i < n; ++i) {
    row.q[static_cast<size_t>(i)] = static_cast<int>(std::nearbyint(x[i] * up));
  }
  return row;
}

// Bit-exact: integers have exact sums, and F32 rounding starts only at their end.
TEST_F(Cuda, Int8ProductsAreThoseOfWholeNumbers) {
  constexpr int64_t kMost = 300;
  for (const auto& [rows, cols] : {std::pair{int64_t{80}, int64_t{100}},
                                   {136, 4096},
                                   {1000, 515},
                                   {2100, 1024},
                                   {4100, 640}}) {
    const auto at = [](int64_t r, int64_t stride, int64_t c) {
      return static_cast<size_t>(r * stride + c);
    };
    Stored s = stored(quant::Format::kINT8, rows, cols, 51);
    s.bytes[4] = 0x80;  // -128, which our encoder never writes
    const auto w = gpu->pack(quant::Format::kINT8, s.rows, cols);
    ASSERT_TRUE(w.ok());
    std::vector<float> x = random_floats(at(kMost, cols, 0), 52);
    for (int64_t c = 0; c < cols; ++c) {
      x[at(2, cols, c)] = 0.0f;
      x[at(3, cols, c)] *= 1e-32f;
      x[at(4, cols, c)] *= 1e30f;
    }
    x[at(5, cols, cols - 1)] = NAN;
    x[at(6, cols, 0)] = -INFINITY;
    const std::vector<float> bias = random_floats(static_cast<size_t>(rows), 53);
    const std::vector<float> old = random_floats(at(kMost, rows, 0), 54);
    std::vector<float> want(old.size());
    for (int64_t t = 0; t < kMost; ++t) {
      const Int8Row row = int8_row(x.data() + t * cols, cols);
      for (int64_t r = 0; r < rows; ++r) {
        const uint8_t* stored_row = s.rows[static_cast<size_t>(r)];
        float scale = 0.0f;
        std::memcpy(&scale, stored_row, sizeof scale);
        int sum = 0;
        for (int64_t c = 0; c < cols; ++c) {
          sum += row.q[static_cast<size_t>(c)] * static_cast<int8_t>(stored_row[4 + c]);
        }
        const float its = scale * row.scale;
        const float v = static_cast<float>(sum) * its;
        const float more = (v + bias[static_cast<size_t>(r)]) * 0.75f;
        want[at(t, rows, r)] = old[at(t, rows, r)] + more;
      }
    }
    DeviceFloats dx(*gpu, x), db(*gpu, bias);
    for (const int64_t count : {1, 8, 9, 17, 30, 33, 64, 65, 100, 128, 129, 300}) {
      for (const int64_t first : {int64_t{0}, kMost - count}) {
        DeviceFloats out(
            *gpu, std::vector(old.begin() + first * rows, old.begin() + (first + count) * rows));
        const ops::Product p{&*w, out.matrix(count, rows), db.data(), 0.75f, true};
        gpu->matmul(dx.matrix(kMost, cols).slice_rows(first, count), {&p, 1});
        const std::vector<float> got = out.get();
        for (size_t i = 0; i < got.size(); ++i) {
          const float its = want[at(first, rows, 0) + i];
          ASSERT_TRUE(got[i] == its || (std::isnan(got[i]) && std::isnan(its)))
              << rows << "x" << cols << ", " << first << "+" << count << " at " << i << ": "
              << got[i] << " for " << its;
        }
      }
    }
  }
}

// Two blocks of a cluster share the rows of a tile: the last such pair has only half a tile, and
// the last block has 16 tokens. Without a bias all warps write the last tile of a block.
TEST_F(Cuda, Fp8ProductsOfManyTokensHaveTheBitsOfOne) {
  constexpr int64_t kCols = 2176, kMost = 400;
  for (const auto& [rows, biased] :
       {std::pair<int64_t, bool>{4150, true}, {4160, true}, {4160, false}, {8200, false}}) {
    const Stored s = stored(quant::Format::kFP8, rows, kCols, 35);
    const auto w = gpu->pack(quant::Format::kFP8, s.rows, kCols);
    ASSERT_TRUE(w.ok());
    DeviceFloats x(*gpu, random_floats(kMost * kCols, 36)), bias(*gpu, random_floats(rows, 37));
    const std::vector<float> before = random_floats(static_cast<size_t>(kMost * rows), 38);
    const auto run = [&](int64_t first, int64_t count) {
      DeviceFloats out(*gpu,
                       {before.begin() + first * rows, before.begin() + (first + count) * rows});
      const float* added = biased ? bias.matrix(1, rows).data : nullptr;
      const ops::Product p{&*w, out.matrix(count, rows), added, 0.5f, true};
      gpu->matmul(x.matrix(kMost, kCols).slice_rows(first, count), {&p, 1});
      return out.get();
    };
    const std::vector<float> all = run(0, kMost);
    for (const int64_t t : {0, 127, 128, 200, 255, 256, 383, 384, 399}) {
      const std::vector<float> alone = run(t, 1);
      ASSERT_EQ(std::memcmp(all.data() + t * rows, alone.data(), alone.size() * 4), 0)
          << rows << " rows, token " << t;
    }
    for (const int64_t count : {150, 300}) {
      const std::vector<float> some = run(13, count);
      ASSERT_EQ(std::memcmp(all.data() + 13 * rows, some.data(), some.size() * 4), 0)
          << rows << " rows, " << count << " tokens";
    }
  }
}

// Router weights that BF16 represents exactly: as close to the exact sums as F32 summation, in
// every batch.
TEST_F(Cuda, ProductsOfRoutersAreThoseInF32) {
  uint32_t seed = 900;
  for (const auto& [rows, cols] :
       {std::pair<int64_t, int64_t>{40, 200}, {128, 2048}, {300, 2880}}) {
    SCOPED_TRACE(std::to_string(rows) + " by " + std::to_string(cols));
    Stored router = stored(quant::Format::kF32, rows, cols, ++seed);
    to_bf16(router);
    const auto on = gpu->pack(quant::Format::kF32, router.rows, cols);
    ASSERT_TRUE(on.ok());
    constexpr int64_t kTokens = 700;
    const std::vector<float> x = random_floats(static_cast<size_t>(kTokens * (cols + 1)), ++seed);
    DeviceFloats dx(*gpu, x);
    std::vector<float> of_many;
    for (const int64_t tokens : {kTokens, int64_t{512}, int64_t{40}, int64_t{9}, int64_t{1}}) {
      DeviceFloats out(*gpu, static_cast<size_t>(tokens * rows));
      for (const int64_t first : {int64_t{0}, kTokens - tokens}) {
        const ops::Product p{&*on, out.matrix(tokens, rows), nullptr, 1.0f, false};
        gpu->matmul({dx.data() + first * cols, tokens, cols, cols}, {&p, 1});
        const std::vector<float> got = out.get();
        if (of_many.empty()) of_many = got;
        ASSERT_EQ(std::memcmp(got.data(), of_many.data() + first * rows, got.size() * 4), 0)
            << tokens << " tokens from " << first;
      }
    }
    // Rows that do not begin at multiples of 16 bytes.
    DeviceFloats out(*gpu, static_cast<size_t>(3 * rows));
    const ops::Product p{&*on, out.matrix(3, rows), nullptr, 1.0f, false};
    gpu->matmul({dx.data() + 1, 3, cols, cols + 1}, {&p, 1});
    const std::vector<float> shifted = out.get();
    double off = 0.0, all = 0.0;
    const auto compare = [&](float got, const float* token, int64_t row) {
      const auto* w = reinterpret_cast<const float*>(router.rows[static_cast<size_t>(row)]);
      double sum = 0.0;
      for (int64_t c = 0; c < cols; ++c) sum += static_cast<double>(token[c]) * w[c];
      off += (got - sum) * (got - sum);
      all += sum * sum;
    };
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t t = 0; t < kTokens; ++t) {
        compare(of_many[static_cast<size_t>(t * rows + r)], x.data() + t * cols, r);
      }
      for (int64_t t = 0; t < 3; ++t) {
        compare(shifted[static_cast<size_t>(t * rows + r)], x.data() + 1 + t * (cols + 1), r);
      }
    }
    EXPECT_LT(std::sqrt(off / all), 1.4 * 0x1p-23);
  }
}

TEST_F(Cuda, PackingTakesWhatWasSaid) {
  constexpr int64_t kCols = 512;
  for (const quant::Format format : kFormats) {
    for (const int64_t rows : {40, 528}) {
      const Stored s = stored(format, rows, kCols, 8);
      for (const ops::Use use : {ops::Use::kProducts, ops::Use::kExperts, ops::Use::kTable}) {
        const auto w = gpu->pack(format, s.rows, kCols, ops::Ops::kNoLook, use);
        ASSERT_TRUE(w.ok());
        const auto said =
            static_cast<size_t>(gpu->device()->packed_bytes(format, rows, kCols, use));
        // Few rows in F32 may be packed a second time, in BF16, but these numbers are not exact in
        // BF16.
        const bool router = format == quant::Format::kF32 && rows < 256;
        if (router) {
          EXPECT_LT(w->packed.size(), said);
        } else {
          EXPECT_EQ(w->packed.size(), said) << quant::info(format).name;
        }
      }
    }
  }
}

TEST_F(Cuda, EmbeddingsAreTheDecodedRows) {
  for (const quant::Format format : kFormats) {
    const Stored s = stored(format, 150, 512, 9);
    const auto w = gpu->pack(format, s.rows, 512, ops::Ops::kNoLook, ops::Use::kTable);
    ASSERT_TRUE(w.ok());
    const std::vector<int32_t> ids = {0, 15, 16, 47, 3, 133};
    DeviceFloats out(*gpu, ids.size() * 512);
    gpu->embed(out.matrix(6, 512), *w, ids, 1.0f, 2);
    std::vector<float> want(ids.size() * 512);
    for (size_t i = 0; i < ids.size(); ++i) {
      quant::info(format).decode(s.rows[static_cast<size_t>(ids[i] + 2)], want.data() + i * 512,
                                 512);
    }
    expect_near(out.get(), want, 1e-6f, std::string(quant::info(format).name));
  }
}

TEST_F(Cuda, HeadwiseProductsAreNearTheReference) {
  for (const auto& [cols, rows] :
       {std::pair{int64_t{192}, int64_t{576}}, {int64_t{40}, int64_t{24}}}) {
    const int64_t heads = 18, tokens = 5;
    std::vector<ops::Weight> on, host;
    std::vector<Stored> keep;
    for (int64_t h = 0; h < heads; ++h) {
      keep.push_back(stored(quant::Format::kBF16, rows, cols, static_cast<uint32_t>(h) + 1));
      on.push_back(std::move(gpu->pack(quant::Format::kBF16, keep.back().rows, cols)).value());
      host.push_back(std::move(cpu->pack(quant::Format::kBF16, keep.back().rows, cols)).value());
    }
    std::vector<float> x = rounded(random_floats(static_cast<size_t>(tokens * heads * cols), 3));
    std::vector<float> want(static_cast<size_t>(tokens * heads * rows));
    DeviceFloats dx(*gpu, x), out(*gpu, want.size());
    cpu->matmul_heads({x.data(), tokens, heads * cols, heads * cols}, host,
                      {want.data(), tokens, heads * rows, heads * rows});
    gpu->matmul_heads(dx.matrix(tokens, heads * cols), on, out.matrix(tokens, heads * rows));
    expect_near(out.get(), want, 1e-3f, "matmul_heads");
  }
}

TEST_F(Cuda, RefusesWhatItCannotDo) {
  const Status type = gpu->device()->supports({ops::KvType::kF32, 1, 64, 64, false});
  EXPECT_NE(type.message().find("type f32"), std::string::npos) << type.message();
  const Status heads = gpu->device()->supports({ops::KvType::kFP8, 1, 72, 64, false});
  EXPECT_NE(heads.message().find("use --kv-cache-dtype f16"), std::string::npos) << heads.message();
  EXPECT_FALSE(gpu->device()->supports({ops::KvType::kF16, 1, 60, 64, false}).ok());
}

}  // namespace
}  // namespace freshet

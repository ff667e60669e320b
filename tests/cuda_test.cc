// Products and experts of the CUDA backend against the reference ops, on random shapes
// and in guarded memory; and the law of the batch: a row has the same bits alone and in any batch.
// Skipped without a GPU.
#include <bit>
#include <cmath>
#include <cstring>
#include <optional>
#include <tuple>

#include "quant/fp8.h"
#include "tests/cuda_fixture.h"
#include "tests/op_cases.h"

namespace freshet {
namespace {

using test::DeviceFloats;
using test::random_floats;
using test::rounded;

// To E4M3, 128 numbers with one scale.
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

// To whole numbers in [-127, 127], of which each row has the largest, times a power of two: what
// INT8 activations hold exactly.
std::vector<float> rounded_int8(std::vector<float> v, int64_t cols) {
  for (size_t i = 0; i < v.size(); ++i) {
    v[i] = std::clamp(std::nearbyint(v[i] * 32.0f), -127.0f, 127.0f) / 32.0f;
    if (static_cast<int64_t>(i) % cols == cols / 2) v[i] = -127.0f / 32.0f;
  }
  return v;
}

class Cuda : public test::CudaTest {
 protected:
  struct WeightsOfExperts {
    WeightsOfExperts(ops::Ops& gpu, ops::Ops& cpu, int64_t experts, int64_t hidden, int64_t ff,
                     uint32_t seed, quant::Format gate_up = quant::Format::kBF16,
                     quant::Format down = quant::Format::kBF16) {
      const auto put = [&](quant::Format format, int64_t rows, int64_t cols, auto& on, auto& host) {
        const Stored& s = keep.emplace_back(stored(format, rows, cols, ++seed));
        on.push_back(std::move(gpu.pack(format, s.rows, cols)).value());
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

const quant::Format kFormats[] = {
    quant::Format::kBF16,  quant::Format::kF16,  quant::Format::kF32,      quant::Format::kFP8,
    quant::Format::kQ8_0,  quant::Format::kQ4_0, quant::Format::kQ4_1,     quant::Format::kQ5_0,
    quant::Format::kQ5_1,  quant::Format::kQ2_K, quant::Format::kQ3_K,     quant::Format::kQ4_K,
    quant::Format::kQ5_K,  quant::Format::kQ6_K, quant::Format::kIQ4_NL,   quant::Format::kIQ4_XS,
    quant::Format::kMXFP4, quant::Format::kINT8, quant::Format::kInt4G128, quant::Format::kInt4G32};
// Multiplied as BF16, though their values are not.
bool rounds(quant::Format f) {
  return f != quant::Format::kBF16 && f != quant::Format::kF32 && f != quant::Format::kFP8 &&
         f != quant::Format::kMXFP4 && f != quant::Format::kINT8;
}

TEST_F(Cuda, ProductsAreNearTheReference) {
  std::vector<cases::MatmulCase> all = cases::matmul_cases();
  all.push_back({3, 4100, 1024});  // few leaves
  all.push_back({40, 96, 4096});   // many
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
      // Rounding to BF16 takes up to 2^-8 of a number, at random; weights with scales are rounded
      // twice. Tensor cores sum products of E4M3 in less than F32. The others are exact.
      const float typical = std::sqrt(static_cast<float>(c.cols)) * 0.5f * 0.5f;
      const float allowed = rounds(format)                  ? 1.6e-2f * typical + 1e-4f
                            : format == quant::Format::kFP8 ? 2e-3f * typical + 1e-4f
                                                            : 2e-3f;
      expect_near(out.get(), want, allowed, what);
    }
  }
}

// What docs/cuda.md says of them: the scale in BF16, and its product with the number, too.
TEST_F(Cuda, QuantisedProductsHaveTheBitsOfTheirValuesInBf16) {
  constexpr int64_t kRows = 80, kCols = 4096, kTokens = 130;
  for (const quant::Format format : {quant::Format::kQ4_0, quant::Format::kQ8_0,
                                     quant::Format::kInt4G128, quant::Format::kInt4G32}) {
    const quant::FormatInfo& info = quant::info(format);
    const auto scale_of = [&](const uint8_t* block) {
      if (info.block_bytes - 3 == info.block_size / 2) {  // see quant/int4.h
        const auto bits =
            uint32_t{block[1]} << 24 | uint32_t{block[0]} << 16 | (uint32_t{block[2]} & 0xf0) << 8;
        return std::bit_cast<float>(bits);
      }
      uint16_t scale = 0;
      std::memcpy(&scale, block, 2);
      return f16_to_f32(scale);
    };
    const Stored s = stored(format, kRows, kCols, 45);
    Stored values = stored(quant::Format::kBF16, kRows, kCols, 46);
    std::vector<float> row(kCols);
    for (int64_t r = 0; r < kRows; ++r) {
      info.decode(s.rows[r], row.data(), kCols);
      for (int64_t c = 0; c < kCols; ++c) {
        const float d = scale_of(s.rows[r] + c / info.block_size * info.block_bytes);
        const uint16_t v = f32_to_bf16(d == 0.0f ? 0.0f : std::round(row[c] / d) * test::bf16(d));
        std::memcpy(values.bytes.data() + (r * kCols + c) * 2, &v, 2);
      }
    }
    const auto w = gpu->pack(format, s.rows, kCols);
    const auto plain = gpu->pack(quant::Format::kBF16, values.rows, kCols);
    ASSERT_TRUE(w.ok() && plain.ok());
    DeviceFloats x(*gpu, random_floats(static_cast<size_t>(kTokens * kCols), 47));
    for (const int64_t count : {1, 9, 40, 130}) {
      const auto run = [&](const ops::Weight& of) {
        DeviceFloats out(*gpu, static_cast<size_t>(count * kRows));
        ops::Product p{&of, out.matrix(count, kRows), nullptr, 1.0f, false};
        gpu->matmul(x.matrix(kTokens, kCols).slice_rows(0, count), {&p, 1});
        return out.get();
      };
      EXPECT_EQ(run(*w), run(*plain)) << info.name << ", " << count << " tokens";
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
        DeviceFloats out(*gpu, static_cast<size_t>(count * kRows));
        ops::Product p{&*w, out.matrix(count, kRows), nullptr, 1.0f, false};
        gpu->matmul(x.matrix(kMost, cols).slice_rows(first, count), {&p, 1});
        return out.get();
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

// So many rows that blocks walk through the leaves of K rather than share them; how many blocks
// share them depends on the rows, and for 6,160 on the tokens, too.
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
      {quant::Format::kQ8_0, 33860, 320},      {quant::Format::kQ4_K, 33860, 768}};
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

// Scales that rows, or columns, have in common are taken another way.
TEST_F(Cuda, Fp8ScalesOfRowsAndOfBlocks) {
  constexpr int64_t kCols = 2304, kMost = 150;
  constexpr auto kFp8 = quant::Format::kFP8;
  enum { kRow, kBlock, kBoth };
  for (const auto& [kind, rows] : {std::pair{kRow, int64_t{200}},
                                   {kBlock, 200},
                                   {kBoth, 200},
                                   {kRow, 2250},
                                   {kBlock, 2250},
                                   {kBoth, 2250},
                                   {kRow, 4160},
                                   {kBlock, 4160},
                                   {kRow, 6160},
                                   {kBlock, 6160}}) {
    Stored s = stored(kFp8, rows, kCols, 31);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t b = 0; b < kCols / 128; ++b) {
        const bool of_row = kind == kRow || (kind == kBoth && r >= 64);
        const float scale = 1e-3f * static_cast<float>(of_row ? 1 + r % 7 : 2 + b % 3 + r / 64);
        uint8_t* block = s.bytes.data() + (r * (kCols / 128) + b) * 132;
        std::memcpy(block + 128, &scale, sizeof scale);
      }
    }
    const auto w = gpu->pack(kFp8, s.rows, kCols), ref = cpu->pack(kFp8, s.rows, kCols);
    ASSERT_TRUE(w.ok() && ref.ok());
    std::vector<float> x = rounded_e4m3(random_floats(kMost * kCols, 32));
    const std::vector<float> bias = random_floats(rows, 33);
    std::vector<float> want(kMost * rows);
    const ops::Product p{&*ref, {want.data(), kMost, rows, rows}, bias.data(), 0.5f, false};
    cpu->matmul({x.data(), kMost, kCols, kCols}, {&p, 1});
    DeviceFloats dx(*gpu, x), db(*gpu, bias);
    const auto run = [&](int64_t first, int64_t count) {
      DeviceFloats out(*gpu, static_cast<size_t>(count * rows));
      const ops::Product q{&*w, out.matrix(count, rows), db.data(), 0.5f, false};
      gpu->matmul(dx.matrix(kMost, kCols).slice_rows(first, count), {&q, 1});
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

// What a row of INT8 activations is: the largest magnitude becomes 127, and NaN and infinity take
// all of the row with them.
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

// To the bit: whole numbers have exact sums, and F32 begins at their end.
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
    s.bytes[4] = 0x80;  // -128, which our encoder may not write
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

// Tiles that two blocks of a cluster share the rows of: the last of these is half of one, and the
// last block has 16 tokens. Without a bias all warps write a block's last tile.
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

// Routers that BF16 holds: as near to the exact sums as sums in F32, in every batch alike.
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

TEST_F(Cuda, EmbeddingsAreTheDecodedRows) {
  for (const quant::Format format : kFormats) {
    const Stored s = stored(format, 50, 512, 9);
    const auto w = gpu->pack(format, s.rows, 512);
    ASSERT_TRUE(w.ok());
    const std::vector<int32_t> ids = {0, 15, 16, 47, 3, 33};
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

struct ExpertsCase {
  ops::Routing::Score score;
  int64_t hidden, ff, experts = 16;
  bool wide = false;  // many features: fewer tokens
  quant::Format gate_up = quant::Format::kBF16, down = gate_up;
  float limit = 0.0f;
};
class CudaExperts : public Cuda, public testing::WithParamInterface<ExpertsCase> {};
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
    for (const int64_t t : {tokens / 2, tokens - 1}) {  // by themselves
      gpu->moe(one.matrix(1, hidden), dx.matrix(tokens, hidden).slice_rows(t, 1), on_ids + t * 4,
               dw.data() + t * 4, 4, e, false);
      ASSERT_EQ(std::memcmp(one.get().data(), all.data() + t * hidden, size_t(hidden) * 4), 0)
          << "experts of token " << t << " alone, of " << tokens;
    }
  }
}

// The product, the routes and the groups of few tokens are one kernel; of many, several.
class CudaRouters : public Cuda, public testing::WithParamInterface<std::tuple<int64_t, bool>> {};
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
    // As layers do, or with rows that others read, too.
    o.norm(normed, x, {ops::NormKind::kRms, norm, nullptr, 1e-6f}, in_bf16 ? &w : nullptr);
    o.matmul(normed, {&p, 1});
    o.route(logits, r, ids, weights);
    o.moe(out, in_bf16 ? normed : x, ids, weights, kTopK, e, false);
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

// A token alone has one kernel for the norm, the router's product and the routes, which chooses in
// another way: equals, and groups that it does not take, too.
TEST_F(Cuda, ATokenAloneGoesWhereItGoesAmongOthers) {
  constexpr int64_t kTopK = 8, kTokens = 5;
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
      router.rows[i] = router.rows[i / 2];  // equals
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
      gpu->norm(to, x.matrix(kTokens, hidden).slice_rows(first, n),
                {ops::NormKind::kRms, norm.data(), nullptr, 1e-6f}, &*on);
      gpu->matmul(to, {&p, 1});
      gpu->route(logits.matrix(n, experts), r, chosen, weights.data());
      for (const bool add : {false, true}) {
        gpu->moe(out.matrix(n, hidden), to, chosen, weights.data(), kTopK, e, add);
      }
      return Got{ids.get(), weights.get(), logits.get(), normed.get(), out.get()};
    };
    const Got all = run(0, kTokens);
    for (int64_t t = 0; t < kTokens; ++t) {
      SCOPED_TRACE("token " + std::to_string(t));
      const Got one = run(t, 1);
      const auto same = [&](const std::vector<float>& its, const std::vector<float>& of_all) {
        return std::memcmp(its.data(), of_all.data() + static_cast<size_t>(t) * its.size(),
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

TEST_F(Cuda, RefusesWhatItCannotDo) {
  const Status type = gpu->device()->supports({ops::KvType::kF32, 1, 64, 64, false});
  EXPECT_NE(type.message().find("type f32"), std::string::npos) << type.message();
  const Status heads = gpu->device()->supports({ops::KvType::kFP8, 1, 72, 64, false});
  EXPECT_NE(heads.message().find("use --kv-cache-dtype f16"), std::string::npos) << heads.message();
  EXPECT_FALSE(gpu->device()->supports({ops::KvType::kF16, 1, 60, 64, false}).ok());
}

}  // namespace
}  // namespace freshet

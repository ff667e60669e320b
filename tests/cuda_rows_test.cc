// The CUDA backend's ops on rows and heads against the reference ops, and the batch invariance of
// their sums. Skipped without a GPU.
#include <array>
#include <limits>
#include <optional>
#include <tuple>

#include "sampling/sampler.h"
#include "tests/cuda_fixture.h"
#include "tests/op_cases.h"

namespace freshet {
namespace {

using test::DeviceFloats;
using test::random_floats;

class CudaRows : public test::CudaTest {};

TEST_F(CudaRows, RowOpsAreNearTheReference) {
  uint32_t seed = 100;
  for (const int64_t n : cases::row_lengths()) {
    const int64_t rows = 1 + n % 5;
    const auto size = static_cast<size_t>(rows * n);
    const std::vector<float> a = random_floats(size, ++seed, 2.0f), b = random_floats(size, ++seed);
    const std::vector<float> w = random_floats(static_cast<size_t>(n), ++seed);
    DeviceFloats dw(*gpu, w);
    const auto both = [&](const std::string& what, float allowed, auto&& op) {
      std::vector<float> host = a, other = b;
      DeviceFloats on(*gpu, a), with(*gpu, b);
      op(*cpu, Matrix{host.data(), rows, n, n}, Matrix{other.data(), rows, n, n}, w.data());
      op(*gpu, on.matrix(rows, n), with.matrix(rows, n), dw.data());
      expect_near(on.get(), host, allowed, fmt::format("{} n={}", what, n));
    };
    for (const auto kind : {ops::NormKind::kRms, ops::NormKind::kLayer}) {
      both("norm", 1e-4f, [&](ops::Ops& o, Matrix x, Matrix, const float* weight) {
        o.norm(x, x, {kind, weight, weight, 1e-5f});
      });
    }
    for (int k = 0; k <= 6; ++k) {
      both("activation", 1e-4f, [&](ops::Ops& o, Matrix x, Matrix, const float*) {
        o.activation(x, static_cast<ops::Activation>(k));
      });
      both("glu", 1e-4f, [&](ops::Ops& o, Matrix x, Matrix y, const float*) {
        o.glu(x, x, y, {static_cast<ops::Activation>(k), 0.0f, 0.0f});
      });
    }
    both("glu limit", 1e-4f, [&](ops::Ops& o, Matrix x, Matrix y, const float*) {
      o.glu(x, x, y, {ops::Activation::kSilu, 1.5f, 1.7f});
    });
    both("add", 1e-5f, [&](ops::Ops& o, Matrix x, Matrix y, const float*) { o.add(x, y, 0.3f); });
    both("scale", 1e-5f, [&](ops::Ops& o, Matrix x, Matrix, const float*) { o.scale(x, 3.0f); });
    both("softcap", 1e-4f,
         [&](ops::Ops& o, Matrix x, Matrix, const float*) { o.softcap(x, 1.5f); });
    both("sigmoid_gate", 1e-4f,
         [&](ops::Ops& o, Matrix x, Matrix y, const float*) { o.sigmoid_gate(x, y); });
    both("gather", 0.0f, [&](ops::Ops& o, Matrix x, Matrix y, const float*) {
      std::vector<int32_t> from(static_cast<size_t>(rows), 0);
      from.back() = static_cast<int32_t>(rows - 1);
      o.gather_rows(x, y, from);
    });
  }
}

// A GEMM may prefetch the next weights.
TEST_F(CudaRows, PrefetchOfWhatComesNextChangesNoBit) {
  constexpr int64_t kMost = 8;
  using quant::Format;
  const std::tuple<Format, int64_t, int64_t> cases[] = {
      {Format::kQ4_0, 4096, 4608},      {Format::kQ4_0, 3584, 4672}, {Format::kQ4_0, 2560, 4608},
      {Format::kInt4G128, 4096, 14336}, {Format::kQ8_0, 4096, 4240}, {Format::kQ4_K, 4096, 4608},
      {Format::kQ4_K, 3584, 4608},      {Format::kQ6_K, 4096, 4608}};
  for (const auto& [format, columns, rows] : cases) {
    SCOPED_TRACE(quant::info(format).name);
    const int64_t cols = columns;
    const auto weight = [&, f = format](int64_t n, uint32_t seed) {
      return std::move(gpu->pack(f, stored(f, n, cols, seed).rows, cols)).value();
    };
    const ops::Weight o = weight(cols, 2);
    const ops::Weight gate = weight(rows, 3), up = weight(rows, 4);
    DeviceFloats x(*gpu, random_floats(static_cast<size_t>(kMost * cols), 1)),
        out(*gpu, static_cast<size_t>(kMost * cols));
    DeviceFloats gates(*gpu, static_cast<size_t>(kMost * rows)),
        ups(*gpu, static_cast<size_t>(kMost * rows));
    const auto run = [&](int64_t tokens, const ops::PrefetchNext& next) {
      const ops::Product p{&o, out.matrix(tokens, cols), nullptr, 1.0f, false, next};
      gpu->matmul(x.matrix(tokens, cols), {&p, 1});
    };
    for (const int64_t tokens : {int64_t{1}, kMost}) {
      run(tokens, {});
      const std::vector<float> want = out.get();
      for (int turn = 0; turn < 3; ++turn) {
        const ops::Product both[] = {{&gate, gates.matrix(tokens, rows)},
                                     {&up, ups.matrix(tokens, rows)}};
        gpu->matmul(x.matrix(tokens, cols), both);
        run(tokens, {&gate, &up});
        const std::vector<float> got = out.get();
        ASSERT_EQ(std::memcmp(got.data(), want.data(), got.size() * sizeof(float)), 0)
            << tokens << " tokens, turn " << turn;
      }
    }
  }
}

// In prompts one warp processes all heads of a token.
TEST_F(CudaRows, HeadsOfPromptsAreThoseOfTokensAlone) {
  constexpr int kHeads = 5, kDim = 128;
  constexpr int64_t kTokens = 1100, kCols = kHeads * kDim;
  const std::vector<float> x = random_floats(kTokens * kCols, 290), w = random_floats(kDim, 291);
  const std::vector<float> table = random_floats(kTokens * kDim, 292);
  DeviceFloats all(*gpu, x), some(*gpu, x), dw(*gpu, w), dt(*gpu, table);
  const auto run = [&](const Matrix& m, int64_t first) {
    gpu->norm_heads(m, kHeads, kDim, {ops::NormKind::kRms, dw.data(), nullptr, 1e-6f}, false);
    gpu->rope(m, kHeads, kDim, 0, kDim, false, dt.data() + first * kDim);
  };
  run(all.matrix(kTokens, kCols), 0);
  std::vector<float> want = x;
  const Matrix host{want.data(), kTokens, kCols, kCols};
  cpu->norm_heads(host, kHeads, kDim, {ops::NormKind::kRms, w.data(), nullptr, 1e-6f}, false);
  cpu->rope(host, kHeads, kDim, 0, kDim, false, table.data());
  const std::vector<float> got = all.get();
  expect_near(got, want, 1e-4f, "heads of a prompt");
  constexpr int64_t kFirst = 1093, kSome = 3;
  run(some.matrix(kTokens, kCols).slice_rows(kFirst, kSome), kFirst);
  EXPECT_EQ(std::memcmp(some.get().data() + kFirst * kCols, got.data() + kFirst * kCols,
                        kSome * kCols * 4),
            0);
}

TEST_F(CudaRows, HeadsRotateAndAreNormalised) {
  uint32_t seed = 300;
  for (const int head_dim : {8, 64, 96, 128}) {
    for (const bool interleaved : {false, true}) {
      const int heads = 3, rotary = head_dim / 2, offset = head_dim / 4;
      const std::vector<int32_t> positions = {0, 1, 77, 5000, 131071};
      const auto tokens = static_cast<int64_t>(positions.size());
      const int64_t cols = int64_t{heads} * head_dim;
      std::vector<float> x = random_floats(static_cast<size_t>(tokens * cols), ++seed);
      const std::vector<float> w = random_floats(static_cast<size_t>(cols), ++seed);
      std::vector<float> freq;
      for (int i = 0; i < rotary / 2; ++i) {
        freq.push_back(
            std::pow(10000.0f, -2.0f * static_cast<float>(i) / static_cast<float>(rotary)));
      }
      std::vector<float> table(static_cast<size_t>(tokens * rotary));
      DeviceFloats dx(*gpu, x), dw(*gpu, w), df(*gpu, freq), dt(*gpu, table.size());
      cpu->rope_table(table.data(), positions, freq, 1.1f);
      gpu->rope_table(dt.data(), positions, {df.data(), freq.size()}, 1.1f);
      expect_near(dt.get(), table, 1e-6f, "rope_table");
      const Matrix host{x.data(), tokens, cols, cols}, on = dx.matrix(tokens, cols);
      for (const bool distinct : {false, true}) {
        cpu->norm_heads(host, heads, head_dim, {ops::NormKind::kRms, w.data(), nullptr, 1e-6f},
                        distinct);
        gpu->norm_heads(on, heads, head_dim, {ops::NormKind::kRms, dw.data(), nullptr, 1e-6f},
                        distinct);
        cpu->rope(host, heads, head_dim, offset, rotary, interleaved, table.data());
        gpu->rope(on, heads, head_dim, offset, rotary, interleaved, dt.data());
      }
      expect_near(dx.get(), x, 1e-3f, fmt::format("rope head_dim={}", head_dim));
    }
  }
}

// Few rows and many rows use different kernels.
TEST_F(CudaRows, ARowsNormHasTheSameBitsInEveryBatch) {
  constexpr int64_t kRows = 300;
  for (const int64_t n : {37, 512, 2048, 2056, 4096, 4104, 9000}) {
    const std::vector<float> values = random_floats(static_cast<size_t>(kRows * n), 7, 3.0f);
    const std::vector<float> w = random_floats(static_cast<size_t>(n), 8);
    DeviceFloats x(*gpu, values), weight(*gpu, w);
    using Kind = ops::NormKind;
    for (const auto& [kind, usual] :
         {std::pair{Kind::kRms, false}, {Kind::kLayer, false}, {Kind::kRms, true}}) {
      const auto norm = [usual = usual, kind = kind](const float* its) {
        return ops::Norm{kind, its, usual ? nullptr : its, 1e-5f};
      };
      const auto run = [&](int64_t first, int64_t count) {
        DeviceFloats out(*gpu, static_cast<size_t>(count * n));
        gpu->norm(out.matrix(count, n), x.matrix(kRows, n).slice_rows(first, count),
                  norm(weight.data()));
        return out.get();
      };
      const std::vector<float> all = run(0, kRows);
      std::vector<float> want(values.size());
      cpu->norm({want.data(), kRows, n, n}, {const_cast<float*>(values.data()), kRows, n, n},
                norm(w.data()));
      expect_near(all, want, 1e-4f, fmt::format("norm n={}", n));
      for (const auto& [first, count] : {std::pair{0, 1}, {150, 1}, {299, 1}, {20, 32}}) {
        const std::vector<float> some = run(first, count);
        ASSERT_EQ(std::memcmp(some.data(), all.data() + first * n, some.size() * 4), 0)
            << "rows " << first << "+" << count << " of " << n;
      }
    }
  }
}

// The operations between a layer's QKV GEMM and its attention run as one kernel.
TEST_F(CudaRows, HeadsAreNormalisedRotatedAndStoredTogether) {
  constexpr int kQueryHeads = 6, kKeyHeads = 2, kBlocks = 9;
  const std::vector<int32_t> starts = {0, 3, 4, 21}, contexts = {20, 1, 33};
  const std::vector<int32_t> tables = {4, 0, -1, 7, -1, -1, 8, 2, 5};
  const int64_t tokens = starts.back();
  uint32_t seed = 700;
  for (const auto& [dim, value_dim, rotary] :
       {std::tuple{128, 128, 128}, {64, 64, 64}, {96, 64, 32}, {256, 128, 64}}) {
    for (const auto& [interleaved, normed] :
         {std::pair{false, true}, {true, true}, {false, false}}) {
      const ops::KvShape shape{ops::KvType::kF16, kKeyHeads, dim, value_dim, false};
      const ops::AttentionBatch batch{starts, contexts, tables.data(), 3};
      const std::vector<float> w = random_floats(static_cast<size_t>(dim), ++seed);
      const std::vector<float> table = random_floats(static_cast<size_t>(tokens * rotary), ++seed);
      const std::vector<float> values[] = {
          random_floats(static_cast<size_t>(tokens * kQueryHeads * dim), ++seed),
          random_floats(static_cast<size_t>(tokens * kKeyHeads * dim), ++seed),
          random_floats(static_cast<size_t>(tokens * kKeyHeads * value_dim), ++seed)};
      // Queries, keys, and the cache.
      struct Got {
        std::vector<float> q, k;
        std::vector<uint16_t> cache;
      };
      const size_t bytes = shape.block_bytes() * kBlocks;
      const auto cache_of = [&](ops::Ops& o, const Buffer& cache) {
        std::vector<uint16_t> got(bytes / 2);
        o.fetch(got.data(), cache.data(), bytes);
        o.wait();
        return got;
      };
      const auto store = [&](ops::Ops& o, DeviceFloats& k, DeviceFloats& v) {
        const Buffer cache = std::move(Buffer::allocate(bytes, o.memory())).value();
        o.store_kv({shape, const_cast<uint8_t*>(cache.data()), kBlocks},
                   k.matrix(tokens, kKeyHeads * dim), v.matrix(tokens, kKeyHeads * value_dim),
                   batch);
        return cache_of(o, cache);
      };
      const auto run = [&](ops::Ops& o, bool apart) {
        DeviceFloats dw(o, w), dt(o, table), q(o, values[0]), k(o, values[1]), v(o, values[2]);
        const Matrix qs = q.matrix(tokens, kQueryHeads * dim),
                     ks = k.matrix(tokens, kKeyHeads * dim);
        const ops::Norm norm{ops::NormKind::kRms, dw.data(), nullptr, 1e-6f};
        Got got;
        if (apart) {
          if (normed) {
            o.norm_heads(qs, kQueryHeads, dim, norm, false);
            o.norm_heads(ks, kKeyHeads, dim, norm, false);
          }
          o.rope(qs, kQueryHeads, dim, dim - rotary, rotary, interleaved, dt.data());
          o.rope(ks, kKeyHeads, dim, dim - rotary, rotary, interleaved, dt.data());
          got.cache = store(o, k, v);
        } else {
          const Buffer cache = std::move(Buffer::allocate(bytes, o.memory())).value();
          ops::Heads all;
          all.q = {qs,           kQueryHeads, dim,        normed ? &norm : nullptr, false, false,
                   dim - rotary, rotary,      interleaved};
          all.k = all.q;
          all.k.x = ks;
          all.k.heads = kKeyHeads;
          all.v = v.matrix(tokens, kKeyHeads * value_dim);
          all.cos_sin = dt.data();
          all.cache = {shape, const_cast<uint8_t*>(cache.data()), kBlocks};
          all.batch = batch;
          o.heads(all);
          got.cache = cache_of(o, cache);
        }
        got.q = q.get();
        got.k = k.get();
        return got;
      };
      const Got got = run(*gpu, false), apart = run(*gpu, true), want = run(*cpu, false);
      const std::string what = fmt::format("heads of {} rotated by {}", dim, rotary);
      EXPECT_EQ(std::memcmp(got.q.data(), apart.q.data(), got.q.size() * 4), 0) << what;
      EXPECT_EQ(std::memcmp(got.k.data(), apart.k.data(), got.k.size() * 4), 0) << what;
      EXPECT_EQ(got.cache, apart.cache) << what;
      expect_near(got.q, want.q, 1e-5f, what);
      expect_near(got.k, want.k, 1e-5f, what);
      // The cache layout is specific to the device: compare with keys from the reference, stored on
      // the device.
      DeviceFloats k(*gpu, want.k), v(*gpu, values[2]);
      const std::vector<uint16_t> alone = store(*gpu, k, v);
      for (size_t i = 0; i < got.cache.size(); ++i) {
        ASSERT_NEAR(f16_to_f32(got.cache[i]), f16_to_f32(alone[i]), 8e-3f) << what << " at " << i;
      }
    }
  }
}

// A norm whose output is read only by GEMMs writes it in their input form: the bits are the same as
// for separate operations.
TEST_F(CudaRows, FusedInputsHaveTheBitsOfSingleOperations) {
  constexpr int64_t kCols = 768, kOut = 48;
  for (const quant::Format format :
       {quant::Format::kBF16, quant::Format::kF32, quant::Format::kFP8, quant::Format::kQ8_0,
        quant::Format::kQ4_K, quant::Format::kINT8}) {
    const Stored s = stored(format, kOut, kCols, 3);
    const auto w = gpu->pack(format, s.rows, kCols);
    ASSERT_TRUE(w.ok());
    for (const int64_t rows : {1, 20, 50, 300}) {
      const auto size = static_cast<size_t>(rows * kCols);
      DeviceFloats x(*gpu, random_floats(size, 1));
      const ops::Norm norm{ops::NormKind::kRms, nullptr, nullptr, 1e-5f};
      const auto run = [&](bool fused) {
        DeviceFloats between(*gpu, size), out(*gpu, static_cast<size_t>(rows * kOut));
        const Matrix in = x.matrix(rows, kCols), to = between.matrix(rows, kCols);
        const ops::Product p{&*w, out.matrix(rows, kOut), nullptr, 1.0f, false};
        if (fused) {
          gpu->project({in, &norm, to}, {&p, 1});
        } else {
          gpu->norm(to, in, norm);
          gpu->matmul(to, {&p, 1});
        }
        return out.get();
      };
      const std::string what = fmt::format("{} of {} rows", quant::info(format).name, rows);
      EXPECT_EQ(run(true), run(false)) << what;
      // Once more with norms that have other readers too.
      ops::EncodedForms forms;
      DeviceFloats shared(*gpu, size), first(*gpu, static_cast<size_t>(rows * kOut));
      DeviceFloats second(*gpu, static_cast<size_t>(rows * kOut));
      const ops::Product p{&*w, first.matrix(rows, kOut)}, q{&*w, second.matrix(rows, kOut)};
      gpu->project({x.matrix(rows, kCols), &norm, shared.matrix(rows, kCols), &forms}, {&p, 1});
      gpu->project({shared.matrix(rows, kCols), nullptr, {}, &forms}, {&q, 1});
      EXPECT_EQ(first.get(), run(false)) << what;
      EXPECT_EQ(second.get(), run(false)) << what;
    }
  }
}

// GEMMs in two formats with the same input form share it; GEMMs with another form get the plain
// numbers, too.
TEST_F(CudaRows, GroupsOfTwoFormatsHaveTheBitsOfSingleOperations) {
  using quant::Format;
  constexpr int64_t kCols = 768, kOut = 48;
  const Stored four = stored(Format::kQ4_K, kOut, kCols, 3),
               six = stored(Format::kQ6_K, kOut, kCols, 4);
  const auto a = gpu->pack(Format::kQ4_K, four.rows, kCols);
  const auto b = gpu->pack(Format::kQ6_K, six.rows, kCols);
  const Stored whole = stored(Format::kF32, kOut, kCols, 5),
               eight = stored(Format::kFP8, kOut, kCols, 6);
  const auto c = gpu->pack(Format::kF32, whole.rows, kCols);
  const auto d = gpu->pack(Format::kFP8, eight.rows, kCols);
  ASSERT_TRUE(a.ok() && b.ok() && c.ok() && d.ok());
  DeviceFloats weight(*gpu, random_floats(kCols, 2));
  for (const int64_t rows : {1, 8, 12, 20, 50, 300}) {
    DeviceFloats x(*gpu, random_floats(static_cast<size_t>(rows * kCols), 1));
    const auto run = [&](bool fused, const ops::Weight& with) {
      const auto size = static_cast<size_t>(rows * kOut);
      DeviceFloats between(*gpu, static_cast<size_t>(rows * kCols));
      DeviceFloats one(*gpu, size), other(*gpu, size);
      const Matrix to = between.matrix(rows, kCols);
      const ops::Norm norm{ops::NormKind::kRms, weight.data(), nullptr, 1e-5f};
      const ops::Product list[] = {{&*a, one.matrix(rows, kOut), nullptr, 1.0f, false},
                                   {&with, other.matrix(rows, kOut), nullptr, 1.0f, false}};
      if (fused) {
        gpu->project({x.matrix(rows, kCols), &norm, to}, list);
      } else {
        gpu->norm(to, x.matrix(rows, kCols), norm);
        gpu->matmul(to, list);
      }
      return std::pair(one.get(), other.get());
    };
    for (const ops::Weight* with : {&*b, &*c, &*d}) {
      EXPECT_EQ(run(true, *with), run(false, *with))
          << rows << " rows with " << quant::info(with->format).name;
    }
  }
}

// The same for some dozens of rows and for many rows of a layer's usual norm, with one and with two
// passes over the columns.
TEST_F(CudaRows, FusedNormsOfManyRowsHaveTheBitsOfSingleOperations) {
  constexpr int64_t kOut = 48, kMost = 300;
  for (const quant::Format format :
       {quant::Format::kBF16, quant::Format::kFP8, quant::Format::kQ4_0}) {
    for (const int64_t cols : {int64_t{768}, int64_t{4352}}) {
      const Stored s = stored(format, kOut, cols, 3);
      const auto w = gpu->pack(format, s.rows, cols);
      ASSERT_TRUE(w.ok());
      DeviceFloats x(*gpu, random_floats(static_cast<size_t>(kMost * cols), 1));
      DeviceFloats weight(*gpu, random_floats(static_cast<size_t>(cols), 2));
      const auto run = [&, cols = cols](int64_t rows, bool fused) {
        DeviceFloats between(*gpu, static_cast<size_t>(rows * cols));
        DeviceFloats out(*gpu, static_cast<size_t>(rows * kOut));
        const Matrix to = between.matrix(rows, cols);
        const ops::Norm norm{ops::NormKind::kRms, weight.data(), nullptr, 1e-5f};
        const ops::Product p{&*w, out.matrix(rows, kOut), nullptr, 1.0f, false};
        if (fused) {
          gpu->project({x.matrix(rows, cols), &norm, to}, {&p, 1});
        } else {
          gpu->norm(to, x.matrix(rows, cols), norm);
          gpu->matmul(to, {&p, 1});
        }
        return out.get();
      };
      for (const int64_t rows : {int64_t{20}, int64_t{40}, int64_t{125}, kMost}) {
        EXPECT_EQ(run(rows, true), run(rows, false))
            << quant::info(format).name << " of " << rows << " x " << cols;
      }
    }
  }
}

// Scales shared by all columns of a row (if of_rows(row)) or by all rows of a block of 128.
template <class OfRows>
void share_scales(std::vector<uint8_t>& bytes, int64_t rows, int64_t cols, const OfRows& of_rows) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t b = 0; b < cols / 128; ++b) {
      const float scale =
          1e-3f * static_cast<float>(of_rows(r) ? 1 + r % 7 : 2 + b % 3 + r / 128 % 5);
      std::memcpy(bytes.data() + (r * (cols / 128) + b) * 132 + 128, &scale, sizeof scale);
    }
  }
}

// Gate and up may have a SwiGLU epilogue. A row has the same bits in any batch, and equals the
// reference activation of the GPU's separate GEMMs.
TEST_F(CudaRows, GatedProductsKeepTheirBits) {
  constexpr int64_t kOut = 48, kMost = 450;
  const std::tuple<quant::Format, int64_t, int64_t> shapes[] = {
      {quant::Format::kINT8, 576, 1808},      {quant::Format::kINT8, 136, 17000},
      {quant::Format::kInt4G128, 2176, 8704}, {quant::Format::kInt4G32, 2176, 4608},
      {quant::Format::kBF16, 576, 208},       {quant::Format::kBF16, 2112, 208},
      {quant::Format::kBF16, 2112, 14320},    {quant::Format::kBF16, 576, 28000},
      {quant::Format::kFP8, 640, 12800},      {quant::Format::kFP8, 1152, 12800},
      {quant::Format::kFP8, 1280, 12800},     {quant::Format::kFP8, 2176, 12800},
      {quant::Format::kFP8, 1024, 25600},     {quant::Format::kQ4_0, 2176, 8768},
      {quant::Format::kQ4_0, 2112, 8256},     {quant::Format::kQ8_0, 2112, 8704},
      {quant::Format::kMXFP4, 2176, 8704},    {quant::Format::kQ4_K, 2304, 8704},
      {quant::Format::kQ6_K, 2304, 8704},     {quant::Format::kQ5_K, 2304, 8704},
      {quant::Format::kQ3_K, 2304, 8704},     {quant::Format::kQ5_1, 2112, 8256}};
  for (const auto& [format, cols, ff] : shapes) {
    Stored stored_gate = stored(format, ff, cols, 3), stored_up = stored(format, ff, cols, 4);
    if (format == quant::Format::kFP8 && cols != 2176) {
      const bool mixed = cols == 1024;
      share_scales(stored_gate.bytes, ff, cols,
                   [&](int64_t r) { return mixed ? r / 64 % 3 != 0 : cols != 1280; });
      share_scales(stored_up.bytes, ff, cols,
                   [&](int64_t r) { return mixed ? r / 128 % 2 == 0 : cols == 640; });
    }
    const Stored stored_down = stored(format, kOut, ff, 5);
    const auto gate = gpu->pack(format, stored_gate.rows, cols);
    const auto up = gpu->pack(format, stored_up.rows, cols);
    const auto down = gpu->pack(format, stored_down.rows, ff);
    ASSERT_TRUE(gate.ok() && up.ok() && down.ok());
    DeviceFloats x(*gpu, random_floats(static_cast<size_t>(kMost * cols), 1));
    DeviceFloats bias(*gpu, random_floats(static_cast<size_t>(ff), 2));
    const auto run = [&](int64_t first, int64_t rows, bool fused) {
      const auto size = static_cast<size_t>(rows * ff);
      DeviceFloats a(*gpu, size), b(*gpu, size), out(*gpu, static_cast<size_t>(rows * kOut));
      const Matrix g = a.matrix(rows, ff), u = b.matrix(rows, ff);
      const ops::Product both[] = {{&*gate, g, bias.matrix(1, ff).data, 1.0f, false},
                                   {&*up, u, nullptr, 0.5f, false}};
      const Matrix in = x.matrix(kMost, cols).slice_rows(first, rows);
      const ops::Product last{&*down, out.matrix(rows, kOut), nullptr, 1.0f, false};
      if (fused) {
        gpu->gated({{in}, both[0], both[1], {ops::Activation::kSilu, 0.0f, 0.0f}, last});
      } else {
        gpu->matmul(in, both);
        gpu->glu(u, g, u, {ops::Activation::kSilu, 0.0f, 0.0f});
        gpu->matmul(u, {&last, 1});
      }
      return out.get();
    };
    const std::vector<float> all = run(0, kMost, false);
    for (const int64_t rows : {int64_t{1}, int64_t{5}, int64_t{9}, int64_t{16}, int64_t{19},
                               int64_t{32}, int64_t{40}, int64_t{64}, int64_t{65}, int64_t{100},
                               int64_t{128}, int64_t{129}, int64_t{200}, int64_t{385}, kMost}) {
      for (const int64_t first : {int64_t{0}, kMost - rows}) {
        const std::vector<float> got = run(first, rows, true);
        ASSERT_EQ(std::memcmp(got.data(), all.data() + first * kOut, got.size() * 4), 0)
            << quant::info(format).name << " of " << cols << " columns, rows " << first << "+"
            << rows;
      }
    }
  }
}

// Few rows, in one GEMM or several: the split over blocks depends on the number of rows and of
// tokens.
TEST_F(CudaRows, ProductsOfFewRowsHaveTheBitsOfOneToken) {
  constexpr int64_t kMost = 128;
  using quant::Format;
  const std::tuple<Format, int64_t, std::vector<int64_t>> lists[] = {
      {Format::kBF16, 2368, {640}},
      {Format::kBF16, 2368, {1601, 399}},
      {Format::kBF16, 2368, {3990}},
      {Format::kBF16, 2368, {4112}},
      {Format::kBF16, 2368, {4104, 1000, 1000}},
      {Format::kBF16, 2368, {4096, 2050}},
      {Format::kQ4_0, 4096, {4112}},
      {Format::kQ4_0, 4096, {4096, 1024, 1024}},
      {Format::kQ4_0, 4096, {4096, 1030}},
      {Format::kQ4_0, 4096, {18976}},
      {Format::kMXFP4, 4096, {8480}},
      {Format::kQ4_K, 4096, {8480}},
      {Format::kInt4G128, 4096, {8480}},
      {Format::kQ4_K, 4096, {4096, 1024, 1024}},
      {Format::kInt4G128, 4096, {4096, 1024, 1024}},
      {Format::kQ8_0, 4096, {4096}},
      {Format::kMXFP4, 4096, {4096, 1024, 1024}},
      {Format::kInt4G32, 4096, {4096, 1024, 1024}},
      {Format::kQ6_K, 4096, {4096}},
      {Format::kQ5_K, 4096, {4096, 1024, 1024}},
      {Format::kIQ4_XS, 4096, {4096, 1024, 1024}},
      {Format::kQ3_K, 4096, {4096}},
      {Format::kQ5_1, 4096, {4096}},
      {Format::kQ2_K, 4096, {4096}},
      {Format::kQ5_K, 4096, {8480}},
      {Format::kQ3_K, 4096, {8480}},
      {Format::kIQ4_XS, 14336, {64}},
      {Format::kQ3_K, 8192, {64}},
      {Format::kQ5_K, 8192, {64}},
      {Format::kQ2_K, 8192, {64}},
      {Format::kQ5_0, 6144, {64}},
      {Format::kQ5_1, 6144, {64}},
      {Format::kQ8_0, 6144, {64}},
      {Format::kQ4_0, 14336, {2112}},
      {Format::kQ4_K, 14336, {64}},
      {Format::kQ6_K, 8192, {64}},
      {Format::kMXFP4, 8192, {64}},
      {Format::kInt4G128, 14336, {64}},
      {Format::kInt4G32, 10240, {64}},
      // Columns of other models: leaves of one size that is no multiple of a stage, or of two
      // sizes.
      {Format::kQ4_0, 2048, {2048, 512, 512}},
      {Format::kQ4_0, 2560, {4096, 1024, 1024}},
      {Format::kQ4_0, 3072, {3072, 1024, 1024}},
      {Format::kQ4_0, 3584, {3584, 512, 512}},
      {Format::kQ4_0, 5120, {4352, 512, 512}},
      {Format::kQ4_0, 6144, {4096}},
      {Format::kQ4_K, 2560, {4096, 1024, 1024}},
      {Format::kQ4_K, 3584, {3584, 512, 512}},
      {Format::kQ4_K, 5120, {4352, 512, 512}},
      {Format::kQ4_K, 7168, {2048}},
      {Format::kQ4_K, 2048, {9216}},
      {Format::kInt4G128, 2560, {2560}},
      {Format::kInt4G128, 3584, {3584, 512, 512}},
      {Format::kMXFP4, 2880, {4096, 512, 512}},
      {Format::kQ8_0, 3584, {3584}},
      {Format::kQ6_K, 3584, {512}},
      {Format::kQ5_K, 5120, {1024}},
      {Format::kQ3_K, 2560, {1024}},
      {Format::kQ2_K, 3584, {1024}},
      {Format::kIQ4_XS, 5120, {1024}},
      {Format::kQ5_0, 2560, {1024}},
      {Format::kQ4_1, 3072, {1024}},
      {Format::kQ4_0, 3584, {8480}},
      {Format::kQ4_K, 2560, {8480}},
      {Format::kInt4G128, 2560, {8480}},
      {Format::kQ4_0, 9728, {512}},
      {Format::kQ4_0, 18944, {512}},
      {Format::kQ4_K, 17920, {512}},
      {Format::kQ4_K, 18944, {512}},
      {Format::kQ6_K, 9728, {512}},
      {Format::kQ6_K, 17408, {512}},
      {Format::kInt4G128, 9728, {512}},
      {Format::kMXFP4, 17920, {512}},
      {Format::kQ8_0, 18944, {512}}};
  for (const auto& [format, cols, rows] : lists) {
    SCOPED_TRACE(quant::info(format).name);
    DeviceFloats x(*gpu, random_floats(static_cast<size_t>(kMost * cols), 1));
    std::vector<ops::Weight> weights;
    std::vector<std::unique_ptr<DeviceFloats>> biases;
    for (const int64_t n : rows) {
      const Stored s = stored(format, n, cols, static_cast<uint32_t>(n));
      auto packed = gpu->pack(format, s.rows, cols);
      ASSERT_TRUE(packed.ok());
      weights.push_back(std::move(*packed));
      biases.push_back(std::make_unique<DeviceFloats>(*gpu, random_floats(n, 2)));
    }
    const auto run = [&](int64_t first, int64_t tokens) {
      std::vector<ops::Product> list;
      std::vector<std::unique_ptr<DeviceFloats>> out;
      for (size_t i = 0; i < rows.size(); ++i) {
        out.push_back(std::make_unique<DeviceFloats>(
            *gpu, std::vector<float>(static_cast<size_t>(tokens * rows[i]), 0.25f)));
        list.push_back({&weights[i], out.back()->matrix(tokens, rows[i]),
                        i == 0 ? nullptr : biases[i]->matrix(1, rows[i]).data, 0.5f, i == 0});
      }
      gpu->matmul(x.matrix(kMost, cols).slice_rows(first, tokens), list);
      std::vector<std::vector<float>> got;
      for (const auto& each : out) got.push_back(each->get());
      return got;
    };
    for (const int64_t tokens : {int64_t{3}, int64_t{8}, int64_t{12}, int64_t{25}, int64_t{33},
                                 int64_t{40}, int64_t{64}, int64_t{65}, kMost}) {
      const auto all = run(kMost - tokens, tokens);
      for (const int64_t t : {int64_t{0}, int64_t{9}, int64_t{31}, tokens - 1}) {
        if (t >= tokens) continue;
        const auto alone = run(kMost - tokens + t, 1);
        for (size_t i = 0; i < rows.size(); ++i) {
          ASSERT_EQ(std::memcmp(all[i].data() + t * rows[i], alone[i].data(), alone[i].size() * 4),
                    0)
              << "product " << i << " of " << rows[i] << " rows, token " << t << " of " << tokens;
        }
      }
    }
  }
}

// The GEMMs of a list share a launch.
TEST_F(CudaRows, ProductsOfAListHaveTheBitsOfEachAlone) {
  using quant::Format;
  constexpr int64_t kMost = 128;
  struct Case {
    Format format, last;  // output of the last GEMM
    int64_t cols;
    std::array<int64_t, 3> rows;
  };
  for (const auto& [format, last, cols, all_rows] :
       {Case{Format::kQ4_0, Format::kQ4_0, 2304, {1000, 48, 250}},
        Case{Format::kQ6_K, Format::kQ6_K, 2304, {1000, 48, 250}},
        Case{Format::kQ5_K, Format::kQ5_K, 4096, {4096, 192, 208}},
        Case{Format::kQ5_K, Format::kQ6_K, 4096, {4096, 192, 208}},
        Case{Format::kQ4_K, Format::kQ6_K, 4096, {1000, 48, 250}},
        Case{Format::kQ4_K, Format::kQ6_K, 4096, {4096, 192, 208}},
        Case{Format::kQ4_K, Format::kQ6_K, 2560, {4096, 1024, 1040}},
        Case{Format::kQ4_K, Format::kQ6_K, 3584, {3584, 512, 528}},
        Case{Format::kQ4_K, Format::kQ6_K, 3584, {4096, 2048, 2064}},
        Case{Format::kQ4_K, Format::kQ6_K, 5120, {4352, 512, 528}},
        Case{Format::kQ5_K, Format::kQ6_K, 3072, {3072, 1024, 1040}}}) {
    std::vector<ops::Weight> weights;
    std::vector<std::unique_ptr<DeviceFloats>> alone, together;
    DeviceFloats x(*gpu, random_floats(static_cast<size_t>(kMost * cols), 1));
    for (const int64_t rows : all_rows) {
      const Format its = rows == all_rows.back() ? last : format;
      const Stored s = stored(its, rows, cols, static_cast<uint32_t>(rows));
      auto packed = gpu->pack(its, s.rows, cols);
      ASSERT_TRUE(packed.ok());
      weights.push_back(std::move(*packed));
    }
    for (const int64_t tokens : {int64_t{1}, int64_t{8}, int64_t{9}, int64_t{17}, int64_t{32},
                                 int64_t{61}, int64_t{65}, kMost}) {
      std::vector<ops::Product> list;
      for (size_t i = 0; i < weights.size(); ++i) {
        const auto size = static_cast<size_t>(tokens * all_rows[i]);
        alone.push_back(std::make_unique<DeviceFloats>(*gpu, size));
        together.push_back(std::make_unique<DeviceFloats>(*gpu, size));
        list.push_back(
            {&weights[i], together.back()->matrix(tokens, all_rows[i]), nullptr, 1.0f, false});
        const ops::Product one{&weights[i], alone.back()->matrix(tokens, all_rows[i]), nullptr,
                               1.0f, false};
        gpu->matmul(x.matrix(kMost, cols).slice_rows(0, tokens), {&one, 1});
      }
      gpu->matmul(x.matrix(kMost, cols).slice_rows(0, tokens), list);
      for (size_t i = 0; i < weights.size(); ++i) {
        EXPECT_EQ(alone[alone.size() - weights.size() + i]->get(),
                  together[together.size() - weights.size() + i]->get())
            << quant::info(format).name << " and " << quant::info(last).name << ", product " << i
            << ", " << tokens << " tokens";
      }
    }
  }
}

// With few tokens gate and up have a SwiGLU epilogue as well, after a norm and before GEMMs with
// any number of tokens.
TEST_F(CudaRows, GatedProductsOfFewTokensKeepTheirBits) {
  using quant::Format;
  constexpr int64_t kOut = 256, kMost = 40;
  struct Case {
    Format format;
    int64_t cols, ff;
    std::optional<Format> other = {};  // format of the GEMM that reads the SwiGLU output
  };
  // Blocks process one tile, several, or several rounds of tiles.
  for (const auto& [format, cols, ff, other] : {Case{Format::kBF16, 2112, 512},
                                                {Format::kBF16, 4096, 6208},
                                                {Format::kBF16, 2048, 9088},
                                                {Format::kBF16, 2048, 16448},
                                                {Format::kBF16, 8704, 64},
                                                {Format::kQ4_0, 2080, 512},
                                                {Format::kQ4_0, 4096, 9088},
                                                {Format::kMXFP4, 4096, 4288},
                                                {Format::kQ4_K, 4096, 4352},
                                                {Format::kInt4G128, 4096, 8576},
                                                {Format::kInt4G32, 4096, 4352},
                                                {Format::kQ4_0, 288, 512},
                                                {Format::kQ8_0, 4096, 512},
                                                {Format::kQ4_K, 2304, 512},
                                                {Format::kQ6_K, 2048, 512},
                                                {Format::kMXFP4, 4096, 512},
                                                {Format::kQ5_0, 1056, 512},
                                                {Format::kQ5_K, 4096, 4352},
                                                {Format::kQ3_K, 2304, 512},
                                                {Format::kQ3_K, 4096, 4352},
                                                {Format::kIQ4_XS, 4096, 4352},
                                                {Format::kIQ4_NL, 1056, 512},
                                                {Format::kQ5_0, 4096, 4352},
                                                {Format::kQ4_1, 4096, 4352},
                                                {Format::kQ5_1, 4096, 4352},
                                                {Format::kQ2_K, 2304, 512},
                                                {Format::kFP8, 4096, 512},
                                                {Format::kQ4_0, 576, 9728},
                                                {Format::kQ4_0, 576, 17408},
                                                {Format::kQ4_0, 3072, 8192},
                                                {Format::kQ4_0, 3584, 4672},
                                                {Format::kQ4_0, 5120, 4352},
                                                {Format::kQ4_K, 512, 9728},
                                                {Format::kQ4_0, 2560, 4352},
                                                {Format::kQ4_K, 512, 17408},
                                                {Format::kQ4_K, 2560, 4352},
                                                {Format::kQ4_K, 3584, 4352},
                                                {Format::kQ4_K, 5120, 4352},
                                                {Format::kInt4G128, 640, 17408},
                                                {Format::kInt4G128, 3584, 4352},
                                                {Format::kInt4G32, 576, 9728},
                                                {Format::kMXFP4, 576, 17408},
                                                {Format::kMXFP4, 2880, 4352},
                                                {Format::kQ5_K, 5120, 4352},
                                                {Format::kQ3_K, 2560, 4352},
                                                {Format::kIQ4_XS, 3584, 4352},
                                                {Format::kQ8_0, 576, 17408},
                                                {Format::kQ6_K, 512, 17408},
                                                {Format::kQ4_K, 2304, 512, Format::kQ6_K},
                                                {Format::kQ4_0, 2048, 512, Format::kBF16},
                                                {Format::kBF16, 2048, 512, Format::kF32},
                                                {Format::kBF16, 2048, 512, Format::kFP8}}) {
    SCOPED_TRACE(fmt::format("{} {}x{}", quant::info(format).name, ff, cols));
    const Stored of_gate = stored(format, ff, cols, 3), of_up = stored(format, ff, cols, 4);
    const Stored of_down = stored(other.value_or(format), kOut, ff, 5);
    const auto gate = gpu->pack(format, of_gate.rows, cols),
               up = gpu->pack(format, of_up.rows, cols);
    const auto down = gpu->pack(other.value_or(format), of_down.rows, ff);
    ASSERT_TRUE(gate.ok() && up.ok() && down.ok());
    DeviceFloats x(*gpu, random_floats(static_cast<size_t>(kMost * cols), 1, 2.0f));
    DeviceFloats bias(*gpu, random_floats(static_cast<size_t>(ff), 2));
    DeviceFloats weight(*gpu, random_floats(static_cast<size_t>(cols), 6));
    const auto run = [&](int64_t first, int64_t rows, bool fused) {
      const auto size = static_cast<size_t>(rows * ff);
      // The addend is in the output before the sum.
      DeviceFloats a(*gpu, size), b(*gpu, size);
      DeviceFloats out(*gpu, std::vector<float>(static_cast<size_t>(rows * kOut), 3.0f));
      DeviceFloats normed(*gpu, static_cast<size_t>(rows * cols));
      const Matrix in = normed.matrix(rows, cols), g = a.matrix(rows, ff), u = b.matrix(rows, ff);
      const ops::Norm norm{ops::NormKind::kRms, weight.data(), nullptr, 1e-5f};
      const Matrix from = x.matrix(kMost, cols).slice_rows(first, rows);
      const ops::Product both[] = {{&*gate, g, bias.data(), 1.0f, false},
                                   {&*up, u, nullptr, 0.5f, false}};
      const ops::Product last{&*down, out.matrix(rows, kOut), nullptr, 1.0f, true};
      if (fused) {
        gpu->gated(
            {{from, &norm, in}, both[0], both[1], {ops::Activation::kSilu, 0.0f, 0.0f}, last});
      } else {
        gpu->norm(in, from, norm);
        gpu->matmul(in, both);
        gpu->glu(u, g, u, {ops::Activation::kSilu, 0.0f, 0.0f});
        gpu->matmul(u, {&last, 1});
      }
      return out.get();
    };
    const std::vector<float> all = run(0, kMost, false);
    for (const int64_t rows : {1, 2, 3, 5, 7, 8, 9, 16, 17, 25, 32}) {
      for (const int64_t first : {int64_t{0}, kMost - rows}) {
        const std::vector<float> got = run(first, rows, true);
        ASSERT_EQ(std::memcmp(got.data(), all.data() + first * kOut, got.size() * 4), 0)
            << "rows " << first << "+" << rows;
      }
    }
  }
}

TEST_F(CudaRows, ArgmaxIsTheFirstOfTheLargest) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  for (const int64_t n : {1, 7, 128, 8192, 128256, 50257}) {
    const int64_t rows = 6;
    std::vector<float> x = random_floats(static_cast<size_t>(rows * n), 5, 9.0f);
    const auto at = [&](int64_t row, int64_t c) -> float& {
      return x[static_cast<size_t>(row * n + c)];
    };
    at(1, n - 1) = at(1, n / 2) = 100.0f;  // ties go to the lower id
    for (int64_t c = 0; c < n; ++c) at(2, c) = kNone;
    for (int64_t c = 0; c < n; ++c) at(3, c) = c % 2 == 0 ? std::nanf("") : -7.0f;
    at(4, n / 3) = std::numeric_limits<float>::infinity();
    for (int64_t c = 0; c < n; ++c) at(5, c) = c == n - 1 ? 0.0f : -0.0f;  // equal values
    std::vector<int32_t> want(rows), got(rows);
    cpu->argmax({x.data(), rows, n, n}, want.data());
    DeviceFloats dx(*gpu, x), ids(*gpu, static_cast<size_t>(rows));
    gpu->argmax(dx.matrix(rows, n), reinterpret_cast<int32_t*>(ids.data()));
    const std::vector<float> back = ids.get();
    std::memcpy(got.data(), back.data(), back.size() * 4);
    EXPECT_EQ(got, want) << n;
    EXPECT_EQ(got[2], -1);
    EXPECT_EQ(got[5], 0);
    SamplerScratch scratch(n);  // the host sampler's choice
    for (int64_t r = 0; r < rows; ++r) {
      Sampler greedy({.temperature = 0.0f}, n, 0, 0, {}, 1, {});
      EXPECT_EQ(got[static_cast<size_t>(r)],
                greedy.sample({&at(r, 0), static_cast<size_t>(n)}, 0, scratch));
    }
  }
}

}  // namespace
}  // namespace freshet

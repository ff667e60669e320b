#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "backend/cpu/backend.h"
#include "backend/cpu/matmul_layout.h"
#include "backend/cpu/tables.h"
#include "backend/cpu/testing/matmul_rows.h"
#include "ops/weight.h"
#include "quant/int8.h"
#include "tensor/dtype.h"

namespace freshet::cpu {

extern const IsaKernels kEmulatedTileKernels;  // testing/matmul_emulated_avx512vnni.cc

namespace {

using ops::ActEncoder;
using ops::ActKind;
using ops::CpuIsa;
using ops::MatmulArgs;
using ops::MatmulKernel;
using ops::Weight;

constexpr uint8_t kGuard = 0xa5;
constexpr size_t kGuardBytes = 256;

// Bytes with guards on both sides.
class Guarded {
 public:
  explicit Guarded(size_t bytes) : size_(bytes) {
    auto b = Buffer::allocate(bytes + 2 * kGuardBytes);
    buffer_ = std::move(b).value();
    std::memset(buffer_.data(), kGuard, buffer_.size());
  }
  uint8_t* data() { return buffer_.data() + kGuardBytes; }
  size_t size() const { return size_; }
  bool intact() const {
    const uint8_t* p = buffer_.data();
    for (size_t i = 0; i < kGuardBytes; ++i) {
      if (p[i] != kGuard || p[kGuardBytes + size_ + i] != kGuard) return false;
    }
    return true;
  }

 private:
  Buffer buffer_;
  size_t size_;
};

struct Case {
  Format format;
  int64_t rows;
  int64_t cols;
  int64_t tokens;
  Values values = Values::kUsual;
};

std::vector<float> random_x(const Case& c, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(c.tokens * c.cols), 1.0f);
  if (c.values == Values::kLargest) return x;
  for (auto& v : x) v = normal(rng) * (rng() % 64 == 0 ? 20.0f : 1.0f);
  return x;
}

const ActEncoder* encoder(ActKind kind, const ops::Capabilities& can) {
  for (const ActEncoder& e : act_encoders()) {
    if (e.kind == kind && can.has(e.isa)) return &e;
  }
  return nullptr;
}

// Encoded rows, with a given stride.
struct Encoded {
  Guarded bytes{0};
  int64_t stride = 0;
};
Encoded encode(ActKind kind, const std::vector<float>& x, int64_t cols) {
  const int64_t tokens = static_cast<int64_t>(x.size()) / cols;
  Encoded e;
  if (kind == ActKind::kF32) {
    e.stride = cols * 4;
    e.bytes = Guarded(x.size() * 4);
    std::memcpy(e.bytes.data(), x.data(), x.size() * 4);
    return e;
  }
  const ActEncoder* row = encoder(kind, detect());
  e.stride = static_cast<int64_t>(row->row_bytes(cols));
  e.bytes = Guarded(static_cast<size_t>(e.stride * tokens));
  for (int64_t t = 0; t < tokens; ++t) {
    row->encode(x.data() + t * cols, cols, 0, cols, true, e.bytes.data() + t * e.stride);
  }
  EXPECT_TRUE(e.bytes.intact());
  return e;
}

// The values that an encoded row represents.
std::vector<double> decode_row(const MatmulKernel& kernel, const uint8_t* p, const Case& c) {
  const ActKind kind = kernel.act;
  std::vector<double> x(static_cast<size_t>(c.cols));
  const bool fine = kernel.always_fine || uses_fine_plane(c.rows, c.cols);
  const auto f32 = [&](int64_t at) {
    float v;
    std::memcpy(&v, p + at, 4);
    return static_cast<double>(v);
  };
  const auto bf16 = [&](int64_t at) {
    uint16_t h;
    std::memcpy(&h, p + at, 2);
    return static_cast<double>(bf16_to_f32(h));
  };
  const auto q = [&](int64_t at) { return static_cast<double>(static_cast<int8_t>(p[at])); };
  for (int64_t k = 0; k < c.cols; ++k) {
    auto& v = x[static_cast<size_t>(k)];
    switch (kind) {
      case ActKind::kF32:
        v = f32(k * 4);
        break;
      case ActKind::kBF16: {
        const int64_t at = (k / 4 * 4 + (k & 1) * 2 + (k >> 1 & 1)) * 2;
        v = bf16(at) + (fine ? bf16(bf16_layout(c.cols).fine + at) : 0.0);
        break;
      }
      case ActKind::kQ8x256: {
        const Q8x256Layout l = q8x256_layout(c.cols);
        v = (q(k) + (fine ? q(l.fine + k) / 254.0 : 0.0)) * f32(l.records + k / 256 * 2 * kLine);
        break;
      }
      case ActKind::kInt8:
        v = q(k) * f32(int8_layout(c.cols).record);
        break;
    }
  }
  return x;
}

class Product {
 public:
  Product(const MatmulKernel& kernel, const Case& c, uint32_t seed = 1)
      : case_(c), stored_(random_rows(c.format, c.rows, c.cols, c.values, seed)) {
    w_.format = c.format;
    w_.rows = c.rows;
    w_.cols = c.cols;
    w_.kernel = &kernel;
    const size_t bytes = kernel.packed_bytes(c.rows, c.cols);
    w_.packed = std::move(Buffer::allocate(bytes + kGuardBytes)).value();
    std::memset(w_.packed.data(), kGuard, w_.packed.size());
    for (int64_t p = 0; p * kPanelRows < c.rows; ++p) {
      const uint8_t* rows[kPanelRows] = {};
      for (int64_t r = 0; r < kPanelRows && p * kPanelRows + r < c.rows; ++r) {
        rows[r] = stored_[static_cast<size_t>(p * kPanelRows + r)].data();
      }
      kernel.pack_panel(w_.packed.data(), p, rows, c.cols);
    }
    for (size_t i = 0; i < kGuardBytes; ++i) {
      EXPECT_EQ(w_.packed.data()[bytes + i], kGuard) << "packing wrote past its end";
    }
  }

  std::vector<float> run(Encoded& act, int64_t tokens, MatmulArgs args = {}, float fill = 0.0f) {
    const int64_t stride = case_.rows + 5;
    Guarded out(static_cast<size_t>(tokens * stride) * 4);
    auto* o = reinterpret_cast<float*>(out.data());
    std::fill(o, o + tokens * stride, fill);
    args.weight = &w_;
    args.tokens = tokens;
    args.out = o;
    args.out_stride = stride;
    const int64_t panels = (case_.rows + kPanelRows - 1) / kPanelRows;
    const int64_t middle = panels / 3;
    w_.kernel->run(args, act.bytes.data(), act.stride, 0, middle);
    w_.kernel->run(args, act.bytes.data(), act.stride, middle, panels);
    EXPECT_TRUE(out.intact());
    std::vector<float> result;
    for (int64_t t = 0; t < tokens; ++t) {
      result.insert(result.end(), o + t * stride, o + t * stride + case_.rows);
      for (int i = 0; i < 5; ++i) EXPECT_EQ(o[t * stride + case_.rows + i], fill);
    }
    return result;
  }

  std::vector<float> decoded(int64_t row) const {
    std::vector<float> v(static_cast<size_t>(case_.cols));
    quant::info(case_.format)
        .decode(stored_[static_cast<size_t>(row)].data(), v.data(), case_.cols);
    return v;
  }
  // The exact GEMM of the effective weights.
  double exact(int64_t row, const std::vector<double>& x) const {
    const std::vector<uint8_t>& stored = stored_[static_cast<size_t>(row)];
    if (rounds() && case_.format == Format::kQ4_K) return rounded_q4_k_product(stored, x);
    const auto w =
        rounds() ? rounded_q4_0(stored, case_.cols) : weights_of(case_.format, stored, case_.cols);
    return std::inner_product(w.begin(), w.end(), x.begin(), 0.0);
  }
  const Weight& weight() const { return w_; }
  // Whether products are rounded to bytes.
  bool rounds() const {
    const bool tiles =
        w_.kernel->isa == CpuIsa::kAmx || std::string_view(w_.kernel->name) == "emulated tiles";
    const bool format = case_.format == Format::kQ4_0 || case_.format == Format::kQ4_K;
    return tiles && format && !uses_fine_plane(case_.rows, case_.cols);
  }
  // Whether weights are split into two BF16 values.
  bool splits() const { return case_.format == Format::kF32 && w_.kernel->isa == CpuIsa::kAmx; }
  // Whether the bits are those of this kernel alone.
  bool differs() const { return rounds() || splits(); }

 private:
  Case case_;
  std::vector<std::vector<uint8_t>> stored_;
  Weight w_;
};

#if defined(__x86_64__)
template <Format f>
void run_emulated(const MatmulArgs& args, const uint8_t* act, int64_t act_row_bytes, int64_t first,
                  int64_t last) {
  GateCall gate;
  const MatmulCall call = call_of(args, act, act_row_bytes, gate);
  kEmulatedTileKernels.run[static_cast<size_t>(f)](call, first, last);
}

// The tile GEMMs on emulated tiles, as the AVX-512 VNNI row, with which they share packing and
// activations.
template <size_t... i>
std::vector<MatmulKernel> emulated_rows(std::index_sequence<i...>) {
  std::vector<MatmulKernel> rows;
  const auto add = [&](Format f, auto run) {
    if (kEmulatedTileKernels.run[static_cast<size_t>(f)] == nullptr) return;
    for (const MatmulKernel& k : matmul_kernels()) {
      if (k.format != f || k.isa != CpuIsa::kAvx512Vnni) continue;
      rows.push_back(k);
      rows.back().name = "emulated tiles";
      rows.back().run = run;
      rows.back().gates = (kEmulatedTileKernels.gates >> static_cast<int>(f) & 1) != 0;
    }
  };
  (add(static_cast<Format>(i), run_emulated<static_cast<Format>(i)>), ...);
  return rows;
}

#else
std::vector<MatmulKernel> emulated_rows(std::make_index_sequence<kFormats>) {
  return {};
}
#endif

std::vector<const MatmulKernel*> runnable(Format f) {
  static const auto emulated = emulated_rows(std::make_index_sequence<kFormats>());
  std::vector<const MatmulKernel*> rows;
  const ops::Capabilities can = detect();
  const auto add = [&](const MatmulKernel& k) {
    if (k.format == f && can.has(k.isa)) rows.push_back(&k);
  };
  for (const MatmulKernel& k : matmul_kernels()) add(k);
  for (const MatmulKernel& k : emulated) add(k);
  return rows;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * 4) == 0;
}

std::vector<Case> cases(Format f) {
  if (quant::info(f).block_size == 128) {
    return {{f, 2048, 2176, 3}, {f, 2049, 2304, 1}, {f, 2050, 2048, 18}, {f, 16, 128, 1},
            {f, 1, 384, 2},     {f, 33, 768, 5},    {f, 40, 2432, 7},    {f, 160, 512, 19},
            {f, 24, 2688, 70},  {f, 17, 128, 33}};
  }
  if (quant::info(f).block_size > 32) {
    return {{f, 2048, 2048, 3}, {f, 2049, 2304, 1}, {f, 2050, 2048, 18},
            {f, 16, 256, 1},    {f, 1, 512, 2},     {f, 33, 768, 5},
            {f, 40, 2304, 7},   {f, 160, 512, 19},  {f, 24, 2560, 70}};
  }
  std::vector<Case> list = {{f, 2048, 2048, 3}, {f, 2049, 2112, 1}, {f, 2050, 2048, 18},
                            {f, 16, 32, 1},     {f, 1, 64, 2},      {f, 33, 288, 5},
                            {f, 40, 2080, 7},   {f, 160, 96, 19},   {f, 24, 4160, 70},
                            {f, 288, 64, 530},  {f, 17, 2048, 33},  {f, 64, 512, 16}};
  if (quant::info(f).block_size == 1) {
    list.push_back({f, 48, 24, 3});
    list.push_back({f, 7, 1, 1});
    list.push_back({f, 20, 50, 40});
    list.push_back({f, 19, 2071, 6});
  }
  return list;
}

class MatmulOfFormat : public testing::TestWithParam<Format> {};

std::string describe(const MatmulKernel& k, const Case& c) {
  return fmt::format("{} rows={} cols={} tokens={}", k.name, c.rows, c.cols, c.tokens);
}

TEST_P(MatmulOfFormat, EqualsExactProductOfEncodedActivations) {
  for (const MatmulKernel* k : runnable(GetParam())) {
    for (const Case& c : cases(GetParam())) {
      Product product(*k, c);
      const auto x = random_x(c, 7);
      Encoded act = encode(k->act, x, c.cols);
      const auto out = product.run(act, c.tokens);
      EXPECT_TRUE(act.bytes.intact());
      for (int64_t t = 0; t < c.tokens; t += std::max<int64_t>(1, c.tokens / 9)) {
        const auto ax = decode_row(*k, act.bytes.data() + t * act.stride, c);
        for (int64_t r = 0; r < c.rows; r += c.rows > 1000 ? 97 : 1) {
          const auto w = product.decoded(r);
          const double exact = product.exact(r, ax);
          double size = 0, f32 = 0, norm_w = 0, norm_x = 0;
          for (int64_t i = 0; i < c.cols; ++i) {
            const auto at = static_cast<size_t>(i);
            const double wi = static_cast<double>(w[at]);
            const double xi = static_cast<double>(x[static_cast<size_t>(t * c.cols + i)]);
            size += std::fabs(wi * ax[at]);
            f32 += wi * xi;
            norm_w += wi * wi;
            norm_x += xi * xi;
          }
          const double got = static_cast<double>(out[static_cast<size_t>(t * c.rows + r)]);
          const double loss = product.splits() ? 0x1p-15 : 4e-6;
          ASSERT_NEAR(got, exact, loss * size + 1e-30)
              << describe(*k, c) << " at " << t << "," << r;
          // The expected loss from rounding activations to 8 bits, and scales, as a fraction of
          // what random signs would give.
          double rounding = scale_bits(c.format) > 0 ? std::ldexp(1.0, -scale_bits(c.format)) : 0.0;
          if (product.rounds()) rounding = 0.02;
          const bool fine =
              k->always_fine || (uses_fine_plane(c.rows, c.cols) && k->act != ActKind::kInt8);
          ASSERT_NEAR(got, f32,
                      ((fine ? 2e-4 : 0.08) + rounding) * std::sqrt(norm_w * norm_x) + 1e-30)
              << describe(*k, c);
        }
      }
    }
  }
}

TEST_P(MatmulOfFormat, SameBitsForAnyNumberOfTokensAndAnyInstructionSet) {
  for (const Values values : {Values::kUsual, Values::kExtreme, Values::kLargest}) {
    auto list = cases(GetParam());
    // With one plane of activations: the tokens of a tile, of two steps, and more. Too slow for the
    // scalar row.
    if (values == Values::kUsual) {
      for (const int64_t tokens : {13, 37, 75}) list.push_back({GetParam(), 2048, 2304, tokens});
      if (GetParam() == Format::kQ4_K) list.push_back({GetParam(), 2048, 4352, 67});
    }
    for (Case c : list) {
      if (values == Values::kLargest && c.rows > 1000) continue;  // slow, and not different
      c.values = values;
      std::vector<float> first, first_rounded;
      for (const MatmulKernel* k : runnable(GetParam())) {
        if (k->isa == CpuIsa::kScalar && c.rows == 2048 && c.cols > 2048) continue;
        Product product(*k, c);
        Encoded act = encode(k->act, random_x(c, 3), c.cols);
        const auto all = product.run(act, c.tokens);
        // The test above checks the rounded values.
        std::vector<float>& same = product.differs() ? first_rounded : first;
        if (same.empty()) same = all;
        EXPECT_TRUE(same_bits(same, all)) << describe(*k, c) << " differs from the first row";
        for (const int64_t n : {1, 2, 3, 8, 16}) {
          if (!product.differs() || n >= c.tokens) continue;
          const auto some = product.run(act, n);
          EXPECT_EQ(std::memcmp(some.data(), all.data(), some.size() * 4), 0)
              << describe(*k, c) << " first " << n;
        }
        for (int64_t t = 0; t < c.tokens; t += std::max<int64_t>(1, c.tokens / 5)) {
          const auto n =
              std::min<int64_t>(product.differs() && t == 0 ? 40 : 1 + t % 3, c.tokens - t);
          std::vector<int32_t> index(static_cast<size_t>(n));
          for (int64_t i = 0; i < n; ++i)
            index[static_cast<size_t>(i)] = static_cast<int32_t>(t + i);
          MatmulArgs args;
          args.rows_index = index.data();
          const auto alone = product.run(act, n, args);
          EXPECT_EQ(std::memcmp(alone.data(), all.data() + t * c.rows, alone.size() * 4), 0)
              << describe(*k, c) << " token " << t;
        }
      }
    }
  }
}

TEST_P(MatmulOfFormat, GathersRowsAndFinishes) {
  for (const MatmulKernel* k : runnable(GetParam())) {
    const Case c{GetParam(), 37, 512, 50};
    Product product(*k, c);
    Encoded act = encode(k->act, random_x(c, 11), c.cols);
    const auto plain = product.run(act, c.tokens);
    std::mt19937 rng(5);
    for (const int64_t n : {1, 3, 16, 21, 40}) {
      std::vector<int32_t> index(static_cast<size_t>(n));
      for (auto& i : index) i = static_cast<int32_t>(rng() % 50);
      std::vector<float> bias(37);
      for (auto& b : bias) b = static_cast<float>(rng() % 100) * 0.37f;
      MatmulArgs args;
      args.rows_index = index.data();
      args.bias = bias.data();
      args.scale = 0.3f;
      args.add = true;
      const auto out = product.run(act, n, args, 2.5f);
      for (int64_t t = 0; t < n; ++t) {
        for (size_t r = 0; r < 37; ++r) {
          const float sum = plain[static_cast<size_t>(index[static_cast<size_t>(t)]) * 37 + r];
          const float scaled = (sum + bias[r]) * 0.3f;
          EXPECT_EQ(out[static_cast<size_t>(t) * 37 + r], 2.5f + scaled) << describe(*k, c);
        }
      }
    }
  }
}

// Any function of both that shows whether denormals are treated as zero.
void test_glu(float* out, const float* gate, const float* up, int64_t n, int activation,
              float limit, float alpha) {
  for (int64_t i = 0; i < n; ++i) {
    const float v = std::min(gate[i], limit) * up[i] + alpha;
    out[i] = activation == 1 ? v * 1e-39f : v;
  }
}

TEST_P(MatmulOfFormat, GatedUnitsAreThoseOfTheResultsOfBothProducts) {
  for (const MatmulKernel* k : runnable(GetParam())) {
    if (!k->gates) continue;
    for (const Case& c : {Case{GetParam(), 2048, 2048, 65},
                          {GetParam(), 288, 256, 70},
                          {GetParam(), 96, 512, 131}}) {
      const int64_t first = c.rows > 2000 ? 60 : 1,
                    last = first + std::min<int64_t>(17, c.rows / 32);
      Product gate(*k, c, 1), up(*k, c, 2);
      Encoded act = encode(k->act, random_x(c, 7), c.cols);
      std::vector<float> bias(static_cast<size_t>(c.rows));
      for (size_t i = 0; i < bias.size(); ++i) bias[i] = static_cast<float>(i % 7) - 3.0f;
      const auto run = [&](const Weight& w, const float* b, float scale,
                           const ops::GateArgs* with_gate) {
        Guarded out(static_cast<size_t>(c.tokens * c.rows) * 4);
        auto* const o = reinterpret_cast<float*>(out.data());
        std::fill(o, o + c.tokens * c.rows, 9.0f);
        const MatmulArgs args{&w, c.tokens, nullptr, o, c.rows, b, scale, false, with_gate};
        k->run(args, act.bytes.data(), act.stride, first, last);
        EXPECT_TRUE(out.intact());
        return std::vector<float>(o, o + c.tokens * c.rows);
      };
      const auto of_gate = run(gate.weight(), bias.data(), 0.3f, nullptr);
      const auto of_up = run(up.weight(), nullptr, 1.7f, nullptr);
      for (const int activation : {0, 1}) {
        std::vector<float> want = of_up;
        for (int64_t t = 0; t < c.tokens; ++t) {
          const int64_t at = t * c.rows + first * kPanelRows;
          test_glu(want.data() + at, of_gate.data() + at, of_up.data() + at,
                   (last - first) * kPanelRows, activation, 2.5f, 0.25f);
        }
        const ops::GateArgs gated{&gate.weight(), bias.data(), 0.3f, test_glu,
                                  activation,     2.5f,        0.25f};
        EXPECT_TRUE(same_bits(run(up.weight(), nullptr, 1.7f, &gated), want))
            << describe(*k, c) << " activation " << activation;
      }
    }
  }
}

TEST_P(MatmulOfFormat, UnpackedRowsAreTheDecodedOnes) {
  const MatmulKernel* k = runnable(GetParam()).front();
  for (Case c : cases(GetParam())) {
    c.values = Values::kExtreme;
    Product product(*k, c);
    for (int64_t r = 0; r < c.rows; ++r) {
      Guarded out(static_cast<size_t>(c.cols) * 4);
      k->unpack_row(product.weight().packed.data(), r, c.cols,
                    reinterpret_cast<float*>(out.data()));
      const auto want = product.decoded(r);
      ASSERT_EQ(std::memcmp(out.data(), want.data(), want.size() * 4), 0) << describe(*k, c);
      ASSERT_TRUE(out.intact());
    }
  }
}

TEST_P(MatmulOfFormat, PackingKeepsTheStoredSize) {
  const MatmulKernel* k = runnable(GetParam()).front();
  const auto stored = static_cast<double>(quant::row_bytes(GetParam(), 2048)) * 2048;
  EXPECT_LE(static_cast<double>(k->packed_bytes(2048, 2048)), stored * 1.001);
}

// The arguments of a thread that finds no panel left.
TEST_P(MatmulOfFormat, NoPanelsAreNotRead) {
  for (const MatmulKernel* k : runnable(GetParam())) {
    for (const int64_t tokens : {1, 21, 64, 300}) {
      const Case c{GetParam(), 20, 512, tokens};
      Encoded act = encode(k->act, random_x(c, 13), c.cols);
      Weight nowhere;
      nowhere.format = c.format;
      nowhere.rows = c.rows;
      nowhere.cols = c.cols;
      nowhere.kernel = k;
      std::vector<float> out(static_cast<size_t>(tokens * c.rows), 3.0f);
      MatmulArgs args;
      args.weight = &nowhere;
      args.tokens = tokens;
      args.out = out.data();
      args.out_stride = c.rows;
      k->run(args, act.bytes.data(), act.stride, 0, 0);
      for (const float v : out) ASSERT_EQ(v, 3.0f) << describe(*k, c);
    }
  }
}

TEST_P(MatmulOfFormat, NotANumberStaysInItsRow) {
  for (const MatmulKernel* k : runnable(GetParam())) {
    const Case c{GetParam(), 20, 512, 21};
    Product product(*k, c);
    auto x = random_x(c, 13);
    Encoded clean = encode(k->act, x, c.cols);
    const auto want = product.run(clean, c.tokens);
    x[static_cast<size_t>(4 * c.cols + 100)] = std::numeric_limits<float>::quiet_NaN();
    x[static_cast<size_t>(9 * c.cols + 300)] = std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < c.cols; ++i) x[static_cast<size_t>(12 * c.cols + i)] = 0.0f;
    Encoded act = encode(k->act, x, c.cols);
    const auto out = product.run(act, c.tokens);
    for (int64_t t = 0; t < c.tokens; ++t) {
      for (int64_t r = 0; r < c.rows; ++r) {
        const auto at = static_cast<size_t>(t * c.rows + r);
        if (t == 4) {
          EXPECT_TRUE(std::isnan(out[at])) << describe(*k, c);
        } else if (t == 9) {
          EXPECT_FALSE(std::isfinite(out[at])) << describe(*k, c);
        } else if (t == 12) {
          EXPECT_EQ(out[at], 0.0f) << describe(*k, c);
        } else {
          EXPECT_EQ(out[at], want[at]) << describe(*k, c) << " token " << t;
        }
      }
    }
  }
}

TEST_P(MatmulOfFormat, AScaleThatIsNoNumberSpoilsItsRowAlone) {
  if (scale_offsets(GetParam()).empty() && GetParam() != Format::kIQ1_M)
    GTEST_SKIP() << "no scale of F16";
  for (const MatmulKernel* k : runnable(GetParam())) {
    for (const int64_t tokens : {1, 40}) {
      const Case usual{GetParam(), 20, 512, tokens};
      Case bad = usual;
      bad.values = Values::kBadScale;
      Encoded act = encode(k->act, random_x(usual, 13), usual.cols);
      const auto want = Product(*k, usual).run(act, tokens);
      const auto out = Product(*k, bad).run(act, tokens);
      for (size_t i = 0; i < out.size(); ++i) {
        if (i % 20 == kBadRow) {
          EXPECT_TRUE(std::isnan(out[i])) << describe(*k, bad);
        } else {
          EXPECT_EQ(out[i], want[i]) << describe(*k, bad);
        }
      }
    }
  }
}

std::vector<Format> formats() {
  std::vector<Format> list;
  for (const auto& i : quant::all_formats()) list.push_back(i.format);
  return list;
}
INSTANTIATE_TEST_SUITE_P(Formats, MatmulOfFormat, testing::ValuesIn(formats()),
                         [](const auto& p) { return std::string(quant::info(p.param).name); });

// Sums of the largest values over the longest rows, and of arbitrary ones, must equal 64-bit sums,
// scaled as the format defines.
TEST(Int8Products, AreWholeNumberSumsTimesTheProductOfTwoScales) {
  for (const Values values : {Values::kUsual, Values::kLargest}) {
    for (const Case& shape : {Case{Format::kINT8, 17, quant::INT8::kMostCols, 5},
                              Case{Format::kINT8, 35, 2071, 40}, Case{Format::kINT8, 3, 50, 2}}) {
      Case c = shape;
      c.values = values;
      const auto stored = random_rows(c.format, c.rows, c.cols, values, 1);
      const auto x = random_x(c, 5);
      for (const MatmulKernel* k : runnable(c.format)) {
        Encoded act = encode(k->act, x, c.cols);
        const auto out = Product(*k, c).run(act, c.tokens);
        for (int64_t t = 0; t < c.tokens; t += 1 + c.tokens / 4) {
          const float* const xs = x.data() + t * c.cols;
          float most = 0.0f;
          for (int64_t i = 0; i < c.cols; ++i) most = std::max(most, std::fabs(xs[i]));
          const float token = most / 127.0f;
          const auto* codes = reinterpret_cast<const int8_t*>(act.bytes.data() + t * act.stride);
          for (int64_t i = 0; i < c.cols; ++i) {
            ASSERT_LE(std::fabs(codes[i] - double{xs[i]} / token), 0.5 + 1e-4);
          }
          for (int64_t r = 0; r < c.rows; ++r) {
            const uint8_t* const row = stored[static_cast<size_t>(r)].data();
            int64_t sum = 0;
            for (int64_t i = 0; i < c.cols; ++i) sum += static_cast<int8_t>(row[4 + i]) * codes[i];
            float scale;
            std::memcpy(&scale, row, sizeof scale);
            EXPECT_EQ(out[static_cast<size_t>(t * c.rows + r)],
                      static_cast<float>(sum) * (scale * token))
                << describe(*k, c) << " at " << t << "," << r;
          }
        }
      }
    }
  }
}

TEST(MatmulRows, AreNamedByFormatAndIsaBestFirst) {
  std::vector<CpuIsa> last(quant::all_formats().size(), ops::kAnyIsa);
  for (const MatmulKernel& k : matmul_kernels()) {
    EXPECT_EQ(std::string(k.name),
              fmt::format("{}.{}", quant::info(k.format).name, ops::name_of(k.isa)));
    EXPECT_LE(k.isa, last[static_cast<size_t>(k.format)]);
    last[static_cast<size_t>(k.format)] = k.isa;
  }
  for (const auto& i : quant::all_formats()) {
    EXPECT_EQ(last[static_cast<size_t>(i.format)], CpuIsa::kScalar) << i.name;
  }
}

}  // namespace
}  // namespace freshet::cpu

// Shared parts of the CUDA backend tests: a device next to the reference ops, guarded memory.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "backend/cuda/backend.h"
#include "backend/cuda/device.h"
#include "tensor/dtype.h"
#include "tests/op_test_util.h"

namespace freshet::test {

inline float bf16(float v) {
  return bf16_to_f32(f32_to_bf16(v));
}
inline std::vector<float> rounded(std::vector<float> v) {
  for (float& x : v) x = bf16(x);
  return v;
}

// Device floats between two guard regions that detect stray writes.
class DeviceFloats {
 public:
  DeviceFloats(ops::Ops& o, size_t n) : ops_(o), n_(n) {
    std::vector<float> all(n + 2 * kWall, kMark);
    buffer_ = std::move(o.upload(all)).value();
  }
  DeviceFloats(ops::Ops& o, const std::vector<float>& v) : DeviceFloats(o, v.size()) {
    const size_t bytes = v.size() * sizeof(float);
    if (o.device() == nullptr) {  // the reference's
      std::memcpy(data(), v.data(), bytes);
    } else {
      EXPECT_TRUE(o.device()->write(data(), v.data(), bytes).ok());
    }
  }
  float* data() { return buffer_.as<float>() + kWall; }
  Matrix matrix(int64_t rows, int64_t cols) { return {data(), rows, cols, cols}; }
  std::vector<float> get() {
    std::vector<float> all(n_ + 2 * kWall);
    ops_.fetch(all.data(), buffer_.data(), all.size() * sizeof(float));
    ops_.wait();
    for (size_t i = 0; i < kWall; ++i) {
      EXPECT_EQ(all[i], kMark) << "before";
      EXPECT_EQ(all[kWall + n_ + i], kMark) << "after";
    }
    return {all.begin() + kWall, all.begin() + static_cast<int64_t>(kWall + n_)};
  }

 private:
  static constexpr size_t kWall = 128;
  static constexpr float kMark = -12345.5f;
  ops::Ops& ops_;
  size_t n_;
  Buffer buffer_;
};

class CudaTest : public testing::Test {
 protected:
  void SetUp() override {
    auto device = cuda::open(std::string("auto"));
    ASSERT_TRUE(device.ok()) << device.status().message();
    if (*device == nullptr) GTEST_SKIP() << "no GPU here";
    gpu = ops::Ops::create(pool, std::move(*device));
    ASSERT_TRUE(gpu->set_scratch(size_t{512} << 20).ok());
    ops::OpsOptions options;
    options.reference = true;
    cpu = std::move(ops::Ops::create(pool, ops::reference_kernels(), {}, options)).value();
    ASSERT_TRUE(cpu->set_scratch(size_t{256} << 20).ok());
  }

  const cuda::DeviceLimits& limits() const {
    return static_cast<const cuda::CudaDevice&>(*gpu->device()).limits();
  }

  // Another device, which may be the same GPU, with kernels forced by name.
  std::unique_ptr<ops::Ops> open(const std::string& device,
                                 const std::vector<std::string>& forced) {
    auto opened = cuda::open(device, false, forced);
    EXPECT_TRUE(opened.ok()) << opened.status().message();
    if (!opened.ok()) return nullptr;
    auto o = ops::Ops::create(pool, std::move(*opened));
    EXPECT_TRUE(o->set_scratch(size_t{512} << 20).ok());
    return o;
  }

  // Computes x times a weight, nothing else.
  std::vector<float> product(const ops::Weight& w, const Matrix& x) {
    DeviceFloats out(*gpu, static_cast<size_t>(x.rows * w.rows));
    ops::Product p{&w, out.matrix(x.rows, w.rows), nullptr, 1.0f, false};
    gpu->matmul(x, {&p, 1});
    return out.get();
  }

  // Each value must be within `allowed` of the wanted one.
  static void expect_near(const std::vector<float>& got, const std::vector<float>& want,
                          float allowed, const std::string& what) {
    ASSERT_EQ(got.size(), want.size()) << what;
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_TRUE(std::fabs(got[i] - want[i]) <= allowed)
          << what << " at " << i << ": " << got[i] << " for " << want[i];
    }
  }
  static float largest(const std::vector<float>& v) {
    float most = 0.0f;
    for (const float x : v) most = std::max(most, std::fabs(x));
    return most;
  }

  // Random rows in a stored format.
  struct Stored {
    std::vector<uint8_t> bytes;
    std::vector<const uint8_t*> rows;
  };
  static Stored stored(quant::Format format, int64_t rows, int64_t cols, uint32_t seed) {
    const quant::FormatInfo& info = quant::info(format);
    const size_t row_bytes = quant::row_bytes(format, cols);
    Stored s;
    s.bytes.resize(row_bytes * static_cast<size_t>(rows));
    if (info.head_bytes > 0 || info.block_bytes == 3 + info.block_size / 2) {
      fill(info, s, rows, cols, seed);
      return s;
    }
    // Encoders are slow, so later rows repeat earlier ones, a prime number of rows apart.
    const int64_t distinct = std::min<int64_t>(rows, 509);
    const std::vector<float> values =
        random_floats(static_cast<size_t>(distinct * cols), seed, 0.5f);
    for (int64_t r = 0; r < rows; ++r) {
      uint8_t* to = s.bytes.data() + row_bytes * static_cast<size_t>(r);
      if (r < distinct) {
        info.encode(values.data() + r * cols, to, cols, nullptr);
      } else {
        std::memcpy(to, s.rows[static_cast<size_t>(r % distinct)], row_bytes);
      }
      s.rows.push_back(to);
    }
    return s;
  }

  // Truncates F32 rows to values that BF16 represents exactly.
  static void to_bf16(Stored& s) {
    for (size_t i = 0; i < s.bytes.size(); i += 4) s.bytes[i] = s.bytes[i + 1] = 0;
  }

  // INT8 and INT4 groups, whose encoders would take too long: arbitrary bytes, with scales that
  // give values of the same size as other formats.
  static void fill(const quant::FormatInfo& info, Stored& s, int64_t rows, int64_t cols,
                   uint32_t seed) {
    std::mt19937 rng(seed);
    for (uint8_t& b : s.bytes) b = static_cast<uint8_t>(rng() >> 8);
    const size_t row_bytes = quant::row_bytes(info.format, cols);
    const int64_t scales = info.head_bytes > 0 ? 1 : cols / info.block_size;
    for (int64_t r = 0; r < rows; ++r) {
      uint8_t* row = s.bytes.data() + row_bytes * static_cast<size_t>(r);
      s.rows.push_back(row);
      for (int64_t i = 0; i < scales; ++i) {
        const float part = 0.5f + static_cast<float>(rng() % 1024) / 1024.0f;
        const float d = part * (info.head_bytes > 0 ? 0.0068f : 0.077f);
        const auto bits = std::bit_cast<uint32_t>(d);
        if (info.head_bytes > 0) {
          std::memcpy(row, &bits, sizeof bits);
        } else {  // its upper 20 bits, and a zero point
          uint8_t* block = row + i * info.block_bytes;
          block[0] = static_cast<uint8_t>(bits >> 16);
          block[1] = static_cast<uint8_t>(bits >> 24);
          block[2] = static_cast<uint8_t>((bits >> 8 & 0xf0) | (block[2] & 15));
        }
      }
    }
  }

  ThreadPool pool{2, false};
  std::unique_ptr<ops::Ops> gpu, cpu;
};

}  // namespace freshet::test

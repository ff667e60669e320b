#include "tensor/dtype.h"

#include <cmath>

#include <gtest/gtest.h>

namespace freshet {
namespace {

// The compiler's own half type is the reference: IEEE 754 binary16, round to nearest even.
TEST(DType, EveryF16Widens) {
  for (uint32_t h = 0; h < 0x10000; ++h) {
    const auto expected = static_cast<float>(std::bit_cast<_Float16>(static_cast<uint16_t>(h)));
    const float actual = f16_to_f32(static_cast<uint16_t>(h));
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(actual)) << h;
    } else {
      ASSERT_EQ(std::bit_cast<uint32_t>(actual), std::bit_cast<uint32_t>(expected)) << h;
    }
  }
}

void check_f16(uint32_t bits) {
  const auto f = std::bit_cast<float>(bits);
  const uint16_t actual = f32_to_f16(f);
  if (std::isnan(f)) {
    ASSERT_TRUE(std::isnan(f16_to_f32(actual))) << bits;
  } else {
    ASSERT_EQ(actual, std::bit_cast<uint16_t>(static_cast<_Float16>(f))) << bits;
  }
}

TEST(DType, F16NarrowsToNearestEven) {
  for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += 1009)
    check_f16(static_cast<uint32_t>(bits));
  // Every half, every midpoint between halves, and the floats next to them.
  for (uint32_t h = 0; h < 0x7c01; ++h) {
    const uint32_t bits = std::bit_cast<uint32_t>(f16_to_f32(static_cast<uint16_t>(h)));
    for (uint32_t offset : {0U, 0xfffU, 0x1000U, 0x1001U}) check_f16(bits + offset);
    check_f16((bits - 1) | 0x80000000);
  }
}

TEST(DType, Bf16RoundsToNearestEven) {
  for (uint32_t h = 0; h < 0x10000; ++h) {
    const float f = bf16_to_f32(static_cast<uint16_t>(h));
    if (std::isnan(f)) {
      ASSERT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(f))));
      continue;
    }
    ASSERT_EQ(f32_to_bf16(f), h);
    if (std::isinf(f)) continue;
    const uint32_t low = h << 16;
    ASSERT_EQ(f32_to_bf16(std::bit_cast<float>(low + 0x7fff)), h);
    ASSERT_EQ(f32_to_bf16(std::bit_cast<float>(low + 0x8000)), h + (h & 1));
    ASSERT_EQ(f32_to_bf16(std::bit_cast<float>(low + 0x8001)), h + 1);
  }
  // A NaN whose payload is entirely in the lower half must not become infinity.
  EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(std::bit_cast<float>(0x7f800001U)))));
}

TEST(DType, NamesAndSizes) {
  EXPECT_EQ(name_of(DType::kBF16), "bf16");
  EXPECT_EQ(size_of(DType::kBF16), 2U);
  EXPECT_EQ(size_of(DType::kI64), 8U);
}

}  // namespace
}  // namespace freshet

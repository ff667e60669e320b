#include <gtest/gtest.h>

#include "backend/cpu/backend.h"

namespace freshet::cpu {
namespace {

using ops::CpuIsa;

TEST(Detect, LimitsWhatItReports) {
  for (const CpuIsa isa : {CpuIsa::kScalar, CpuIsa::kAvx2, CpuIsa::kAvx512, CpuIsa::kAmx}) {
    EXPECT_LE(detect(isa).isa, isa);
  }
  EXPECT_EQ(detect(CpuIsa::kScalar).isa, CpuIsa::kScalar);
  EXPECT_FALSE(detect(CpuIsa::kAvx2).avx_vnni);
  EXPECT_GE(detect().l2_bytes, 128 << 10);
}

}  // namespace
}  // namespace freshet::cpu
